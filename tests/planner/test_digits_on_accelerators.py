"""What is rounded on a GPU or TPU alone loses no digits that a reader behind it needs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

import precpass as pp
from tests.support.jaxprs import low_products
from tests.support.passes import quiet
from tests.support.values import identical, normal_array, rel_error

X, W, V = normal_array(0, 64, 64), normal_array(1, 64, 64) / 8, normal_array(2, 64, 64) / 8
CAUSAL, PADDED = jnp.tril(jnp.ones((64, 64), bool)), jnp.arange(64) >= 5
NEAR_ONE = 1 + normal_array(3, 64, 256) / 20, 1 + normal_array(4, 256, 64) / 20
each_target = pytest.mark.parametrize("target", ["h100", "tpu v5e"])


def run(fn: Callable[..., Any], target: str | None, *args: Any) -> jax.Array:
    """The first result as it is planned for a target, with every rounding that the plan has."""
    return jaxpr_as_fun(pp.inspect(fn, target=target)(*args).after)(*args)[0]


# ---------------------------------------------------------------- small steps


def clipped_update(w: jax.Array, x: jax.Array) -> jax.Array:
    gradient = jax.grad(lambda w: jnp.square(jnp.tanh(x @ w)).mean())(w)
    return jnp.clip(w - 1e-3 * gradient, -1, 1)


def capped_stream(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(20):
        x = jax.nn.relu6(x + 1e-3 * jnp.tanh(x @ w) @ V)
    return x


def reshaped_stream(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(20):
        x = (x + 1e-3 * jnp.tanh(x @ w) @ V).reshape(8, 8, 64)
        x = jax.nn.relu(x).reshape(64, 64)
    return x


def averaged(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(10):
        x = jnp.minimum(jnp.maximum(0.999 * x + 0.001 * (x @ w), -1.0), 1.0)
    return x


KEPT = Primitive("kept_by_a_library")
"""One that precpass does not know, as equinox has: it returns its operand."""
KEPT.def_impl(lambda x: x)
KEPT.def_abstract_eval(lambda x: x)
mlir.register_lowering(KEPT, mlir.lower_fun(lambda x: x, multiple_results=False))


def behind_a_library(w: jax.Array, x: jax.Array) -> jax.Array:
    def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = x + 1e-3 * jnp.tanh(x @ w) @ V
        return KEPT.bind(jnp.where(y @ w > 1e9, 0.0, y)), None

    return jax.lax.scan(step, x, length=20)[0]


@pytest.mark.release(keep=1)
@each_target
@pytest.mark.parametrize(
    "fn", [clipped_update, capped_stream, reshaped_stream, averaged, behind_a_library]
)
def test_small_steps_are_not_lost_in_a_clip_or_a_relu(fn: Callable[..., Any], target: str):
    x = X if fn is clipped_update else jnp.clip(jnp.abs(X), 0.0, 0.9)
    start = W if fn is clipped_update else x
    assert rel_error(run(fn, target, W, x) - start, fn(W, x) - start) < 0.03


# ---------------------------------------------------------------- the errors of a CPU


def attention(w: jax.Array, x: jax.Array) -> jax.Array:
    bias = jnp.where(CAUSAL, 0.0, -1e9) + jnp.where(PADDED, 0.0, -1e9)[None]
    return jnp.square(jax.nn.softmax((x @ w) @ x.T + bias, -1) @ x).sum()


def squashed(w: jax.Array, x: jax.Array) -> jax.Array:
    """The correction of soft actor-critic, whose policy is a squashed normal distribution."""
    a = jnp.tanh(2 * (x @ w))
    return jnp.square(a @ V).mean() - jnp.log(1 - a**2 + 1e-6).mean()


def complement(w: jax.Array, x: jax.Array) -> jax.Array:
    return -jnp.log(1 - jax.nn.sigmoid(3 * (x @ w))).mean()


def clipped_log1p(w: jax.Array, x: jax.Array) -> jax.Array:
    return -jnp.log1p(-jnp.clip(jax.nn.sigmoid(5 * (x @ w)), 1e-6, 1 - 1e-6)).mean()


def clipped_arctanh(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.square(jnp.arctanh(jnp.clip(x @ w, -0.999, 0.999)) @ w).mean()


def ridge(w: jax.Array, x: jax.Array) -> jax.Array:
    h = jax.nn.relu(x @ w)
    return jnp.linalg.inv(h.T @ h + 1e-2 * jnp.eye(64))


def pairs(w: jax.Array, x: jax.Array) -> jax.Array:
    h = NEAR_ONE[0] @ NEAR_ONE[1][:, :8]
    return jnp.square(h[:, None] - h[None]).sum(-1)


def hinge(w: jax.Array, x: jax.Array) -> jax.Array:
    h = NEAR_ONE[0] @ NEAR_ONE[1]
    return jnp.square(jnp.maximum(h, 256.0) - h).sum(-1)


def ctc(w: jax.Array, x: jax.Array) -> jax.Array:
    logits = jnp.tanh(x.reshape(2, 32, 64) @ w) @ V
    labels = jnp.tile(jnp.arange(1, 9), (2, 1))
    return optax.ctc_loss(logits, jnp.zeros((2, 32)), labels, jnp.zeros((2, 8))).mean()


def of_two(w: jax.Array, x: jax.Array) -> jax.Array:
    a = 20 * (x @ w)
    return jnp.logaddexp(a[:, :32], a[:, 32:]).mean()


def with_a_repeated_row(w: jax.Array, x: jax.Array) -> jax.Array:
    a = 20 * (x @ w)
    return jnp.logaddexp(a, jnp.broadcast_to(a[:1] + 1.0, a.shape)).mean()


def added_in_a_loop(w: jax.Array, x: jax.Array) -> jax.Array:
    scores = 20 * (x @ w)
    return jax.lax.scan(lambda a, b: (jnp.logaddexp(a, b), None), scores[0], scores)[0].mean()


GUARDED = (jax.grad(complement), jax.grad(squashed), clipped_log1p, clipped_arctanh)
# A derivative of a smooth maximum is an exponential of an array less the maximum.
SMOOTH = (ctc, of_two, with_a_repeated_row, added_in_a_loop)
# the most error: a number of times that of a plan for a CPU, and what is added to it
BOUNDED: dict[str, tuple[Callable[..., Any], float, float]] = {
    "softmax with a masked row": (jax.grad(attention), 0, 0.1),
    "softmax of large logits": (lambda w, x: jax.nn.softmax(x @ w + 1e5, -1) @ V, 0, 0.1),
    "logsumexp": (lambda w, x: jax.nn.logsumexp(x @ w - 1e9, axis=-1), 0, 0.1),
    "softmax scaled behind its mask": (
        lambda w, x: jax.nn.softmax(jnp.where(CAUSAL & PADDED[None], x @ w, -1e9) * 1.5, -1) @ V,
        *(0, 0.1),
    ),
    **{f.__name__: (f, 2, 0.01) for f in (*GUARDED, ridge, pairs, hinge)},
    **{f.__name__: (jax.grad(f), 1.3, 0) for f in SMOOTH},
}


@pytest.mark.release(keep=3)
@each_target
@pytest.mark.parametrize("name", BOUNDED)
def test_it_is_about_as_near_to_float32_as_the_program_that_is_planned_for_a_cpu(
    name: str, target: str
):
    fn, times, more = BOUNDED[name]
    wanted, got = jax.jit(fn)(W, X), run(fn, target, W, X)
    assert bool(jnp.isfinite(got).all())
    assert rel_error(got, wanted) < times * rel_error(run(fn, None, W, X), wanted) + more


# ---------------------------------------------------------------- orders


@each_target
def test_whole_numbers_are_those_of_float32(target: str):
    mask = (normal_array(5, 1000, 8) > -0.5).astype(jnp.float32)

    def rank_in_expert(mask: jax.Array) -> jax.Array:
        counts = jnp.tril(jnp.ones((1000, 1000))) @ mask
        return (counts * mask).astype(jnp.int32)

    with quiet():  # The product whose result becomes whole numbers is the only one.
        assert low_products(pp.inspect(rank_in_expert, target=target)(mask).after) == []
        assert identical(run(rank_in_expert, target, mask), rank_in_expert(mask))


BIAS = jnp.arange(64.0)[None] / 640
ORDERS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "largest": lambda h: jnp.argmax(h, -1),
    # A router chooses experts by the softmax of a product's result.
    "softmax": lambda h: jax.lax.top_k(jax.nn.softmax(h), 2)[1],
    "sigmoid and bias": lambda h: jax.lax.top_k(
        jax.nn.sigmoid(h) + jnp.arange(64.0)[None] / 640, 2
    )[1],
    "log softmax": lambda h: jax.lax.top_k(jax.nn.log_softmax(h), 2)[1],
    "standardized": lambda h: jax.lax.top_k(jax.nn.standardize(h), 2)[1],
}


@pytest.mark.release(keep=2)
@each_target
@pytest.mark.parametrize("name", ORDERS)
def test_an_order_is_that_of_a_results_float32_digits(name: str, target: str):
    def order(x: jax.Array, w: jax.Array) -> jax.Array:
        return ORDERS[name](x @ w)

    assert len(low_products(pp.inspect(order, target=target)(*NEAR_ONE).after)) == 1
    assert bool((run(order, target, *NEAR_ONE) == run(order, None, *NEAR_ONE)).all())
