"""The time of a compiled program's bytes and of its products' arithmetic, by published peaks."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from precpass.devices.peaks import PEAKS, peaks_of_kind
from precpass.measure.counts import Counts, count
from precpass.measure.execute import compiled
from precpass.measure.roofline import roofline

X = jnp.ones((64, 64))
FLOPS = 2.0 * 64**3
H100, V4 = (peaks_of_kind(*kind) for kind in (("gpu", "NVIDIA H100"), ("tpu", "TPU v4")))


def arithmetic(counts: Counts, peaks: Any) -> float | None:
    """The seconds of a program without any bytes."""
    nothing = compiled(lambda: ()).traffic
    assert nothing.moved == 0
    return roofline(nothing, counts, peaks.bandwidth, peaks.flops)


@pytest.mark.parametrize("peaks", PEAKS, ids=str)
def test_bytes_and_flops_are_added(peaks: Any):
    program = compiled(lambda x, w: x @ w, X, X)
    counts = count(program.jaxpr)
    seconds = roofline(program.traffic, counts, peaks.bandwidth, peaks.flops)
    bytes_alone = program.traffic.moved / peaks.bandwidth
    if peaks.flops("f32") is None:
        assert seconds is None
    else:
        assert seconds == pytest.approx(bytes_alone + FLOPS / peaks.flops("f32"))
    assert program.traffic.moved == 3 * X.nbytes


def test_a_product_runs_as_precisely_as_it_is_asked_to():
    def counts(precision: Any) -> Counts:
        return count(jax.make_jaxpr(lambda x: jnp.tanh(jnp.dot(x, x, precision=precision)))(X))

    assert counts(None).product_flops == {"f32": FLOPS}
    assert counts("highest").product_flops == {"f32 highest": FLOPS}
    for asked, flops in (
        (None, H100.tf32),
        ("high", H100.tf32),
        ("highest", H100.f32),
        ("BF16_BF16_F32", H100.bf16),
        ("BF16_BF16_F32_X3", H100.bf16 / 3),
        (lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, jnp.float32), H100.bf16),
    ):
        assert arithmetic(counts(asked), H100) == pytest.approx(FLOPS / flops)
    assert arithmetic(counts("highest"), V4) == pytest.approx(FLOPS / V4.bf16 * 6)


def test_a_format_without_a_published_peak_has_no_time():
    def region(x: jax.Array) -> jax.Array:
        with pp.keep("f64"):
            return x @ x

    wide = count(pp.auto_mixed(region, policy="AlwaysF32").trace(X).jaxpr)
    eight = count(
        jax.make_jaxpr(lambda x: lax.dot(x, x, preferred_element_type=jnp.int32))(
            jnp.ones((64, 64), jnp.int8)
        )
    )
    assert wide.product_flops == {"f64": FLOPS} and eight.product_flops == {"int8": FLOPS}
    for counts, peak in ((wide, H100.f64), (eight, H100.int8)):
        assert arithmetic(counts, V4) is None
        assert arithmetic(counts, H100) == pytest.approx(FLOPS / peak)


def test_of_a_linear_solve_only_what_solves_counts():
    def products(fn: Any, *args: Any) -> float:
        return sum(count(jax.make_jaxpr(fn)(*args)).product_flops.values())

    def solved(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.linalg.solve(a, b)

    def symmetric(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.custom_linear_solve(
            lambda x: a @ x, b, lambda _, b: (a + 1.0) @ b, symmetric=True
        )

    assert products(solved, X, X) == 0
    # one product, of the two solutions
    assert products(jax.grad(lambda a, b: solved(a, b).sum()), X, X) == FLOPS
    assert products(symmetric, X, X[0]) == 2.0 * 64**2
