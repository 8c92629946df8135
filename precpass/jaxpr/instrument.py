"""Evaluating a jaxpr beside a record of its equations, which crosses loops, branches and calls.

A record has one row for each observed equation of the flattened program, in a fixed order. A
`Look` says what a row holds and how the rows of two runs are joined.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jax import lax
from jax.extend import source_info_util

from precpass.jaxpr.binding import bind, trace
from precpass.jaxpr.bodies import hidden_jaxprs, name_of
from precpass.jaxpr.primitives.scaling import rounds_operand
from precpass.jaxpr.reading import (
    Source,
    consts_of,
    in_avals,
    is_inexact,
    is_literal,
    open_jaxpr,
    scope_of,
    source_of,
)
from precpass.jaxpr.types import Atom, Eqn, Jaxpr

__all__ = [
    "Body",
    "Enter",
    "Entered",
    "LateLook",
    "Look",
    "LoopLook",
    "Part",
    "Place",
    "Ran",
    "Record",
    "Watch",
    "place_of",
    "varying",
]

Record = Any
"""A pytree of arrays with a row per place."""


@dataclasses.dataclass(frozen=True)
class Place:
    """An equation of the flattened program.

    Attributes:
        primitive: its name; for a hi-primitive the name of the primitive inside it.
        scope: the name scopes around it, as JAX prints them.
        source: your source line; the first caller's if JAX recorded none.
        inside: the loops and branches that it runs in, outermost first.
        dtype, shape: of its first floating or complex result, or of the values that it rounds to 8
            bits. Places that differ only in shape are equal.
        is_entered: False for an equation whose inside cannot be observed: a kernel, a callback.
    """

    primitive: str
    scope: str
    source: Source
    inside: tuple[str, ...]
    dtype: str
    shape: tuple[Any, ...] = dataclasses.field(compare=False)
    is_entered: bool = True

    def inside_of(self, what: str) -> Place:
        """The place with one more loop or branch around it."""
        return dataclasses.replace(self, inside=(what, *self.inside))


class Ran(NamedTuple):
    """An equation that ran, with the values that it read and made.

    Attributes:
        has_row: False for one that only a `LateLook` is told of.
    """

    eqn: Eqn
    operands: Sequence[Any]
    results: Sequence[Any]
    has_row: bool = True


class Look(Protocol):
    """What is recorded of the equations that ran, and how records are joined."""

    def sees(self, eqn: Eqn) -> bool:
        """Whether an equation without bodies that has floating or complex results has a row."""
        ...

    def record(self, ran: Sequence[Ran]) -> Record:
        """The rows of equations that ran in a sequence."""
        ...

    def none(self, places: int) -> Record:
        """The record of equations that did not run, one row each."""
        ...

    def joined(self, one: Record, other: Record) -> Record:
        """The record of two runs."""
        ...

    def in_trip(self, record: Record, trip: Any) -> Record:
        """The record of one trip of a loop, an int32 scalar."""
        ...

    def over_shards(self, record: Record, axes: tuple[str, ...]) -> Record:
        """The record of all shards."""
        ...


@runtime_checkable
class LoopLook(Look, Protocol):
    """A look at loops, which have rows too and may be stopped."""

    def counts(self, eqn: Eqn) -> bool:
        """Whether a `while` has a row, behind those of its body."""
        ...

    def goes_on(self, trip: Any, inside: Record) -> Any:
        """Whether such a loop may make another trip, by their number and its body's record."""
        ...

    def row(self, trip: Any) -> Record:
        """The row of a loop that ended after so many trips."""
        ...


@runtime_checkable
class LateLook(Look, Protocol):
    """A look that makes one record for many sequences of equations.

    Its `record` only notes the values of a sequence, and is told of every equation, also of those
    without a row. `finished` makes the record: at the end of a loop's body, of a branch, and of the
    program. So the values of nested calls are recorded together.
    """

    def finished(self, noted: Sequence[Any]) -> Record:
        """The record of several sequences of equations."""
        ...


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("record",), meta_fields=("rows", "is_noted")
)
@dataclasses.dataclass
class Part:
    """A part of a record.

    Attributes:
        record: the record, or what a `LateLook` noted for it.
        rows: how many rows it has.
        is_noted: whether it is noted and not finished.
    """

    record: Any
    rows: int
    is_noted: bool = False


Entered = tuple[Sequence[Any], list[Part], tuple[Place, ...]]
"""The results of an equation, the record of what its bodies ran, and the places of its rows."""
Enter = Callable[["Watch", Any, Sequence[Any]], Entered]


class Body:
    """A jaxpr whose last results are the parts of the record of its equations."""

    def __init__(self, jaxpr: Jaxpr, original: Any, places: tuple[Place, ...], tree: Any) -> None:
        self.jaxpr = jaxpr
        self.original = original  # keeps it alive: an id is only unique while its object lives
        self.places = places
        self._tree = tree

    def split(self, results: Sequence[Any], own: int) -> tuple[list[Any], list[Part]]:
        """Splits results into the original's own and the parts of the record behind them."""
        return list(results[:own]), jax.tree.unflatten(self._tree, results[own:])


class Watch:
    """An evaluation beside a record.

    Args:
        look: what is recorded.
        dead: the ids of equations whose results nothing reads; they have no row.
        entered: enters an equation; None if it is not entered.
    """

    def __init__(
        self,
        look: Look,
        dead: frozenset[int],
        entered: Callable[[Any], Enter | None],
    ) -> None:
        self.look = look
        self.dead = dead
        self.entered = entered
        self.traced: dict[Any, Body] = {}

    def run(
        self, jaxpr: Jaxpr, args: Sequence[Any]
    ) -> tuple[list[Any], list[Part], tuple[Place, ...]]:
        """The results of a jaxpr, the parts of the record, and the places of its rows."""
        opened = open_jaxpr(jaxpr)
        values = dict(zip(opened.constvars, consts_of(jaxpr), strict=True))
        values.update(zip(opened.invars, args, strict=True))

        def read(atom: Atom) -> Any:
            return atom.val if is_literal(atom) else values[atom]

        places: list[Place] = []
        parts: list[Part] = []
        ran: list[Ran] = []
        is_late = isinstance(self.look, LateLook)

        def close() -> None:
            if rows := sum(step.has_row for step in ran):
                record = jax.tree.map(varying, self.look.record(ran))
                parts.append(Part(record, rows, is_late))
            ran.clear()

        outside = source_info_util.current_name_stack()
        for eqn in opened.eqns:
            operands = [read(v) for v in eqn.invars]
            stack = outside + eqn.source_info.name_stack
            user = source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)
            enter = None if id(eqn) in self.dead else self.entered(eqn)
            with user, eqn.ctx.manager:
                if enter is None:
                    results = bind(eqn, operands)
                    has_row = self.sees(eqn)
                    if has_row:
                        places.append(_place(eqn))
                    if has_row or is_late:
                        ran.append(Ran(eqn, operands, results, has_row))
                else:
                    results, recorded, inner = enter(self, eqn, operands)
                    if inner:
                        close()
                        parts += recorded
                        places += [_within(eqn, place) for place in inner]
            values.update(zip(eqn.outvars, results, strict=True))
        close()
        return [read(v) for v in opened.outvars], parts, tuple(places)

    def finished(self, parts: Sequence[Part]) -> Record:
        """The record of which these are the parts."""
        noted = [part.record for part in parts if part.is_noted]
        if not noted:
            return self.concatenated([part.record for part in parts])
        assert isinstance(self.look, LateLook)
        made = jax.tree.map(varying, self.look.finished(noted))
        if len(noted) == len(parts):
            return made
        records: list[Record] = []
        start = 0
        for part in parts:
            if part.is_noted:
                cut = functools.partial(
                    lax.slice_in_dim, start_index=start, limit_index=start + part.rows
                )
                records.append(jax.tree.map(cut, made))
                start += part.rows
            else:
                records.append(part.record)
        return self.concatenated(records)

    def sees(self, eqn: Eqn) -> bool:
        """Whether an equation without bodies has a row."""
        inexact = any(is_inexact(v.aval) for v in eqn.outvars)
        return inexact and id(eqn) not in self.dead and self.look.sees(eqn)

    def none(self, places: int) -> Record:
        """The record of equations that did not run."""
        return jax.tree.map(varying, self.look.none(places))

    def concatenated(self, records: Sequence[Record]) -> Record:
        """One record of several."""
        if not records:
            return self.none(0)
        if len(records) == 1:
            return records[0]
        return jax.tree.map(lambda *xs: lax.concatenate(xs, 0), *records)

    def body(self, jaxpr: Jaxpr) -> Body:
        """A body with its record, traced once for all who call it."""
        key = id(open_jaxpr(jaxpr)), jax.sharding.get_abstract_mesh()
        instrumented = self.traced.get(key)
        if instrumented is None:
            places: list[Place] = []
            trees: list[Any] = []

            def run(*args: Any) -> list[Any]:
                results, parts, inner = self.run(jaxpr, args)
                places[:] = inner
                leaves, tree = jax.tree.flatten(parts)
                trees[:] = [tree]
                return [*results, *leaves]

            new = trace(run, *in_avals(jaxpr))
            if not hasattr(jaxpr, "consts"):
                # on 0.10 the jaxpr of remat is open
                assert not consts_of(new)
                new = open_jaxpr(new)
            instrumented = self.traced[key] = Body(new, jaxpr, tuple(places), *trees)
        return instrumented

    def split(self, results: Sequence[Any], places: int, own: int) -> tuple[list[Any], Record]:
        """Splits results into the equation's own and the finished record behind them."""
        tree = jax.tree.structure(self.none(places))
        return list(results[:own]), jax.tree.unflatten(tree, results[own:])

    def after(self, state: Any, record: Record) -> Any:
        """The number of a loop's next trip and the record so far, after one more trip."""
        trip, before = state
        return trip + np.int32(1), self.look.joined(before, self.look.in_trip(record, trip))


def varying(x: Any) -> Any:
    """An array, typed as one that may differ between the shards of a `shard_map` around it.

    A record that a loop carries must have the same type before and after each trip.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    kind: Any = jax.typeof(x)
    missing = tuple(axis for axis in axes if axis not in kind.manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def _place(eqn: Eqn) -> Place:
    # Of such an equation the first result counts, also if it is int8, and not the float32 scale.
    is_rounding = rounds_operand(eqn)
    result = next(v.aval for v in eqn.outvars if is_rounding or is_inexact(v.aval))
    place = dataclasses.replace(place_of(eqn), dtype=str(result.dtype), shape=tuple(result.shape))
    return dataclasses.replace(place, is_entered=not hidden_jaxprs(eqn))


def place_of(eqn: Eqn) -> Place:
    """The place of an equation whose results have no row of their own."""
    return Place(name_of(eqn), scope_of(eqn), source_of(eqn), (), "", ())


def _within(eqn: Eqn, place: Place) -> Place:
    """A place of a body, with the caller's loop or branch around it."""
    outer = scope_of(eqn)
    scope = f"{outer}/{place.scope}" if outer and place.scope else outer or place.scope
    source = place.source if place.source.file else source_of(eqn)
    return dataclasses.replace(place, scope=scope, source=source)
