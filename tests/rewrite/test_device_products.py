"""Float32 products with the digits that they have on a GPU or a TPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from precpass.rewrite.device_products import with_products_of
from tests.support.values import rel_error

RANDOM = np.random.default_rng(0)
X = jnp.asarray(RANDOM.normal(size=(64, 96)), jnp.float32)
W = jnp.asarray(RANDOM.normal(size=(96, 96)), jnp.float32) / 10
EXACT = np.asarray(X, np.float64) @ np.asarray(W, np.float64)
HIGHEST, X3 = lax.Precision.HIGHEST, lax.DotAlgorithmPreset.BF16_BF16_F32_X3
X6, ONE = lax.DotAlgorithmPreset.BF16_BF16_F32_X6, lax.DotAlgorithmPreset.BF16_BF16_F32
# A product of n terms with rounded operands has about sqrt(2/3) of an operand's unit roundoff.
TF32, BF16, THREE, SIX = (1e-4, 4e-4), (1e-3, 4e-3), (1e-6, 1e-5), (0, 5e-7)


def on(platform, fn, *args):
    """A function's result with the products of a platform."""
    jaxpr = with_products_of(platform, jax.make_jaxpr(fn)(*args))
    (result,) = jax.jit(lambda *xs: jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *xs))(*args)
    return result


@pytest.mark.release(keep=5)
@pytest.mark.parametrize(
    ("platform", "precision", "error"),
    [
        ("gpu", None, TF32),
        ("gpu", "high", TF32),
        ("gpu", X3, THREE),
        ("gpu", X6, SIX),
        ("gpu", ONE, BF16),
        ("gpu", HIGHEST, SIX),
        ("tpu", None, BF16),
        ("tpu", "high", THREE),
        ("tpu", X3, THREE),
        ("tpu", X6, SIX),
        ("tpu", HIGHEST, SIX),
        ("cpu", None, SIX),
    ],
)
def test_a_product_has_the_digits_of_the_device(platform, precision, error):
    least, most = error
    found = on(platform, lambda x, w: lax.dot(x, w, precision=precision), X, W)
    assert found.dtype == jnp.float32
    assert least <= rel_error(found, EXACT) <= most


def test_tf32_keeps_11_bits_of_each_operand():
    """The oracle rounds the operands in integer arithmetic."""

    def rounded(x):
        bits = np.asarray(x).view(np.uint32)
        return ((bits + 0xFFF + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)).view(np.float32)

    wanted = rounded(X).astype(np.float64) @ rounded(W).astype(np.float64)
    assert rel_error(on("gpu", jnp.matmul, X, W), wanted) < 5e-7


def scanned(x, w):
    return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)[0]


def branched(x, w):
    return lax.cond(x.sum() > 1e9, lambda: x, lambda: x @ w)


def convolved(x, w):
    return lax.conv(x[None, None], w[None, None, :3, :3], (1, 1), "SAME")


def ragged(x, w):
    return lax.ragged_dot(x, jnp.stack([w, w]), jnp.array([24, 40]))


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("fn", [scanned, branched, convolved, ragged, jax.jit(jnp.matmul)])
def test_products_inside_of_bodies_and_of_other_kinds_have_them_too(fn):
    exact = fn(X, W)
    assert 1e-4 < rel_error(on("gpu", fn, X, W), exact) < 1e-3
    assert 1e-3 < rel_error(on("tpu", fn, X, W), exact) < 1e-2


def test_what_is_not_float32_is_left_alone():
    low = jax.make_jaxpr(jnp.matmul)(X.astype(jnp.bfloat16), W.astype(jnp.bfloat16))
    assert with_products_of("tpu", low) is low
    sums = jax.make_jaxpr(lambda x: jnp.sin(x).sum())(X)
    assert with_products_of("gpu", sums) is sums


@pytest.mark.parametrize(("platform", "precision"), [("gpu", None), ("gpu", X3), ("tpu", X6)])
def test_what_is_not_finite_stays_so_and_spreads_no_further(platform, precision):
    x, w = X.at[3, 4].set(jnp.inf).at[5, 6].set(jnp.nan), jnp.abs(W)
    found = on(platform, lambda x, w: lax.dot(x, w, precision=precision), x, w)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(jnp.matmul(x, w)))
