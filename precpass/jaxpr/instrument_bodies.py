"""How an observed evaluation enters equations with bodies, so that records cross their borders."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from precpass.jaxpr.binding import bind, bind_shard_map, evaluate, trace
from precpass.jaxpr.bodies import Body, bodies, scan_split, with_bodies
from precpass.jaxpr.border_copies import scan_counts
from precpass.jaxpr.instrument import (
    Enter,
    Entered,
    Look,
    LoopLook,
    Place,
    Record,
    Spliced,
    Watch,
    place_of,
    varying,
)
from precpass.jaxpr.reading import in_avals, open_jaxpr, out_avals
from precpass.jaxpr.types import Eqn, Jaxpr

__all__ = ["DROPS_RULES", "entered", "watched"]


def watched(
    jaxpr: Jaxpr,
    args: Sequence[Any],
    look: Look,
    dead: frozenset[int] = frozenset(),
) -> tuple[list[Any], Record, tuple[Place, ...]]:
    """A jaxpr's results, and the record of its equations.

    Args:
        jaxpr: the jaxpr.
        args: its operands.
        look: what is recorded.
        dead: the ids of equations whose results nothing reads; they have no row.

    Returns:
        The results, the record, and the place of each of its rows.
    """
    return Watch(look, dead, entered).run(jaxpr, args)


def _jit(watch: Watch, eqn: Eqn, operands: Sequence[Any]) -> Entered:
    shardings = *eqn.params["in_shardings"], *eqn.params["out_shardings"]
    if not any(isinstance(x, jax.sharding.Sharding) for x in shardings):
        return Spliced(eqn.params["jaxpr"], operands)
    body = watch.body(eqn.params["jaxpr"])
    more = len(out_avals(body.jaxpr)) - len(eqn.outvars)
    params = {**eqn.params, "jaxpr": body.jaxpr}
    params["out_shardings"] = (*params["out_shardings"], *[_unspecified()] * more)
    params["out_layouts"] = (*params["out_layouts"], *[None] * more)
    results = bind(eqn, operands, params)
    return *watch.split(results, len(eqn.outvars)), body.places


@functools.cache
def _unspecified() -> Any:
    """The value that a jit has for a sharding that the user did not give."""
    with jax.disable_jit(False):
        (eqn,) = open_jaxpr(jax.make_jaxpr(jax.jit(lambda x: x))(1.0)).eqns
    return eqn.params["out_shardings"][0]


def _call(watch: Watch, eqn: Eqn, operands: Sequence[Any]) -> Entered:
    inner = bodies(eqn)
    body = watch.body(inner[0].jaxpr, hoists=True)
    params = with_bodies(eqn, inner, [body.jaxpr])
    if isinstance(params.get("prevent_cse"), tuple):  # of a checkpoint: for each operand
        params["prevent_cse"] = *[False for _ in body.consts], *params["prevent_cse"]
    results = bind(eqn, [*body.consts, *operands], params)
    return *watch.split(results, len(eqn.outvars)), body.places


def _inline(watch: Watch, eqn: Eqn, operands: Sequence[Any]) -> Entered:
    """Runs the first body of an equation whose other functions are derivative rules."""
    body = bodies(eqn)[0]
    return Spliced(body.jaxpr, [operands[i] for i in body.operands])


def _solve(watch: Watch, eqn: Eqn, operands: Sequence[Any]) -> Entered:
    body = _solving(eqn)
    return Spliced(body.jaxpr, [operands[i] for i in body.operands])


def _solving(eqn: Eqn) -> Body:
    at = eqn.params["jaxprs"]._fields.index("solve")
    return next(body for body in bodies(eqn) if body.index == at)


def _cond(watch: Watch, eqn: Eqn, operands: Sequence[Any]) -> Entered:
    instrumented = list(map(watch.body, eqn.params["branches"]))
    result_count = len(eqn.outvars)

    def branch(at: int) -> Any:
        def run(*args: Any) -> list[Any]:
            ran = evaluate(instrumented[at].jaxpr, args)
            records = [watch.none(len(body.places)) for body in instrumented]
            results, records[at] = watch.split(ran, result_count)
            return [*results, *jax.tree.leaves(watch.concatenated(records))]

        return trace(run, *in_avals(instrumented[at].original))

    new = tuple(map(branch, range(len(instrumented))))
    results = bind(eqn, operands, {**eqn.params, "branches": new})
    places = [
        place.inside_of(f"branch {at}")
        for at, body in enumerate(instrumented)
        for place in body.places
    ]
    return *watch.split(results, result_count), tuple(places)


def _scan(watch: Watch, eqn: Eqn, operands: Sequence[Any]) -> Entered:
    body, (consts, carry) = watch.body(eqn.params["jaxpr"]), scan_split(eqn.params)
    start, tree = jax.tree.flatten((np.int32(0), watch.none(len(body.places))))
    more, held = len(start), consts + carry

    def run(*args: Any) -> list[Any]:
        constants, state, rows = _cut(args, held, more)
        ran = evaluate(body.jaxpr, [*constants, *rows])
        results, record = watch.split(ran, len(eqn.outvars))
        state = watch.after(jax.tree.unflatten(tree, state), record)
        return [*results[:carry], *jax.tree.leaves(state), *results[carry:]]

    outer_constants, _, rows = _cut(operands, held, 0)
    inner = in_avals(body.original)
    jaxpr = trace(run, *inner[:held], *map(jax.typeof, start), *inner[held:])
    ys = len(eqn.outvars) - carry
    counts = scan_counts(eqn, consts, carry + more, len(rows), ys)
    params = {**eqn.params, "jaxpr": jaxpr, **counts}
    results = bind(eqn, [*outer_constants, *start, *rows], params)
    _, record = jax.tree.unflatten(tree, results[carry : carry + more])
    places = tuple(place.inside_of("scan") for place in body.places)
    return [*results[:carry], *results[carry + more :]], record, places


def _while(watch: Watch, eqn: Eqn, operands: Sequence[Any]) -> Entered:
    params = eqn.params
    body, condition = watch.body(params["body_jaxpr"]), params["cond_jaxpr"]
    shape = out_avals(condition)[0].shape  # that of a batch whose elements end at different trips

    def for_each(state: Any) -> Any:
        return (
            jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, *x.shape)), state)
            if shape
            else state
        )

    def longest(leaves: Sequence[Any]) -> Any:
        state = jax.tree.unflatten(tree, leaves)
        at = jnp.argmax(state[0].ravel()) if shape else 0
        return jax.tree.map(lambda x: lax.collapse(x, 0, len(shape))[at], state) if shape else state

    start, tree = jax.tree.flatten(for_each((np.int32(0), watch.none(len(body.places)))))
    result_count = len(eqn.outvars)
    loops = watch.look if isinstance(watch.look, LoopLook) and watch.look.counts(eqn) else None

    def run(*args: Any) -> list[Any]:
        constants, state, _ = _cut(args, len(args) - len(start), len(start))
        results, record = watch.split(evaluate(body.jaxpr, constants), result_count)
        state = for_each(watch.after(longest(state), record))
        return [*results, *jax.tree.leaves(state)]

    def goes_on(*args: Any) -> list[Any]:
        own, state, _ = _cut(args, len(args) - len(start), len(start))
        (on,) = evaluate(condition, own)
        return [on if loops is None else on & loops.goes_on(*longest(state))]

    more = [jax.typeof(x) for x in start]
    new = trace(run, *in_avals(body.original), *more)
    until = trace(goes_on, *in_avals(condition), *more)
    params = {**params, "body_jaxpr": new, "cond_jaxpr": until}
    results = bind(eqn, [*operands, *start], params)
    trips, record = longest(results[result_count:])
    places = [place.inside_of("while") for place in body.places]
    if loops is not None:
        record = watch.concatenated([record, jax.tree.map(varying, loops.row(trips))])
        places.append(place_of(eqn))
    return results[:result_count], record, tuple(places)


def _shard_map(watch: Watch, eqn: Eqn, operands: Sequence[Any]) -> Entered:
    places: list[Place] = []
    axes = tuple(eqn.params["newly_manual_axes"])

    def on_shards(*args: Any) -> tuple[Any, ...]:
        results, record, inner = watch.run(eqn.params["jaxpr"], args)
        places[:] = inner
        return *results, *jax.tree.leaves(watch.look.over_shards(record, axes))

    none = jax.tree.leaves(watch.none(0))
    specs = [PartitionSpec() for _ in none]
    results = bind_shard_map(eqn, on_shards, operands, more_specs=specs)
    return *watch.split(results, len(eqn.outvars)), tuple(places)


def _cut(args: Sequence[Any], start: int, size: int) -> tuple[list[Any], list[Any], list[Any]]:
    return list(args[:start]), list(args[start : start + size]), list(args[start + size :])


_ENTERED: dict[str, Enter] = {
    "jit": _jit,
    **dict.fromkeys(("remat2", "call", "closed_call", "eval_jaxpr"), _call),
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "shard_map": _shard_map,
    "custom_linear_solve": _solve,
    # Their other operands serve derivatives, and none is taken.
    **dict.fromkeys(
        ("custom_jvp_call", "custom_vjp_call", "remat_opt", "linear_call", "call_hi_primitive"),
        _inline,
    ),
}
"""The primitives whose equations are looked at inside. What calls by a rule of its own for batches
or for lowering (`custom_vmap`, `composite`) is bound as it is."""


DROPS_RULES = frozenset((_inline, _solve))
"""The ways to enter after which no derivative by the equation's own rules can be taken."""


def entered(eqn: Eqn) -> Enter | None:
    """How an equation is entered; None if it is bound as it is."""
    return _ENTERED.get(eqn.primitive.name) if bodies(eqn) else None
