"""Which products of a program a policy multiplies in 8 bits by itself."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import precpass as pp
from precpass.types import OpKind, Precision
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


def products(fn, policy, *args):
    """The format and the reason of each product that a plan lowers."""
    plan = pp.inspect(fn, policy)(*args).plan
    return [
        (d.product.scaled or d.compute, str(d.reason))
        for d in plan.walk()
        if d.kind is OpKind.COMPUTE
    ]


def squares(model):
    def loss(params, ids):
        return jnp.square(model(params, ids)).mean()

    return loss


@pytest.mark.parametrize(("model", "copies"), [(scanned, 1), (unrolled, LAYERS), (rematted, 1)])
def test_a_transformers_weights_multiply_in_eight_bits_but_not_its_attention_and_its_head(
    model, copies
):
    found = products(model, "int8", PARAMS, IDS)
    formats = [precision for precision, _ in found]
    assert formats.count(Precision.INT8) == 4 * copies
    whys = [why for precision, why in found if precision is Precision.BF16]
    assert sum("it has batch dimensions" in why for why in whys) == 2 * copies
    assert sum("no other product follows" in why for why in whys) == 1
    assert len(whys) == 2 * copies + 1


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("model", [scanned, unrolled, rematted])
def test_the_derivatives_of_these_products_alone_have_eight_bits(model):
    found = products(jax.grad(squares(model)), "f8", PARAMS, IDS)
    eight = [precision for precision, _ in found].count(Precision.F8E4M3)
    forward = [p for p, _ in products(model, "f8", PARAMS, IDS)].count(Precision.F8E4M3)
    # A checkpoint computes all products of a block again but the last one.
    repeated = 3 if model is rematted else 0
    assert eight == forward * 3 + repeated
    whys = [why for precision, why in found if precision is Precision.BF16]
    # the derivatives of the head
    assert sum("differentiates no product that does" in why for why in whys) == 2


def test_the_derivatives_of_int8_have_sixteen_bits_and_what_is_computed_again_has_eight():
    found = products(jax.grad(squares(rematted)), "int8", PARAMS, IDS)
    assert [precision for precision, _ in found].count(Precision.INT8) == 4 + 3
    assert sum("derivatives are in bf16" in why for _, why in found) > 8


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ((512, 256, 200), "200 is not a multiple of 16"),
        ((512, 100, 256), "100 is not a multiple of 16"),
        ((500, 256, 256), "500 is not a multiple of 16"),
        ((16, 256, 256), "it is smaller than 16777216 multiplications"),
    ],
)
def test_a_product_of_unfit_sizes_has_sixteen_bits(sizes, why):
    rows, inner, columns = sizes

    def layers(a, b, c, x):
        return jnp.tanh(jnp.tanh(x @ a) @ b) @ c

    args = f32(256, inner), f32(inner, columns), f32(columns, 256), f32(rows, 256)
    _, (precision, reason), _ = products(layers, "int8", *args)
    assert precision is Precision.BF16 and reason.endswith(why)


def test_a_first_and_a_last_layer_have_sixteen_bits():
    def layers(a, b, c, x):
        return jnp.tanh(jnp.tanh(x @ a) @ b) @ c

    first, middle, last = products(layers, "int8", *[f32(D, D)] * 3, f32(TOKENS, D))
    assert first[1].endswith("both its operands are given")
    assert middle[0] is Precision.INT8
    assert last[1].endswith("no other product follows")


def test_calls_of_one_function_are_told_apart():
    def layers(ws, x):
        for w in ws:
            x = jax.nn.relu(x @ w)  # one jaxpr for all calls
        return x

    @jax.jit
    def dense(w, x):
        return jnp.tanh(x @ w)

    def through_calls(ws, x):
        x = jnp.sin(x)
        for w in ws:
            x = dense(w, x)
        return x @ ws[0]

    args = [f32(D, D)] * 4, f32(D, D)
    found = products(jax.grad(lambda ws, x: layers(ws, x).sum()), "f8", *args)
    # two layers in the middle, with two derivatives each
    assert [precision for precision, _ in found].count(Precision.F8E4M3) == 2 * 3
    # the product of the body that all calls share, and the last one
    found = dict(products(through_calls, "int8", *args))
    assert found.keys() == {Precision.INT8, Precision.BF16}
    assert found[Precision.BF16].endswith("no other product follows")


def test_a_loops_constant_is_a_weight():
    def recurrent(w, head, xs):
        def step(h, x):
            return jax.checkpoint(lambda h: jnp.tanh(h @ w + x))(h), None

        return lax.scan(step, jnp.sin(xs[0]), xs)[0] @ head

    args = f32(D, D), f32(D, D), f32(3, D, D)
    found = products(recurrent, "int8", *args)
    assert sorted(str(precision) for precision, _ in found) == ["bf16", "int8"]
    # It is rounded once, before the loop; in the loop it is the state that is rounded.
    jaxpr = jax.make_jaxpr(pp.auto_mixed(recurrent, "AutoMixedInt8"))(*args)
    (scan,) = named(jaxpr, "scan")
    rounded = [e.outvars[0].aval for e in named(scan.params["jaxpr"], "precpass_scaling")]
    assert [a.shape for a in rounded if a.dtype == jnp.int8] == [(D, D)]
    assert [v.aval.shape for v in scan.invars if v.aval.dtype == jnp.int8] == [(D, D)]


def of_stack(ws, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), jnp.arctan(x), jnp.stack(ws))[0]


def test_weights_may_be_stacked():
    args = [f32(D, D)] * 3, f32(D, D)
    ((precision, _),) = products(of_stack, "int8", *args)
    assert precision is Precision.INT8
    # What is stacked of computed values is no weight.
    ((_, why),) = products(lambda ws, x: of_stack([jnp.sin(w) for w in ws], x), "int8", *args)
    assert why.endswith("neither of its operands is a weight")
    # The gradient of a weight is known as such too.
    gradient = jax.grad(lambda ws, x: of_stack(ws, x).sum())
    policy = pp.AutoMixedF8.with_weight_gradients("bf16")
    found = [precision for precision, _ in products(gradient, policy, *args)]
    assert sorted(map(str, found)) == ["bf16", "f8e4m3", "f8e4m3"]


def test_what_is_assembled_of_computed_integers_is_no_weight():
    def spikes(ws, x):
        h = jnp.tanh(x @ ws[0])
        s = jnp.concatenate([h[:, :128] > 0, h[:, 128:] > 0.1], -1).astype(jnp.float32)
        return jnp.tanh(s @ ws[1]) @ ws[2]

    def broadcast(ws, x):
        h = jnp.tanh(x @ ws[0])
        s = jnp.broadcast_to(jnp.argmax(h, -1)[:, None], (D, D)).astype(jnp.float32)
        return jnp.tanh(s.T @ h) @ ws[1]

    args = [f32(D, D)] * 3, f32(D, D)
    assert [str(p) for p, _ in products(spikes, "int8", *args)] == ["bf16", "int8", "bf16"]
    found = products(broadcast, "int8", *args)
    assert found[1][1].endswith("neither of its operands is a weight")


def test_a_batch_that_a_loop_takes_of_the_data_is_no_weight():
    def trained(ws, data):
        def step(ws, i):
            x = lax.dynamic_slice_in_dim(data, i * D, D)
            loss = lambda ws: jnp.square(jnp.tanh(x @ ws[0]) @ ws[1]).sum()  # noqa: E731
            grads = jax.grad(loss)(ws)
            return jax.tree.map(lambda w, g: w - 1e-3 * g, ws, grads), None

        return lax.scan(step, ws, jnp.arange(2))[0]

    found = products(trained, "AutoMixedF8", [f32(D, D)] * 2, f32(2 * D, D))
    assert {precision for precision, _ in found} == {Precision.BF16}


@pytest.mark.parametrize("policy", ["AutoMixedF8", "AutoMixedInt8"])
def test_the_gradient_of_a_last_layer_behind_a_loop_is_as_the_layer(policy):
    def loss(params, x):
        e, ws, head = params
        return (of_stack(ws, x @ e) @ head).sum()

    params = f32(D, D), [f32(D, D)] * 3, f32(D, 2 * D)
    found = products(jax.grad(loss), policy, params, f32(D, D))
    count = [p for p, _ in found if p is not Precision.BF16]
    assert len(count) == (3 if policy == "AutoMixedF8" else 1)  # those of the layers in the loop


def test_a_rule_orders_what_is_not_eligible_and_excludes_what_is():
    policy = pp.AutoMixedInt8.with_rules(
        pp.Rule(where=lambda e: e.out_shapes[0] == (TOKENS, D), precision="int8"),
        pp.Rule(where=lambda e: e.out_shapes[0] == (TOKENS, 4 * D), precision="bf16"),
    )
    found = [precision for precision, _ in products(scanned, policy, PARAMS, IDS)]
    # qkv, out, down and the head; the products of attention and `up` are bfloat16
    assert (found.count(Precision.INT8), found.count(Precision.BF16)) == (4, 3)


def test_the_presets_of_sixteen_bits_never_choose_eight():
    for policy in ("AutoMixedBf16", "AutoMixed", "AlwaysBf16", "AutoMixedConservative"):
        low = {precision for precision, _ in products(scanned, policy, PARAMS, IDS)}
        assert low and not any(precision.is_scaled for precision in low)


def test_a_training_step_has_them_as_its_gradient_has():
    def step(params, momentum, ids):
        grads = jax.grad(squares(scanned))(params, ids)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum

    found = [precision for precision, _ in products(step, "f8", PARAMS, PARAMS, IDS)]
    assert found.count(Precision.F8E4M3) == 4 * 3


@pytest.mark.release
@pytest.mark.programs
def test_a_gradient_of_such_a_model_is_near():
    keys = iter(range(20))
    params = jax.tree.map(lambda s: normal_array(next(keys), *s.shape) / D**0.5, PARAMS)
    ids = jnp.arange(TOKENS) % D
    want = jax.jit(jax.grad(squares(scanned)))(params, ids)
    flat = jnp.concatenate([g.ravel() for g in jax.tree.leaves(want)])
    for policy, most in (("int8", 0.05), ("f8", 0.1)):
        got = jax.tree.leaves(pp.auto_mixed(jax.grad(squares(scanned)), policy)(params, ids))
        error = jnp.concatenate([g.ravel() for g in got]) - flat
        assert float(jnp.linalg.norm(error) / jnp.linalg.norm(flat)) < most, policy


def test_shards_have_the_weights_that_the_program_has():
    def layers(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P(), P("rows")), "out_specs": P("rows")}
    args = [f32(D, D)] * 4, f32(2 * D, D)
    whole = [precision for precision, _ in products(layers, "int8", *args)]
    for check_vma in (True, False):  # with the check JAX marks what differs between shards
        sharded = jax.shard_map(layers, mesh=mesh, **specs, check_vma=check_vma)
        assert [precision for precision, _ in products(sharded, "int8", *args)] == whole


def test_a_branch_keeps_its_eight_bits_in_a_gradient():
    """The branch that is not differentiated returns something in the place of residuals."""

    def loss(ws, x):
        x = jnp.tanh(x @ ws[0])
        x = lax.cond(x[0, 0] < 2, lambda x, w: jnp.tanh(x @ w), lambda x, _: x, x, ws[1])
        x = lax.switch(ws[3], [lambda x, w: jnp.arctan(x @ w), lambda x, w: x + w], x, ws[1])
        return jnp.square(x @ ws[2]).sum()

    args = (*[f32(D, D)] * 3, jax.ShapeDtypeStruct((), jnp.int32)), f32(D, D)
    forward = [p for p, _ in products(loss, "f8", *args)].count(Precision.F8E4M3)
    gradient = products(jax.grad(loss, 1), "f8", *args)
    assert forward == 2
    assert [p for p, _ in gradient].count(Precision.F8E4M3) >= 2 * forward


def test_a_product_by_constants_is_that_of_no_weight():
    def layers(w, x):
        x = jnp.tanh(x @ w)
        return jnp.tanh(x @ jnp.ones((D, D))) @ w

    found = products(layers, "int8", f32(D, D), f32(D, D))
    assert Precision.INT8 not in [precision for precision, _ in found]
