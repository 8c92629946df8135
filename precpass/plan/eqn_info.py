"""`EqnInfo`: what a plan says of an equation's place, so that it can be read without its jaxpr."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from precpass.jaxpr import Source
from precpass.policy.precision import Precision

__all__ = ["Body", "Cast", "Crossed", "EqnInfo", "PlanSource", "Value"]


class Value(NamedTuple):
    """The type of a value.

    Attributes:
        dtype: as a plan writes it, "f32", or the dtype's name where it is no floating format.
        shape: its dimensions; a symbolic one as text.
        nbytes: its bytes, where a symbolic dimension counts as
            `precpass.analysis.sizes.NOMINAL_SIZE`.
    """

    dtype: str
    shape: tuple[int | str, ...]
    nbytes: float

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Cast:
    """A conversion between floating formats that the pass added, moved or took away.

    Attributes:
        what: "inserted", "moved" (one that the user wrote, and that is made elsewhere) or
            "removed".
        before: the format that it reads.
        after: the value that it makes.
    """

    what: str
    before: Precision
    after: Value

    def __str__(self) -> str:
        return f"{self.before} -> {self.after}"


class Crossed(NamedTuple):
    """A value that crosses the borders of an equation's bodies on 16 bits, beside its own form.

    Attributes:
        value: its type in the low format.
        is_operand: whether it enters the bodies; else it leaves them.
        alone: whether all that reads the value inside reads these 16 bits, so that XLA
            drops its own form where nothing is differentiated.
    """

    value: Value
    is_operand: bool
    alone: bool


class Body(NamedTuple):
    """A body that an equation enters.

    Attributes:
        name: the parameter that holds it, such as "branches[1]".
        trips: how often it runs per call; None where only run time knows.
    """

    name: str
    trips: int | str | None


@dataclasses.dataclass(frozen=True)
class EqnInfo:
    """An equation's place in the program, and what was added there.

    Attributes:
        primitive: its name; that of what is hidden in a hi-primitive.
        scope: its own name stack as JAX prints it, which its callers' come before.
        source: the user's line; that of the first caller where JAX recorded none.
        has_line: whether JAX recorded it.
        operands, results: their types in the original program.
        flops: floating-point operations of one execution.
        contracts: whether it is a product, of real or complex numbers, that sums over something.
        casts: what the rewritten program has more or less of at this equation. A cast at the
            start of a body stands at the first equation that reads what it makes, one at
            its end at the equation that makes what it casts; those of a body without
            equations stand at what enters it.
        bodies: of its inner plans, in their order.
        crossed: what crosses the borders of these on 16 bits.
    """

    primitive: str
    scope: str
    source: Source
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
        """Primitive, operands and results."""
        return " ".join((self.primitive, *map(str, self.operands), "->", *map(str, self.results)))


@dataclasses.dataclass(frozen=True)
class PlanSource:
    """What a plan was made of.

    Attributes:
        name: of the function.
        policy: as values that JSON has (`precpass.plan.file`); None where the pass is switched off.
        scope: the name scope around the program.
        output: the format of the results; "" where each keeps its own.
    """

    name: str
    policy: Mapping[str, Any] | None
    scope: str
    output: str = ""
