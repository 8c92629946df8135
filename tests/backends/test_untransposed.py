"""Products of transposes, and operands in the memory order that they are written in."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import precpass as pp
from precpass.analysis.residuals import kept_bytes
from tests.support.audits import factor_dtypes
from tests.support.passes import COMPOSITIONS
from tests.support.values import normal_array

both = functools.partial(jax.grad, argnums=(0, 1))
X, W = normal_array(0, 8, 16), normal_array(1, 16, 16) / 4


def text_of(fn: Callable[..., Any], *args: Any, **options: Any) -> str:
    return jax.jit(fn, **options).lower(*args).compile().as_text()


# ---------------------------------------------------------------- several devices


def tied(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.arctan(jnp.tanh(x @ w) @ w.T))


def looped(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(lax.scan(lambda h, _: (jnp.tanh(h @ w.T), None), x, length=3)[0])


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("order", COMPOSITIONS)
@pytest.mark.parametrize("fn", [tied, looped])
def test_no_device_gathers_what_others_have(fn: Any, order: str):
    """Of a batch that is divided each device needs its own part alone, as in float32.

    No type says how it is divided where only `in_shardings` do.
    """
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    options = {"in_shardings": (NamedSharding(mesh, P()), NamedSharding(mesh, P("data")))}
    mixed = COMPOSITIONS[order](fn, both, "AutoMixedBf16")
    for program in (both(fn), mixed):
        assert "all-gather" not in text_of(program, W, X, **options)
    for a, b in zip(jax.jit(mixed, **options)(W, X), both(fn)(W, X), strict=True):
        assert np.linalg.norm(a - b) <= 2**-6 * np.linalg.norm(b)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("order", COMPOSITIONS)
def test_the_shards_of_an_array_are_in_order_too(order: str):
    """XLA divides nothing there, so products run on low operands as on one device."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    rows, whole = P("d"), P()

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(whole, rows), out_specs=rows)
    def on_shards(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ w.T) @ w)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(on_shards(w, x)))

    w, x = normal_array(2, 64, 128) / 8, normal_array(3, 64, 128)
    fn = COMPOSITIONS[order](loss, both, "AutoMixedBf16")
    factors = factor_dtypes(text_of(fn, w, x))
    assert len(factors) > 4 and set(factors) == {("bf16", "bf16")}


# ---------------------------------------------------------------- what comes of a transpose


DERIVED: dict[str, Callable[[jax.Array], jax.Array]] = {
    "name": lambda w: checkpoint_name(w.T, "w"),
    "sin": lambda w: jnp.sin(w.T),
    "scale": lambda w: 2.0 * w.T,
    "stop_gradient": lambda w: lax.stop_gradient(w.T),
    "rev": lambda w: w.T[:, ::-1],
    "reshape": lambda w: w.T.reshape(64, 2, 96).reshape(128, 96),
    "twice": lambda w: jnp.tanh(w.T).T.T,
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", DERIVED)
def test_what_is_computed_of_a_transpose_is_in_order(name: str, backward: bool):
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return x @ DERIVED[name](w)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(fn(w, x)))

    w, x = normal_array(2, 96, 128) / 8, normal_array(3, 64, 128)
    mixed = pp.auto_mixed(both(loss) if backward else fn, policy="AutoMixedBf16")
    factors = factor_dtypes(text_of(mixed, w, x))
    assert len(factors) > 0 and set(factors) == {("bf16", "bf16")}


def test_a_product_with_its_own_transpose_keeps_one_copy_for_each_side():
    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.arctan(x.T @ x))

    jaxpr = jax.make_jaxpr(jax.grad(pp.auto_mixed(loss)))(X)
    # the derivative of arctan, and x in bfloat16 for the cotangents of both
    assert kept_bytes(jaxpr) <= 4 * 16 * 16 + 2 * (2 * X.size)


# ---------------------------------------------------------------- values


def swapped(w: jax.Array, x: jax.Array) -> Any:
    product = (x @ w).T
    return product @ x, product.T @ w.T, jnp.arctan(product)


def both_sides(w: jax.Array, x: jax.Array) -> Any:
    t = x.T
    return t @ x, x @ t, t, w.T.T.T @ t


def carried(w: jax.Array, x: jax.Array) -> Any:
    return lax.scan(lambda h, _: (jnp.tanh(w @ h.T).T, h), x, length=3)


def across_a_jit(w: jax.Array, x: jax.Array) -> Any:
    turned = jax.jit(lambda a: a.T)
    return turned(turned(x)) @ turned(w), turned(w) @ turned(x)


def branched(w: jax.Array, x: jax.Array) -> Any:
    return lax.cond(x[0, 0] > 0, lambda: jnp.arctan(x @ w.T), lambda: (w @ x.T).T)


def kept_exact(w: jax.Array, x: jax.Array) -> Any:
    t = w.T
    with pp.keep("f64"):
        y = jnp.arctan(x @ t)
        z = y.T
    return z.T @ t, y @ w


def heads(w: jax.Array, x: jax.Array) -> Any:
    q, k = (a.reshape(2, -1, 4, 4).transpose(0, 2, 1, 3) for a in (x, x @ w))
    return (jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ k).transpose(0, 2, 1, 3)


def empty(w: jax.Array, x: jax.Array) -> Any:
    return w.T @ x[:0].T, x[:0].T @ (x[:0] @ w)


PROGRAMS = [swapped, both_sides, carried, across_a_jit, branched, kept_exact, heads, empty]


def summed(fn: Callable[..., Any]) -> Callable[..., jax.Array]:
    return lambda w, x: sum(jnp.sum(jnp.arctan(y)) for y in jax.tree.leaves(fn(w, x)))  # pyright: ignore


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("fn", PROGRAMS)
def test_gradients_of_both_orders_are_near_and_a_fixed_point(fn: Any):
    wanted = both(summed(fn))(W, X)
    for order in COMPOSITIONS.values():
        got = jax.jit(order(summed(fn), both, "AutoMixedBf16"))(W, X)
        for a, b in zip(got, wanted, strict=True):
            assert np.linalg.norm(a - b) <= 2**-5 * np.linalg.norm(b)
    once = pp.inspect(both(summed(fn)), "AutoMixedBf16")(W, X).after
    again = pp.inspect(jaxpr_as_fun(once), "AutoMixedBf16")(W, X).after
    assert str(once.jaxpr) == str(again.jaxpr)
