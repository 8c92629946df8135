"""Kernels that take only 16 bits are called in the format of the function around them."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

import precpass as pp
from tests.support.jaxprs import named
from tests.support.passes import COMPOSITIONS, look, quiet
from tests.support.values import assert_near, normal_array

X, W = normal_array(0, 4, 8), normal_array(1, 8, 8)


@jax.custom_vjp
def kernel(x: Any, w: Any) -> Any:
    """As cuDNN's attention, it refuses float32, forward and backward."""
    refuse(x, w)
    return jnp.sin(jnp.dot(x, w))


def refuse(*arrays: Any) -> None:
    for x in arrays:
        if x.dtype not in (jnp.bfloat16, jnp.float16):
            raise TypeError(f"the kernel takes 16 bits, not {x.dtype}")


def forward(x: Any, w: Any) -> Any:
    return kernel(x, w), (x, w)


def backward(saved: Any, ct: Any) -> Any:
    refuse(*saved, ct)
    return jax.vjp(lambda x, w: jnp.sin(jnp.dot(x, w)), *saved)[1](ct)


kernel.defvjp(forward, backward)
decorated = pp.in_compute_dtype(kernel)


def by_cast(x: Any, w: Any) -> Any:
    return kernel(*pp.cast_floating((x, w), "compute")).astype(jnp.float32)


def loss(run: Any) -> Any:
    return lambda x, w: jnp.square(run(jnp.tanh(x @ w), w)).mean()


def plain(x: Any, w: Any) -> Any:
    return jnp.sin(x @ w)


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("run", [decorated, by_cast])
@pytest.mark.parametrize(
    ("policy", "dtype"), [(pp.AutoMixedBf16, jnp.bfloat16), (pp.AlwaysF16, jnp.float16)]
)
def test_in_both_compositions(run: Any, composition: str, policy: Any, dtype: Any):
    with quiet():
        mixed = COMPOSITIONS[composition](loss(run), jax.grad, policy=policy)
        got = jax.jit(mixed)(X, W)
    want = jax.grad(loss(plain))(X, W)
    assert got.dtype == jnp.float32
    assert_near(got, want, 0.05)
    after = look(loss(run), policy, X, W).after
    (sine,) = named(after, "sin")
    assert sine.invars[0].aval.dtype == dtype


def test_it_is_called_as_it_is_where_nothing_is_lowered():
    seen: list[Any] = []

    @pp.in_compute_dtype
    def look_at(x: Any, n: int, name: str = "") -> Any:
        seen.append((x.dtype, n, name))
        return x * n

    def run(x: Any) -> Any:
        return look_at(x @ x.T, 2, name="a")

    run(X)
    pp.auto_mixed(run, "AlwaysF32")(X)
    with pp.use_policy(None):
        pp.auto_mixed(run, "AutoMixedBf16")(X)
    with pp.keep("f32"), quiet():
        pp.auto_mixed(run, "AutoMixedBf16")(X)
    assert seen == [(np.dtype(np.float32), 2, "a")] * 4
    with pp.use_policy("AutoMixedBf16"):
        assert run(X).dtype == jnp.float32
    with pp.keep("f16"):
        pp.auto_mixed(run, "AutoMixedBf16")(X)
    pp.auto_mixed(pp.auto_mixed(run), "AutoMixedBf16")(X)
    dtypes = [dtype for dtype, *_ in seen[4:]]
    assert dtypes == [jnp.bfloat16, jnp.float16, jnp.bfloat16]


def test_arrays_that_have_16_bits_come_out_as_they_are():
    low = X.astype(jnp.bfloat16)
    out = pp.auto_mixed(lambda x: pp.in_compute_dtype(jnp.tanh)(x @ x.T), "AutoMixedBf16")(low)
    assert out.dtype == jnp.bfloat16


def test_a_jitted_function_inside_is_not_shared_between_policies():
    inner = jax.jit(lambda x: pp.cast_floating(x, "compute").astype(jnp.float32) + 0)
    x = jnp.float32(1.001)
    got = [float(pp.auto_mixed(lambda x: inner(x) * 1, p)(x)) for p in ("AlwaysBf16", "AlwaysF32")]
    assert got[0] == 1.0 and got[1] == float(x)


@pytest.mark.programs
@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_flash_attention_for_a_tpu_reads_bfloat16(composition: str):
    """JAX's Pallas kernels, forward and backward, as they are lowered; without a warning."""
    run = pp.in_compute_dtype(functools.partial(flash_attention, causal=True))

    def loss(w: Any, x: Any) -> Any:
        heads = (x @ w).reshape(2, 128, 4, 3 * 128).transpose(0, 2, 1, 3)
        return jnp.square(run(*jnp.split(heads, 3, axis=-1))).mean()

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 1536), (2, 128, 512))]
    mixed = COMPOSITIONS[composition](loss, jax.grad)
    lowered = jax.jit(mixed).trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
    calls = [line for line in lowered.splitlines() if "@tpu_custom_call" in line]
    assert len(calls) == 3
    for call in calls:
        (operands,) = re.findall(r" : \(([^()]*)\) -> ", call)
        assert operands.split(", ")[:3] == ["tensor<2x4x128x128xbf16>"] * 3
