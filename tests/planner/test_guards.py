"""Guards: what would overflow, vanish, lose integers or spoil a sampler stays in float32."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precpass as pp
from precpass import AlwaysBf16, AutoMixed
from precpass.analysis.propagate import ANY, ValueRange
from precpass.planner.guards import why_out_of_range
from precpass.types import Precision
from tests.support.jaxprs import low_values, named, product_dtypes
from tests.support.passes import decided, quiet
from tests.support.values import f32

F16, BF16, F32 = Precision.F16, Precision.BF16, Precision.F32
LOWEST = float(np.finfo(np.float32).min)


def known(value):
    return ValueRange(value, value, abs(value), constant=True)


# ---------------------------------------------------------------- the rule itself


@pytest.mark.parametrize(
    ("fact", "target", "fires"),
    [
        # -1e9 is a mask: minus infinity in float16, an ordinary number in bfloat16
        (known(-1e9), F16, True),
        (known(-1e9), BF16, False),
        # the lowest float32 rounds to minus infinity in both
        (known(LOWEST), F16, True),
        (known(LOWEST), BF16, True),
        (known(LOWEST), F32, False),
        (ValueRange(-1.0, 65504.0), F16, False),
        (ValueRange(-65505.0, 0.0), F16, True),
        # no bound is no evidence
        (ANY, F16, False),
        (ValueRange(0.0, math.inf), F16, False),
        (known(1e-12), F16, True),
        (known(1e-12), BF16, False),
        (known(1e-39), BF16, True),
        (known(0.0), F16, False),
        (known(6.2e-5), F16, False),
        (known(6.0e-5), F16, True),
        # bounds alone say nothing of what lies close to zero
        (ValueRange(0.0, 1.0), F16, False),
        (ValueRange(0.0, 256.0, integer=True), BF16, False),
        (ValueRange(0.0, 257.0, integer=True), BF16, True),
        (ValueRange(-257.0, 0.0, integer=True), BF16, True),
        (ValueRange(0.0, 2048.0, integer=True), F16, False),
        (ValueRange(0.0, 2049.0, integer=True), F16, True),
        (ValueRange(integer=True), BF16, True),
        (ValueRange(0.0, 257.0), BF16, False),
    ],
)
def test_a_guard_fires_exactly_at_the_formats_limits(fact, target, fires):
    assert (why_out_of_range(fact, target) is not None) is fires


@pytest.mark.parametrize(
    ("fact", "target", "words"),
    [
        (known(-1e9), F16, ["1e+09", "f16", "6.55e+04"]),
        (known(1e-12), F16, ["1e-12", "f16", "vanishes"]),
        (ValueRange(0.0, 299.0, integer=True), BF16, ["299", "bf16", "256"]),
    ],
)
def test_a_guard_names_the_value_the_format_and_the_limit(fact, target, words):
    text = str(why_out_of_range(fact, target))
    assert all(word in text for word in words), text


# ---------------------------------------------------------------- in a plan


def after(fn, policy, *args):
    return pp.inspect(fn, policy)(*args)


def test_what_is_scaled_to_nothing_and_back_has_the_values_and_gradients_of_float32():
    def loss(x):
        return jnp.square((x * 1e-12) @ X8.T * 1e12).sum()

    for mixed, plain in (
        (pp.auto_mixed(loss, policy=AutoMixed), loss),
        (pp.auto_mixed(jax.grad(loss), policy=AutoMixed), jax.grad(loss)),
        (jax.grad(pp.auto_mixed(loss, policy=AutoMixed)), jax.grad(loss)),
    ):
        with quiet():
            got, want = jax.jit(lambda x: (mixed(x), plain(x)))(X8)  # noqa: B023
        np.testing.assert_allclose(got, want, rtol=1e-2)


def test_no_equation_of_a_sampler_is_low_and_its_own_say_why():
    def fn(key, x):
        return x @ x, jax.random.normal(key, (8, 8))

    found = after(fn, AlwaysBf16, jax.random.key(0), f32(8, 8))
    (sampler,) = (e for e in named(found.after, "jit") if e.params["name"] == "_normal")
    assert low_values(sampler.params["jaxpr"]) == []
    assert product_dtypes(found.after) == ["bfloat16"]
    (inverse,), (largest,) = decided(found, "erf_inv"), decided(found, "max")
    assert "random bits" in str(inverse.reason)
    assert "random bits" in str(largest.reason)


@pytest.mark.release(keep=2)
@pytest.mark.parametrize(
    "loss",
    [
        lambda w: (X8 @ w).mean() * 1e-6,
        lambda w: (1e5 * jnp.tanh(X8 @ w)).sum(),
        lambda w: (1e5 * (X8 @ w)).sum(),
    ],
    ids=["cotangents that vanish", "cotangents that overflow", "constant ones that overflow"],
)
def test_cotangents_that_float16_cannot_hold_keep_their_products_wide(loss):
    w = jnp.full((16, 4), 0.01)
    got, expected = (
        pp.auto_mixed(jax.grad(loss), policy=pp.AutoMixed)(w),
        jax.jit(jax.grad(loss))(w),
    )
    np.testing.assert_allclose(got, expected, rtol=1e-2)


X8 = jnp.asarray(np.random.default_rng(8).standard_normal((8, 16)), jnp.float32)
