"""A cast to 16 bits stands before the reversal of a convolution's kernel.

XLA has a kernel for the derivative of a convolution on a GPU, and finds the place for it by the
reversed array that a convolution reads.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp

AXES = ("NHWC", "HWIO", "NHWC")


def convolved(kernel: jax.Array, x: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=AXES)


def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.square(convolved(kernel, x)).sum()


def transposed(kernel: jax.Array, x: jax.Array) -> jax.Array:
    return lax.conv_transpose(x, kernel, (2, 2), "SAME", transpose_kernel=True)


def flipped(kernel: jax.Array, x: jax.Array) -> jax.Array:
    return lax.rev(x, (1,)) @ kernel[0, 0]


PROGRAMS = {
    "gradient": jax.grad(loss, argnums=(0, 1)),
    "transposed": transposed,
    "flipped": flipped,
}
KERNEL, X = (3, 3, 4, 4), (2, 8, 8, 4)


def makers(jaxpr: Any) -> dict[Any, Any]:
    return {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}


def reversal(jaxpr: Any, atom: Any) -> Any:
    """The reversal from which a product's operand was moved, if there is one."""
    made = makers(jaxpr)
    while atom in made and made[atom].primitive.name in ("transpose", "precpass_detach"):
        (atom,) = made[atom].invars
    found = made.get(atom)
    return found if found is not None and found.primitive.name == "rev" else None


@pytest.mark.parametrize("target", ["h100", "tpu v5e", None])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_product_reads_an_array_that_was_reversed_in_16_bits(name: str, target: str | None):
    args = jax.ShapeDtypeStruct(KERNEL, jnp.float32), jax.ShapeDtypeStruct(X, jnp.float32)
    policy = pp.AutoMixedBf16.with_profitability("always")
    after = pp.inspect(PROGRAMS[name], policy, target=target, compiled=False)(*args).after.jaxpr
    products = [
        e for e in after.eqns if e.primitive.name in ("conv_general_dilated", "dot_general")
    ]
    found = [r for e in products for v in e.invars if (r := reversal(after, v)) is not None]
    assert [str(r.outvars[0].aval.dtype) for r in found] == ["bfloat16"]


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_value_is_that_of_a_cast_after_the_reversal(name: str):
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (KERNEL, X)]
    policy = pp.AutoMixedBf16.with_profitability("always")
    found = jax.tree.leaves(pp.auto_mixed(PROGRAMS[name], policy)(*args))
    rounded = [a.astype(jnp.bfloat16).astype(jnp.float32) for a in args]
    wanted = jax.tree.leaves(jax.jit(PROGRAMS[name])(*rounded))
    for got, want in zip(found, wanted, strict=True):
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        # the operands are exact, and what is left is the rounding of results and cotangents
        assert error < 2**-8 * np.sqrt(2)
