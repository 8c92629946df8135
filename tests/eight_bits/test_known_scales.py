"""Scaled products whose scales are known before the call (`Rule.largest`)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from precpass.eight_bits.scaled_product import Rounding
from precpass.eight_bits.scales import scale_for
from precpass.types import Precision
from tests.support.jaxprs import named
from tests.support.passes import COMPOSITIONS
from tests.support.values import identical, normal_array, rel_error

N = 64
W, X = normal_array(1, N, N) / 8, normal_array(2, N, N)
LARGEST = float(np.abs(X).max()), float(np.abs(W).max())
ERRORS = {"int8": 0.02, "f8e4m3": 0.06}
"""Of one product, with a scale for each array."""
each_precision = pytest.mark.parametrize("precision", ERRORS)


def known(precision: str, *largest: float) -> Any:
    """A policy that orders 8 bits for every dot, with known scales."""
    rule = pp.Rule(primitive="dot_general", precision=precision, largest=largest)
    return pp.AutoMixedBf16.with_rules(rule)


def roundings(fn: Callable[..., Any], policy: Any, *args: Any) -> list[str]:
    """How each operand of a scaled product is rounded, as a jaxpr shows it."""
    scalings = named(pp.inspect(fn, policy)(*args).after, "precpass_scaling")
    return [str(eqn.params["arithmetic"]) for eqn in scalings if len(eqn.invars) == 1]


# ---------------------------------------------------------------- one array


@pytest.mark.parametrize("largest", [1e-3, 0.5, 1.0, 448.0, 449.0, 7e4])
def test_a_scale_of_float8_is_the_smallest_power_of_two_that_fits(largest: float):
    most = float(Precision.F8E4M3.max)
    scale = scale_for(largest, most, is_power=True)
    assert np.log2(scale) == round(np.log2(scale))
    assert largest <= most * scale < 2 * largest


def test_tiny_magnitudes_have_the_smallest_scale():
    assert scale_for(0.0, 448.0, is_power=True) == scale_for(1e-35, 448.0, is_power=True) == 2**-100


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_larger_numbers_become_the_largest_one_of_float8_and_nan_stays(dtype: Any):
    x = jnp.asarray([0.3, -5.0, 1e6, -jnp.inf, jnp.nan], dtype)
    low, scale = Rounding(Precision.F8E4M3, (), largest=4.0)(x, platform="cpu")
    assert float(scale) == 2.0**-6
    want = np.asarray(x[:2], np.float32) * 64
    assert identical(low[:2], want.astype(low.dtype))
    assert np.asarray(low[2:4], np.float32).tolist() == [448.0, -448.0]
    assert jnp.isnan(low[4])


def test_larger_numbers_become_the_largest_one_of_int8_and_nan_is_lost():
    x = jnp.asarray([0.3, -5.0, 1e6, -jnp.inf, jnp.nan])
    low, scale = Rounding(Precision.INT8, (0,), largest=4.0)(x, platform="cpu")
    assert low.tolist() == [10, -127, 127, -127, 0]
    np.testing.assert_allclose(scale, 4 / 127, rtol=1e-6)


def test_dimensions_are_put_into_the_order_that_a_device_takes():
    x = normal_array(3, 4, 6)
    low, scale = Rounding(Precision.F8E4M3, (), (1, 0), 8.0)(x, platform="cuda")
    straight, same = Rounding(Precision.F8E4M3, (), (), 8.0)(x, platform="cuda")
    assert identical(low, straight.T) and identical(scale, same)


# ---------------------------------------------------------------- programs


@each_precision
def test_a_product_is_near_and_no_call_looks_for_a_largest_magnitude(precision: str):
    policy = known(precision, *LARGEST)
    assert rel_error(pp.auto_mixed(jnp.dot, policy)(X, W), X @ W) < ERRORS[precision]
    texts = roundings(jnp.dot, policy, X, W)
    assert [" up to " in text for text in texts] == [True, True]
    lowered = jax.jit(pp.auto_mixed(jnp.dot, policy)).lower(X, W).as_text()
    assert "stablehlo.maximum" not in lowered
    unknown = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="dot_general", precision=precision))
    lowered = jax.jit(pp.auto_mixed(jnp.dot, unknown)).lower(X, W).as_text()
    assert "stablehlo.maximum" in lowered


def test_float8_with_the_operands_own_magnitudes_is_as_without_them():
    dynamic = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="dot_general", precision="f8"))
    got = pp.auto_mixed(jnp.dot, known("f8", *LARGEST))(X, W)
    assert identical(got, pp.auto_mixed(jnp.dot, dynamic)(X, W))


@each_precision
def test_each_operand_has_its_own_magnitude_where_they_are_exchanged(precision: str):
    def transposed(x: Any, w: Any) -> Any:
        return (x @ w).T

    policy = known(precision, 100 * LARGEST[0], LARGEST[1])
    got = pp.auto_mixed(transposed, policy)(100 * X, W)
    assert rel_error(got, 100 * transposed(X, W)) < ERRORS[precision]


@each_precision
@pytest.mark.parametrize("compose", COMPOSITIONS.values(), ids=COMPOSITIONS)
def test_derivatives_have_scales_of_their_own(precision: str, compose: Any):
    """Cotangents of 1e-6 would all be rounded to zero by the scales of the forward pass."""

    def loss(w: Any, x: Any) -> Any:
        return 1e-6 * jnp.tanh(x @ w).sum()

    got = compose(loss, policy=known(precision, *LARGEST))(W, X)
    assert rel_error(got, jax.grad(loss)(W, X)) < 3 * ERRORS[precision]


def scanned(w: Any, x: Any) -> Any:
    return lax.scan(jax.checkpoint(lambda h, _: (jnp.tanh(h @ w), None)), x, None, length=3)[0]


def batched(w: Any, x: Any) -> Any:
    return jax.vmap(lambda row: jnp.sin(row @ w))(x)


def branched(w: Any, x: Any) -> Any:
    return lax.cond(x.sum() > 0, lambda: x @ w, lambda: jnp.sin(x @ w.T))


@each_precision
@pytest.mark.parametrize("fn", [scanned, batched, branched])
def test_loops_branches_and_vmaps(precision: str, fn: Callable[..., Any]):
    policy = known(precision, *LARGEST)
    assert rel_error(pp.auto_mixed(fn, policy)(W, X), fn(W, X)) < 3 * ERRORS[precision]
    # What crosses a border in 8 bits has the scale that it was given there.
    assert any(" up to " in text for text in roundings(fn, policy, W, X))


@each_precision
def test_weights_that_have_8_bits_keep_their_scales(precision: str):
    policy = known(precision, LARGEST[0], 1e-3)
    small = pp.quant.quantized(jnp.dot, policy, argnums=1)(X, W)
    got = pp.auto_mixed(jnp.dot, policy)(X, small)
    assert rel_error(got, X @ W) < ERRORS[precision]
