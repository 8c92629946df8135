"""Issue 2, item 4: gradients that accumulate thousands of terms, within 1 % of float32."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from tests.support.passes import COMPOSITIONS, run_low
from tests.support.values import assert_near, normal_array

pytestmark = pytest.mark.programs

N = 16384
EYE = jnp.eye(8)
each_composition = pytest.mark.parametrize("compose", COMPOSITIONS.values(), ids=COMPOSITIONS)
POLICIES = {
    "AutoMixedBf16": pp.AutoMixedBf16,
    "AutoMixed": pp.AutoMixed,
    "AlwaysBf16": pp.AlwaysBf16,
}


def rnn(w, xs):
    """Inputs of one sign: the 4096 terms of dW add up instead of cancelling."""
    h, hs = lax.scan(lambda h, x: (jnp.tanh(h @ w + x),) * 2, jnp.zeros((2, 16)), xs)
    return h.sum() + hs.mean(0).sum()


def rnn_sum(w, xs):
    hs = lax.scan(lambda h, x: (jnp.tanh(h @ w + x),) * 2, jnp.zeros((2, 16)), xs)[1]
    return hs.sum()


def loop_constant(w, xs):
    return lax.scan(lambda c, x: (c + (x @ w).sum(), None), jnp.zeros(()), xs)[0]


def token(table, w):
    return (table[jnp.zeros(N, jnp.int32)] @ w).sum()


def token_by_take(table, w):
    return (jnp.take(table, jnp.zeros(N, jnp.int32), axis=0) @ w).sum()


def views(s, ws):
    """300 products that read one vector, each through a view of its own."""
    total = jnp.zeros(())
    for i in range(300):
        total = total + lax.dot(s[None], ws[i]).sum()
    return total


def bias(b, x):
    return ((x @ EYE + b) @ EYE).sum()


def bias_into_product(b, w):
    return (jnp.broadcast_to(b, (N, 8)) @ w).sum()


def fan_out_of_a_product(x, w):
    shared = x @ w
    return sum((shared @ EYE).sum() for _ in range(300))


ROWS = jnp.full((N, 2, 8), 0.5)  # an element of x.T @ g is 1
Case = tuple[Callable[..., Any], tuple[Any, ...], float | None]
# the function, its arguments, and every element of the gradient where it is known
CASES: dict[str, Case] = {
    "rnn": (rnn, (normal_array(0, 16, 16) / 8, jnp.abs(normal_array(1, 4096, 2, 16)) / 2), None),
    "rnn sum": (
        rnn_sum,
        (normal_array(0, 16, 16) / 8, jnp.abs(normal_array(1, 4096, 2, 16)) / 2),
        None,
    ),
    "loop constant": (loop_constant, (EYE, ROWS), N),
    "token": (token, (jnp.ones((4, 8)), EYE), None),
    "token by take": (token_by_take, (jnp.ones((4, 8)), EYE), None),
    "views": (views, (jnp.ones(2), jnp.full((300, 2, 2), 0.5)), 300),
    "bias": (bias, (jnp.ones((1, 8)), jnp.ones((N, 8))), N),
    "bias into product": (bias_into_product, (jnp.ones((1, 8)), EYE), N),
    "fan-out of a product": (fan_out_of_a_product, (jnp.ones((1, 8)), EYE), 300),
}
# a product whose results the gradient needs: forward and backward; linear ones lose the forward
LEAST = {"rnn": 3, "rnn sum": 3}


# 300 products in a row take long to compile: once is enough.
LONG = ("views", "fan-out of a product")
UNDER = [(n, p) for n in CASES for p in POLICIES if n not in LONG or p == "AutoMixedBf16"]


@functools.cache
def in_float32(name: str) -> Any:
    fn, args, _ = CASES[name]
    return jax.jit(jax.value_and_grad(fn))(*args)


@pytest.mark.release(keep=5)
@each_composition
@pytest.mark.enumerated
@pytest.mark.parametrize(("name", "policy"), UNDER)
def test_a_gradient_of_thousands_of_terms(name: str, compose: Any, policy: str):
    fn, args, known = CASES[name]
    mixed = compose(fn, jax.value_and_grad, POLICIES[policy])
    value, got = run_low(mixed, *args, least=LEAST.get(name, 2))
    if known is not None:
        assert_near(got, jnp.full(got.shape, float(known)))
    if name.startswith("token"):
        assert_near(got, jnp.zeros((4, 8)).at[0].set(N))
    if policy == "AlwaysBf16":
        return  # it orders tanh in bfloat16: what it rounds there is its own
    assert_near((value, got), in_float32(name))


@each_composition
def test_both_operands_at_once(compose: Any):
    def loss(x, w):
        y = lax.scan(
            lambda c, _: (c + jnp.tanh(x @ w), (x @ w).sum()), jnp.zeros((4, 8)), None, 512
        )
        return y[0].sum() + y[1].sum()

    args = jnp.abs(normal_array(2, 4, 8)), jnp.abs(normal_array(3, 8, 8)) / 8
    mixed = compose(loss, lambda f: jax.grad(f, (0, 1)))
    assert_near(run_low(mixed, *args, least=3), jax.jit(jax.grad(loss, (0, 1)))(*args))


def forward_over_reverse(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x: jax.jvp(lambda w: jax.grad(f)(w, x), (w,), (jnp.ones_like(w),))[1]


SECOND = {"hessian": jax.hessian, "forward over reverse": forward_over_reverse}


@each_composition
@pytest.mark.parametrize("order", SECOND)
def test_second_derivatives(order: str, compose: Any):
    def loss(w, xs):
        step = lambda h, x: (jnp.tanh(h @ w + x), None)  # noqa: E731
        return lax.scan(step, jnp.zeros((2, 4)), xs)[0].sum()

    args = jnp.abs(normal_array(4, 4, 4)) / 8, jnp.abs(normal_array(5, 64, 2, 4)) / 2
    mixed = compose(loss, SECOND[order])
    assert_near(run_low(mixed, *args, least=4), jax.jit(SECOND[order](loss))(*args))


@each_composition
def test_the_second_derivative_of_a_loop_constant_is_exact(compose: Any):
    def loss(w, xs):
        return lax.scan(lambda c, x: (c + ((x @ w) ** 2).sum() / 2, None), jnp.zeros(()), xs)[0]

    args = jnp.ones((2, 2)), jnp.full((N, 4, 2), 0.5)  # an element of x.T @ x is 1
    got = run_low(compose(loss, jax.hessian), *args, least=2)
    assert_near(got, N * jnp.einsum("ik,jl->ijkl", jnp.ones((2, 2)), jnp.eye(2)))
