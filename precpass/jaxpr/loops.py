"""Loops that end at a bound of trips, in case they would never end by themselves.

A `while` whose end depends on floating values may never end in another precision: its residual
stays above the tolerance. Its trips are counted, and a loop that reaches the bound is stopped.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precpass.jaxpr.binding import bind, retrace
from precpass.jaxpr.bodies import bodies, with_bodies
from precpass.jaxpr.custom_rules import Rewrite, has_rules, with_rewritten_rules
from precpass.jaxpr.instrument import Enter, Entered, Place, Ran, Watch
from precpass.jaxpr.instrument_bodies import DROPS_RULES, entered
from precpass.jaxpr.reading import is_inexact, is_literal, open_jaxpr
from precpass.jaxpr.types import Eqn, Jaxpr

__all__ = ["UNBOUNDED", "has_loops", "with_bounded_loops"]

UNBOUNDED = int(np.iinfo(np.int32).max)
"""A bound that no loop reaches."""


def has_loops(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr holds a `while` whose end depends on floating values."""
    return any(map(_holds_loop, open_jaxpr(jaxpr).eqns))


def with_bounded_loops(
    jaxpr: Jaxpr, args: Sequence[Any], bound: int, *, keeps_rules: bool
) -> tuple[list[Any], Any, tuple[Place, ...]]:
    """A jaxpr's results if each `while` whose end depends on floating values stops at a bound.

    Args:
        jaxpr: the jaxpr.
        args: its operands.
        bound: the most trips of each run of a loop.
        keeps_rules: whether derivatives may be taken of the results. Functions with rules of their
            own keep them then, and have no rows: their floating results are NaN if a loop inside is
            stopped.

    Returns:
        The results; int32[loops, 2], for each loop the most trips of its runs and whether (1 or 0)
        one reached the bound; and the place of each.
    """

    def enter(eqn: Eqn) -> Enter | None:
        if not _holds_loop(eqn):
            return None
        found = entered(eqn)
        return _with_rules if found is None or (keeps_rules and found in DROPS_RULES) else found

    return Watch(_Trips(bound), frozenset(), enter).run(jaxpr, args)


class _Trips:
    """An `ir.LoopLook` with a row for each loop: its trips, and whether it reached the bound."""

    def __init__(self, bound: int) -> None:
        self.bound = np.int32(bound)

    def sees(self, eqn: Eqn) -> bool:
        del eqn
        return False

    def record(self, ran: Sequence[Ran]) -> Any:
        return self.none(len(ran))

    def none(self, places: int) -> Any:
        return lax.full((places, 2), 0, np.int32)

    def joined(self, one: Any, other: Any) -> Any:
        return lax.max(one, other)

    def in_trip(self, record: Any, trip: Any) -> Any:
        del trip
        return record

    def over_shards(self, record: Any, axes: tuple[str, ...]) -> Any:
        return lax.pmax(record, axes)

    def counts(self, eqn: Eqn) -> bool:
        return _ends_by_floats(eqn)

    def goes_on(self, trip: Any, inside: Any) -> Any:
        """Whether a loop may make another trip: it ends with a loop inside that was stopped."""
        below = trip < self.bound
        # Shards with collectives in the loop must all end it at the same trip.
        alike = not jax.sharding.get_abstract_mesh().manual_axes
        return below & ~jnp.any(inside[:, 1] > 0) if alike and len(inside) else below

    def row(self, trip: Any) -> Any:
        return jnp.stack([trip, (trip >= self.bound).astype(np.int32)])[None]


def _with_rules(watch: Watch, eqn: Eqn, operands: Sequence[Any]) -> Entered:
    """An equation with custom rules, of which no more results can be asked."""

    def bounded(jaxpr: Jaxpr) -> Any:
        return retrace(jaxpr, functools.partial(run, jaxpr)) if has_loops(jaxpr) else jaxpr

    def run(jaxpr: Jaxpr, *args: Any) -> list[Any]:
        results, record, _ = watch.run(jaxpr, args)
        stopped = jnp.any(record[:, 1] > 0)
        marked = [
            lax.select(stopped, lax.full_like(x, np.nan), x) if is_inexact(x) else x
            for x in results
        ]
        return marked

    found = bodies(eqn)
    params = with_bodies(eqn, found, [bounded(body.jaxpr) for body in found])
    if has_rules(eqn):
        with_rewritten_rules(eqn, params, Rewrite(bounded, contextlib.nullcontext))
    return bind(eqn, operands, params), watch.none(0), ()


def _holds_loop(eqn: Eqn) -> bool:
    own = eqn.primitive.name == "while" and _ends_by_floats(eqn)
    return own or any(has_loops(body.jaxpr) for body in bodies(eqn))


def _ends_by_floats(eqn: Eqn) -> bool:
    """Whether floating values decide how many trips a `while` makes."""
    condition, body = (open_jaxpr(inner.jaxpr) for inner in bodies(eqn))
    consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    (at, has_floats), known = _read(condition, {0}), set[int]()
    carried = {i - consts[0] for i in at if i >= consts[0]}
    while not has_floats and not carried <= known:
        known |= carried
        at, has_floats = _read(body, known)
        carried = {i - consts[1] for i in at if i >= consts[1]}
    return has_floats


def _read(jaxpr: Any, results: set[int]) -> tuple[set[int], bool]:
    """The operands that some results depend on, and whether floating values are among all that."""
    needed = {jaxpr.outvars[i] for i in results if not is_literal(jaxpr.outvars[i])}
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if not is_literal(v))
    at = {i for i, v in enumerate(jaxpr.invars) if v in needed}
    return at, any(is_inexact(v.aval) for v in needed)
