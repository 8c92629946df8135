"""Loops whose end depends on floating values are counted and stopped wherever they are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from precpass import jaxpr as ir


def halves(x: Any) -> Any:
    """Five trips from 16, and no end below 0."""
    return lax.while_loop(lambda x: x != 0.5, lambda x: x / 2, x)


def in_custom_root(x: Any) -> Any:
    return lax.custom_root(lambda y: y - x, x, lambda _, y: halves(y), lambda g, y: y / g(1.0))


@jax.custom_jvp
def with_rule(x: Any) -> Any:
    return halves(x)


with_rule.defjvp(lambda xs, ts: (with_rule(*xs), halves(xs[0]) * ts[0]))

WITHIN: dict[str, Callable[[Any], Any]] = {
    "alone": halves,
    "jit": jax.jit(halves),
    "cond": lambda x: lax.cond(x > 100, lambda x: x, halves, x),
    "scan": lambda x: lax.scan(lambda c, _: (halves(c) + x - 0.5, c), x, None, 3)[0],
    "while": lambda x: lax.while_loop(lambda s: s != 0.5, halves, x),
    "remat": jax.checkpoint(halves),
    "shard_map": jax.shard_map(
        halves, mesh=jax.make_mesh((1,), ("i",)), in_specs=P(), out_specs=P(), check_vma=True
    ),
    "custom_jvp": with_rule,
    "custom_root": in_custom_root,
    "vmap": lambda x: jax.vmap(halves)(jnp.stack([x, x]))[0],
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("within", WITHIN)
def test_a_loop_is_counted_and_stopped(within: str) -> None:
    jaxpr = jax.make_jaxpr(WITHIN[within])(1.0)
    assert ir.has_loops(jaxpr)

    @jax.jit
    def trips(x: Any) -> Any:
        out, loops, places = ir.with_bounded_loops(jaxpr, [x], 20, keeps_rules=False)
        assert all(place.source.file == __file__ for place in places)
        return out, loops

    out, loops = trips(16.0)
    assert out[0] == 0.5 or within == "scan"
    assert (loops[:, 1] == 0).all()
    assert loops[0, 0] == 5
    assert trips(-1.0)[1][0].tolist() == [20, 1]  # -1, -0.5, ... is never 0.5


@pytest.mark.parametrize("within", ["custom_jvp", "custom_root"])
def test_where_derivatives_are_taken_a_stopped_loop_in_a_rule_gives_nan(within: str) -> None:
    jaxpr = jax.make_jaxpr(WITHIN[within])(1.0)

    @jax.jit
    def derivative(x: Any) -> Any:
        def bounded(x: Any) -> Any:
            return ir.with_bounded_loops(jaxpr, [x], 20, keeps_rules=True)[0][0]

        return jax.jvp(bounded, (x,), (jnp.ones_like(x),))

    assert all(jnp.isfinite(x) for x in derivative(16.0))
    assert jnp.isnan(derivative(-1.0)[0])


def test_a_loop_around_a_stopped_one_ends() -> None:
    def outer(x: Any) -> Any:
        return lax.while_loop(lambda s: s[0] < 3, lambda s: (halves(s[0]), s[1] + 1), (x, 0))[1]

    jaxpr = jax.make_jaxpr(outer)(-1.0)
    (trips,), loops, _ = ir.with_bounded_loops(jaxpr, [-1.0], 20, keeps_rules=False)
    assert trips == 1
    assert loops.tolist() == [[20, 1], [1, 0]]


def test_a_loop_that_integers_end_is_not_stopped() -> None:
    def counted(n: Any, x: Any) -> Any:
        return lax.fori_loop(0, n, lambda i, x: x + i, x)

    assert not ir.has_loops(jax.make_jaxpr(counted)(3, 1.0))
    batched = jax.vmap(counted)
    assert not ir.has_loops(jax.make_jaxpr(batched)(jnp.arange(3), jnp.ones(3)))
