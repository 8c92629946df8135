"""A loop's body, or what is outside all loops, as kernels, and what each reads from memory.

This is a model of XLA's fusion, simple and the same for every device. It looks at a stretch of
equations without loops and branches, with calls written out:

- A product is a kernel, which reads its operands and writes its result. So is every equation that
  neither fuses nor contracts: a sort, a scatter, a kernel of linear algebra.
- Elementwise work, movement and casts between two kernels are one fusion, together with the
  reductions that end it. A fusion reads each value from outside once and writes what others read.
- A value that another fusion can make from no more bytes than the value itself is made again there
  and not stored: a broadcast, a cast from 16 bits, a mask.
- Views (a slice, a transpose, a reshape) move nothing.
- A cast of a loop's constant to 16 bits runs once, before the loop.

`precpass.planner.storage.costs` counts in the same way: a value inside a fusion costs nothing, a
cast of a value in memory reads and writes it, and a product's sums leave it in the format of its
result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from precpass import jaxpr as ir
from precpass.analysis.equations import contracts
from precpass.analysis.sizes import flops, nbytes
from precpass.policy.primitives import OpKind, op

__all__ = ["Kernel", "Stretch", "Value"]

_INT8 = np.dtype(np.int8)
# It writes into its first operand's buffer, as scatters do.
_IN_PLACE = "dynamic_update_slice"
# A value with more sources is stored, because it is not cheap to compute again.
_MOST_SOURCES = 8
# To compute a value again, a fusion may read this multiple of its bytes: a row's mean beside it.
_SLACK = 1.25


class Kernel(NamedTuple):
    """One kernel.

    Attributes:
        name: the primitive's name; "fusion" for several.
        nbytes: the bytes that it reads and writes.
        flops: the FLOPs of a product; 0 for any other kernel.
        eqn: the equation of a product; None for any other kernel.
    """

    name: str
    nbytes: float
    flops: float = 0.0
    eqn: ir.Eqn = None


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """A value of a stretch.

    Attributes:
        size: its bytes.
        level: the level of the first fusion that can read it.
        maker: the step that makes it; None for an operand and for a view.
        sources: the values that other fusions read in its place, with the bytes of each; None if
            they read the value itself.
        base: the value that a view is a part of; None for a value that is no view.
        writes: how often it is written to memory.
        is_constant: whether it is a loop's constant.
    """

    size: float
    level: int = 0
    maker: _Step | None = None
    sources: dict[Value, float] | None = None
    base: Value | None = None
    writes: int = 0
    is_constant: bool = False

    def origins(self) -> dict[Value, float]:
        """The values that another fusion reads to have this one, with their bytes."""
        return {self: self.size} if self.sources is None else self.sources

    def part(self, size: float) -> Value:
        """A view of some of its elements."""
        if not self.size or self.size == size:
            return self
        base = self.base or self
        if self.sources is None:
            return Value(size, self.level, None, {base: size}, base)
        share = min(size / self.size, 1.0)
        sources = {source: taken * share for source, taken in self.sources.items()}
        return Value(size, self.level, None, sources, base)

    def keep(self) -> float:
        """Puts the value in memory; returns the bytes that a kernel reads of it."""
        stored = self.base or self
        stored.writes = max(stored.writes, 1)
        if stored.maker is not None:
            stored.maker.runs = True
        return self.size


Inside = Sequence[Any]
"""Bodies, each with how often it runs, in a form that only the caller interprets."""

NOTHING = Value(0.0)
"""A value without memory: a literal, a token."""


@dataclasses.dataclass(eq=False, slots=True)
class _Step:
    """An equation.

    Attributes:
        eqn: the equation.
        level: the level of its fusion.
        fuses: whether it is part of a fusion.
        reads, makes: its operands and results.
        inside: the bodies that it runs.
        runs: whether its results are needed.
    """

    eqn: ir.Eqn
    level: int
    fuses: bool
    reads: list[Value]
    makes: list[Value]
    inside: Inside
    runs: bool = False


class Stretch:
    """A stretch of equations, which are added in order; `kernels` then returns its kernels.

    Attributes:
        by_bytes: the primitives whose arithmetic is not counted.
    """

    def __init__(self) -> None:
        self.by_bytes: set[str] = set()
        self._steps: list[_Step] = []
        self._hoisted: dict[Value, Kernel] = {}

    def add(self, eqn: ir.Eqn, reads: list[Value]) -> list[Value]:
        """Adds an equation without bodies; its results.

        Args:
            eqn: the equation.
            reads: its operands.
        """
        name = eqn.primitive.name
        if ir.is_identity_of_first_operand(eqn) or ir.keeps_bits(eqn) or op(name).is_view:
            # The other operands serve derivatives, or are indices.
            return reads[: len(eqn.outvars)]
        sizes = [nbytes(v.aval) for v in eqn.outvars]
        if ir.cast_formats(eqn) is not None and reads[0].is_constant and sizes[0] < reads[0].size:
            return [self._cast_outside(reads[0], sizes[0])]
        if op(name).is_slice:
            return [reads[0].part(size) for size in sizes]
        if _is_fused(eqn):
            return self._fused(eqn, reads, sizes)
        kind = op(name).kind
        if kind is OpKind.BOUNDARY and any(sizes) and not ir.effects_of(eqn):
            self.by_bytes.add(name)
        elif kind is OpKind.COMPUTE and not _has_counted_flops(eqn):
            self.by_bytes.add(f"{name} of integers")
        return self.kernel(eqn, reads, sizes)

    def kernel(
        self, eqn: ir.Eqn, reads: list[Value], sizes: Iterable[float], inside: Inside = ()
    ) -> list[Value]:
        """Adds an equation that is a kernel, or has bodies: its results.

        Args:
            eqn: the equation.
            reads: its operands.
            sizes: the bytes of its results.
            inside: the bodies that it runs, which read the operands and write the results.
        """
        level = 1 + max((v.level for v in reads), default=0)
        step = _Step(eqn, level, False, reads, [], inside, ir.effects_of(eqn))
        step.makes = [Value(size, level, step) for size in sizes]
        self._steps.append(step)
        return step.makes

    def _cast_outside(self, value: Value, size: float) -> Value:
        """A cast of a loop's constant to fewer bits, which is made once, outside the loop."""
        copy = Value(size, is_constant=True)
        self._hoisted[copy] = Kernel("fusion", value.size + size)
        return copy

    def _fused(self, eqn: ir.Eqn, reads: list[Value], sizes: list[float]) -> list[Value]:
        level = max((v.level for v in reads), default=0)
        step = _Step(eqn, level, True, reads, [], ())
        ends = op(eqn.primitive.name).kind is OpKind.REDUCTION
        for size in sizes:
            sources = None if ends else _sources(reads, size)
            step.makes.append(Value(size, level + ends, step, sources))
        self._steps.append(step)
        return step.makes

    # ------------------------------------------------------------ what is read

    def kernels(self, results: Iterable[Value]) -> tuple[list[Kernel], list[Any]]:
        """The kernels that the results and effects need, and the bodies of the other equations.

        Args:
            results: the values in memory at the end; one that occurs twice is written twice.
        """
        _keep(results)
        fused: list[Kernel] = []
        inside: list[Any] = []
        read: dict[int, dict[Value, float]] = {}
        for step in reversed(self._steps):
            if not step.fuses and (step.runs or any(v.writes for v in step.makes)):
                moved = _moved(step)
                inside += step.inside
                if not step.inside:
                    fused.append(_kernel(step.eqn, moved))
            elif step.fuses and step.runs:
                for value in step.reads:
                    _read(value, read.setdefault(step.level, {}), step.level)
        fused.reverse()
        return fused + self._fusions(read), inside

    def _fusions(self, read: dict[int, dict[Value, float]]) -> list[Kernel]:
        """The fusions, one per level, from the values that each level reads."""
        moved = {level: sum(sizes.values()) for level, sizes in read.items()}
        for step in self._steps:
            if step.fuses and step.runs:
                written = sum(v.size * v.writes for v in step.makes)
                moved[step.level] = moved.get(step.level, 0.0) + written
        return [Kernel("fusion", nbytes) for nbytes in moved.values() if nbytes]

    def outside(self) -> list[Kernel]:
        """The kernels of a loop's body that run once before the loop; call it after `kernels`."""
        return [kernel for value, kernel in self._hoisted.items() if value.writes]


def _keep(results: Iterable[Value]) -> None:
    """Puts the results in memory, each written as often as it is a result."""
    wanted: dict[Value, int] = {}
    for value in results:
        value.keep()
        wanted[value.base or value] = wanted.get(value.base or value, 0) + 1
    for value, times in wanted.items():
        value.writes = times


def _read(value: Value, read: dict[Value, float], level: int) -> None:
    """Adds the values that a fusion reads to have one value."""
    if value.maker is not None and value.maker.fuses and value.maker.level == level:
        value.maker.runs = True
        return
    for source, size in value.origins().items():
        maker = source.maker
        if maker is not None and maker.fuses and maker.level == level:
            maker.runs = True
        elif source.size:
            source.keep()
            read[source] = max(size, read.get(source, 0.0))


def _moved(step: _Step) -> float:
    """The bytes that a kernel reads and writes."""
    name = step.eqn.primitive.name
    written = sum(v.size for v in step.makes)
    read = [v.keep() if v.size else 0.0 for v in step.reads]
    if name == _IN_PLACE or name.startswith("scatter"):
        # It reads the update and the indices, and writes the updated elements.
        return sum(read[1:]) + (read[1] if name == _IN_PLACE else 2.0 * read[-1])
    if name == "gather":
        return sum(read[1:]) + 2.0 * written
    return sum(read) + written


def _kernel(eqn: ir.Eqn, moved: float) -> Kernel:
    name, counts = eqn.primitive.name, _has_counted_flops(eqn)
    return Kernel(name, moved, flops(eqn), eqn) if counts else Kernel(name, moved)


def _has_counted_flops(eqn: ir.Eqn) -> bool:
    """Whether an equation is a product of floating-point or complex numbers, or of int8."""
    if op(eqn.primitive.name).kind is not OpKind.COMPUTE:
        return False
    dtypes = [v.aval.dtype for v in eqn.invars[:2]]
    return any(jnp.issubdtype(d, jnp.inexact) for d in dtypes) or set(dtypes) == {_INT8}


# ---------------------------------------------------------------- kinds of equations


def _is_fused(eqn: ir.Eqn) -> bool:
    """Whether an equation is part of a fusion."""
    name = eqn.primitive.name
    if op(name).own_kernel:
        return False
    match op(name).kind:
        case OpKind.COMPUTE:
            return not contracts(eqn)
        case OpKind.REDUCTION:
            is_plain = name.startswith("reduce_") and not name.startswith("reduce_window")
            return is_plain or name in ("argmax", "argmin")
        case OpKind.BOUNDARY:
            return op(name).fuses or not eqn.invars
        case _:
            return True


def _sources(reads: list[Value], size: float) -> dict[Value, float] | None:
    """The values in memory from which another is cheaply computed; None if it is not cheap."""
    bytes_of: dict[Value, float] = {}
    for value in reads:
        for source, taken in value.origins().items():
            if source.size:
                bytes_of[source] = max(taken, bytes_of.get(source, 0.0))
    is_cheap = len(bytes_of) <= _MOST_SOURCES and sum(bytes_of.values()) <= _SLACK * size
    return bytes_of if is_cheap else None
