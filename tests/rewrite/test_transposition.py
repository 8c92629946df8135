"""A lowered product can be transposed as it stands, as JAX does with the tangents of rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import partial_eval

import precpass as pp
from tests.support.jaxprs import is_low, products

W = jnp.asarray(np.random.default_rng(0).standard_normal((6, 4)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).standard_normal((3, 6)), jnp.float32)
G = jnp.ones((3, 4))

PROGRAMS = {
    "dot": lambda x: x @ W,
    "scan": lambda x: lax.scan(lambda c, w: (c, c @ w), x, W[None])[1][0],
    "jit": lambda x: jax.jit(lambda x: x @ W)(x),
    "vmap": lambda x: jax.vmap(lambda row: row @ W)(x),
    "two readers": lambda x: x @ W + (2 * x) @ W,
}


SIZES = jnp.array([1, 2], jnp.int32)
PRODUCTS = {
    "dot": lambda x: x @ W,
    "conv": lambda x: lax.conv(x[None], W.T[:, :3, None] + x[0, 0], (1,), "SAME"),
    "ragged": lambda x: lax.ragged_dot(x, W[None] + x[:2, :1, None], SIZES),
}


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_linear_transpose_of_a_lowered_product_is_low_and_right(name: str):
    fn = PROGRAMS[name]
    mixed = pp.auto_mixed(fn)
    (got,) = jax.linear_transpose(mixed, X)(G)
    (expected,) = jax.jit(lambda g: jax.linear_transpose(fn, X)(g))(G)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-2 * float(np.abs(expected).max()))
    traced = jax.make_jaxpr(lambda g: jax.linear_transpose(mixed, X)(g))(G)
    # jax 0.10 leaves the transpose of what is detached behind, of zeros and without a reader
    alive, _ = partial_eval.dce_jaxpr(traced.jaxpr, [True], instantiate=True)
    low = [is_low(eqn, jnp.bfloat16) for eqn in products(alive, repeated=True)]
    assert low and all(low)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("policy", [pp.AutoMixed, pp.AutoMixedBf16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_in_the_tangents_of_a_custom_rule_is_transposed(name: str, policy):
    product = PRODUCTS[name]
    fn = jax.custom_jvp(product)
    fn.defjvp(lambda primals, tangents: jax.jvp(product, primals, tangents))

    def loss(x):
        return jnp.square(fn(x)).sum()

    got, expected = jax.grad(pp.auto_mixed(loss, policy=policy))(X), jax.jit(jax.grad(loss))(X)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-2 * float(np.abs(expected).max()))


def test_a_transpose_adds_up_wide():
    fn = pp.auto_mixed(lambda s: jnp.concatenate([(s[None] @ jnp.eye(2))] * 300))
    (got,) = jax.linear_transpose(fn, jnp.ones(2))(jnp.ones((300, 2)))
    assert float(got[0]) == 300
