"""Programs in which a value that is stored low would be a wrong one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from tests.support.values import assert_near, normal, normal_array, on_device


def activations() -> tuple[jax.Array, jax.Array]:
    return normal_array(0, 16, 32), on_device(normal(1, 32, 32) / np.float32(8))


def test_what_no_product_made_keeps_its_digits_in_a_gradient():
    """The offset cancels in the forward pass; the backward pass keeps the value."""
    x, w = activations()

    def loss(w: jax.Array, x: jax.Array, rows: jax.Array) -> jax.Array:
        def body(h: jax.Array, row: jax.Array) -> Any:
            h = jnp.tanh(h @ w)
            y = row * 1.5 + 1000.0
            return h, (y - 1000.0) * jnp.mean(h) * y

        return jnp.sum(lax.scan(body, x, rows)[1]) / 1000.0

    gradient = jax.value_and_grad(loss, argnums=(0, 2))
    args = w, x, normal_array(2, 64, 64)
    assert_near(pp.auto_mixed(gradient)(*args), jax.jit(gradient)(*args), 0.03)


def euler(x: jax.Array, w: jax.Array) -> jax.Array:
    return x + 1e-3 * jnp.tanh(x @ w)


def unrolled(x: jax.Array, w: jax.Array) -> jax.Array:
    for _ in range(30):
        x = euler(x, w)
    return x


def in_calls(x: jax.Array, w: jax.Array) -> jax.Array:
    for _ in range(20):
        x = jax.checkpoint(euler)(x, w)
    return x


def two_in_a_trip(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.scan(lambda x, _: (euler(euler(x, w), w), None), x, None, length=20)[0]


def on_a_sphere(x: jax.Array, w: jax.Array) -> jax.Array:
    """The sum is scaled before it is handed on."""

    def body(x: jax.Array, _: Any) -> Any:
        x = euler(x, w)
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)), None

    return lax.scan(body, x, None, length=60)[0]


def averaged(x: jax.Array, w: jax.Array) -> jax.Array:
    """Each step scales before it adds."""
    for _ in range(20):
        x = 0.999 * x + 0.001 * jnp.tanh(x @ w)
    return x


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("steps", [unrolled, in_calls, two_in_a_trip, on_a_sphere, averaged])
def test_small_steps_are_not_lost_under_a_gradient(steps: Callable[..., jax.Array]):
    """Rounded to bfloat16 after each step, a state of about 2 loses steps of 1e-3."""
    x, w = activations()
    x = x + 2.0
    x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return 1e4 * jnp.sum((steps(x, w) - x) ** 2)

    gradient = jax.value_and_grad(loss, argnums=(0, 1))
    assert_near(pp.auto_mixed(gradient)(x, w), jax.jit(gradient)(x, w), 0.05)


def test_what_scales_a_state_keeps_its_digits():
    """A decay of 0.999 is 1 in bfloat16."""
    x, w = activations()

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(s: jax.Array, row: jax.Array) -> Any:
            decay = jax.nn.sigmoid(7.0 + jnp.tanh(jnp.tanh(s + row * x) @ w))
            return decay * s, None

        return jnp.mean(lax.scan(body, jnp.ones_like(x), jnp.arange(500.0))[0])

    gradient = jax.value_and_grad(loss)
    assert_near(pp.auto_mixed(gradient)(w, x), jax.jit(gradient)(w, x), 0.03)


@pytest.mark.release
@pytest.mark.parametrize("scale", [1e6, 1e-9])
def test_float16_does_not_hold_what_it_has_no_range_for(scale: float):
    x, w = activations()

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(h: jax.Array, _: Any) -> Any:
            y = scale * jnp.tanh(h @ w)
            return jnp.tanh(y / scale), jnp.mean(jnp.sqrt(y * y) / scale)

        h, found = lax.scan(body, x, None, length=5)
        return jnp.sum(h) + jnp.sum(found)

    gradient = jax.value_and_grad(loss)
    assert_near(pp.auto_mixed(gradient, policy=pp.AutoMixed)(w, x), jax.jit(gradient)(w, x), 0.03)


def test_a_residual_is_low_beside_a_smaller_copy_of_its_loop():
    """What JAX makes of a body by leaving out what nobody reads has that body's variables."""
    w, rows = normal_array(0, 256, 256), normal_array(1, 16, 256, 256)

    @jax.jit
    def loss(w: jax.Array, rows: jax.Array) -> jax.Array:
        return lax.scan(lambda c, x: (c + jnp.sum(jnp.arctan(x @ w) * x), None), 0.0, rows)[0]

    gradient = jax.jit(jax.value_and_grad(loss))

    def program(w: jax.Array, rows: jax.Array) -> Any:
        scaled = jax.checkpoint(lambda scale: jnp.arctan(gradient(w, rows)[0] * scale))
        return gradient(w, rows), jax.linearize(scaled, 2.0)[1](1.0)

    for fn in (gradient, program):
        plan = pp.inspect(fn, policy=pp.AutoMixedBf16)(w, rows).plan
        assert any(decision.stores_low for decision in plan.walk())
