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

from precpass.jaxpr.binding import bind, evaluate, trace
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
    "Look",
    "LoopLook",
    "Place",
    "Ran",
    "Record",
    "Spliced",
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
        has_row: whether it has a row of the record. The others say which values are equal.
    """

    eqn: Eqn
    operands: Sequence[Any]
    results: Sequence[Any]
    has_row: bool


class Look(Protocol):
    """What is recorded of the equations that ran, and how records are joined."""

    def sees(self, eqn: Eqn) -> bool:
        """Whether an equation without bodies that has floating or complex results has a row."""
        ...

    def record(self, ran: Sequence[Ran]) -> Record:
        """The rows of equations that ran in a sequence; at least one has a row."""
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


class Spliced(NamedTuple):
    """A jaxpr that is evaluated in an equation's place, in the same sequence."""

    jaxpr: Jaxpr
    operands: Sequence[Any]


Entered = Spliced | tuple[Sequence[Any], Record, tuple[Place, ...]]
"""What an equation runs, or its results, the record of what its bodies ran, and its places."""
Enter = Callable[["Watch", Any, Sequence[Any]], Entered]


class Body(NamedTuple):
    """A jaxpr whose last results are the record of its equations.

    Attributes:
        jaxpr: the jaxpr.
        consts: values that are to be its first operands.
        original: the jaxpr without a record. It is kept alive: an id is unique while its object
            lives.
        places: the places of the record's rows.
    """

    jaxpr: Jaxpr
    consts: Sequence[Any]
    original: Any
    places: tuple[Place, ...]


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

    def run(self, jaxpr: Jaxpr, args: Sequence[Any]) -> tuple[list[Any], Record, tuple[Place, ...]]:
        """The results of a jaxpr, the record of its equations, and the places of its rows."""
        records: list[Record] = []
        ran: list[Ran] = []
        results, places = self._run(jaxpr, args, ran, records)
        self._close(ran, records)
        return results, self.concatenated(records), tuple(places)

    def _run(
        self, jaxpr: Jaxpr, args: Sequence[Any], ran: list[Ran], records: list[Record]
    ) -> tuple[list[Any], list[Place]]:
        """The results and places; what ran is added to the last sequence, or makes new records."""
        opened = open_jaxpr(jaxpr)
        values = dict(zip(opened.constvars, consts_of(jaxpr), strict=True))
        values.update(zip(opened.invars, args, strict=True))

        def read(atom: Atom) -> Any:
            return atom.val if is_literal(atom) else values[atom]

        places: list[Place] = []
        outside = source_info_util.current_name_stack()
        for eqn in opened.eqns:
            operands = [read(v) for v in eqn.invars]
            stack = outside + eqn.source_info.name_stack
            user = source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)
            enter = None if id(eqn) in self.dead else self.entered(eqn)
            with user, eqn.ctx.manager:
                inner: Sequence[Place]
                if enter is None:
                    results, inner = bind(eqn, operands), ()
                    ran.append(Ran(eqn, operands, results, self.sees(eqn)))
                    if ran[-1].has_row:
                        places.append(_place(eqn))
                elif isinstance(found := enter(self, eqn, operands), Spliced):
                    results, inner = self._run(*found, ran, records)
                else:
                    results, record, inner = found
                    if inner:
                        self._close(ran, records)
                        records.append(record)
                places += [_within(eqn, place) for place in inner]
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in opened.outvars], places

    def _close(self, ran: list[Ran], records: list[Record]) -> None:
        """Ends a sequence of equations."""
        if any(step.has_row for step in ran):
            records.append(jax.tree.map(varying, self.look.record(ran)))
        ran.clear()

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

    def body(self, jaxpr: Jaxpr, *, hoists: bool = False) -> Body:
        """A body with its record, traced once for all who call it.

        Args:
            jaxpr: the body.
            hoists: whether constants become operands, for an equation whose body may have none.
        """
        key = id(open_jaxpr(jaxpr)), jax.sharding.get_abstract_mesh(), hoists
        instrumented = self.traced.get(key)
        if instrumented is None:
            places: list[Place] = []

            def run(*args: Any) -> list[Any]:
                results, record, inner = self.run(jaxpr, args)
                places[:] = inner
                return [*results, *jax.tree.leaves(record)]

            new, consts = trace(run, *in_avals(jaxpr)), []
            if hoists:
                consts = consts_of(new)
                avals = *map(jax.typeof, consts), *in_avals(jaxpr)
                new = trace(functools.partial(_on_constants, new, len(consts)), *avals)
            if not hasattr(jaxpr, "consts"):  # on 0.10 the jaxpr of remat is open
                new = open_jaxpr(new)
            instrumented = self.traced[key] = Body(new, consts, jaxpr, tuple(places))
        return instrumented

    def split(self, results: Sequence[Any], own: int) -> tuple[list[Any], Record]:
        """Splits results into the equation's own and the record behind them."""
        tree = jax.tree.structure(self.none(0))
        return list(results[:own]), jax.tree.unflatten(tree, results[own:])

    def after(self, state: Any, record: Record) -> Any:
        """The number of a loop's next trip and the record so far, after one more trip."""
        trip, before = state
        return trip + np.int32(1), self.look.joined(before, self.look.in_trip(record, trip))


def _on_constants(jaxpr: Jaxpr, count: int, *args: Any) -> list[Any]:
    return evaluate(jaxpr, args[count:], args[:count])


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
