"""Names for the parts of JAX's IR in annotations.

They are `Any` to a type checker, because the attributes of JAX's classes differ between releases
(0.11 merged `ClosedJaxpr` into `Jaxpr`), and hi-primitives are read as equations too. They tell a
reader what is meant.
"""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["Atom", "Aval", "Eqn", "Jaxpr", "Var"]

Jaxpr: TypeAlias = Any
"""A jaxpr, open or closed."""
Eqn: TypeAlias = Any
"""An equation of a jaxpr."""
Var: TypeAlias = Any
"""A variable of a jaxpr."""
Atom: TypeAlias = Any
"""An operand of an equation: a variable, or a literal (`is_literal`)."""
Aval: TypeAlias = Any
"""An abstract value: the type of a variable or of an array."""
