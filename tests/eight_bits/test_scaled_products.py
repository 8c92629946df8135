"""Scaled products: operands of 8 bits, with scales behind the product."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, PartitionSpec as P

import precpass as pp
from precpass.eight_bits.scales import power_of_two_scale
from precpass.types import OpKind, Precision
from tests.support.jaxprs import named
from tests.support.passes import COMPOSITIONS
from tests.support.values import identical, normal_array, rel_error

W, X = normal_array(1, 16, 16) / 4, normal_array(2, 8, 16)
ERRORS = {"int8": 0.03, "f8e4m3": 0.15}
"""Of a gradient through three products. A product's two operands are rounded to 3 bits of fraction:
by a 16th of each number at most, and by 0.036 of it in the mean square. Twelve such roundings that
are independent make 0.12 of the result."""
DTYPES = {"int8": "int8", "f8e4m3": "float8_e4m3fn"}
each_precision = pytest.mark.parametrize("precision", ERRORS)
each_composition = pytest.mark.parametrize("compose", COMPOSITIONS.values(), ids=COMPOSITIONS)


def ordered(precision):
    """A policy that orders 8 bits for every dot, whatever its size."""
    return pp.AutoMixedBf16.with_rules(pp.Rule(primitive="dot_general", precision=precision))


def layers(w, x):
    return jnp.tanh(x @ w) @ w


def scanned(w, x):
    body = jax.checkpoint(lambda h, _: (jnp.tanh(h @ w), None))
    return lax.scan(body, x, None, length=3)[0]


def stacked(w, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, jnp.stack([w, w.T, w]))[0]


def branched(w, x):
    return lax.cond(x.sum() > 0, lambda: x @ w, lambda: jnp.sin(x @ w.T))


def batched(w, x):
    return jax.vmap(lambda row: jnp.sin(row @ w))(x)


def attention(w, x):
    heads = (x @ w).reshape(8, 4, 4)
    scores = jnp.einsum("qhd,khd->hqk", heads, heads)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), heads)


def transposed(w, x):
    return lax.dot_general(jnp.sin(x.T), w, (((0,), (1,)), ((), ())))


@jax.custom_vjp
def with_rule(w, x):
    return x @ w


with_rule.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, g: (kept[1].T @ g, g @ kept[0].T))


def on_shards(w, x):
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P("rows")), "out_specs": P("rows")}
    product = jax.shard_map(lambda w, x: x @ w, mesh=mesh, **specs)
    return jnp.sin(product(w, x))


def squared(fn):
    def squares(w, x):
        return jnp.square(fn(w, x)).sum()

    return squares


loss = squared(layers)
FUNCTIONS = [
    layers,
    scanned,
    stacked,
    branched,
    batched,
    attention,
    transposed,
    with_rule,
    on_shards,
]
each_function = pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)


def operands(fn, *args):
    """The dtypes of the operands of each dot of a function, without those of 16 bits and more."""
    dots = named(jax.make_jaxpr(fn)(*args), "dot_general")
    pairs = [tuple(v.aval.dtype.name for v in dot.invars) for dot in dots]
    return [pair for pair in pairs if {*DTYPES.values()} & set(pair)]


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("precision", ["int8", "f8e4m3"])
@each_function
def test_a_function_is_near_and_its_products_have_eight_bits(fn, precision):
    mixed = pp.auto_mixed(fn, ordered(precision))
    found = operands(mixed, W, X)
    assert found and {name for pair in found for name in pair} == {DTYPES[precision]}
    assert rel_error(mixed(W, X), jax.jit(fn)(W, X)) < ERRORS[precision]
    assert rel_error(jax.jit(mixed)(W, X), mixed(W, X)) < 1e-5


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("precision", ["int8", "f8e4m3"])
@each_composition
@each_function
def test_a_gradient_is_near_from_either_side(fn, compose, precision):
    got = compose(squared(fn), policy=ordered(precision))(W, X)
    assert rel_error(got, jax.jit(jax.grad(squared(fn)))(W, X)) < ERRORS[precision]


@each_composition
def test_the_backward_pass_of_int8_is_in_bfloat16(compose):
    gradient = compose(loss, policy=ordered("int8"))
    assert operands(gradient, W, X) == [("int8", "int8")] * 2
    dots = named(jax.make_jaxpr(gradient)(W, X), "dot_general")
    assert {v.aval.dtype.name for dot in dots for v in dot.invars} == {"int8", "bfloat16"}


@each_composition
def test_the_backward_pass_of_float8_is_in_float8(compose):
    found = operands(compose(loss, policy=ordered("f8e4m3")), W, X)
    # two products forward; the derivatives with respect to x @ w and w
    assert found == [("float8_e4m3fn", "float8_e4m3fn")] * 5


@pytest.mark.release
def test_a_tangent_is_near():
    for precision, most in ERRORS.items():
        mixed = pp.auto_mixed(layers, ordered(precision))
        want = jax.jvp(layers, (W, X), (W + 1, X - 1))
        for fn in (mixed, jax.jit(mixed)):
            assert rel_error(jax.jvp(fn, (W, X), (W + 1, X - 1)), want) < most


@pytest.mark.release(keep=1)
@each_precision
def test_second_derivatives_are_near(precision):
    def curvature(f):
        return lambda w: jax.jvp(jax.grad(lambda w: f(w, X)), (w,), (jnp.ones_like(w),))[1]

    mixed = pp.auto_mixed(loss, ordered(precision))
    assert rel_error(curvature(mixed)(W), curvature(loss)(W)) < 2 * ERRORS[precision]


def test_int8_is_what_its_formula_says():
    def rounded(a, axis):
        scale = np.abs(a).max(axis, keepdims=True) / np.float32(127)
        return np.rint(a / scale).astype(np.int32), scale

    (x, s), (w, t) = rounded(np.asarray(X), 1), rounded(np.asarray(W), 0)
    got = pp.auto_mixed(jnp.dot, ordered("int8"))(X, W)
    assert rel_error(got, (x @ w) * (s * t)) < 1e-6


def test_float8_is_what_its_formula_says():
    def rounded(a):
        scale = np.float32(2.0) ** np.ceil(np.log2(np.abs(a).max() / np.float32(448)))
        return (a / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32), scale

    (x, s), (w, t) = rounded(np.asarray(X)), rounded(np.asarray(W))
    got = pp.auto_mixed(jnp.dot, ordered("fp8"))(X, W)
    assert rel_error(got, (x @ w) * (s * t)) < 1e-6


@pytest.mark.parametrize("most", [256.0, 448.0, 57344.0])
def test_a_scale_is_the_smallest_power_of_two(most):
    """The format's largest number itself needs none, and what is a little larger needs one."""
    largest = np.float32([most, most * 1.01, most / 8, most * 1.99 / 8, most * 32])
    np.testing.assert_array_equal(power_of_two_scale(largest, most), [1.0, 2.0, 1 / 8, 1 / 4, 32.0])


def test_batch_dimensions_have_scales_of_their_own():
    x, w = normal_array(3, 5, 8, 16), normal_array(4, 5, 16, 4)
    large = w.at[2].multiply(1e6)
    got = pp.auto_mixed(jnp.matmul, ordered("int8"))(x, large)
    assert rel_error(got[0], x[0] @ w[0]) < 0.02
    assert rel_error(got[2], x[2] @ large[2]) < 0.02


# ---------------------------------------------------------------- values that are hard to scale


@pytest.mark.release(keep=2)
@each_precision
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38, 1e-30, 1.0, 1e30, 3e38])
def test_no_size_of_values_makes_a_result_that_is_not_finite(precision, size):
    x = jnp.full((8, 64), size, jnp.float32)
    got = pp.auto_mixed(jnp.dot, ordered(precision))(x, jnp.eye(64) * 0.5)
    assert np.isfinite(got).all()
    if size == 0 or size >= 1e-30:
        assert rel_error(got, x * 0.5) < ERRORS[precision]


@each_precision
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_does_not_become_finite(precision, value, side):
    pair = [X, W]
    pair[side] = pair[side].at[3, 5].set(value)
    got = np.asarray(pp.auto_mixed(jnp.dot, ordered(precision))(*pair))
    wide = np.asarray(jnp.dot(*pair))
    assert not np.isfinite(got[~np.isfinite(wide)]).any()


@each_precision
def test_an_outlier_leaves_the_others_their_sign_at_least(precision):
    x = X.at[0, 0].set(1e4)
    got = pp.auto_mixed(jnp.dot, ordered(precision))(x, jnp.eye(16))
    assert np.isfinite(got).all()
    if precision == "int8":  # the other rows have scales of their own
        assert rel_error(got[1:], X[1:]) < 0.02


# ---------------------------------------------------------------- around it


@pytest.mark.release(keep=1)
@each_precision
def test_it_is_exported_for_every_platform(precision):
    mixed = jax.jit(pp.auto_mixed(loss, ordered(precision)))
    exported = export.export(mixed, platforms=("cpu", "cuda", "tpu"))(W, X)
    assert identical(exported.call(W, X), mixed(W, X))
    text = exported.mlir_module()
    assert {"int8": "xi8>", "f8e4m3": "f8E4M3FN"}[precision] in text


@pytest.mark.release(keep=2)
@each_precision
def test_the_plan_the_diff_and_the_explanation_say_so(precision):
    found = pp.inspect(loss, ordered(precision))(W, X)
    products = [d for d in found.plan.walk() if d.kind is OpKind.COMPUTE]
    assert {(d.compute, d.product.scaled) for d in products} == {
        (Precision.BF16, Precision(precision))
    }
    assert f"in {precision}, accumulated in {'int32' if precision == 'int8' else 'f32'}" in str(
        found.diff()
    )
    assert f"2 in {precision}: Rule(" in str(pp.explain(loss, ordered(precision))(W, X))
    counts = pp.compare(loss, [ordered(precision)], rounds=0)(W, X).rows[0].counts
    assert (counts.products, counts.low) == (2, 2)
    assert set(counts.flops) >= {precision}


def test_the_audit_knows_that_cpus_multiply_int8_and_not_float8():
    found = pp.audit(loss, ordered("int8"))(W, X)
    assert (found.ok, found.as_planned, found.products) == (True, 2, 2)
    found = pp.audit(loss, ordered("fp8"))(W, X)
    assert not found.ok
    assert "f8e4m3 is not on a CPU, and an emulation of it runs instead" in str(
        pp.explain(loss, ordered("fp8"))(W, X)
    )


@pytest.mark.parametrize(
    ("target", "precision", "device"),
    [
        ("a100", "fp8", "NVIDIA A100, 80 GB"),
        ("h100", "fp8", ""),
        ("a100", "int8", ""),
        ("tpu v5e", "fp8", "TPU v5e"),
        ("tpu v5e", "int8", ""),
        ("tpu v4", "int8", "TPU v4"),
        ("tpu 7x", "fp8", ""),
        ("tpu 7x", "int8", "TPU 7x"),
    ],
)
def test_the_plan_says_which_devices_emulate_eight_bits(target: str, precision: str, device: str):
    plan = pp.inspect(loss, ordered(precision), target=target)(W, X).plan
    said = [str(d.reason) for d in plan.walk() if d.product.scaled]
    assert len(said) == 2
    wanted = f" is not on a {device}, and an emulation of it runs instead"
    assert all((wanted in text) if device else ("emulation" not in text) for text in said)


def test_a_saved_plan_has_eight_bits(tmp_path):
    path = tmp_path / "loss.json"
    pp.inspect(loss, ordered("int8"))(W, X).plan.save(path)
    mixed = pp.auto_mixed(loss, pp.Plan.load(path))
    assert operands(mixed, W, X) == [("int8", "int8")] * 2


def test_a_region_has_eight_bits_and_one_inside_of_it_leaves_them():
    def regions(w, x):
        with pp.keep("int8"):
            x = jnp.tanh(x @ w)
            with pp.keep("f32"):
                x = jnp.tanh(x @ w)
            return x @ w

    found = pp.inspect(regions, "bf16")(W, X)
    formats = [d.product.scaled or d.compute for d in found.plan.walk() if d.kind is OpKind.COMPUTE]
    assert formats == [Precision.INT8, Precision.F32, Precision.INT8]


def test_what_is_no_dot_stays_in_bfloat16_and_the_plan_says_why():
    def convolved(kernel, image):
        return lax.conv(image, kernel, (1, 1), "SAME").sum()

    rule = pp.Rule(primitive="*", precision="int8")
    kernel, image = normal_array(5, 4, 3, 3, 3), normal_array(6, 2, 3, 8, 8)
    found = pp.inspect(convolved, pp.AutoMixedBf16.with_rules(rule))(kernel, image)
    (product,) = [d for d in found.plan.walk() if d.kind is OpKind.COMPUTE]
    assert (product.compute, product.product.scaled) == (Precision.BF16, None)
    assert "in bf16 and not in int8: it is not a dot" in str(product.reason)


def test_sums_that_int32_cannot_hold_are_not_made():
    long, short = (jnp.full((2, n), 1.0) for n in (2**31 // 127**2 + 1, 2**31 // 127**2))
    mixed = pp.auto_mixed(lambda x: x @ x.T, ordered("int8"))
    assert operands(mixed, short) == [("int8", "int8")]
    assert operands(mixed, long) == []
    assert rel_error(mixed(short), short @ short.T) < 1e-5
    assert rel_error(mixed(long), long @ long.T) < 1e-2


def test_a_value_that_several_products_read_is_rounded_once():
    def twice(w, x):
        return (x @ w) + jnp.sin(x @ w.T)

    # int8 has scales for rows of `w` in one product, and for columns in the other.
    for precision, copies in (("f8e4m3", 2), ("int8", 3)):
        jaxpr = jax.make_jaxpr(pp.auto_mixed(twice, ordered(precision)))(W, X)
        made = [v.aval.dtype for e in named(jaxpr, "precpass_scaling") for v in e.outvars]
        assert sum(dtype.itemsize == 1 for dtype in made) == copies, precision


def rounded_to_eight_bits(fn, *args):
    """The shapes of what the equations of a function round to 8 bits."""
    found = named(jax.make_jaxpr(fn)(*args), "precpass_scaling")
    results = [e.outvars[0].aval for e in found]
    return [a.shape for a in results if a.dtype.itemsize == 1 and a.dtype != jnp.uint8]


@pytest.mark.release
def test_a_backward_pass_reads_the_8_bits_of_the_forward_pass():
    """In one scale for an array they are the same; int8's rows are not."""
    x, w = normal_array(5, 8, 16), normal_array(6, 16, 24)

    def fn(x, w):
        return jnp.square(x @ w).sum()

    mixed = pp.auto_mixed(fn, ordered("f8e4m3"))
    # The cotangent of x @ w is rounded for each of the two products that read it.
    rounded = rounded_to_eight_bits(jax.grad(mixed, (0, 1)), x, w)
    assert sorted(rounded) == [(8, 16), (8, 24), (8, 24), (16, 24)]
    both = pp.auto_mixed(jax.grad(fn, (0, 1)), ordered("f8e4m3"))(x, w)
    assert rel_error(jax.grad(mixed, (0, 1))(x, w), both) < 1e-6
    mapped = jax.vmap(jax.grad(mixed, (0, 1)), (0, None))(jnp.stack([x, 2 * x]), w)
    assert rel_error([g[0] for g in mapped], jax.grad(mixed, (0, 1))(x, w)) < 1e-6


@pytest.mark.release
def test_weights_of_8_bits_are_not_rounded_again_in_a_backward_pass():
    ws, x = [normal_array(i, 256, 256) / 16 for i in range(4)], normal_array(9, 256, 256)

    def fn(x, ws):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.square(x).sum()

    small = pp.quant.quantized(lambda ws, x: fn(x, ws), "AutoMixedF8")(ws, x)
    gradient = jax.grad(pp.auto_mixed(fn, "AutoMixedF8"))
    # Forward the inputs of four layers are rounded, backward their cotangents.
    assert len(rounded_to_eight_bits(gradient, x, small)) == 8
    assert rel_error(gradient(x, small), jax.jit(jax.grad(fn))(x, ws)) < 0.15


def test_a_loop_saves_8_bits_for_its_backward_pass():
    ws = jnp.stack([normal_array(i, 32, 32) / 6 for i in range(3)])
    x = normal_array(9, 8, 32)

    def fn(ws, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0].sum()

    jaxpr = jax.make_jaxpr(jax.grad(pp.auto_mixed(fn, ordered("fp8"))))(ws, x)
    saved = [v.aval for e in named(jaxpr, "scan") for v in e.outvars]
    assert {a.shape for a in saved if a.dtype == jnp.uint8} == {(3, 8, 32), (3, 32, 32)}


@pytest.mark.release
def test_a_checkpoint_may_save_everything():
    """It passes what it saves through `reduce_precision`, by which float8's 448 is NaN."""
    policy = jax.checkpoint_policies.everything_saveable
    layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w), policy=policy)
    x, w = normal_array(5, 32, 32), normal_array(6, 32, 32) / 6

    def once(x, w):
        return layer(x, w).sum()

    def looped(x, w):
        return lax.scan(lambda x, _: (layer(x, w), None), x, None, length=2)[0].sum()

    for fn in (once, looped):
        got = jax.grad(pp.auto_mixed(fn, ordered("f8e4m3")), (0, 1))(x, w)
        assert rel_error(got, jax.jit(jax.grad(fn, (0, 1)))(x, w)) < 0.15
