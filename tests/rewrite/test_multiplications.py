"""Precisions of products alone: TF32, passes of bfloat16, and exact float32."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, PartitionSpec as P

import precpass as pp
from precpass.types import Action, OpKind, Precision
from tests.support.jaxprs import named
from tests.support.passes import COMPOSITIONS
from tests.support.values import rel_error

W, X, KERNEL, IMAGE = (
    jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32) / 4
    for shape in [(16, 16), (8, 16), (4, 3, 3, 3), (2, 3, 8, 8)]
)
HIGH, HIGHEST = (lax.Precision.HIGH,) * 2, (lax.Precision.HIGHEST,) * 2
X3, X6 = lax.DotAlgorithmPreset.BF16_BF16_F32_X3, lax.DotAlgorithmPreset.BF16_BF16_F32_X6
DOTS = {"tf32": HIGH, "bf16x3": X3, "bf16x6": X6, "f32_exact": HIGHEST}
OTHERS = {"tf32": HIGH, "bf16x3": HIGHEST, "bf16x6": HIGHEST, "f32_exact": HIGHEST}
each_precision = pytest.mark.parametrize("precision", DOTS)


def loss(w, x):
    return jnp.square(jnp.tanh(x @ w) @ w).sum()


def scanned(w, x):
    body = jax.checkpoint(lambda h, _: (jnp.tanh(h @ w), h.sum()))
    return jax.lax.scan(body, x, None, length=3)[0].sum()


def branched(w, x):
    return lax.cond(x.sum() > 0, lambda: (x @ w).sum(), lambda: (x @ w.T).sum())


def batched(w, x):
    return jax.vmap(lambda row: jnp.sin(row @ w).sum())(x).sum()


@jax.custom_vjp
def with_rule(w, x):
    return (x @ w).sum()


with_rule.defvjp(
    lambda w, x: ((x @ w).sum(), (w, x)),
    lambda kept, g: (g * kept[1].T @ jnp.ones((8, 16)), g * jnp.ones((8, 16)) @ kept[0].T),
)


def convolved(kernel, image):
    return jnp.tanh(lax.conv(image, kernel, (1, 1), "SAME")).sum()


def ragged(w, x):
    return jnp.sin(lax.ragged_dot(x, jnp.stack([w, w]), jnp.array([3, 5]))).sum()


def on_shards(w, x):
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P("rows")), "out_specs": P("rows")}
    product = jax.shard_map(lambda w, x: x @ w, mesh=mesh, **specs)
    return jnp.sin(product(w, x)).sum()


FUNCTIONS = [loss, scanned, branched, batched, with_rule, ragged, on_shards]


def asked(fn, *args):
    """The `precision` of each product of a function."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    names = "dot_general", "conv_general_dilated", "ragged_dot_general"
    return {(e.primitive.name, e.params["precision"]) for e in named(jaxpr, *names)}


@pytest.mark.release(keep=1)
@each_precision
@pytest.mark.parametrize("compose", COMPOSITIONS.values(), ids=COMPOSITIONS)
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_every_product_forward_and_backward_says_how_it_is_multiplied(fn, compose, precision):
    gradient = compose(fn, policy=precision)
    found = asked(gradient, W, X)
    assert {how for name, how in found if name == "dot_general"} <= {DOTS[precision]}
    assert {how for name, how in found if name != "dot_general"} <= {OTHERS[precision]}
    assert found
    assert rel_error(jax.jit(gradient)(W, X), jax.jit(jax.grad(fn))(W, X)) < 1e-5


@pytest.mark.release(keep=1)
@each_precision
@pytest.mark.parametrize("compose", COMPOSITIONS.values(), ids=COMPOSITIONS)
def test_a_convolution_has_no_algorithm_and_never_fewer_digits(compose, precision):
    gradient = compose(convolved, policy=precision)
    found = asked(gradient, KERNEL, IMAGE)
    assert found == {("conv_general_dilated", OTHERS[precision])}
    plain = jax.grad(convolved)(KERNEL, IMAGE)
    assert rel_error(gradient(KERNEL, IMAGE), plain) < 1e-5


@each_precision
def test_nothing_is_cast_and_the_plan_says_what_runs_here(precision):
    found = pp.inspect(jax.grad(loss), precision)(W, X)
    products = [d for d in found.plan.walk() if d.kind is OpKind.COMPUTE]
    assert {(d.action, d.compute) for d in products} == {(Action.MULTIPLY, Precision(precision))}
    assert not named(found.after, "convert_element_type")
    instead = Precision(precision).runs_as("cpu")
    assert all((f"{precision} is not on a CPU" in str(d.reason)) == bool(instead) for d in products)
    assert f"multiplied in {precision}" in found.diff()
    assert f"{len(products)} in {precision}" in str(pp.explain(jax.grad(loss), precision)(W, X))
    assert f"{len(products)} multiplied in another way" in repr(found.plan)


def test_a_rule_and_a_region_order_products_alone():
    def layers(w, x):
        with jax.named_scope("head"):
            x = jnp.sin(x @ w)
        with pp.keep("bf16x3"):
            x = jnp.cos(x @ w)
        return x @ w

    policy = pp.AlwaysF32.with_rules(pp.Rule(scope="head", precision="tf32"))
    found = pp.inspect(layers, policy)(W, X)
    computes = [d.compute for d in found.plan.walk() if d.kind is OpKind.COMPUTE]
    assert computes == [Precision.TF32, Precision.BF16X3, Precision.F32]
    others = [d for d in found.plan.walk() if d.kind is OpKind.ELEMENTWISE]
    assert {(d.action, d.compute) for d in others} == {(Action.KEEP, Precision.F32)}


def test_in_a_mixed_program_its_operands_and_result_stay_float32():
    def layers(w, x):
        with pp.keep("tf32"):
            h = jnp.tanh(x @ w)
        return (h @ w).sum()

    found = pp.inspect(jax.grad(layers), "AutoMixedBf16")(W, X)
    tf32 = [e for e in named(found.after, "dot_general") if e.params["precision"] == HIGH]
    assert len(tf32) == 2
    for eqn in tf32:
        assert {v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars)} == {"float32"}
    assert any(
        v.aval.dtype.name == "bfloat16" for e in named(found.after, "dot_general") for v in e.invars
    )


def test_what_the_user_said_of_a_product_is_left_alone():
    def mine(w, x):
        return lax.dot(x, w, precision="highest")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        (decision,) = pp.inspect(mine, "tf32")(W, X).plan.walk()
    assert decision.action is Action.KEEP
    assert "precision=" in str(decision.reason)
    with pytest.warns(pp.PrecisionWarning, match="lowered nothing"):
        assert asked(pp.auto_mixed(mine, "tf32"), W, X) == {("dot_general", HIGHEST)}


def test_products_of_other_formats_are_left_alone():
    low, high = W.astype(jnp.bfloat16), X.astype(jnp.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert asked(pp.auto_mixed(jnp.matmul, "tf32"), high, low) == {("dot_general", None)}
        assert asked(pp.auto_mixed(jnp.matmul, "tf32"), lax.complex(X, X), lax.complex(W, W)) == {
            ("dot_general", None)
        }


@each_precision
def test_a_saved_plan_multiplies_in_the_same_way(precision, tmp_path):
    pp.inspect(loss, precision)(W, X).plan.save(tmp_path / "plan.json")
    locked = pp.Plan.load(tmp_path / "plan.json")
    assert asked(pp.auto_mixed(loss, locked), W, X) == {("dot_general", DOTS[precision])}


TEXTS = {
    "tf32": ("precision = [HIGH, HIGH]", 2),
    "bf16x3": ("num_primitive_operations = 3", 2),
    "bf16x6": ("num_primitive_operations = 6", 2),
    "f32_exact": ("precision = [HIGHEST, HIGHEST]", 2),
}


@pytest.mark.release(keep=2)
@each_precision
def test_one_exported_program_is_for_all_platforms_and_runs_on_this_one(precision):
    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (W, X)]
    exported = export.export(pp.auto_mixed(loss, precision), platforms=("cpu", "cuda", "tpu"))(
        *specs
    )
    text, count = TEXTS[precision]
    module = exported.mlir_module()
    assert module.count(text) == 3 * count  # JAX itself lowers each product once for a platform
    again = export.deserialize(exported.serialize())
    np.testing.assert_allclose(again.call(W, X), loss(W, X), rtol=1e-5)


@pytest.mark.parametrize(
    ("take", "offender"),
    [
        (lambda: pp.AutoMixedBf16.with_output("tf32"), "output = 'tf32'"),
        (lambda: pp.AutoMixedBf16.with_parameters("bf16x3"), "parameters = 'bf16x3'"),
        (lambda: pp.AutoMixedBf16.with_retypes("f32", "tf32"), "'tf32'"),
        (lambda: pp.cast_floating({"w": W}, "tf32"), "'tf32'"),
        (lambda: pp.Custom({"elementwise": "tf32"}), "OpKind.COMPUTE"),
        (lambda: pp.types.PrecisionPolicy.parse("p=tf32,c=bf16"), "parameters = Precision.TF32"),
        (lambda: pp.numerics.Roles(jacobian="tf32"), "'tf32'"),
        (lambda: pp.numerics.Ladder.create(("tf32", "f32"), X), "'tf32'"),
    ],
)
def test_a_place_for_formats_refuses_it_and_names_them(take, offender):
    with pytest.raises(ValueError, match=r"legal|takes it") as caught:
        take()
    assert offender in str(caught.value)
