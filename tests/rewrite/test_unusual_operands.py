"""Equations whose operands or params have types of their own: casts, mixed products, combiners."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from tests.support.jaxprs import dtypes_in, low_products, named
from tests.support.passes import LOWERING, decided, look as looked, run
from tests.support.values import identical, normal, rel_error, stable_id

lowering = pytest.mark.parametrize("policy", LOWERING, ids=lambda p: p.name)
low_dtypes = pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16), ids=stable_id)


@pytest.mark.release(keep=2)
@low_dtypes
@pytest.mark.parametrize("to", (jnp.int32, jnp.int8, jnp.uint16, jnp.bool_, jnp.complex64))
def test_always_f32_keeps_a_cast_to_another_type(dtype, to):
    x = jnp.asarray(normal(0, 16) * 4, dtype)

    def f(x):
        return lax.convert_element_type(x, to), lax.convert_element_type(x + x, to)

    got, want = run(f, pp.AlwaysF32, x), jax.jit(f)(x)
    assert [y.dtype for y in got] == [np.dtype(to)] * 2
    assert identical(got[0], want[0])


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("name", ("add", "mul", "min", "max", "subtract"))
@low_dtypes
def test_always_f32_widens_scatters_with_their_combiner(name, dtype):
    x, updates = jnp.asarray(normal(0, 8), dtype), jnp.asarray(normal(1, 6), dtype)
    at = jnp.asarray([0, 1, 1, 1, 5, 5])

    def f(x, updates):
        return getattr(x.at[at], name)(updates)

    after = looked(f, pp.AlwaysF32, x, updates).after
    scatters = named(after, *SCATTERS)
    assert [dtypes_in(e) for e in scatters] == [[np.dtype(np.float32)] * 2]
    wide = jax.jit(f)(x.astype(jnp.float32), updates.astype(jnp.float32))
    got = run(f, pp.AlwaysF32, x, updates)
    assert got.dtype == dtype
    assert identical(got, wide.astype(dtype))


SCATTERS = ("scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub")


def test_always_f32_adds_up_a_scatter_in_float32():
    """4096 updates of 1 to one element: bfloat16 stops at 256."""
    zeros, ones = jnp.zeros(2, jnp.bfloat16), jnp.ones(4096, jnp.bfloat16)

    def f(x, updates):
        return x.at[jnp.zeros(4096, jnp.int32)].add(updates)

    assert float(run(f, pp.AlwaysF32, zeros, ones)[0]) == 4096
    assert float(jax.jit(f)(zeros, ones)[0]) == 256


APPLIED = {
    "sin": jnp.sin,
    "casts": lambda v: (v.astype(jnp.float32) * 2).astype(v.dtype),
    "branches": lambda v: jnp.where(v > 0, v, -v),
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", APPLIED)
@pytest.mark.parametrize("policy", (*LOWERING, pp.AlwaysF32), ids=lambda p: p.name)
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16), ids=stable_id)
def test_a_function_applied_in_place_stays(name, policy, dtype):
    x = jnp.asarray(normal(0, 8), dtype)

    def f(x):
        return x.at[jnp.asarray([1, 3])].apply(APPLIED[name])

    assert identical(run(f, policy, x), jax.jit(f)(x))
    (decision,) = decided(looked(f, policy, x), "scatter")
    assert decision.action is pp.types.Action.KEEP
    assert "function" in str(decision.reason)


def test_a_function_applied_in_place_has_no_bounds():
    x = jnp.asarray(normal(0, 8))

    def f(x, w):
        # tanh is within 1, what is made of it is not
        big = jnp.tanh(x).at[jnp.asarray([1])].apply(lambda v: v * 1e6 + 1e6)
        return jnp.dot(jnp.clip(big, -1e6, 1e6), w)

    assert np.isfinite(run(f, pp.AutoMixed, x, jnp.ones(8)))


@pytest.mark.release(keep=2)
@lowering
@pytest.mark.parametrize("order", (1, -1))
def test_a_product_of_a_real_and_a_complex_operand_stays(policy, order):
    operands = (jnp.asarray(normal(0, 4, 4)), jnp.asarray(normal(1, 4, 4) + 1j * normal(2, 4, 4)))

    def f(a, b):
        numbers = (((1,), (0,)), ((), ()))
        real = a if order == 1 else b
        return lax.dot_general(a, b, numbers), real @ real

    args = operands[::order]
    after = looked(f, policy, *args).after
    assert len(low_products(after)) == 1
    got, want = run(f, policy, *args), jax.jit(f)(*args)
    assert identical(got[0], want[0])
    assert 0 < rel_error(got[1], want[1]) < 0.02
