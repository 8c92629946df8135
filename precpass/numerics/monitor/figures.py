"""The figures recorded of each equation: how large its results are, and what went wrong.

Magnitudes are compared as the bits of float32, whose order as unsigned integers is that of the
numbers (IEEE 754-2019, 3.4): XLA:CPU takes subnormal numbers for zero in its arithmetic, but not
in that of integers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precpass import jaxpr as ir
from precpass.policy.primitives import OpKind, op

__all__ = ["INFINITY", "MOST", "NEVER", "Figures", "Recorder", "joined", "none"]

INFINITY = np.uint32(0x7F800000)
"""The bits of float32's infinity; a NaN's are more."""
MOST = NEVER = np.int32(2**31 - 1)
_UNBOUNDED = np.uint32(2**32 - 1)


class Figures(NamedTuple):
    """Arrays with a row per equation. Magnitudes are bits of float32, as uint32.

    Attributes:
        largest: the largest finite magnitude of the results; 0 if there is none.
        smallest: the smallest nonzero magnitude; infinity if there is none.
        counts: int32 `[..., 5]`: runs, results that are not finite, infinities made from finite
            operands, NaNs made from operands without one, and results that were lost to zero.
            They saturate at `MOST`.
        first: the trip of the outermost loop in which the first infinity or NaN was made, int32;
            0 outside loops, `NEVER` if there was none.
        reads: uint32 `[..., 3]`: the largest and the smallest magnitude of the operands, and the
            smallest of the operands' largest magnitudes; None if operands are not recorded.
    """

    largest: Any
    smallest: Any
    counts: Any
    first: Any
    reads: Any = None


def none(places: int, *, reads: bool = False) -> Figures:
    """The figures of equations that did not run."""
    operands = [lax.full((places, 1), x, np.uint32) for x in (0, INFINITY, INFINITY)]
    return Figures(
        lax.full((places,), 0, np.uint32),
        lax.full((places,), INFINITY, np.uint32),
        lax.full((places, 5), 0, np.int32),
        lax.full((places,), NEVER, np.int32),
        lax.concatenate(operands, 1) if reads else None,
    )


def joined(one: Figures, other: Figures) -> Figures:
    """The figures of two runs together."""
    reads = None
    if one.reads is not None:
        largest = lax.max(one.reads[..., :1], other.reads[..., :1])
        least = lax.min(one.reads[..., 1:], other.reads[..., 1:])
        reads = lax.concatenate((largest, least), largest.ndim - 1)
    return Figures(
        lax.max(one.largest, other.largest),
        lax.min(one.smallest, other.smallest),
        one.counts + lax.min(other.counts, MOST - one.counts),
        lax.min(one.first, other.first),
        reads,
    )


class Recorder:
    """The `ir.Look` that records `Figures`.

    Args:
        reads: whether operands are recorded too, and equations that only move values, because
            these may be low.
    """

    def __init__(self, *, reads: bool = False) -> None:
        self.reads = reads

    def sees(self, eqn: ir.Eqn) -> bool:
        """As for `ir.Look`: all equations, but data movement only if operands are recorded."""
        return not ir.is_identity_of_first_operand(eqn) and (
            self.reads or not _moves(eqn.primitive.name)
        )

    def record(self, ran: Sequence[ir.Ran]) -> Figures:
        """As `ir.Look` says."""
        extents = _Extents()
        rows = [_row(step, self.reads, extents) for step in ran]

        def column(name: str) -> Any:
            return jnp.stack([row[name] for row in rows])

        # If a result is made from many elements, only operands without a NaN show where it began.
        infinities = jnp.where(column("not_finite_read") == 0, column("infinities"), 0)
        nans = jnp.where(column("nans_read") == 0, column("nans"), 0)
        bad, lost = column("bad"), column("lost")
        counts = jnp.stack([jnp.ones_like(bad), bad, infinities, nans, lost], 1)
        first = jnp.where(lax.max(infinities, nans) > 0, np.int32(0), NEVER)
        reads = None
        if self.reads:
            ends = column("largest_read"), _nonzero(column("smallest_read")), column("whole")
            reads = jnp.stack(ends, 1)
        return Figures(column("largest"), _nonzero(column("smallest")), counts, first, reads)

    def none(self, places: int) -> Figures:
        """As `ir.Look` says."""
        return none(places, reads=self.reads)

    def joined(self, one: Figures, other: Figures) -> Figures:
        """As `ir.Look` says."""
        return joined(one, other)

    def in_trip(self, record: Figures, trip: Any) -> Figures:
        """As `ir.Look` says."""
        return record._replace(first=jnp.where(record.first < NEVER, trip, NEVER))

    def over_shards(self, record: Figures, axes: tuple[str, ...]) -> Figures:
        """As `ir.Look` says."""
        shards = lax.all_gather(record, axes)
        count = jax.tree.leaves(shards)[0].shape[0]
        each = [jax.tree.map(lambda x, i=i: x[i], shards) for i in range(count)]
        whole = functools.reduce(joined, each)
        # The maximum is equal on all of them, and its type says so.
        return jax.tree.map(lambda x: lax.pmax(x, axes), whole)


# ---------------------------------------------------------------- one equation


def _moves(name: str) -> bool:
    # A gather makes NaNs for indices out of bounds.
    return op(name).kind is OpKind.DATA_MOVEMENT and name != "gather"


class _Extent(NamedTuple):
    """The range of a value's magnitudes, and how many of its elements are not finite.

    Attributes:
        largest: the bits of the largest finite magnitude, a uint32 scalar; 0 if there is none.
        smallest_less_one: the bits of the smallest nonzero magnitude, less one. A zero wraps to the
            largest uint32, so that the minimum over all elements passes over zeros.
        infinities: the number of infinities, an int32 scalar.
        nans: the number of NaNs, an int32 scalar.
    """

    largest: Any
    smallest_less_one: Any
    infinities: Any
    nans: Any

    @property
    def not_finite(self) -> Any:
        return self.infinities + self.nans


class _Extents:
    """The bits and extents of values.

    One equation makes a value and others read it, and all need its extent. It is computed once,
    because each reduction is a pass over the value's memory, and a kernel that XLA compiles.
    Values are told apart by their ids, so the caller must keep them alive.
    """

    def __init__(self) -> None:
        self._bits: dict[int, Any] = {}
        self._extents: dict[int, _Extent] = {}

    def bits(self, value: Any) -> Any:
        """The bits of a value's magnitudes."""
        if id(value) not in self._bits:
            self._bits[id(value)] = _bits(value)
        return self._bits[id(value)]

    def of(self, value: Any) -> _Extent:
        """The extent of a value."""
        return self.beside(value, {})[0]

    def beside(self, value: Any, columns: Columns) -> tuple[_Extent, dict[str, Any]]:
        """The extent of a value, and what `columns` of its shape reduce to.

        Both are computed in one loop if the extent is not known yet.
        """
        known = self._extents.get(id(value))
        own = _extent_columns(self.bits(value)) if known is None else []
        if not (own or columns):
            return self._extents[id(value)], {}
        figures = _reduced([*own, *columns.values()])
        if known is None:
            known = self._extents[id(value)] = _Extent(*figures[: len(own)])
        return known, dict(zip(columns, figures[len(own) :], strict=True))


def _row(step: ir.Ran, reads: bool, extents: _Extents) -> dict[str, Any]:
    name = step.eqn.primitive.name
    chooses = op(name).makes_an_operand or _moves(name)
    results = [x for x in step.results if _is_inexact(x)]
    operands = [x for x in step.operands if _is_inexact(x)]
    shapes = {jnp.shape(x) for x in operands} - {()}
    pointwise = op(name).kind is OpKind.ELEMENTWISE and shapes <= {jnp.shape(results[0])}
    around = [extents.bits(x) for x in operands] if pointwise else []
    row: dict[str, Any] = dict.fromkeys(("bad", "infinities", "nans", "lost"), np.int32(0))
    row |= {"largest": np.uint32(0), "smallest": _UNBOUNDED}
    row |= _not_finite_read(step, [] if pointwise or chooses else operands, extents)
    for x in results:
        columns = _by_element(name, extents.bits(x), around) if pointwise else {}
        extent, made = extents.beside(x, columns)
        if not (pointwise or chooses):
            made = {"infinities": extent.infinities, "nans": extent.nans}
        row["largest"] = lax.max(row["largest"], extent.largest)
        row["smallest"] = lax.min(row["smallest"], extent.smallest_less_one)
        for key, count in (("bad", extent.not_finite), *made.items()):
            row[key] += count
    row["lost"] += _lost_in_eight_bits(step)
    return row | (_reads([extents.of(x) for x in operands]) if reads else {})


def _not_finite_read(step: ir.Ran, operands: Sequence[Any], extents: _Extents) -> dict[str, Any]:
    """The largest numbers of elements of one operand that are not finite, and that are NaNs."""
    if any(map(_is_ref, step.operands)):
        # A reference may hold a NaN, so what the equation makes of it does not count as born here.
        return {"not_finite_read": np.int32(1), "nans_read": np.int32(1)}
    read = [extents.of(x) for x in operands]
    return {
        "not_finite_read": functools.reduce(lax.max, [x.not_finite for x in read], np.int32(0)),
        "nans_read": functools.reduce(lax.max, [x.nans for x in read], np.int32(0)),
    }


def _lost_in_eight_bits(step: ir.Ran) -> Any:
    """The number of values that a scaled product's operand loses to zero by its rounding."""
    if not ir.rounds_operand(step.eqn):
        return np.int32(0)
    given, low = _bits(step.operands[0]), _bits(step.results[0])
    return _reduced([((low == 0) & (given > 0) & (given < INFINITY), "sum")])[0]


Column = tuple[Any, str]
"""The array that a figure is reduced from, and the reduction."""
Columns = dict[str, Column]
"""Name of a figure -> its column."""


def _extent_columns(bits: Any) -> list[Column]:
    """The columns of an `_Extent`, in its order."""
    return [
        (_finite(bits), "max"),
        (bits - np.uint32(1), "min"),
        (bits == INFINITY, "sum"),
        (bits > INFINITY, "sum"),
    ]


def _by_element(name: str, bits: Any, around: Sequence[Any]) -> Columns:
    """The columns that count what a pointwise equation makes or loses at each element.

    An infinity or a NaN was made there if no operand has one at the same element, and a number was
    lost if the result is zero and the exact result is not.
    """
    columns: Columns = {}
    if not op(name).makes_an_operand:
        finite, numbers = _all(b < INFINITY for b in around), _all(b <= INFINITY for b in around)
        columns["infinities"] = (bits == INFINITY) & finite, "sum"
        columns["nans"] = (bits > INFINITY) & numbers, "sum"
    not_zero = _not_zero(name, around)
    if not_zero is not None:
        columns["lost"] = (bits == 0) & not_zero, "sum"
    return columns


def _reads(operands: Sequence[_Extent]) -> dict[str, Any]:
    """The magnitudes of an equation's operands."""
    largest = [x.largest for x in operands]
    wholes = [jnp.where(top > 0, top, INFINITY) for top in largest]
    return {
        "largest_read": functools.reduce(lax.max, largest, np.uint32(0)),
        "smallest_read": functools.reduce(
            lax.min, [x.smallest_less_one for x in operands], _UNBOUNDED
        ),
        "whole": functools.reduce(lax.min, wholes, INFINITY),
    }


def _not_zero(name: str, given: Sequence[Any]) -> Any:
    """A mask of the elements whose exact result is not zero; None if that is unknown."""
    if not given:
        return None
    finite = _all(bits < INFINITY for bits in given)
    if op(name).zero_if_too_small:
        return _all((bits > 0 for bits in given), finite)
    if op(name).never_zero:
        return finite
    return (given[0] > 0) & finite if op(name).zero_if_first_is else None


_COMBINE = {"max": lax.max, "min": lax.min, "sum": lax.add}
_START = {"max": np.uint32(0), "min": _UNBOUNDED, "sum": np.int32(0)}


def _reduced(columns: Sequence[Column]) -> Sequence[Any]:
    """Arrays of one shape as scalars, in one loop: "max", "min" of uint32, "sum" of booleans."""
    hows = [how for _, how in columns]
    arrays = [x.astype(np.int32) if how == "sum" else x for x, how in columns]

    def combined(one: Any, other: Any) -> Any:
        return tuple(_COMBINE[how](a, b) for how, a, b in zip(hows, one, other, strict=True))

    if not jnp.ndim(arrays[0]):
        return arrays
    starts = [_START[how] for how in hows]
    return lax.reduce(arrays, starts, combined, tuple(range(jnp.ndim(arrays[0]))))


def _all(tests: Any, found: Any = True) -> Any:
    return functools.reduce(jnp.logical_and, tests, found)


def _is_inexact(x: Any) -> bool:
    return not _is_ref(x) and jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _is_complex(x: Any) -> bool:
    return not _is_ref(x) and jnp.issubdtype(jnp.result_type(x), jnp.complexfloating)


def _is_ref(x: Any) -> bool:
    return ir.is_ref(jax.typeof(x))


def _bits(x: Any) -> Any:
    """The bits of magnitudes in float32; beyond its range those of the range's ends.

    For a complex number they are those of its larger part; a NaN counts as the largest.
    """
    x = ir.summed_up(jnp.asarray(x))
    if _is_complex(x):
        return lax.max(_bits(lax.real(x)), _bits(lax.imag(x)))
    bits = lax.bitcast_convert_type(x.astype(np.float32), np.uint32) & np.uint32(0x7FFFFFFF)
    if x.dtype != np.float64:
        return bits
    bits = jnp.where(jnp.isfinite(x) & (bits == INFINITY), INFINITY - np.uint32(1), bits)
    return jnp.where((x != 0) & (bits == 0), np.uint32(1), bits)


def _finite(bits: Any) -> Any:
    return jnp.where(bits < INFINITY, bits, np.uint32(0))


def _nonzero(less_one: Any) -> Any:
    """The smallest nonzero bits, from the smallest of all bits minus one."""
    return lax.min(less_one, INFINITY - np.uint32(1)) + np.uint32(1)
