"""What surrounds scaled products: not finite numbers, transposition, Taylor series, shardings."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.experimental import jet
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import precpass as pp
from precpass.devices.detect import planned_for
from precpass.devices.targets import target_of
from tests.support.jaxprs import named
from tests.support.values import normal_array, rel_error

N = 128
W, X = normal_array(1, N, N) / 8, normal_array(2, N, N)
each_precision = pytest.mark.parametrize("precision", ["int8", "f8e4m3"])
MOST = 0.06
"""The largest error of one product."""


def ordered(precision):
    """A policy that orders 8 bits for every dot, whatever its size."""
    return pp.AutoMixedBf16.with_rules(pp.Rule(primitive="dot_general", precision=precision))


@pytest.mark.release(keep=1)
@each_precision
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [16, 64, 256])
def test_what_is_not_finite_stays_so_in_arrays_of_any_size(precision, value, size):
    """XLA:CPU's kernel for the maximum of 64 elements and more leaves out NaN."""
    product = pp.auto_mixed(jnp.dot, ordered(precision))
    ones = jnp.ones((size, size))
    out = product(ones.at[3, 5].set(value), ones)
    assert not jnp.isfinite(out[3]).any()
    assert not jnp.isfinite(product(ones, ones.at[3, 5].set(value))[:, 5]).any()


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("policy", ["AutoMixedInt8", "AutoMixedF8"])
def test_a_loss_of_weights_with_a_nan_is_nan(policy):
    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.square(x).mean()

    ws, x = [normal_array(i, 256, 256) / 16 for i in range(4)], normal_array(9, 256, 256)
    ws[1] = ws[1].at[3, 4].set(jnp.nan)
    assert jnp.isnan(pp.auto_mixed(loss, policy)(ws, x))
    assert jnp.isnan(pp.quant.quantized(loss, policy)(ws, x)[1].array()).any()


@jax.custom_jvp
def dense(w, x):
    return x @ w


@dense.defjvp
def _dense_jvp(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    return dense(w, x), dx @ w + x @ dw


@pytest.mark.release(keep=1)
@each_precision
def test_tangents_of_a_custom_rule_are_transposed(precision):
    def loss(w):
        return jnp.sin(dense(w, X)).sum()

    policy = ordered(precision)
    want = jax.jit(jax.grad(loss))(W)
    outside = jax.grad(pp.auto_mixed(loss, policy))(W)
    assert rel_error(outside, want) < 2.5 * MOST
    assert rel_error(outside, pp.auto_mixed(jax.grad(loss), policy)(W)) < 2.5 * MOST


@pytest.mark.release
@pytest.mark.programs
@each_precision
def test_a_linear_function_is_transposed(precision):
    linear = pp.auto_mixed(lambda x: x @ W, ordered(precision))
    (got,) = jax.linear_transpose(linear, X)(X)
    assert rel_error(got, X @ W.T) < MOST

    def solved(b):
        return jax.scipy.sparse.linalg.gmres(lambda v: v + linear(v) / 100, b, maxiter=2)[0].sum()

    assert jnp.isfinite(jax.grad(solved)(X)).all()


@pytest.mark.release(keep=1)
@each_precision
def test_taylor_coefficients_are_those_of_the_product(precision):
    def fn(x):
        return jnp.sin(x) @ W

    series = ([X, X],)
    got = jet.jet(pp.auto_mixed(fn, ordered(precision)), (X,), series)
    want = jet.jet(fn, (X,), series)
    assert rel_error(got[0], want[0]) < MOST
    for a, b in zip(got[1], want[1], strict=True):
        assert rel_error(a, b) < 5e-3  # in bfloat16


SPECS = {
    "rows over rows": (P("data", None), P("data", None), P("data", None)),
    "weights over one axis twice": (P("data", None), P(None, "data"), P("data", None)),
    "weights over both axes": (P(None, None), P("data", "model"), P(None, None)),
    "columns of the result": (P("data", None), P(None, "model"), P("data", "model")),
}


@pytest.mark.release(keep=1)
@pytest.mark.programs
@each_precision
@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
def test_meshes_of_explicit_axes(precision, specs):
    axes = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=axes, devices=jax.devices()[:4])
    of_x, of_w, of_result = specs
    policy = ordered(precision)

    def loss(w, x):
        out = jnp.einsum("ij,jk->ik", jnp.sin(x), w, out_sharding=of_result)
        return jnp.square(out).mean()

    # An H100 reads the operands of float8 in other orders.
    with planned_for(target_of("h100")), jax.set_mesh(mesh):
        w, x = (jax.device_put(v, NamedSharding(mesh, s)) for v, s in ((W, of_w), (X, of_x)))
        want = jax.jit(jax.grad(loss, (0, 1)))(w, x)
        for gradient in (
            jax.grad(pp.auto_mixed(loss, policy), (0, 1)),
            pp.auto_mixed(jax.grad(loss, (0, 1)), policy),
        ):
            got = gradient(w, x)
            for a, b in zip(got, want, strict=True):
                assert a.sharding == b.sharding
                assert rel_error(np.asarray(a), np.asarray(b)) < 1.7 * MOST


def formats(fn, *args):
    """How many dots have operands of these formats."""
    dots = named(jax.make_jaxpr(fn)(*args), "dot_general")
    return Counter("/".join(sorted(v.aval.dtype.name for v in e.invars)) for e in dots)


def test_both_compositions_multiply_the_same_products_of_a_checkpoint_in_8_bits():
    ws, x = [normal_array(i, 256, 256) / 16 for i in range(4)], normal_array(9, 256, 256)

    @jax.checkpoint
    def model(ws, x):
        for w in ws:
            x = jax.nn.relu(x @ w)
        return x

    def loss(ws, x):
        return jnp.square(model(ws, x)).mean()

    inside = formats(pp.auto_mixed(jax.grad(loss), "f8"), ws, x)
    assert inside == formats(jax.grad(pp.auto_mixed(loss, "f8")), ws, x)
    # Four products, of which three are computed again, and two with each cotangent but the first.
    assert inside["float8_e4m3fn/float8_e4m3fn"] == 4 + 3 + 8


@pytest.mark.release(keep=1)
@each_precision
def test_an_exported_program_of_any_batch_has_8_bits(precision):
    (batch,) = export.symbolic_shape("batch")
    mixed = jax.jit(pp.auto_mixed(lambda x: jnp.tanh(x @ W), ordered(precision)))
    exported = export.export(mixed, platforms=("cpu", "cuda", "tpu"))(
        jax.ShapeDtypeStruct((batch, N), jnp.float32)
    )
    assert ("xi8>" if precision == "int8" else "f8E4M3FN") in exported.mlir_module()
    for rows in (1, 5):
        some = np.asarray(X)[:rows]
        assert rel_error(exported.call(some), np.tanh(some @ np.asarray(W))) < MOST


@pytest.mark.release
def test_rounding_is_mapped_along_every_dimension():
    def fn(w, x):
        return lax.dot_general(x, w, (((1,), (0,)), ((), ())))

    for precision in ("int8", "f8e4m3"):
        mixed = pp.auto_mixed(fn, ordered(precision))
        ws, xs = jnp.stack([W, -W, W]), jnp.stack([X, X, -X], 1)
        got = jax.vmap(mixed, (0, 1), 2)(ws, xs)
        want = jax.vmap(fn, (0, 1), 2)(ws, xs)
        assert rel_error(got, want) < MOST
        one = [mixed(ws[i], xs[:, i]) for i in range(3)]
        assert rel_error(got, jnp.stack(one, 2)) < 1e-6


@pytest.mark.release
def test_a_monitor_counts_what_rounding_to_8_bits_makes_zero():
    x = np.ones((N, N), np.float32)
    x[0, 0] = 1e6
    for precision, lost in (
        ("int8", N - 1),  # a row
        ("f8e4m3", N * N - 1),  # the whole array
    ):
        _, health = pp.monitor(jnp.dot, ordered(precision))(x, W + 1.0)
        assert [seen.lost for seen in health.seen() if seen.lost] == [lost], precision
        (seen,) = [seen for seen in health.seen() if seen.lost]
        assert seen.lost_share == lost / N**2 and seen.place.shape == (N, N)
        assert f"{lost} values ({100 * lost / N**2:.3g} %) by precpass_scaling" in health.summary()
