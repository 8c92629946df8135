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


def count_known(fn: Callable[..., Any], policy: Any, *args: Any) -> int:
    """How many operands are rounded with a known scale."""
    scalings = named(pp.inspect(fn, policy)(*args).after, "precpass_scaling")
    return sum(" up to " in str(eqn.params["arithmetic"]) for eqn in scalings)


# ---------------------------------------------------------------- one array


@pytest.mark.parametrize("largest", [1e-3, 0.5, 1.0, 448.0, 449.0, 7e4])
def test_a_scale_of_float8_is_the_smallest_power_of_two_that_fits(largest: float):
    most = float(Precision.F8E4M3.max)
    scale = scale_for(largest, most, is_power=True)
    assert np.log2(scale) == round(np.log2(scale))
    assert largest <= most * scale < 2 * largest


def test_tiny_magnitudes_have_the_smallest_scale():
    assert scale_for(0.0, 448.0, is_power=True) == scale_for(1e-35, 448.0, is_power=True) == 2**-60


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


def product(x: Any, w: Any) -> Any:
    """A product of values that the program makes: arguments keep scales of their own."""
    return jnp.negative(x) @ jnp.negative(w)


def compiled_text(policy: Any) -> str:
    return jax.jit(pp.auto_mixed(product, policy)).lower(X, W).compile().as_text()


def unknown(precision: str) -> Any:
    """A policy that orders 8 bits for every dot."""
    return pp.AutoMixedBf16.with_rules(pp.Rule(primitive="dot_general", precision=precision))


@each_precision
def test_a_product_is_near_and_no_call_looks_for_a_largest_magnitude(precision: str):
    policy = known(precision, *LARGEST)
    assert rel_error(pp.auto_mixed(product, policy)(X, W), X @ W) < ERRORS[precision]
    assert count_known(product, policy, X, W) == 2
    assert " maximum(" not in compiled_text(policy)
    assert " maximum(" in compiled_text(unknown(precision))


def test_float8_with_the_operands_own_magnitudes_is_as_without_them():
    got = pp.auto_mixed(product, known("f8", *LARGEST))(X, W)
    assert identical(got, pp.auto_mixed(product, unknown("f8"))(X, W))


@each_precision
def test_each_operand_has_its_own_magnitude_where_they_are_exchanged(precision: str):
    def transposed(x: Any, w: Any) -> Any:
        return product(x, w).T

    policy = known(precision, 100 * LARGEST[0], LARGEST[1])
    got = pp.auto_mixed(transposed, policy)(100 * X, W)
    assert rel_error(got, 100 * transposed(X, W)) < ERRORS[precision]


@each_precision
def test_arguments_keep_scales_of_their_own(precision: str):
    """Layers on one line share a rule, and their weights may differ by any factor."""

    def layers(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    ws = [W, W / 1000]
    got = pp.auto_mixed(layers, known(precision, *LARGEST))(ws, X)
    assert rel_error(got, layers(ws, X)) < 2 * ERRORS[precision]


def scanned(x: Any, w: Any) -> Any:
    return lax.scan(jax.checkpoint(lambda h, _: (jnp.tanh(h @ w), None)), x, None, length=3)[0]


def batched(x: Any, w: Any) -> Any:
    return jax.vmap(lambda row: jnp.sin(jnp.negative(row) @ w))(x)


def branched(x: Any, w: Any) -> Any:
    x = jnp.negative(x)
    return lax.cond(x.sum() > 0, lambda: x @ w, lambda: jnp.sin(x @ w.T))


def called(x: Any, w: Any) -> Any:
    return jax.jit(jnp.dot)(jnp.negative(x), w)


def kept(x: Any, w: Any) -> Any:
    return jax.checkpoint(jnp.dot)(jnp.negative(x), w)


@each_precision
@pytest.mark.parametrize(
    ("fn", "count"), [(scanned, 1), (batched, 1), (branched, 2), (called, 1), (kept, 1)]
)
def test_bodies_of_loops_branches_and_calls(precision: str, fn: Callable[..., Any], count: int):
    policy = known(precision, *LARGEST)
    assert rel_error(pp.auto_mixed(fn, policy)(X, W), fn(X, W)) < 3 * ERRORS[precision]
    assert count_known(fn, policy, X, W) == count


@each_precision
def test_weights_that_have_8_bits_keep_their_scales_and_data_have_known_ones(precision: str):
    policy = known(precision, LARGEST[0], 1e-3)
    small = pp.quant.quantized(jnp.dot, policy, argnums=1)(X, W)
    got = pp.auto_mixed(jnp.dot, policy)(X, small)
    assert rel_error(got, X @ W) < ERRORS[precision]
    assert count_known(jnp.dot, policy, X, small) == 1


# ---------------------------------------------------------------- derivatives


def loss(w: Any, x: Any) -> Any:
    return 1e-6 * jnp.tanh(product(x, w)).sum()


@jax.custom_vjp
def dense(w: Any, x: Any) -> Any:
    return product(x, w)


def dense_forward(w: Any, x: Any) -> Any:
    return product(x, w), (w, x)


def dense_backward(kept: Any, g: Any) -> Any:
    w, x = kept
    return x.T @ g, g @ w.T


dense.defvjp(dense_forward, dense_backward)


def custom(w: Any, x: Any) -> Any:
    return 1e-6 * jnp.tanh(dense(w, x)).sum()


@each_precision
@pytest.mark.parametrize("fn", [loss, custom])
@pytest.mark.parametrize("compose", COMPOSITIONS.values(), ids=COMPOSITIONS)
def test_gradients_have_scales_of_their_own(precision: str, compose: Any, fn: Any):
    """Cotangents of 1e-6 would all be rounded to zero by the scales of the forward pass."""
    got = compose(fn, policy=known(precision, *LARGEST))(W, X)
    assert rel_error(got, jax.grad(fn)(W, X)) < 4 * ERRORS[precision]


@pytest.mark.parametrize("size", [100, 1e-6])
@pytest.mark.parametrize("compose", COMPOSITIONS.values(), ids=COMPOSITIONS)
def test_gradients_do_not_read_operands_that_were_cut_off(size: float, compose: Any):
    def linear(w: Any, x: Any) -> Any:
        return (product(x, w) * jnp.arange(1.0, N + 1)[None]).sum()

    got = compose(linear, policy=known("f8", *LARGEST))(W, size * X)
    assert rel_error(got, jax.grad(linear)(W, size * X)) < ERRORS["f8e4m3"]


@each_precision
@pytest.mark.parametrize("size", [100, 1e-5])
def test_tangents_have_scales_of_their_own(precision: str, size: float):
    def tangent(w: Any, v: Any) -> Any:
        return jax.jvp(lambda w: product(X, w), (w,), (v,))[1]

    got = pp.auto_mixed(tangent, known(precision, *LARGEST))(W, size * W[::-1])
    assert rel_error(got, tangent(W, size * W[::-1])) < ERRORS[precision]


@pytest.mark.parametrize("size", [1e-30, 1e20])
def test_scales_at_the_ends_of_their_range_make_no_nan(size: float):
    policy = known("f8", size, size)
    assert identical(pp.auto_mixed(product, policy)(0 * X, X), jnp.zeros((N, N)))


@pytest.mark.parametrize(
    "largest", [(1.0,), (0.0, 1.0), (1.0, np.inf), (1.0, np.nan), (1e21, 1.0), ("a", 1.0), 3.0]
)
def test_what_is_no_pair_of_magnitudes_is_refused(largest: Any):
    with pytest.raises(ValueError, match="must be two numbers above 0, up to 1e\\+20"):
        pp.Rule(primitive="dot_general", precision="f8", largest=largest)


def test_a_precision_without_scales_is_refused_with_the_legal_ones():
    with pytest.raises(ValueError, match="needs precision 'f8e4m3' or 'int8', not 'bf16'"):
        pp.Rule(primitive="dot_general", precision="bf16", largest=(1.0, 1.0))
