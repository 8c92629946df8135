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
TARGETS = ("h100", "tpu v5e")


def run(fn: Callable[..., Any], target: str, *args: Any) -> jax.Array:
    """The first result as it is planned for a target, with every rounding that the plan has."""
    return jaxpr_as_fun(pp.inspect(fn, target=target)(*args).after)(*args)[0]


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.square(jnp.tanh(x @ w)).mean()


def clipped_update(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.clip(w - 1e-3 * jax.grad(loss)(w, x), -1, 1)


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


def library_primitive() -> Primitive:
    """A primitive that precpass does not know, as equinox has: it returns its operand."""
    primitive = Primitive("kept_by_a_library")
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x: x, multiple_results=False))
    return primitive


KEPT = library_primitive()


def behind_a_library(w: jax.Array, x: jax.Array) -> jax.Array:
    def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = x + 1e-3 * jnp.tanh(x @ w) @ V
        return KEPT.bind(jnp.where(y @ w > 1e9, 0.0, y)), None

    return jax.lax.scan(step, x, length=20)[0]


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "fn", [clipped_update, capped_stream, reshaped_stream, averaged, behind_a_library]
)
def test_small_steps_are_not_lost_in_a_clip_or_a_relu(fn: Callable[..., Any], target: str):
    start = W if fn is clipped_update else jnp.clip(jnp.abs(X), 0.0, 0.9)
    args = (W, X) if fn is clipped_update else (W, start)
    change, wanted = run(fn, target, *args) - start, fn(*args) - start
    assert rel_error(change, wanted) < 0.03


def attention(w: jax.Array, x: jax.Array) -> jax.Array:
    bias = jnp.where(CAUSAL, 0.0, -1e9) + jnp.where(PADDED, 0.0, -1e9)[None]
    return jnp.square(jax.nn.softmax((x @ w) @ x.T + bias, -1) @ x).sum()


SOFTMAXES = {
    "a masked row": jax.grad(attention),
    "large logits": lambda w, x: jax.nn.softmax(x @ w + 1e5, -1) @ V,
    "logsumexp": lambda w, x: jax.nn.logsumexp(x @ w - 1e9, axis=-1),
    "scaled behind its mask": lambda w, x: (
        jax.nn.softmax(jnp.where(CAUSAL & PADDED[None], x @ w, -1e9) * 1.5, -1) @ V
    ),
}


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SOFTMAXES)
def test_a_softmax_subtracts_the_maximum_of_what_it_has(name: str, target: str):
    fn = SOFTMAXES[name]
    got, wanted = run(fn, target, W, X), fn(W, X)
    assert bool(jnp.isfinite(got).all())
    assert rel_error(got, wanted) < 0.1


def squashed(w: jax.Array, x: jax.Array) -> jax.Array:
    """The correction of soft actor-critic, whose policy is a squashed normal distribution."""
    a = jnp.tanh(2 * (x @ w))
    return jnp.square(a @ V).mean() - jnp.log(1 - a**2 + 1e-6).mean()


GUARDED = {
    "log of a complement": jax.grad(lambda w, x: -jnp.log(1 - jax.nn.sigmoid(3 * (x @ w))).mean()),
    "a squashed action": jax.grad(squashed),
    "log1p of a clip": lambda w, x: (
        -jnp.log1p(-jnp.clip(jax.nn.sigmoid(5 * (x @ w)), 1e-6, 1 - 1e-6)).mean()
    ),
    "arctanh of a clip": lambda w, x: jnp.square(
        jnp.arctanh(jnp.clip(x @ w, -0.999, 0.999)) @ w
    ).mean(),
    "a ridge of features": lambda w, x: (lambda h: jnp.linalg.inv(h.T @ h + 1e-2 * jnp.eye(64)))(
        jax.nn.relu(x @ w)
    ),
    "pairs": lambda w, x: (lambda h: jnp.square(h[:, None] - h[None]).sum(-1))(
        NEAR_ONE[0] @ NEAR_ONE[1][:, :8]
    ),
    "a hinge": lambda w, x: (lambda h: jnp.square(jnp.maximum(h, 256.0) - h).sum(-1))(
        NEAR_ONE[0] @ NEAR_ONE[1]
    ),
}


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", GUARDED)
def test_what_stands_behind_a_clip_a_complement_or_a_repetition_has_its_digits(
    name: str, target: str
):
    """It is as near to float32 as the program that is planned for a CPU."""
    fn = GUARDED[name]
    wanted = fn(W, X)
    got = run(fn, target, W, X)
    on_cpu = jaxpr_as_fun(pp.inspect(fn)(W, X).after)(W, X)[0]
    assert bool(jnp.isfinite(got).all())
    assert rel_error(got, wanted) < 2 * rel_error(on_cpu, wanted) + 0.01


@pytest.mark.parametrize("target", TARGETS)
def test_orders_and_whole_numbers_are_those_of_float32_results(target: str):
    mask = (normal_array(5, 1000, 8) > -0.5).astype(jnp.float32)

    def rank_in_expert(mask: jax.Array) -> jax.Array:
        counts = jnp.tril(jnp.ones((1000, 1000))) @ mask
        return (counts * mask).astype(jnp.int32)

    with quiet():  # The product whose result becomes whole numbers is the only one.
        assert low_products(pp.inspect(rank_in_expert, target=target)(mask).after) == []
        assert identical(run(rank_in_expert, target, mask), rank_in_expert(mask))

    def largest(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.argmax(x @ w, -1)

    assert len(low_products(pp.inspect(largest, target=target)(*NEAR_ONE).after)) == 1
    on_cpu = jaxpr_as_fun(pp.inspect(largest)(*NEAR_ONE).after)(*NEAR_ONE)[0]
    assert bool((run(largest, target, *NEAR_ONE) == on_cpu).all())


ROUTERS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": jax.nn.softmax,
    "sigmoid and bias": lambda h: jax.nn.sigmoid(h) + jnp.arange(64.0)[None] / 640,
    "log softmax": jax.nn.log_softmax,
    "standardized": jax.nn.standardize,
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ROUTERS)
def test_an_order_of_functions_of_a_result_is_that_of_its_float32_digits(name: str, target: str):
    """A router chooses experts by the softmax of a product's result."""

    def router(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.top_k(ROUTERS[name](x @ w), 2)[1]

    on_cpu = jaxpr_as_fun(pp.inspect(router)(*NEAR_ONE).after)(*NEAR_ONE)[0]
    got = run(router, target, *NEAR_ONE)
    assert bool((got == on_cpu).all())


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


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fn", [ctc, of_two, with_a_repeated_row, added_in_a_loop])
def test_a_smooth_maximum_of_two_arrays_has_its_digits(fn: Callable[..., Any], target: str):
    """The derivative is an exponential of an array less the maximum, which must not be rounded."""
    gradient = jax.grad(fn)
    wanted = jax.jit(gradient)(W, X)
    on_cpu = jaxpr_as_fun(pp.inspect(gradient)(W, X).after)(W, X)[0]
    assert rel_error(run(gradient, target, W, X), wanted) < 1.3 * rel_error(on_cpu, wanted)
