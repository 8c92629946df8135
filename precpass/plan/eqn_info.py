"""`EqnInfo`: where an equation stands, recorded in a plan that is read without its jaxpr."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from precpass.jaxpr import Source
from precpass.policy.precision import Precision

__all__ = ["Body", "Cast", "Crossed", "EqnInfo", "PlanSource", "Site", "Value"]


class Value(NamedTuple):
    """The type of a value.

    Attributes:
        dtype: as a plan writes it: "f32", or the dtype's name if it is not a floating format.
        shape: its dimensions; a symbolic one as text.
        nbytes: its bytes; a symbolic dimension counts as `precpass.analysis.sizes.NOMINAL_SIZE`.
    """

    dtype: str
    shape: tuple[int | str, ...]
    nbytes: float

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Cast:
    """A conversion between floating-point formats that the pass added, moved or removed.

    Attributes:
        what: "inserted", "removed", or "moved" for a cast of yours that is made elsewhere.
        before: the format of its operand.
        after: the format of its result.
    """

    what: str
    before: Precision
    after: Value

    def __str__(self) -> str:
        return f"{self.before} -> {self.after}"


class Crossed(NamedTuple):
    """A value of which a 16-bit or 8-bit copy enters or leaves an equation's bodies.

    Attributes:
        value: its type in the low format.
        is_operand: whether it is an operand of the bodies; otherwise it is a result.
        alone: whether every reader inside reads the copy, so that XLA drops the float32 value if
            nothing is differentiated.
    """

    value: Value
    is_operand: bool
    alone: bool

    @property
    def bits(self) -> int:
        """The bits of each number; 8 if it crosses with a scale."""
        return 8 if Precision.parse(self.value.dtype).is_scaled else 16


class Body(NamedTuple):
    """A body that an equation enters.

    Attributes:
        name: the parameter that holds it, such as "branches[1]".
        trips: how often it runs per call; None if that is only known at run time.
    """

    name: str
    trips: int | str | None


class Site(NamedTuple):
    """Where you find an equation in your code.

    Attributes:
        module: the path of the flax, equinox, haiku or keras module that computes it, such as
            "blocks[i].attention.query"; "" outside of modules.
        source: your line, which may call a function of a library.
    """

    module: str = ""
    source: Source = Source()


@dataclasses.dataclass(frozen=True)
class EqnInfo:
    """An equation's place in the program, and the casts that were added there.

    Attributes:
        primitive: its name; for a hi-primitive the name of the primitive inside it.
        scope: its own name stack as JAX prints it, without those of its callers.
        source: the innermost line outside of JAX; the first caller's if JAX recorded none.
        site: where you find it in your code.
        has_line: whether JAX recorded a line.
        operands, results: their types in the original program.
        flops: floating-point operations of one execution.
        contracts: whether it is a matrix product or a convolution of real or complex numbers.
        casts: the casts that the rewrite added or removed at this equation. A cast at the start of
            a body is listed with the first equation that reads it, one at its end with the equation
            that computes its operand, and one in a body without equations with the equation that
            enters the body.
        bodies: the bodies of its inner plans, in their order.
        crossed: the 16-bit and 8-bit copies that enter or leave these bodies.
    """

    primitive: str
    scope: str
    source: Source
    site: Site
    has_line: bool
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    flops: float
    contracts: bool = False
    casts: tuple[Cast, ...] = ()
    bodies: tuple[Body, ...] = ()
    crossed: tuple[Crossed, ...] = ()

    @property
    def signature(self) -> str:
        """The equation's primitive, operands and results, as text."""
        return " ".join((self.primitive, *map(str, self.operands), "->", *map(str, self.results)))


@dataclasses.dataclass(frozen=True)
class PlanSource:
    """The function and the policy that a plan was made from.

    Attributes:
        name: the function's.
        policy: the policy as JSON values (`precpass.plan.file`); None if the pass is switched off.
        scope: the name scope around the program.
        output: the format of the results; "" if each keeps its own.
    """

    name: str
    policy: Mapping[str, Any] | None
    scope: str
    output: str = ""
