"""The figures recorded of each equation: how large its results are, and what went wrong.

Magnitudes are compared as the bits of float32, whose order as unsigned integers is that of the
numbers (IEEE 754-2019, 3.4): XLA:CPU takes subnormal numbers for zero in its arithmetic, but not
in that of integers. XLA compiles each reduction to a kernel of its own, and each operation on
scalars too. So a value is reduced once, values of few elements and of one shape are reduced
together, and the scalars of all values are gathered into rows.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precpass import jaxpr as ir
from precpass.policy.primitives import OpKind, op

__all__ = ["MOST", "NEVER", "Figures", "Recorder", "joined", "none"]

INFINITY = np.uint32(0x7F800000)
"""The bits of float32's infinity; a NaN's are more."""
UNBOUNDED = np.uint32(2**32 - 1)
_FEW = 4096
"""Arrays of at most so many elements are stacked, which copies them."""
_AT_ONCE = 128
"""As many arrays are stacked in one kernel: compilers take long over more."""
MOST = NEVER = np.int32(2**31 - 1)


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
        reads: uint32 `[..., 4]`: the largest magnitude of the first operand and of the others, the
            smallest of all, and the smallest of the operands' largest magnitudes; None if operands
            are not recorded.
    """

    largest: Any
    smallest: Any
    counts: Any
    first: Any
    reads: Any = None


def none(places: int, *, reads: bool = False) -> Figures:
    """The figures of equations that did not run."""
    operands = [lax.full((places, 1), x, np.uint32) for x in (0, 0, INFINITY, INFINITY)]
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
        largest = lax.max(one.reads[..., :2], other.reads[..., :2])
        least = lax.min(one.reads[..., 2:], other.reads[..., 2:])
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
        cells = _Cells()
        rows: list[_Row] = []
        for step in ran:
            if _keeps_magnitudes(step) or step.eqn.primitive.name == "broadcast_in_dim":
                cells.equate(step.results[0], step.operands[0])
            if step.has_row:
                rows.append(_row(step, self.reads, cells))
        names = _FIGURES if self.reads else _FIGURES[:-2]
        found = dict(zip(names, _gathered(*cells.reduced(), rows, names), strict=True))
        bad, infinities, nans, lost = (_over(lax.add, found[name]) for name in _FIGURES[:4])
        # If a result is made from many elements, only operands without a NaN show where it began.
        nothing = lax.full_like(bad, 0)
        none_read = lax.eq(_over(lax.max, found["not_finite_read"]), nothing)
        infinities = lax.select(none_read, infinities, nothing)
        no_nan_read = lax.eq(_over(lax.max, found["nans_read"]), nothing)
        nans = lax.select(no_nan_read, nans, nothing)
        counts = [lax.full_like(bad, 1), bad, infinities, nans, lost]
        never = lax.full_like(nothing, NEVER, np.int32)
        born = lax.gt(lax.max(infinities, nans), nothing)
        reads = None
        if self.reads:
            each = found["largest_read"]
            whole = [lax.select(lax.gt(x, nothing), x, lax.full_like(x, INFINITY)) for x in each]
            others = _over(lax.max, [lax.full_like(each[0], 0), *each[1:]])
            least = _smallest(found["smallest_read"]), _over(lax.min, whole)
            reads = _columns((each[0], others, *least))
        return Figures(
            _over(lax.max, found["largest"]),
            _smallest(found["smallest"]),
            lax.convert_element_type(lax.min(_columns(counts), np.uint32(MOST)), np.int32),
            lax.select(born, lax.full_like(never, 0), never),
            reads,
        )

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


# ---------------------------------------------------------------- values


def _bits_of(x: Any) -> Any:
    """The bits of magnitudes in float32; beyond its range those of the range's ends.

    For a complex number they are those of its larger part; a NaN counts as the largest.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.max(_bits_of(lax.real(x)), _bits_of(lax.imag(x)))
    narrow = lax.convert_element_type(x, np.float32)
    bits = lax.bitwise_and(lax.bitcast_convert_type(narrow, np.uint32), np.uint32(0x7FFFFFFF))
    if x.dtype != np.float64:
        return bits
    bits = jnp.where(jnp.isfinite(x) & (bits == INFINITY), INFINITY - np.uint32(1), bits)
    return jnp.where((x != 0) & (bits == 0), np.uint32(1), bits)


Cell = int
"""The index of a scalar to which values were reduced."""
_ZERO, _ONE, _UNBOUNDED = range(3)


class _Extent(NamedTuple):
    """The cells of a value's magnitudes, and of how many of its elements are not finite.

    Attributes:
        largest: the bits of the largest finite magnitude; 0 if there is none.
        smallest_less_one: the bits of the smallest nonzero magnitude, less one. A zero wraps to the
            largest uint32, so that the minimum over all elements passes over zeros.
        infinities: the number of infinities.
        nans: the number of NaNs.
    """

    largest: Cell
    smallest_less_one: Cell
    infinities: Cell
    nans: Cell


_Change = Callable[[Any, Sequence[Any]], Sequence[Any]]
_CHANGES: dict[str, _Change] = {
    "infinities": lambda bits, around: [lax.eq(bits, INFINITY), *_finite(around)],
    "nans": lambda bits, around: [lax.gt(bits, INFINITY), *(lax.le(x, INFINITY) for x in around)],
    "lost_if_all": lambda bits, around: [_zero(bits), *_finite(around), *_nonzero(around)],
    "lost": lambda bits, around: [_zero(bits), *_finite(around)],
    "lost_if_first": lambda bits, around: [_zero(bits), *_finite(around), *_nonzero(around[:1])],
}
"""What is counted of a pointwise equation, by the bits of its result and of its operands: the
elements for which all of these hold.

An infinity or a NaN was made if no operand has one at the same element, and a number was lost if
the result is zero and the exact result is not. That is zero only where an operand is
(`lost_if_all`), never (`lost`), or only where the first operand is (`lost_if_first`).
"""


def _finite(around: Sequence[Any]) -> list[Any]:
    return [lax.lt(x, INFINITY) for x in around]


def _nonzero(around: Sequence[Any]) -> list[Any]:
    return [lax.gt(x, np.uint32(0)) for x in around]


def _zero(bits: Any) -> Any:
    return lax.eq(bits, np.uint32(0))


class _Item(NamedTuple):
    """Cells that are reduced in one loop.

    Attributes:
        arrays: a value, and the operands of the pointwise equation that made it.
        is_new: whether the value's extent is among them.
        wanted: those of `_CHANGES` that are.
        first: the first of the cells.
    """

    arrays: Sequence[Any]
    is_new: bool
    wanted: Sequence[str]
    first: Cell

    @property
    def key(self) -> Any:
        """What items that are reduced together share."""
        types = [(x.shape, x.dtype) for x in self.arrays]
        has_few = all(isinstance(n, int) for n in types[0][0]) and math.prod(types[0][0]) <= _FEW
        return (self.is_new, *self.wanted, *types) if has_few else self.first


class _Cells:
    """The scalars to which the values of a sequence of equations are reduced.

    Values are told apart by their ids, so the caller must keep them alive.
    """

    def __init__(self) -> None:
        self._count = _UNBOUNDED + 1
        self._items: list[_Item] = []
        self._equal: dict[int, Any] = {}
        self._extents: dict[int, _Extent] = {}

    def equate(self, value: Any, other: Any) -> None:
        """Notes that a value has another one's magnitudes, in any order and number."""
        other = self._equal.get(id(other), other)
        if value is not other:
            self._equal[id(value)] = other

    def extent(
        self, value: Any, around: Sequence[Any] = (), wanted: Sequence[str] = ()
    ) -> tuple[_Extent, Sequence[Cell]]:
        """The extent of a value, and what changed in the pointwise equation that made it.

        Args:
            value: the value.
            around: the equation's operands, scalars or with as many dimensions.
            wanted: those of `_CHANGES` that are counted.
        """
        value = value if wanted else self._equal.get(id(value), value)
        known = self._extents.get(id(value))
        cells = range(self._count, self._count + (0 if known else 4) + len(wanted))
        if cells:
            arrays = [ir.summed_up(jnp.asarray(x)) for x in (value, *around)]
            self._items.append(_Item(arrays, not known, wanted, self._count))
            self._count = cells.stop
        if known is None:
            known = self._extents[id(value)] = _Extent(*cells[:4])
            cells = cells[4:]
        return known, cells

    def reduced(self) -> tuple[Any, Any]:
        """A vector with all scalars, and the place of each cell in it."""
        vectors: list[Any] = [np.asarray([0, 1, UNBOUNDED], np.uint32)]
        places, end = np.arange(self._count), _UNBOUNDED + 1
        groups = defaultdict[Any, list[_Item]](list)
        for item in self._items:
            groups[item.key].append(item)
        for group in groups.values():
            for start in range(0, len(group), _AT_ONCE):
                items = group[start : start + _AT_ONCE]
                for column, vector in enumerate(_reduced(items)):
                    vectors.append(vector)
                    places[[item.first + column for item in items]] = range(end, end + len(items))
                    end += len(items)
        return _concatenated(vectors), places


_COMBINE = {"max": lax.max, "min": lax.min, "sum": lax.add}
_START = {"max": np.uint32(0), "min": UNBOUNDED, "sum": np.uint32(0)}


def _reduced(items: Sequence[_Item]) -> Sequence[Any]:
    """The columns of alike items, a vector with an element for each item, in one loop."""
    each = zip(*(item.arrays for item in items), strict=True)
    stacks = [_concatenated([lax.expand_dims(x, (0,)) for x in arrays]) for arrays in each]
    bits, *around = map(_bits_of, stacks)
    shape = bits.shape
    # Along the result's axes an operand may have one element, and a scalar has none.
    around = [lax.broadcast_in_dim(x, shape, range(x.ndim)) for x in around]
    columns: list[tuple[Any, str]] = []
    if items[0].is_new:
        finite = lax.select(lax.lt(bits, INFINITY), bits, lax.full_like(bits, 0))
        columns += [(finite, "max"), (lax.sub(bits, np.uint32(1)), "min")]
        columns += [(lax.eq(bits, INFINITY), "sum"), (lax.gt(bits, INFINITY), "sum")]
    for name in items[0].wanted:
        columns.append((functools.reduce(lax.bitwise_and, _CHANGES[name](bits, around)), "sum"))
    arrays = [lax.convert_element_type(x, np.uint32) for x, _ in columns]
    hows = [how for _, how in columns]

    def combined(one: Any, other: Any) -> Any:
        return tuple(_COMBINE[how](a, b) for how, a, b in zip(hows, one, other, strict=True))

    axes = tuple(range(1, len(shape)))
    return lax.reduce(arrays, [_START[how] for how in hows], combined, axes) if axes else arrays


def _concatenated(arrays: Sequence[Any]) -> Any:
    while len(arrays) > _AT_ONCE:
        starts = range(0, len(arrays), _AT_ONCE)
        parts = [lax.concatenate(arrays[i : i + _AT_ONCE], 0) for i in starts]
        # XLA would make one of these and the next one.
        arrays = lax.optimization_barrier(parts)
    return lax.concatenate(arrays, 0) if len(arrays) > 1 else arrays[0]


# ---------------------------------------------------------------- one equation


def _moves(name: str) -> bool:
    # A gather makes NaNs for indices out of bounds.
    return op(name).kind is OpKind.DATA_MOVEMENT and name != "gather"


_Row = dict[str, list[Cell]]
"""The cells that make up an equation's row: sums, maxima or minima are taken over each list.

- largest, smallest: of the results.
- bad: how many results are not finite.
- infinities, nans: how many are made, unless `not_finite_read` or `nans_read` are not zero.
- lost: how many are lost to zero.
- not_finite_read, nans_read: how many elements of operands are not finite, or NaN.
- largest_read, smallest_read: of the operands.
"""


def _row(step: ir.Ran, reads: bool, cells: _Cells) -> _Row:
    name = step.eqn.primitive.name
    results = [x for x in step.results if _is_inexact(x)]
    operands = [x for x in step.operands if _is_inexact(x)]
    chooses = _moves(name) or _makes_an_operand(name, operands, results)
    pointwise = _is_pointwise(name, operands, jnp.shape(results[0]))
    row: _Row = defaultdict(list)
    if reads:
        row["largest_read"] = [x.largest for x in _extents(cells, operands)]
        row["smallest_read"] = [x.smallest_less_one for x in _extents(cells, operands)]
    from_all = not (pointwise or chooses)
    if from_all:
        # A reference may hold a NaN, so what the equation makes of it is not born here.
        has_refs = any(map(_is_ref, step.operands))
        read = [_Extent(*[_ONE] * 4)] if has_refs else _extents(cells, operands)
        row["not_finite_read"] = [cell for x in read for cell in (x.infinities, x.nans)]
        row["nans_read"] = [x.nans for x in read]
    changes = pointwise and not _keeps_magnitudes(step)
    around, wanted = _changes(name, operands, chooses) if changes else ([], {})
    for x in results:
        _note_result(row, cells, x, around, wanted, from_all)
    if ir.rounds_operand(step.eqn):
        # A scaled product's operand loses values to zero by its rounding.
        row["lost"] += cells.extent(step.results[0], step.operands[:1], ["lost_if_all"])[1]
    return row


def _note_result(
    row: _Row, cells: _Cells, x: Any, around: Sequence[Any], wanted: dict[str, str], from_all: bool
) -> None:
    extent, changed = cells.extent(x, around, list(wanted.values()))
    row["largest"].append(extent.largest)
    row["smallest"].append(extent.smallest_less_one)
    row["bad"] += extent.infinities, extent.nans
    for figure, cell in zip(wanted, changed, strict=True):
        row[figure].append(cell)
    if from_all:
        row["infinities"].append(extent.infinities)
        row["nans"].append(extent.nans)


def _extents(cells: _Cells, values: Sequence[Any]) -> list[_Extent]:
    return [cells.extent(x)[0] for x in values]


_KEEP = frozenset(("neg", "abs", "copy", "stop_gradient", "reshape", "squeeze", "transpose", "rev"))
_WIDER = frozenset((np.dtype(np.float32), np.dtype(np.float64)))
_EXACT = dict.fromkeys(map(np.dtype, (jnp.bfloat16, np.float16, np.float32)), _WIDER)
"""Casts that change no number: of a format, and to which."""


def _keeps_magnitudes(step: ir.Ran) -> bool:
    """Whether the magnitudes of an equation's result are those of its first operand."""
    eqn = step.eqn
    if not eqn.outvars or not ir.is_array(eqn.outvars[0].aval) or not step.operands:
        return False
    before, after = jax.typeof(step.operands[0]), jax.typeof(step.results[0])
    if eqn.primitive.name == "convert_element_type":
        return after.dtype in _EXACT.get(before.dtype, ())
    kept = eqn.primitive.name in _KEEP or ir.keeps_bits(eqn) or ir.is_identity_of_first_operand(eqn)
    return kept and after.dtype == before.dtype


def _makes_an_operand(name: str, operands: Sequence[Any], results: Sequence[Any]) -> bool:
    """Whether results are elements of operands. The magnitude of a complex number is none."""
    dtypes = {jnp.result_type(x) for x in (*operands, *results)}
    return op(name).makes_an_operand and len(dtypes) <= 1


def _is_pointwise(name: str, operands: Sequence[Any], shape: tuple[Any, ...]) -> bool:
    """Whether each element of a result is made of one element of each operand.

    An operand may be a scalar, or have one element along an axis.
    """
    shapes = {jnp.shape(x) for x in operands} - {()}
    fit = all(
        len(own) == len(shape) and all(n in (1, m) for n, m in zip(own, shape, strict=True))
        for own in shapes
    )
    return op(name).kind is OpKind.ELEMENTWISE and fit


def _changes(name: str, operands: Sequence[Any], chooses: bool) -> tuple[list[Any], dict[str, str]]:
    """The operands on which it depends what a pointwise equation makes and loses.

    Args:
        name: of its primitive.
        operands: of the equation.
        chooses: whether its results are elements of them.

    Returns:
        The operands, and for each figure of a row the one of `_CHANGES` that it counts.
    """
    wanted: dict[str, str] = {}
    if not chooses:
        wanted |= {"infinities": "infinities", "nans": "nans"}
    # A constant that is neither zero nor infinite decides nothing.
    around = [x for x in operands if not _is_plain_number(x)]
    if operands and op(name).zero_if_too_small:
        wanted["lost"] = "lost_if_all"
    elif operands and op(name).never_zero:
        wanted["lost"] = "lost"
    elif operands and op(name).zero_if_first_is:
        wanted["lost"] = "lost" if _is_plain_number(operands[0]) else "lost_if_first"
    return around, wanted


def _is_plain_number(x: Any) -> bool:
    if isinstance(x, jax.Array) or np.ndim(x):
        return False
    return bool(np.isfinite(x) and x != 0)


def _is_inexact(x: Any) -> bool:
    return not _is_ref(x) and jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _is_ref(x: Any) -> bool:
    return ir.is_ref(jax.typeof(x))


# ---------------------------------------------------------------- all equations


_FIGURES = (
    *("bad", "infinities", "nans", "lost", "not_finite_read", "nans_read"),
    *("largest", "smallest", "largest_read", "smallest_read"),
)


def _gathered(
    vector: Any, places: Any, rows: Sequence[_Row], names: Sequence[str]
) -> list[list[Any]]:
    """For each name as many vectors with an element for each row as a row has cells of the name."""
    indices: list[Any] = []
    ends: list[int] = [0]
    for name in names:
        empty = _UNBOUNDED if name.startswith("smallest") else _ZERO
        width = max(1, *(len(row[name]) for row in rows))
        indices += zip(
            *(row[name] + [empty] * (width - len(row[name])) for row in rows), strict=True
        )
        ends.append(len(indices))
    found = vector.at[places[np.asarray(indices)]].get(mode="promise_in_bounds")
    each = [lax.index_in_dim(found, i, 0, False) for i in range(len(indices))]
    return [each[start:end] for start, end in itertools.pairwise(ends)]


def _over(combine: Any, vectors: Sequence[Any]) -> Any:
    return functools.reduce(combine, vectors)


def _columns(vectors: Sequence[Any]) -> Any:
    return lax.concatenate([lax.expand_dims(x, (1,)) for x in vectors], 1)


def _smallest(less_one: Sequence[Any]) -> Any:
    """The smallest nonzero bits, from the smallest of all bits minus one of several values."""
    return lax.add(lax.min(_over(lax.min, less_one), INFINITY - np.uint32(1)), np.uint32(1))
