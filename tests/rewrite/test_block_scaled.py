"""Micro-scaled products: emulated in bfloat16, and in the form that a Blackwell multiplies."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import precpass as pp
from precpass.devices.detect import planned_for
from precpass.devices.targets import target_of
from precpass.rewrite.block_scaled import _units
from precpass.types import OpKind, Precision
from tests.rewrite.test_scaled_products import BLOCK_ERRORS as ERRORS
from tests.rewrite.test_scaled_products import FUNCTIONS, attention, loss, ordered, squared
from tests.support.jaxprs import named
from tests.support.passes import COMPOSITIONS
from tests.support.values import identical, normal, normal_array, rel_error

N = 64
W, X = normal_array(1, N, N) / 8, normal_array(2, N, N)
BLOCKS = {"mxfp8": 32, "nvfp4": 16}
each_precision = pytest.mark.parametrize("precision", ERRORS)
each_composition = pytest.mark.parametrize("compose", COMPOSITIONS.values(), ids=COMPOSITIONS)
each_function = pytest.mark.parametrize(
    "fn", [f for f in FUNCTIONS if f is not attention], ids=lambda f: f.__name__
)


def roundings(fn, *args, precision):
    """The results of the equations that round to a format."""
    found = named(jax.make_jaxpr(fn)(*args), "precpass_scaling")
    return [
        [v.aval for v in e.outvars]
        for e in found
        if f"to {precision} with a scale for each block" in str(e.params["arithmetic"])
    ]


def on_blackwell(fn, precision, *args):
    """A function as it is rewritten for a B200, to be called with arrays."""
    with planned_for(target_of("b200")):
        jaxpr = jax.make_jaxpr(pp.auto_mixed(fn, ordered(precision)))(*args)
    return lambda *arrays: jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *arrays)[0]


# ---------------------------------------------------------------- what it computes


@pytest.mark.release(keep=1)
@each_precision
@each_function
def test_a_function_is_near_and_its_operands_are_rounded(fn, precision):
    mixed = pp.auto_mixed(fn, ordered(precision))
    assert roundings(mixed, W, X, precision=precision)
    assert rel_error(mixed(W, X), jax.jit(fn)(W, X)) < ERRORS[precision]
    assert rel_error(jax.jit(mixed)(W, X), mixed(W, X)) < 1e-5


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("precision", ["mxfp8", pytest.param("nvfp4", marks=pytest.mark.programs)])
@each_composition
@each_function
def test_a_gradient_is_near_from_either_side(fn, compose, precision):
    got = compose(squared(fn), policy=ordered(precision))(W, X)
    assert rel_error(got, jax.jit(jax.grad(squared(fn)))(W, X)) < ERRORS[precision]


def in_blocks(a, precision, axis):
    """The numbers that the formats' definitions give, in float64."""
    moved = np.moveaxis(np.asarray(a, np.float64), axis, -1)
    blocks = moved.reshape(*moved.shape[:-1], -1, BLOCKS[precision])
    largest = np.abs(blocks).max(-1, keepdims=True)
    if precision == "mxfp8":
        scales, dtype = 2.0 ** np.ceil(np.log2(largest / 448)), ml_dtypes.float8_e4m3fn
    else:
        whole = 2.0 ** np.ceil(np.log2(np.abs(moved).max() / (6 * 448)))
        scales = (largest / 6 / whole).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * whole
        dtype = ml_dtypes.float4_e2m1fn
    # ml_dtypes has no saturation: a scale that was rounded down leaves quotients above 6.
    most = 448 if precision == "mxfp8" else 6
    rounded = np.clip(blocks / scales, -most, most).astype(dtype).astype(np.float64) * scales
    return np.moveaxis(rounded.reshape(moved.shape), -1, axis)


@pytest.mark.release(keep=1)
@each_precision
def test_it_is_what_its_definition_says(precision):
    x, w = (normal_array(i, 40, 96) * np.float32(10.0) ** (i - 3) for i in (3, 5))
    want = in_blocks(x, precision, 1) @ in_blocks(w, precision, 1).T
    got = pp.auto_mixed(lambda x, w: x @ w.T, ordered(precision))(x, w)
    assert rel_error(got, want) < 1e-6


@pytest.mark.release(keep=1)
@each_precision
def test_the_form_of_the_units_has_the_same_digits(precision):
    def fn(w, x):
        return jnp.einsum("bik,bkj->bij", x, w)

    w, x = normal_array(3, 3, 96, 40), normal_array(4, 3, 24, 96)
    units = on_blackwell(fn, precision, w, x)
    found = roundings(units, w, x, precision=precision)
    assert [[str(a.dtype) for a in made] for made in found] == 2 * [
        {
            "mxfp8": ["float8_e4m3fn", "float8_e8m0fnu"],
            "nvfp4": ["float4_e2m1fn", "float8_e4m3fn", "float32"],
        }[precision]
    ]
    assert len(named(jax.make_jaxpr(units)(w, x), "precpass_block_product")) == 1
    emulated = pp.auto_mixed(fn, ordered(precision))
    assert rel_error(units(w, x), emulated(w, x)) < 1e-6


@pytest.mark.release
@each_precision
def test_a_gpu_is_given_the_call_of_scaled_matmul_and_other_platforms_a_dot(precision):
    dtype = {"mxfp8": "f8E4M3FN", "nvfp4": "f4E2M1FN"}[precision]
    for dims, shape in (((None, None), "1x64x64"), ((0, None), "1x192x64"), ((0, 0), "3x64x64")):
        is_mapped = dims != (None, None)
        args = [jnp.stack([v] * 3) if d == 0 else v for v, d in zip((W, X), dims, strict=True)]
        with planned_for(target_of("b200")):
            mixed = pp.auto_mixed(jnp.matmul, ordered(precision))
            fn = jax.jit(jax.vmap(mixed, dims) if is_mapped else mixed)
            traced = fn.trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        (call,) = [line for line in text.splitlines() if "@__op$block_scaled_dot" in line]
        assert f"(tensor<{shape}x{dtype}>, " in call
        assert "dot_general" not in text
        for platform in ("cpu", "tpu"):
            text = traced.lower(lowering_platforms=(platform,)).as_text()
            assert "block_scaled_dot" not in text
            (dot,) = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
            assert "64x64xbf16>" in dot
        want = (jax.vmap(jnp.matmul, dims) if is_mapped else jnp.matmul)(*args)
        assert rel_error(fn(*args), want) < ERRORS[precision]


# ---------------------------------------------------------------- the backward pass


@pytest.mark.release
@each_composition
def test_cotangents_are_rounded_along_the_dimension_that_their_product_sums_over(compose):
    gradient = compose(loss, policy=ordered("mxfp8"))
    # Forward x, tanh(x @ w) and w, which both products read; backward two operands for each of the
    # derivatives with respect to tanh(x @ w) and to w in both products.
    assert len(roundings(gradient, W, X, precision="mxfp8")) == 9
    # 40 rows are no whole blocks, so the gradients of weights are products in bfloat16.
    assert len(roundings(gradient, W, X[:40], precision="mxfp8")) == 5
    assert rel_error(gradient(W, X[:40]), jax.jit(jax.grad(loss))(W, X[:40])) < ERRORS["mxfp8"]


@each_composition
def test_the_backward_pass_of_nvfp4_is_in_bfloat16(compose):
    gradient = compose(loss, policy=ordered("nvfp4"))
    assert len(roundings(gradient, W, X, precision="nvfp4")) == 3
    dots = named(jax.make_jaxpr(gradient)(W, X), "dot_general")
    assert {v.aval.dtype.name for dot in dots for v in dot.invars} == {"bfloat16"}
    assert len(dots) == 5


# ---------------------------------------------------------------- values that are hard to scale


@pytest.mark.release
@each_precision
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_does_not_become_finite_and_spoils_nothing_else(precision, value, side):
    pair = [X, W]
    pair[side] = pair[side].at[3, 5].set(value)
    got = np.asarray(pp.auto_mixed(jnp.dot, ordered(precision))(*pair))
    wide = np.asarray(jnp.dot(*pair))
    assert (np.isfinite(got) == np.isfinite(wide)).all()
    units = np.asarray(on_blackwell(jnp.dot, precision, *pair)(*pair))
    assert (np.isfinite(units) == np.isfinite(wide)).all()


def test_an_outlier_takes_the_digits_of_its_own_block_alone():
    x = X.at[0, 0].set(1e6)
    got = pp.auto_mixed(jnp.dot, ordered("mxfp8"))(x, jnp.eye(N))
    assert rel_error(got[1:], X[1:]) < 0.04
    assert rel_error(got[0, 32:], X[0, 32:]) < 0.04
    assert not got[0, 1:32].any()


# ---------------------------------------------------------------- around it


@pytest.mark.release
@each_precision
def test_it_is_exported_for_every_platform(precision):
    mixed = jax.jit(pp.auto_mixed(loss, ordered(precision)))
    exported = export.export(mixed, platforms=("cpu", "cuda", "tpu"))(W, X)
    assert identical(exported.call(W, X), mixed(W, X))


@each_precision
def test_the_plan_the_diff_and_the_explanation_say_so(precision):
    found = pp.inspect(loss, ordered(precision))(W, X)
    products = [d for d in found.plan.walk() if d.kind is OpKind.COMPUTE]
    of_products = {(d.compute, d.product.scaled) for d in products}
    assert of_products == {(Precision.BF16, Precision(precision))}
    assert f"in {precision}, accumulated in f32" in str(found.diff())
    text = str(pp.explain(loss, ordered(precision))(W, X))
    assert f"2 in {precision}: Rule(" in text
    assert f"{precision} is not on a CPU, and an emulation of it runs instead" in text
    assert "emulation" not in str(pp.explain(loss, ordered(precision), target="b200")(W, X))
    text = str(pp.explain(loss, ordered(precision), target="h100")(W, X))
    assert f"{precision} is not on a NVIDIA H100 SXM" in text


@each_precision
def test_counts_have_the_format_that_multiplies(precision):
    units = on_blackwell(loss, precision, W, X)
    counts = pp.measure.counts.count(jax.make_jaxpr(units)(W, X))
    assert (counts.products, counts.low, counts.flops[precision]) == (2, 2, 2 * 2.0 * N**3)
    emulated = pp.measure.counts.count(
        jax.make_jaxpr(pp.auto_mixed(loss, ordered(precision)))(W, X)
    )
    assert (emulated.products, emulated.low, emulated.flops["bf16"]) == (2, 2, 2 * 2.0 * N**3)


@each_precision
def test_rows_that_are_no_whole_blocks_stay_in_bfloat16_and_the_plan_says_why(precision):
    found = pp.inspect(jnp.dot, ordered(precision))(X[:, :40], W[:40])
    (product,) = [d for d in found.plan.walk() if d.kind is OpKind.COMPUTE]
    assert (product.compute, product.product.scaled) == (Precision.BF16, None)
    block = BLOCKS[precision]
    why = f"not in {precision}: it is not a dot that sums over whole blocks of {block} on each"
    assert why in str(product.reason)


def test_a_policy_has_it_by_name_and_is_saved(tmp_path):
    policy = pp.AutoMixedBf16.with_scaled("nvfp4")
    assert repr(policy) == "AutoMixedBf16.with_scaled('nvfp4')"
    ws, x = [normal_array(i, 256, 256) / 16 for i in range(4)], normal_array(9, 256, 256)

    def layers(ws, x):
        for w in ws:
            x = jax.nn.relu(x @ w)
        return x

    for given in (policy, "nvfp4"):
        plan = pp.inspect(layers, given)(ws, x).plan
        assert [d.product.scaled for d in plan.walk() if d.kind is OpKind.COMPUTE] == [
            None,
            Precision.NVFP4,
            Precision.NVFP4,
            None,
        ]
    plan.save(tmp_path / "plan.json")
    again = pp.auto_mixed(layers, pp.Plan.load(tmp_path / "plan.json"))
    assert len(roundings(again, ws, x, precision="nvfp4")) == 4


@each_precision
def test_weights_ahead_of_time_are_refused_with_the_reason(precision):
    with pytest.raises(ValueError, match=rf"{precision} have a scale for each block.*'int8'"):
        pp.quant.quantized(loss, ordered(precision))


@pytest.mark.release
@each_precision
def test_delayed_scaling_leaves_the_scales_of_blocks_as_they_are(precision):
    def both(w, x):
        with pp.keep("fp8"):
            x = jnp.tanh(x @ w)
        return x @ w

    scaled = pp.quant.delayed_scaling(both, ordered(precision))
    scales = scaled.init(W, X)
    assert [p for p in scales.formats] == [Precision.F8E4M3] * 2
    out, _ = scaled(scales, W, X)
    assert rel_error(out, both(W, X)) < ERRORS[precision]
    with planned_for(target_of("b200")):
        assert len(pp.quant.delayed_scaling(both, ordered(precision)).init(W, X).places) == 2


def test_a_loop_rounds_its_stack_of_weights_and_not_their_float8_twins():
    """A weight that has 8 bits with one scale is no operand of blocks."""

    def layers(ws, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    ws, x = jnp.stack([normal_array(i, 256, 256) / 16 for i in range(4)]), normal_array(9, 256, 256)
    small = pp.quant.quantized(layers, ordered("fp8"))(ws, x)
    mixed = pp.auto_mixed(layers, ordered("mxfp8"))
    assert rel_error(mixed(small, x), jax.jit(layers)(ws, x)) < ERRORS["mxfp8"]


# ---------------------------------------------------------------- layouts and meshes


@pytest.mark.release
@pytest.mark.parametrize("spec", ["abc,abd->cd", "bac,bad->cd", "cab,dab->cd", "cab,bda->cd"])
def test_blocks_lie_along_any_summed_dimension_of_whole_blocks(spec):
    for sizes in ({"a": 2, "b": 64}, {"a": 64, "b": 2}):
        shapes = [
            [{**sizes, "c": 8, "d": 12}[name] for name in side] for side in spec[:7].split(",")
        ]
        x, w = normal_array(3, *shapes[0]), normal_array(4, *shapes[1])

        def fn(x, w):
            return jnp.einsum(spec, x, w)

        mixed = pp.auto_mixed(fn, ordered("mxfp8"))
        assert len(roundings(mixed, x, w, precision="mxfp8")) == 2
        assert rel_error(mixed(x, w), jax.jit(fn)(x, w)) < 0.06
        assert rel_error(on_blackwell(fn, "mxfp8", x, w)(x, w), mixed(x, w)) < 1e-6


@pytest.mark.release
@pytest.mark.parametrize("compiled", [False, True])
def test_a_cpu_runs_every_layout_of_a_program_that_is_planned_for_a_blackwell(compiled):
    x, y = normal_array(3, 16, 32, 3), normal_array(4, 3, 32, 16)

    def fn(x, y):
        return jnp.einsum("ijb,bjk->kbi", x, y)

    units = on_blackwell(fn, "mxfp8", x, y)
    units = jax.jit(units) if compiled else units
    assert rel_error(units(x, y), jax.jit(fn)(x, y)) < 0.06

    def curvature(w):
        return jax.hessian(lambda x: jnp.sin(pp.auto_mixed(jnp.dot, ordered("mxfp8"))(x, w)).sum())

    small, w = np.asarray(X)[:2, :32], np.asarray(W)[:32, :32]
    with planned_for(target_of("b200")):
        got = curvature(w)(small)
    assert rel_error(got, curvature(w)(small)) < 0.02


@pytest.fixture
def by_units(monkeypatch):
    """The product of two arrays as a GPU is given it, with the units' own product emulated."""

    def multiplied(lhs, rhs, of_lhs, of_rhs, preferred_element_type):
        x, w = (
            v.astype(jnp.float32) * jnp.repeat(s.astype(jnp.float32), v.shape[2] // s.shape[2], 2)
            for v, s in ((lhs, of_lhs), (rhs, of_rhs))
        )
        return jnp.einsum("bmk,bnk->bmn", x, w).astype(preferred_element_type)

    _units()  # JAX's own, which is traced once
    monkeypatch.setattr(jax.nn, "scaled_matmul", multiplied)

    def product(fn, precision, *pair):
        with planned_for(target_of("b200")):
            jaxpr = jax.make_jaxpr(pp.auto_mixed(fn, ordered(precision)))(*pair)
        (eqn,) = named(jaxpr, "precpass_block_product")
        rounded = [
            e.params["arithmetic"](v, platform="cuda")
            for e, v in zip(named(jaxpr, "precpass_scaling"), pair, strict=True)
        ]
        operands = [part for parts in zip(*rounded, strict=True) for part in parts]
        (got,) = eqn.params["arithmetic"](*operands, platform="cuda")
        return got

    return product


@pytest.mark.release
def test_the_scales_of_arrays_do_not_overflow_behind_each_other(by_units):
    for sizes in ((1e36, 1e-20), (1e-20, 1e36), (1e-28, 1e-28)):
        x = np.full((4, N), sizes[0], np.float32)
        w = np.full((N, 8), sizes[1], np.float32)
        assert rel_error(by_units(jnp.dot, "nvfp4", x, w), x @ w) < 0.07, sizes


@pytest.mark.release
@pytest.mark.parametrize("spec", ["abc,abd->cd", "zba,zbc->zac"])
def test_the_units_are_given_rows_of_all_summed_dimensions(spec, by_units):
    sizes = {"a": 2, "b": N, "c": 8, "d": 12, "z": 3}
    shapes = [[sizes[name] for name in side] for side in spec.split("->")[0].split(",")]
    x, w = normal(3, *shapes[0]), normal(4, *shapes[1])
    got = by_units(functools.partial(jnp.einsum, spec), "mxfp8", x, w)
    assert rel_error(got, np.einsum(spec, x, w)) < ERRORS["mxfp8"]


@pytest.mark.release(keep=1)
@each_precision
def test_values_near_the_largest_of_float32_stay_finite(precision):
    x = jnp.ones((2, 32)).at[0, 0].set(-3.4028235e38)
    w = jnp.full((32, 16), 1e-3).at[0, 0].set(0.0)
    got = pp.auto_mixed(jnp.dot, ordered(precision))(x, w)
    assert np.isfinite(got).all()
    assert rel_error(got[0, 1:], (x @ w)[0, 1:]) < ERRORS[precision]


@pytest.mark.release
@pytest.mark.parametrize(("rows", "count"), [(64, 6), (128, 10)])
def test_a_shard_of_an_explicit_axis_that_is_no_whole_blocks_stays_in_bfloat16(rows, count):
    """A weight's gradient sums over the batch, of which each of four devices has a part."""
    axes = (AxisType.Explicit,)
    mesh = jax.make_mesh((4,), ("data",), axis_types=axes, devices=jax.devices()[:4])

    def fn(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.square(x).mean()

    with jax.set_mesh(mesh):
        ws = [jax.device_put(normal_array(i, N, N) / 8, NamedSharding(mesh, P())) for i in (1, 2)]
        x = jax.device_put(normal_array(9, rows, N), NamedSharding(mesh, P("data")))
        want = jax.jit(jax.grad(fn))(ws, x)
        for gradient in (
            pp.auto_mixed(jax.grad(fn), ordered("mxfp8")),
            jax.grad(pp.auto_mixed(fn, ordered("mxfp8"))),
        ):
            made = roundings(gradient, ws, x, precision="mxfp8")
            assert len(made) == count
            assert rel_error(gradient(ws, x), want) < ERRORS["mxfp8"]
