"""What a program keeps in memory from its forward to its backward pass."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from precpass.analysis.residuals import kept_bytes
from tests.support.values import f32


@jax.custom_vjp
def doubled(x: jax.Array) -> jax.Array:
    return 2 * x


def forward(x: jax.Array) -> Any:
    low = x.astype(jnp.bfloat16)
    return 2 * x, (low, lax.bitcast_convert_type(low, jnp.uint16))


def backward(kept: Any, g: jax.Array) -> Any:
    low, again = kept[0], lax.bitcast_convert_type(kept[1], jnp.bfloat16)
    return (g * low.astype(jnp.float32) * again.astype(jnp.float32),)


doubled.defvjp(forward, backward)


def test_a_value_and_its_bits_are_kept_once():
    program = jax.make_jaxpr(jax.grad(lambda x: doubled(jnp.sin(x)).sum()))(f32(256))
    # the cosine of the sine's derivative, and the value in bfloat16
    assert kept_bytes(program) == 256 * (4 + 2)
