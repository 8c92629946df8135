"""Legal programs that once came out wrong, written by someone who tried to break the pass."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse

import precpass as pp
from tests.support.jaxprs import low_products
from tests.support.passes import look, quiet
from tests.support.values import rel_error

GROUPS = jnp.array([2, 2], jnp.int32)
PRODUCTS: dict[str, tuple[Callable[[Any, Any], Any], tuple[int, ...], tuple[int, ...]]] = {
    "conv": (lambda x, k: lax.conv(x, k, (1, 1), "SAME"), (1, 512, 4, 4), (4, 512, 3, 3)),
    "ragged_dot": (lambda x, k: lax.ragged_dot(x, k, GROUPS), (4, 512), (2, 512, 3)),
    "dot": (lambda x, k: x @ k, (4, 512), (512, 3)),
}
F64_POLICY = pp.Custom({pp.types.OpKind.COMPUTE: "f32"}).with_retypes("f64")


def mixed(fn: Callable[..., Any], policy: Any = pp.AutoMixedBf16) -> Callable[..., Any]:
    return pp.auto_mixed(fn, policy=policy)


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("policy", [pp.AutoMixed, pp.AutoMixedConservative, pp.AlwaysF16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_sum_above_float16s_largest_value_is_taken_wide(name: str, policy: Any):
    product, x_shape, w_shape = PRODUCTS[name]

    def fn(x: Any, w: Any) -> Any:
        return jnp.tanh(product(x, w) * 1e-6)

    x, w = jnp.full(x_shape, 16.0), jnp.full(w_shape, 16.0)
    assert low_products(look(fn, policy, x, w).after, jnp.float16)
    with quiet():
        got = mixed(fn, policy)(x, w)
    tolerance = 2 * policy.low.unit_roundoff
    assert rel_error(got, jax.jit(fn)(x, w)) < tolerance


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_sums_of_a_gradient_inside_of_the_pass_are_not_rounded(name: str):
    """Each weight's cotangent is a sum of 512 or more terms that bfloat16 rounds to 2**-9."""
    product, x_shape, w_shape = PRODUCTS[name]
    x = jnp.asarray(np.random.default_rng(0).choice([0.5, 1.0, 2.0], x_shape), jnp.float32)
    w = jnp.ones(w_shape)
    grad = jax.grad(lambda x, w: product(x, w).sum(), (0, 1))
    assert low_products(look(grad, pp.AutoMixedBf16, x, w).after)
    # every operand is exact in bfloat16
    assert rel_error(mixed(grad)(x, w), jax.jit(grad)(x, w)) < 1e-6


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", PRODUCTS)
def test_float32_products_of_a_float64_program_add_up_in_float64(name: str):
    product, x_shape, w_shape = PRODUCTS[name]
    with jax.enable_x64(True):
        x, w = np.full(x_shape, 1 / 9), np.full(w_shape, 1 / 9)
        exact = product(*(v.astype(np.float32).astype(np.float64) for v in (x, w)))
        assert low_products(look(product, F64_POLICY, x, w).after, np.float32)
        assert rel_error(mixed(product, F64_POLICY)(x, w), exact) < 1e-12


# ---------------------------------------------------------------- integers


def positions() -> Any:
    return jnp.arange(600.0)


INTEGERS: dict[str, Callable[[], Any]] = {
    "homogeneous": lambda: jnp.stack([positions(), jnp.zeros(600), jnp.ones(600)])[0],
    "where": lambda: jnp.where(positions() > 3, positions(), 0.0),
    "maximum": lambda: jnp.maximum(positions(), 0.0),
    "doubled": lambda: positions() * 2,
    "times ones": lambda: positions() * jnp.ones(600),
    "cond": lambda: lax.cond(jnp.any(positions() > 3), positions, lambda: jnp.zeros(600)),
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", INTEGERS)
def test_positions_beside_whole_numbers_are_exact(name: str):
    make = INTEGERS[name]

    def fn(w: Any) -> Any:
        return make() @ w

    np.testing.assert_array_equal(mixed_quietly(fn)(np.eye(600, dtype=np.float32)), jax.jit(make)())


def mixed_quietly(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with quiet():
            return mixed(fn)(*args)

    return run


def test_a_mask_times_a_large_number_counts_nothing():
    def fn(x: Any, mask: Any) -> Any:
        return jax.nn.softmax(x @ x + (1.0 - mask.astype(x.dtype)) * -1e9) @ x

    after = look(fn, pp.AutoMixedBf16, jnp.eye(4), jnp.ones((4, 4), bool)).after
    assert len(low_products(after)) == 2


# ---------------------------------------------------------------- what is said


def messages(fn: Callable[..., Any], *args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mixed(fn)(*args)
    return [str(w.message) for w in caught if issubclass(w.category, pp.PrecisionWarning)]


def test_products_of_a_sparse_format_are_named():
    held = sparse.BCOO.fromdense(jnp.eye(4))
    found = messages(lambda x: held @ x, jnp.ones((4, 4)))
    assert any("bcoo_dot_general" in text and "product" in text for text in found)


def test_a_program_whose_products_are_not_entered_is_not_said_to_have_none():
    def fn(x: Any, w: Any) -> Any:
        ref = jax.new_ref(x)

        def body(_: Any, carry: Any) -> Any:
            ref[...] = ref[...] @ w
            return carry

        lax.fori_loop(0, 3, body, 0)
        return ref[...]

    found = messages(fn, jnp.eye(4), jnp.eye(4))
    assert any("works on references" in text for text in found)
    assert not any("it has no products" in text for text in found)


# ---------------------------------------------------------------- jit disabled


def test_code_that_needs_values_runs_as_written_where_jit_is_disabled():
    def fn(x: Any, w: Any) -> Any:
        return x @ w if x[0, 0] > 0 else x

    x = jnp.eye(4) * 1.001
    with pytest.raises(jax.errors.TracerBoolConversionError):
        mixed(fn)(x, x)
    with jax.disable_jit():
        with pytest.warns(pp.PrecisionWarning, match="runs as written: jit is disabled"):
            got = mixed(fn)(x, x)
        np.testing.assert_array_equal(got, fn(x, x))
    # and what needs none is lowered there too
    with jax.disable_jit():
        assert rel_error(mixed(jnp.matmul)(x, x), x @ x) > 0
