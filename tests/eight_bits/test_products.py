"""Which products of a program a rule by size multiplies in 8 bits, as `AutoMixedF8` has one."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax
from jax.sharding import PartitionSpec as P

import precpass as pp
from precpass.devices.detect import planned_for
from precpass.devices.targets import target_of
from precpass.types import Action, OpKind, Precision
from tests.support.jaxprs import named
from tests.support.values import f32, normal_array

D, TOKENS, LAYERS = 256, 512, 3
STACK = {
    "qkv": f32(LAYERS, D, 3 * D),
    "out": f32(LAYERS, D, D),
    "up": f32(LAYERS, D, 4 * D),
    "down": f32(LAYERS, 4 * D, D),
}
PARAMS = {"embedding": f32(D, D), "blocks": STACK, "head": f32(D, D)}
IDS = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)


def norm(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def block(x, p):
    q, k, v = jnp.split((norm(x) @ p["qkv"]).reshape(TOKENS, 4, -1), 3, axis=-1)
    weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k) / 8)
    x = x + jnp.einsum("hqk,khd->qhd", weights, v).reshape(TOKENS, D) @ p["out"]
    return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]


def scanned(params, ids):
    x = params["embedding"][ids]
    x, _ = lax.scan(lambda x, p: (block(x, p), None), x, params["blocks"])
    return norm(x) @ params["head"]


def unrolled(params, ids):
    x = params["embedding"][ids]
    for i in range(LAYERS):
        x = block(x, jax.tree.map(lambda a, i=i: a[i], params["blocks"]))
    return norm(x) @ params["head"]


def rematted(params, ids):
    x = params["embedding"][ids]
    body = jax.checkpoint(lambda x, p: (block(x, p), None))
    return norm(lax.scan(body, x, params["blocks"])[0]) @ params["head"]


def sharded(params, ids):
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P(), P()), "out_specs": P()}
    return jax.shard_map(scanned, mesh=mesh, **specs)(params, ids)


def products(fn, policy, *args):
    """The format and the reason of each product of a plan."""
    plan = pp.inspect(fn, policy)(*args).plan
    return [
        (d.product.scaled or d.compute, str(d.reason))
        for d in plan.walk()
        if d.kind is OpKind.COMPUTE
    ]


def count(found, precision):
    return [p for p, _ in found].count(precision)


def squares(model):
    def loss(params, ids):
        return jnp.square(model(params, ids)).mean()

    return loss


each_model = pytest.mark.parametrize(
    ("model", "copies", "repeated"),
    [(scanned, 1, 0), (unrolled, LAYERS, 0), (rematted, 1, 3)],  # all of a block but its last one
    ids=["scanned", "unrolled", "rematted"],
)


@each_model
def test_all_products_of_a_transformer_but_its_attention_have_eight_bits(model, copies, repeated):
    forward, weights = 4 * copies + 1, 4 * copies + 1
    found = products(jax.grad(squares(model)), "f8", PARAMS, IDS)
    assert count(found, Precision.F8E4M3) == 3 * forward + repeated
    whys = [why for precision, why in found if precision is Precision.BF16]
    assert len(whys) >= 6 * copies and all("it has batch dimensions" in why for why in whys)
    # int8 has no derivatives, and computes again in 8 bits what a checkpoint left out
    found = products(jax.grad(squares(model)), "int8", PARAMS, IDS)
    assert count(found, Precision.INT8) == forward + repeated
    assert sum("derivatives are in bf16" in why for _, why in found) == 2 * forward
    policy = pp.AutoMixedF8.with_weight_gradients("bf16")
    found = products(jax.grad(squares(model)), policy, PARAMS, IDS)
    assert count(found, Precision.F8E4M3) == 2 * forward + repeated
    assert sum("it is the gradient of a weight" in why for _, why in found) == weights


ORDER = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="dot_general", precision="f8"))


@pytest.mark.parametrize(
    ("target", "policy", "is_low"),
    [
        ("h100", pp.AutoMixedF8, True),
        ("b200", pp.AutoMixedF8, False),
        ("tpu 7x", pp.AutoMixedF8, False),
        ("h100", pp.AutoMixedF8.with_weight_gradients("f8"), False),
        ("b200", pp.AutoMixedF8.with_weight_gradients("bf16"), True),
        ("h100", ORDER, False),
    ],
)
def test_the_device_decides_on_weight_gradients_if_the_user_does_not(target, policy, is_low):
    """An H100 would read activations in a second order for them."""

    def loss(ws, x):
        return jnp.square(jnp.tanh(jnp.tanh(x) @ ws[0]) @ ws[1]).sum()

    args = [f32(D, D)] * 2, f32(D, D)
    with planned_for(target_of(target)):
        found = products(jax.grad(loss), policy, *args)
        dots = named(jax.make_jaxpr(jax.grad(pp.auto_mixed(loss, policy)))(*args), "dot_general")
    assert count(found, Precision.F8E4M3) == (3 if is_low else 5)
    whys = [why for _, why in found if "it is the gradient of a weight" in why]
    assert len(whys) == (2 if is_low else 0)
    can_be_lowered = policy.weight_gradients is None
    assert all(('with_weight_gradients("f8e4m3")' in why) == can_be_lowered for why in whys)
    # The same where JAX differentiates.
    assert [v.aval.dtype for e in dots for v in e.invars].count("float8_e4m3fn") == 2 * (
        3 if is_low else 5
    )


def test_shards_have_the_products_that_the_program_has():
    policy = pp.AutoMixedF8.with_weight_gradients("bf16")
    found = products(jax.grad(squares(sharded)), policy, PARAMS, IDS)
    assert count(found, Precision.F8E4M3) == 2 * 5


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ((512, 256, 264), "264 is not a multiple of 16"),
        ((512, 264, 256), "264 is not a multiple of 16"),
        ((500, 256, 512), "500 is not a multiple of 16"),
        ((16, 256, 256), "AutoMixedInt8: compute in bf16"),
    ],
)
def test_a_product_of_unfit_sizes_has_sixteen_bits(sizes, why):
    rows, inner, columns = sizes
    args = f32(inner, columns), f32(rows, inner)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Rule.* matched no equation", pp.PrecisionWarning)
        ((precision, reason),) = products(lambda w, x: x @ w, "int8", *args)
    assert precision is Precision.BF16 and reason.endswith(why)


def test_what_has_no_scaled_form_has_sixteen_bits():
    any_size = pp.AutoMixedBf16.with_rules(pp.Rule(min_flops=1, precision="int8"))
    (terms,) = export.symbolic_shape("terms")
    args = jax.ShapeDtypeStruct((64, terms), jnp.float32), jax.ShapeDtypeStruct((terms, 64), "f4")
    ((_, why),) = products(jnp.dot, any_size, *args)
    assert why.endswith("the number of its terms is unknown")
    image, kernel = f32(2, 16, 16, 16), f32(16, 16, 3, 3)
    ((_, why),) = products(lambda x, k: lax.conv(x, k, (1, 1), "SAME"), any_size, image, kernel)
    assert why.endswith("it is not a dot")


def test_a_layer_is_named_for_eight_bits_or_kept_out():
    def model(ws, x):
        for name, w in zip(("first", "middle", "head"), ws, strict=True):
            with jax.named_scope(name):
                x = jnp.tanh(x @ w)
        return x

    args = [f32(D, D)] * 3, f32(D, D)
    policy = pp.AutoMixedInt8.with_rules(
        pp.Rule(scope="first", precision="bf16"), pp.Rule(scope="head", precision="bf16")
    )
    found = [str(precision) for precision, _ in products(model, policy, *args)]
    assert found == ["bf16", "int8", "bf16"]
    only = pp.AutoMixedBf16.with_rules(pp.Rule(scope="middle", precision="int8"))
    assert [str(precision) for precision, _ in products(model, only, *args)] == found


def test_a_rule_by_size_is_as_weak_as_a_preset(tmp_path):
    def rounded(w, x):
        return jnp.floor(x @ w)  # needs every digit

    args = f32(D, D), f32(D, D)
    with pytest.warns(pp.PrecisionWarning, match="lowered nothing in rounded: needed exactly"):
        ((precision, _),) = products(rounded, "AutoMixedF8", *args)
    assert precision is Precision.F32
    order = pp.AutoMixedF8.with_rules(pp.Rule(primitive="dot_general", precision="f8e4m3"))
    ((precision, _),) = products(rounded, order, *args)
    assert precision is Precision.F8E4M3
    # A saved plan comes before it, and behind other rules.
    path = tmp_path / "plan.json"
    pp.inspect(jnp.dot, "AutoMixedF8")(*args).plan.save(path)
    path.write_text(path.read_text().replace('dot_general": "f8e4m3"', 'dot_general": "bf16"'))
    saved = pp.Plan.load(path)
    assert [str(p) for p, _ in products(jnp.dot, saved, *args)] == ["bf16"]
    assert [str(p) for p, _ in products(jnp.dot, saved.with_rules(*order.rules), *args)] == [
        "f8e4m3"
    ]


def test_a_rule_by_size_is_for_products_unless_it_names_a_primitive():
    def model(x):
        return jnp.tanh(x @ x)

    def lowered(**given):
        policy = pp.Custom({}).with_rules(pp.Rule(**given, precision="bf16"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pp.PrecisionWarning)
            found = pp.inspect(model, policy)(f32(64, 64))
        return [d.action is Action.LOWER for d in found.plan.walk()]

    assert lowered(min_flops=2 * 64**3) == [True, False]
    assert lowered(min_flops=2 * 64**3 + 1) == [False, False]
    assert lowered(primitive="tanh", min_flops=64**2) == [False, True]


def test_the_presets_of_sixteen_bits_never_choose_eight():
    for policy in ("AutoMixedBf16", "AutoMixed", "AlwaysBf16", "AutoMixedConservative"):
        low = {precision for precision, _ in products(scanned, policy, PARAMS, IDS)}
        assert low and not any(precision.is_scaled for precision in low)


def test_a_loop_over_training_steps_has_them_too():
    def loss(ws, x):
        return jnp.square(jnp.tanh(jnp.sin(x) @ ws[0]) @ ws[1]).sum()

    def trained(ws, data):
        def step(ws, x):
            return jax.tree.map(lambda w, g: w - 1e-3 * g, ws, jax.grad(loss)(ws, x)), None

        return lax.scan(step, ws, data)[0]

    policy = pp.AutoMixedF8.with_weight_gradients("bf16")
    found = products(trained, policy, [f32(D, D)] * 2, f32(2, D, D))
    # two products, the derivative with respect to what is between them, and those of both weights
    assert sorted(str(precision) for precision, _ in found) == ["bf16"] * 2 + ["f8e4m3"] * 3


@pytest.mark.release
@pytest.mark.programs
def test_a_gradient_of_such_a_model_is_near():
    keys = iter(range(20))
    params = jax.tree.map(lambda s: normal_array(next(keys), *s.shape) / D**0.5, PARAMS)
    ids = jnp.arange(TOKENS) % D
    want = jax.jit(jax.grad(squares(scanned)))(params, ids)
    flat = jnp.concatenate([g.ravel() for g in jax.tree.leaves(want)])
    keeps_head = pp.AutoMixedF8.with_rules(pp.Rule(function="scanned", precision="bf16"))
    for policy, most in (("int8", 0.05), (keeps_head, 0.1)):
        got = jax.tree.leaves(pp.auto_mixed(jax.grad(squares(scanned)), policy)(params, ids))
        error = jnp.concatenate([g.ravel() for g in got]) - flat
        assert float(jnp.linalg.norm(error) / jnp.linalg.norm(flat)) < most, policy
