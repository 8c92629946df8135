"""The extents of many values, and what pointwise equations make of them, in few reductions.

XLA compiles each reduction to a kernel of its own, and each operation on scalars too. So values of
few elements and of one shape are stacked and reduced together, a value is reduced once however
often it is read, and the scalars of all values are gathered into the rows of equations at once.

Magnitudes are compared as the bits of float32, whose order as unsigned integers is that of the
numbers (IEEE 754-2019, 3.4): XLA:CPU takes subnormal numbers for zero in its arithmetic, but not
in that of integers.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precpass import jaxpr as ir

__all__ = [
    "INFINITY",
    "NO_LARGEST",
    "NO_SMALLEST",
    "ONE",
    "ZERO",
    "Cell",
    "Table",
    "Values",
]

INFINITY = np.uint32(0x7F800000)
"""The bits of float32's infinity; a NaN's are more."""
UNBOUNDED = np.uint32(2**32 - 1)
_FEW = 4096
"""Arrays of at most so many elements are stacked, which copies them."""

_AT_ONCE = 128
"""As many vectors are concatenated in one kernel: compilers take long over more."""

Column = tuple[Any, str]
"""An array that is reduced to a scalar, and how: "max" or "min" of uint32, "sum" of booleans."""
Cell = int
"""A scalar that is reduced from values."""
ZERO, ONE, NO_LARGEST, NO_SMALLEST = range(4)
"""Cells that are always there."""


# ---------------------------------------------------------------- bits


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


# ---------------------------------------------------------------- what is reduced


class Extent(NamedTuple):
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


CHANGES = ("infinities", "nans", "lost_if_all", "lost", "lost_if_first")
"""What is counted of a pointwise equation: what it makes, and what it loses to zero.

An infinity or a NaN was made if no operand has one at the same element, and a number was lost if
the result is zero and the exact result is not. That is zero only where an operand is
(`lost_if_all`), never (`lost`), or only where the first operand is (`lost_if_first`).
"""


def _extent(bits: Any) -> list[Column]:
    finite = lax.select(lax.lt(bits, INFINITY), bits, lax.full_like(bits, 0))
    return [(finite, "max"), (lax.sub(bits, np.uint32(1)), "min"), *_not_finite(bits)]


def _not_finite(bits: Any) -> list[Column]:
    return [(lax.eq(bits, INFINITY), "sum"), (lax.gt(bits, INFINITY), "sum")]


def _changes(bits: Any, *around: Any) -> list[Column]:
    finite = [lax.lt(x, INFINITY) for x in around]
    nonzero = [lax.gt(x, np.uint32(0)) for x in around]
    zero = lax.eq(bits, np.uint32(0))
    masks = [
        [lax.eq(bits, INFINITY), *finite],
        [lax.gt(bits, INFINITY), *(lax.le(x, INFINITY) for x in around)],
        [zero, *finite, *nonzero],
        [zero, *finite],
        [zero, *finite, *nonzero[:1]],
    ]
    return [(_all(mask), "sum") for mask in masks]


def _all(tests: Sequence[Any]) -> Any:
    """Where all tests hold; one of a scalar operand counts for all elements."""
    shape = np.shape(tests[0])
    return functools.reduce(
        lax.bitwise_and,
        (x if np.ndim(x) == len(shape) else lax.broadcast_in_dim(x, shape, (0,)) for x in tests),
    )


_COLUMNS: dict[str, tuple[int, Callable[..., list[Column]]]] = {
    "extent": (4, _extent),
    "not finite": (2, _not_finite),
    "changes": (5, _changes),
}
"""How many columns are reduced from the bits of values, `[stacked, ...]`, and which."""


class _Item(NamedTuple):
    """Cells that are reduced from the same arrays.

    Attributes:
        what: a key of `_COLUMNS`, or how the cells were reduced already.
        arrays: the indices of the arrays.
        first: the first of its cells.
    """

    what: str
    arrays: tuple[int, ...]
    first: Cell


class Values:
    """What is to be reduced from the values of some equations.

    Values are told apart by their ids, so the caller must keep them alive.

    Attributes:
        arrays: values of few elements, and vectors of one element that others were reduced to.
        items: the cells that they become.
        count: the number of cells.
    """

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self.items: list[_Item] = []
        self.count = NO_SMALLEST + 1
        self._equal: dict[int, Any] = {}
        self._repeated: dict[int, Any] = {}
        self._spread: dict[tuple[int, tuple[Any, ...]], Any] = {}
        self._bits: dict[int, Any] = {}
        self._indices: dict[int, int] = {}
        self._extents: dict[int, Extent] = {}
        self._not_finite: dict[int, Sequence[Cell]] = {}

    def equate(self, value: Any, other: Any) -> None:
        """Notes that a value's magnitudes are those of another one, in any order."""
        other = self._equal.get(id(other), other)
        if value is not other:
            self._equal[id(value)] = other
        self.repeat(value, other)

    def repeat(self, value: Any, other: Any) -> None:
        """Notes that a value repeats the elements of another one."""
        other = self._repeated.get(id(other), other)
        if value is not other:
            self._repeated[id(value)] = other

    def spread(self, value: Any, shape: tuple[Any, ...]) -> Any:
        """A value in the shape of an equation's result, along whose axes it may have one element.

        A scalar stays one.
        """
        if jnp.shape(value) in ((), shape):
            return value
        key = id(value), shape
        if key not in self._spread:
            axes = tuple(range(len(shape)))
            self._spread[key] = lax.broadcast_in_dim(jnp.asarray(value), shape, axes)
            self.repeat(self._spread[key], value)
        return self._spread[key]

    def extent(self, value: Any) -> Extent:
        """The extent of a value."""
        return self.changed(value)[0]

    def changed(
        self, value: Any, operands: Sequence[Any] = (), wanted: Sequence[str] = ()
    ) -> tuple[Extent, dict[str, Cell]]:
        """The extent of a value, and what changed in a pointwise equation that made it.

        Both are reduced in one loop.

        Args:
            value: the value.
            operands: of the equation, of the value's shape or scalars.
            wanted: those of `CHANGES` that are counted.
        """
        at = [CHANGES.index(name) for name in wanted]
        first = self._equal.get(id(value), value)
        known = self._extents.get(id(first))
        whats = [] if known else [("extent", [first], range(4))]
        whats += [("changes", [value, *operands], at)] if at else []
        found = self._reduced(whats)
        if known is None:
            known = self._extents[id(first)] = Extent(*found[0])
            self._not_finite[id(first)] = known[2:]
        return known, dict(zip(wanted, found[-1], strict=True)) if at else {}

    def not_finite(self, value: Any) -> Sequence[Cell]:
        """The cells with the numbers of a value's infinities and of its NaNs.

        Of a value that repeats another one they are those of the other one.
        """
        value = self._repeated.get(id(value), value)
        if not isinstance(value, jax.Array) and not np.ndim(value):
            return (ONE if np.isinf(value) else ZERO), (ONE if np.isnan(value) else ZERO)
        if id(value) not in self._not_finite:
            (found,) = self._reduced([("not finite", [value], range(2))])
            self._not_finite[id(value)] = found
        return self._not_finite[id(value)]

    def lost(self, value: Any, rounded: Any) -> Cell:
        """The cell with the number of a value's elements that became zero as they were rounded."""
        at = CHANGES.index("lost_if_all")
        ((cell,),) = self._reduced([("changes", [rounded, value], [at])])
        return cell

    def _reduced(
        self, whats: Sequence[tuple[str, Sequence[Any], Sequence[int]]]
    ) -> list[Sequence[Cell]]:
        """The cells of some columns of arrays. Arrays of many elements are reduced at once."""
        found: list[Sequence[Cell]] = []
        columns: list[Column] = []
        first = self.count
        for what, values, at in whats:
            count, columns_of = _COLUMNS[what]
            start = self.count
            if _has_few(values[0]):
                indices = tuple(map(self._index, values))
                self.items.append(_Item(what, indices, start))
                found.append([start + i for i in at])
            else:
                every = columns_of(*map(self._bits_of, values))
                columns += [every[i] for i in at]
                count = len(at)
                found.append(range(start, start + count))
            self.count += count
        if columns:
            hows = [how for _, how in columns]
            vectors = _reductions([x for x, _ in columns], hows)
            for i, (how, vector) in enumerate(zip(hows, vectors, strict=True)):
                self.items.append(_Item(how, (len(self.arrays),), first + i))
                self.arrays.append(vector)
        return found

    def _index(self, value: Any) -> int:
        """The index in `arrays` of a value that is stacked."""
        if id(value) not in self._indices:
            self._indices[id(value)] = len(self.arrays)
            self.arrays.append(_stackable(value))
        return self._indices[id(value)]

    def _bits_of(self, value: Any) -> Any:
        if id(value) not in self._bits:
            self._bits[id(value)] = _bits_of(_stackable(value))
        return self._bits[id(value)]


def _has_few(x: Any) -> bool:
    """Whether an array has so few elements that it is stacked."""
    shape: tuple[Any, ...] = jnp.shape(x)
    return all(isinstance(n, int) for n in shape) and math.prod(shape) <= _FEW


def _stackable(value: Any) -> Any:
    """A value as `[1, ...]`, without other dimensions of size one."""
    array = ir.summed_up(jnp.asarray(value))
    ones = [i for i, n in enumerate(array.shape) if isinstance(n, int) and n == 1]
    return lax.expand_dims(lax.squeeze(array, ones), (0,))


# ---------------------------------------------------------------- reductions


_COMBINE = {"max": lax.max, "min": lax.min, "sum": lax.add}
_START = {"max": np.uint32(0), "min": UNBOUNDED, "sum": np.int32(0)}


def _reductions(arrays: Sequence[Any], hows: Sequence[str]) -> Sequence[Any]:
    """Arrays `[n, ...]` reduced to vectors of n elements, in one loop."""
    pairs = zip(arrays, hows, strict=True)
    arrays = [lax.convert_element_type(x, np.int32) if how == "sum" else x for x, how in pairs]

    def combined(one: Any, other: Any) -> Any:
        return tuple(_COMBINE[how](a, b) for how, a, b in zip(hows, one, other, strict=True))

    inner = tuple(range(1, np.ndim(arrays[0])))
    return lax.reduce(arrays, [_START[how] for how in hows], combined, inner) if inner else arrays


def _concatenated(arrays: Sequence[Any]) -> Any:
    while len(arrays) > _AT_ONCE:
        starts = range(0, len(arrays), _AT_ONCE)
        parts = [lax.concatenate(arrays[i : i + _AT_ONCE], 0) for i in starts]
        # XLA would make one of these and the next one.
        arrays = lax.optimization_barrier(parts)
    return lax.concatenate(arrays, 0) if len(arrays) > 1 else arrays[0]


class Table:
    """The cells of some sequences of equations, reduced.

    Attributes:
        magnitudes: the maxima and minima, a uint32 vector.
        counts: the sums, an int32 vector.

    Args:
        noted: of each sequence the arrays and items of its `Values`, and the number of its cells.
    """

    def __init__(self, noted: Sequence[tuple[Sequence[Any], Sequence[_Item], int]]) -> None:
        self._places = [np.zeros(count, np.int32) for _, _, count in noted]
        vectors: dict[bool, list[Any]] = {True: [np.asarray([0, 1], np.int32)]}
        vectors[False] = [np.asarray([0, UNBOUNDED], np.uint32)]
        lengths = {True: 2, False: 2}
        groups: dict[Any, list[tuple[int, _Item, Sequence[Any]]]] = {}
        for at, (arrays, items, _) in enumerate(noted):
            self._places[at][[ONE, NO_SMALLEST]] = 1
            for item in items:
                own = [arrays[i] for i in item.arrays]
                key = (item.what, *map(jax.typeof, own)) if item.what in _COLUMNS else (at, item)
                groups.setdefault(key, []).append((at, item, own))
        for members in groups.values():
            for column, (how, vector) in enumerate(
                _vectors(members[0][1], [m[2] for m in members])
            ):
                counts = how == "sum"
                for i, (at, item, _) in enumerate(members):
                    self._places[at][item.first + column] = lengths[counts] + i
                vectors[counts].append(vector)
                lengths[counts] += len(members)
        self.counts, self.magnitudes = map(_concatenated, (vectors[True], vectors[False]))

    def rows(
        self,
        vector: Any,
        columns: Sequence[tuple[Sequence[tuple[int, Sequence[Cell]]], Cell]],
    ) -> list[Any]:
        """Arrays `[n, rows]` with up to n cells for each row.

        Args:
            vector: `magnitudes` or `counts`.
            columns: for each array the cells of each row, with the number of its sequence, and the
                cell for what is missing in rows that have fewer.
        """
        indices: list[Any] = []
        for rows, empty in columns:
            width = max(1, *(len(cells) for _, cells in rows))
            cells = [(at, [*own, *[empty] * (width - len(own))]) for at, own in rows]
            indices.append(np.stack([self._places[at][own] for at, own in cells], 1))
        ends = np.cumsum([0, *map(len, indices)]).tolist()
        numbers = lax.GatherDimensionNumbers((), (0,), (0,))
        mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
        found = lax.gather(vector, np.concatenate(indices)[..., None], numbers, (1,), mode=mode)
        return [lax.slice_in_dim(found, *pair) for pair in itertools.pairwise(ends)]


def _vectors(item: _Item, members: Sequence[Sequence[Any]]) -> list[tuple[str, Any]]:
    """What alike items are reduced to: how, and a vector with an element for each of them."""
    if item.what not in _COLUMNS:
        return [(item.what, members[0][0])]
    stacks = [_concatenated(arrays) for arrays in zip(*members, strict=True)]
    columns = _COLUMNS[item.what][1](*map(_bits_of, stacks))
    hows = [how for _, how in columns]
    return list(zip(hows, _reductions([x for x, _ in columns], hows), strict=True))
