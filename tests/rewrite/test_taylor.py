"""`jax.experimental.jet` over lowered products: every Taylor coefficient is a sum of low ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet

import precpass as pp
from tests.support.jaxprs import low_products, products
from tests.support.values import normal_array

X, W, V = normal_array(0, 5, 6), normal_array(1, 6, 4), normal_array(2, 6, 4)
KERNEL = normal_array(3, 2, 1, 3)


def convolved(w):
    return jax.lax.conv_general_dilated(w[None, None, :, 0], KERNEL, (1,), "VALID")


PROGRAMS = {
    "one side": lambda w: jnp.tanh(X @ w),
    "both sides": lambda w: (w.T @ X.T) @ (X @ w),
    "vmap": lambda w: jax.vmap(lambda x: x @ w)(X) ** 2,
    "convolution": convolved,
}


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_taylor_coefficients_are_low_and_near_float32s(name: str):
    fn = PROGRAMS[name]
    mixed = pp.auto_mixed(fn)
    series = (V, jnp.zeros_like(V), 0.1 * V)
    got = jax.tree.leaves(jet(mixed, (W,), (series,)))
    expected = jax.tree.leaves(jet(fn, (W,), (series,)))
    for mine, theirs in zip(got, expected, strict=True):
        error = np.linalg.norm(mine - theirs)
        assert error <= 2e-2 * max(np.linalg.norm(theirs), 1e-3)
    jaxpr = jax.make_jaxpr(lambda w: jet(mixed, (w,), (series,)))(W)
    assert products(jaxpr) and len(low_products(jaxpr)) == len(products(jaxpr))
