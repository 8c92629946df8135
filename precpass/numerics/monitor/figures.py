"""The figures recorded of each equation: how large its results are, and what went wrong."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precpass import jaxpr as ir
from precpass.numerics.monitor.table import (
    INFINITY,
    NO_LARGEST,
    NO_SMALLEST,
    ONE,
    ZERO,
    Cell,
    Table,
    Values,
)
from precpass.policy.primitives import OpKind, op

__all__ = ["MOST", "NEVER", "Figures", "Recorder", "joined", "none"]

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Noted:
    """What is to be reduced to the figures of a sequence of equations.

    Attributes:
        arrays, items, count: those of `Values`.
        rows: the cells of each equation.
    """

    arrays: list[Any]
    items: Sequence[Any] = dataclasses.field(metadata={"static": True})
    count: int = dataclasses.field(metadata={"static": True})
    rows: tuple[Row, ...] = dataclasses.field(metadata={"static": True})


class Recorder:
    """The `ir.LateLook` that records `Figures`.

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

    def record(self, ran: Sequence[ir.Ran]) -> Noted:
        """As `ir.LateLook` says."""
        values = Values()
        rows: list[Row] = []
        for step in ran:
            if _keeps_magnitudes(step):
                values.equate(step.results[0], step.operands[0])
            elif step.eqn.primitive.name == "broadcast_in_dim":
                values.repeat(step.results[0], step.operands[0])
            if step.has_row:
                rows.append(_row(step, self.reads, values))
        return Noted(values.arrays, values.items, values.count, tuple(rows))

    def finished(self, records: Sequence[Noted]) -> Figures:
        """As `ir.LateLook` says."""
        table = Table([(x.arrays, x.items, x.count) for x in records])

        def cells(name: str, empty: Cell) -> Any:
            rows = [(at, row.get(name, [])) for at, x in enumerate(records) for row in x.rows]
            return rows, empty

        names = ("bad", "infinities", "nans", "lost", "not_finite_read", "nans_read")
        found = table.rows(table.counts, [cells(name, ZERO) for name in names])
        bad, infinities, nans, lost = (_over(lax.add, x) for x in found[:4])
        not_finite_read, nans_read = (_over(lax.max, x) for x in found[4:])
        # If a result is made from many elements, only operands without a NaN show where it began.
        nothing = lax.full_like(bad, 0)
        infinities = lax.select(lax.eq(not_finite_read, np.int32(0)), infinities, nothing)
        nans = lax.select(lax.eq(nans_read, np.int32(0)), nans, nothing)
        counts = _columns(lax.full_like(bad, 1), bad, infinities, nans, lost)
        born = lax.gt(lax.max(infinities, nans), np.int32(0))
        first = lax.select(born, nothing, lax.full_like(nothing, NEVER))
        ends = [cells("largest", NO_LARGEST), cells("smallest", NO_SMALLEST)]
        if self.reads:
            ends += [cells("largest_read", NO_LARGEST), cells("smallest_read", NO_SMALLEST)]
        largest, smallest, *read = table.rows(table.magnitudes, ends)
        reads = _reads(*read) if self.reads else None
        return Figures(_over(lax.max, largest), _smallest(smallest), counts, first, reads)

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


Row = dict[str, list[Cell]]
"""The cells that make up an equation's row: sums, maxima or minima are taken over each list.

- largest, smallest: of the results.
- bad: how many results are not finite.
- infinities, nans: how many are made, unless `not_finite_read` or `nans_read` are not zero.
- lost: how many are lost to zero.
- not_finite_read, nans_read: how many elements of operands are not finite, or NaN.
- largest_read, smallest_read: of the operands.
"""


def _row(step: ir.Ran, reads: bool, values: Values) -> Row:
    name = step.eqn.primitive.name
    results = [x for x in step.results if _is_inexact(x)]
    operands = [x for x in step.operands if _is_inexact(x)]
    chooses = _moves(name) or _makes_an_operand(name, operands, results)
    shape = jnp.shape(results[0])
    pointwise = _is_pointwise(name, operands, shape)
    row: Row = defaultdict(list)
    if reads:
        extents = [values.extent(x) for x in operands]
        row["largest_read"] += [x.largest for x in extents]
        row["smallest_read"] += [x.smallest_less_one for x in extents]
    from_all = not (pointwise or chooses)
    if from_all:
        _note_not_finite_read(row, step, operands, values)
    changes = pointwise and not _keeps_magnitudes(step)
    around, wanted = _changes(name, operands, chooses) if changes else ([], {})
    around = [values.spread(x, shape) for x in around]
    for x in results:
        extent, changed = values.changed(x, around, list(wanted.values()))
        row["largest"].append(extent.largest)
        row["smallest"].append(extent.smallest_less_one)
        row["bad"] += extent.infinities, extent.nans
        for figure, field in wanted.items():
            row[figure].append(changed[field])
        if from_all:
            row["infinities"].append(extent.infinities)
            row["nans"].append(extent.nans)
    if ir.rounds_operand(step.eqn):
        # A scaled product's operand loses values to zero by its rounding.
        row["lost"].append(values.lost(step.operands[0], step.results[0]))
    return row


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


def _note_not_finite_read(row: Row, step: ir.Ran, operands: Sequence[Any], values: Values) -> None:
    if any(map(_is_ref, step.operands)):
        # A reference may hold a NaN, so what the equation makes of it does not count as born here.
        row["not_finite_read"].append(ONE)
        row["nans_read"].append(ONE)
        return
    for x in operands:
        infinities, nans = values.not_finite(x)
        row["not_finite_read"] += infinities, nans
        row["nans_read"].append(nans)


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
        The operands, and for each figure of a row the one of `CHANGES` that it counts.
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


def _over(combine: Any, cells: Any) -> Any:
    """The first dimension of an array, combined."""
    each = (lax.index_in_dim(cells, i, 0, False) for i in range(len(cells)))
    return functools.reduce(combine, each)


def _columns(*vectors: Any) -> Any:
    return lax.concatenate([lax.expand_dims(x, (1,)) for x in vectors], 1)


def _smallest(less_one: Any) -> Any:
    """The smallest nonzero bits, from the smallest of all bits minus one of several values."""
    return lax.add(lax.min(_over(lax.min, less_one), INFINITY - np.uint32(1)), np.uint32(1))


def _reads(largest: Any, smallest_less_one: Any) -> Any:
    whole = lax.select(lax.gt(largest, np.uint32(0)), largest, lax.full_like(largest, INFINITY))
    return _columns(_over(lax.max, largest), _smallest(smallest_less_one), _over(lax.min, whole))
