"""The sums between devices that a policy's `reduce`, or a rule, sends in 16 bits."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import precpass as pp
from precpass import jaxpr as ir
from precpass.plan.plan import Action
from precpass.policy.primitives import OpKind
from precpass.policy.rules import WIRE
from tests.support.jaxprs import walk
from tests.support.passes import look
from tests.support.sharded_programs import PROGRAMS, meshed, value

SUMS = ("psum", "psum_invariant", "reduce_scatter")
SENT = (*SUMS, "all_to_all", "all_gather", "all_gather_invariant", "ppermute")
U = pp.AutoMixedBf16.low.unit_roundoff
each_reduce = pytest.mark.parametrize("reduce", ["bf16", WIRE])


def collectives(jaxpr: Any) -> Iterator[Any]:
    """The equations that are no sums for derivatives alone."""
    rounded = {e.invars[1] for e in walk(jaxpr) if e.primitive.name == "precpass_rounded"}
    return (e for e in walk(jaxpr) if e.primitive.name not in SUMS or e.outvars[0] not in rounded)


def sent(jaxpr: Any) -> set[tuple[str, str]]:
    """The collectives of more than a number, each with the format of what it sends.

    Sums that only give a rounded value its derivative are left out, as XLA does.
    """
    eqns = [e for e in collectives(jaxpr) if e.primitive.name in SENT and e.invars[0].aval.size > 1]
    return {(e.primitive.name, e.invars[0].aval.dtype.name) for e in eqns}


def compositions(loss: Callable[..., Any], policy: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "auto(grad)", pp.auto_mixed(jax.grad(loss), policy=policy)
    yield "grad(auto)", jax.jit(jax.grad(pp.auto_mixed(loss, policy=policy)))


def summed(name: str, jaxpr: Any) -> set[str]:
    return {dtype for primitive, dtype in sent(jaxpr) if primitive == name}


# ---------------------------------------------------------------- which sums


@pytest.mark.parametrize("name", ["fsdp_shard_map", "tensor_parallel_shard_map", "experts"])
def test_bf16_sends_all_sums_of_what_products_made_in_bfloat16(name: str):
    program = PROGRAMS[name](jax.devices(), 32)
    arguments = program.arguments(value)
    for policy, wanted in (("bf16", {"bfloat16"}), ("f32", {"float32"}), ("auto", {"float32"})):
        policy = pp.AutoMixedBf16.with_reduce(policy)
        for form, fn in compositions(program.loss, policy):
            jaxpr = jax.make_jaxpr(fn)(*arguments)
            assert {d for n, d in sent(jaxpr) if n in SUMS} == wanted, form


@pytest.mark.parametrize("name", ["fsdp_shard_map", "tensor_parallel_shard_map"])
def test_a_wire_in_bfloat16_exchanges_terms_and_leaves_no_sum_to_the_network(name: str):
    program = PROGRAMS[name](jax.devices(), 32)
    policy = pp.AutoMixedBf16.with_reduce(WIRE)
    for form, fn in compositions(program.loss, policy):
        found = sent(jax.make_jaxpr(fn)(*program.arguments(value)))
        assert ("all_to_all", "bfloat16") in found, form
        # JAX adds up the cotangents of a weight that a program without a gradient copies.
        is_copied = form == "grad(auto)" and name == "tensor_parallel_shard_map"
        assert {d for n, d in found if n in SUMS} == ({"float32"} if is_copied else set()), form


def test_sums_of_gradients_that_the_program_adds_up_itself_are_sent_in_16_bits():
    """The usual step: a derivative in each shard, a mean over all of them, and an update."""

    def step(w: Any, x: Any, y: Any) -> Any:
        def loss(w: Any, x: Any, y: Any) -> Any:
            return jnp.square(jnp.tanh(x @ w) - y).mean()

        own = lax.pcast(w, ("data",), to="varying")
        zero = jnp.zeros_like(own)
        parts = x.reshape(2, -1, 32), y.reshape(2, -1, 32)
        added, _ = lax.scan(lambda g, p: (g + jax.grad(loss)(own, *p), None), zero, parts)
        return w - 0.1 * lax.pmean(added, "data")

    args = [jnp.asarray(x) for x in (np.eye(32), np.ones((128, 32)), np.ones((128, 32)))]
    args = [x.astype(jnp.float32) for x in args]
    fn = on_shards(step, P(), P("data"), P("data"))
    for policy, wanted in (("auto", "float32"), ("bf16", "bfloat16")):
        policy = pp.AutoMixedBf16.with_reduce(policy)
        after = look(fn, policy, *args).after
        assert {d for n, d in sent(after) if n in SUMS} == {wanted}
        got, want = pp.auto_mixed(fn, policy)(*args), fn(*args)
        assert np.linalg.norm(got - want) < 8 * U * np.linalg.norm(want)
    found = sent(look(fn, pp.AutoMixedBf16.with_reduce(WIRE), *args).after)
    assert ("all_to_all", "bfloat16") in found
    assert not [name for name, _ in found if name in SUMS]


def on_shards(fn: Callable[..., Any], *specs: Any, results: int = 1) -> Callable[..., Any]:
    out = P() if results == 1 else (P(),) * results
    return jax.shard_map(fn, mesh=meshed(jax.devices(), "data"), in_specs=specs, out_specs=out)


def clipped(w: Any, x: Any) -> Any:
    """A gradient, added up over the devices and divided by its norm; and the loss."""

    def on_device(w: Any, x: Any) -> Any:
        own = lax.pcast(w, "data", to="varying")
        loss, grad = jax.value_and_grad(lambda w: jnp.square(jnp.tanh(x @ w)).mean())(own)
        scales = jnp.square(grad).sum(0)
        grad, scales, loss = (lax.psum(v, "data") for v in (grad, scales, loss))
        return loss, grad / jnp.sqrt(scales.sum()), scales

    return on_shards(on_device, P(), P("data"), results=3)(w, x)


@each_reduce
def test_losses_and_norms_are_added_up_in_float32(reduce: str):
    w, x = jnp.eye(16), jnp.ones((32, 16))
    policy = pp.AutoMixedBf16.with_reduce(reduce)
    eqns = [
        e
        for e in collectives(jax.make_jaxpr(pp.auto_mixed(clipped, policy=policy))(w, x))
        if e.primitive.name in (*SUMS, "all_to_all")
    ]
    found = {(e.invars[0].aval.ndim, e.invars[0].aval.dtype.name) for e in eqns}
    dims = 2 if reduce == "bf16" else 3
    assert found == {(0, "float32"), (1, "float32"), (dims, "bfloat16")}


def test_a_sum_that_leaves_the_forward_pass_or_is_subtracted_stays_in_float32():
    def partial(x: Any, w: Any) -> Any:
        return lax.psum(x @ w, "data")

    specs = P(None, "data"), P("data")
    policy = pp.AutoMixedBf16.with_reduce("bf16")
    x, w = jnp.ones((8, 16)), jnp.ones((16, 8))
    for fn, wanted in (
        (on_shards(partial, *specs), "float32"),
        (on_shards(lambda x, w: jnp.tanh(partial(x, w) - 0.3), *specs), "float32"),
        (on_shards(lambda x, w: jnp.tanh(partial(x, w)), *specs), "bfloat16"),
    ):
        jaxpr = jax.make_jaxpr(pp.auto_mixed(fn, policy=policy))(x, w)
        assert {d for n, d in sent(jaxpr) if n in SUMS} == {wanted}


def test_terms_that_devices_cannot_divide_stay_in_float32_and_explain_says_so():
    def loss(w: Any, x: Any) -> Any:
        return on_shards(
            lambda w, x: lax.pmean(jnp.square(jnp.tanh(x @ w)).mean(), "data"), P(), P("data")
        )(w, x)

    w, x = jnp.ones((7, 9)), jnp.ones((32, 7))
    policy = pp.AutoMixedBf16.with_reduce(WIRE)
    assert ("psum_invariant", "float32") in sent(
        jax.make_jaxpr(pp.auto_mixed(jax.grad(loss), policy=policy))(w, x)
    )
    text = str(pp.explain(jax.grad(loss), policy)(w, x))
    assert "the sum over devices is in f32: they cannot divide the terms among them" in text
    text = str(pp.explain(jax.grad(loss), policy)(jnp.ones((8, 9)), jnp.ones((32, 8))))
    assert "the sum over devices is in bf16 wire, f32 sum (1 equation)" in text
    text = str(look(jax.grad(loss), policy.with_reduce("bf16"), w, x).diff("lines"))
    assert "psum_invariant in bf16;" in text


# ---------------------------------------------------------------- products of automatic axes


def loss(w: Any, x: Any) -> Any:
    return jnp.square(jnp.tanh(x @ w["a"]) @ w["b"]).mean()


def step(w: Any, x: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w, x))


WEIGHTS, X = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}, jnp.ones((16, 8))


@pytest.mark.parametrize("fn", [jax.grad(loss), step])
@pytest.mark.parametrize("reduce", ["auto", "f32", "bf16", WIRE])
def test_products_that_make_gradients_of_weights_round_their_sums_where_that_is_asked_for(
    fn: Callable[..., Any], reduce: str
):
    plan = look(fn, pp.AutoMixedBf16.with_reduce(reduce), WEIGHTS, X).plan
    products = [d for d in plan.walk() if d.kind is OpKind.COMPUTE and d.action is Action.LOWER]
    assert len(products) == 5
    assert sum(d.product.low_result for d in products) == (2 if reduce == "bf16" else 0)


def test_f32_keeps_partial_sums_of_products_wide_on_accelerators():
    counts = Counter[str]()
    for reduce in ("auto", "f32"):
        policy = pp.AutoMixedBf16.with_reduce(reduce)
        plan = pp.inspect(jax.grad(loss), policy, target="h100")(WEIGHTS, X).plan
        counts[reduce] = sum(d.product.low_result for d in plan.walk())
    assert counts["auto"] and not counts["f32"]


# ---------------------------------------------------------------- rules


def test_a_rule_chooses_the_format_of_a_sum():
    program = PROGRAMS["tensor_parallel_shard_map"](jax.devices(), 32)
    arguments, gradient = program.arguments(value), jax.grad(program.loss)
    wide, low = (pp.Rule(primitive="psum*", precision=p) for p in ("f32", "bf16"))
    for policy, wanted in (
        (pp.AutoMixedBf16.with_reduce("bf16").with_rules(wide), {"float32"}),
        (pp.AutoMixedBf16.with_rules(low), {"bfloat16"}),
    ):
        mixed = pp.auto_mixed(gradient, policy=policy)
        assert summed("psum_invariant", jax.make_jaxpr(mixed)(*arguments)) == wanted


def test_a_rule_orders_the_stream_between_pipeline_stages_in_16_bits():
    program = PROGRAMS["pipeline"](jax.devices(), 32)
    arguments = program.arguments(value)
    policy = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="ppermute", precision="bf16"))
    want = jax.jit(jax.grad(program.loss))(*arguments)
    for form, fn in compositions(program.loss, policy):
        jaxpr = jax.make_jaxpr(fn)(*arguments)
        assert summed("ppermute", jaxpr) == {"bfloat16"}, form
        near(fn(*arguments), want, 8 + len(jax.devices()))


def test_a_saved_plan_keeps_the_format_of_sums(tmp_path: Any):
    program = PROGRAMS["tensor_parallel_shard_map"](jax.devices(), 32)
    arguments, gradient = program.arguments(value), jax.grad(program.loss)
    pp.inspect(gradient, pp.AutoMixedBf16.with_reduce("bf16"))(*arguments).plan.save(
        tmp_path / "plan.json"
    )
    locked = pp.AutoMixedBf16.with_lock(pp.Plan.load(tmp_path / "plan.json").lock)
    jaxpr = jax.make_jaxpr(pp.auto_mixed(gradient, policy=locked))(*arguments)
    assert summed("psum_invariant", jaxpr) == {"bfloat16"}


def test_a_rule_chooses_the_reduce_of_a_region():
    def scoped(w: Any, x: Any) -> Any:
        with jax.named_scope("body"):
            h = jnp.tanh(x @ w["a"])
        with jax.named_scope("head"):
            return jnp.square(h @ w["b"]).mean()

    rule = pp.Rule(scope="head", precision="bf16", reduce="bf16")
    assert repr(rule) == "Rule(scope='head', precision='bf16', reduce='bf16')"
    assert pp.Rule.from_dict(rule.to_dict()) == rule
    with pytest.raises(ValueError, match=r"reduce='f16'\): legal are 'auto', 'f32', 'bf16', "):
        pp.Rule(scope="head", precision="bf16", reduce="f16")
    for policy, wanted in (
        (pp.AutoMixedBf16.with_rules(rule), {"head": True, "body": False}),
        (
            pp.AutoMixedBf16.with_reduce("bf16").with_rules(
                dataclasses.replace(rule, reduce="f32")
            ),
            {"head": False, "body": True},
        ),
    ):
        inspection = look(jax.grad(scoped), policy, WEIGHTS, X)
        pairs = zip(inspection.plan.walk(), inspection.before.eqns, strict=True)
        low = {ir.scope_of(eqn) for decision, eqn in pairs if decision.product.low_result}
        assert {name: any(name in scope for scope in low) for name in wanted} == wanted
        weights, x = WEIGHTS["a"], jnp.ones((32, 8))
        shards = on_shards(
            lambda w, x: lax.pmean(scoped({"a": w, "b": w}, x), "data"), P(), P("data")
        )
        for form, fn in compositions(shards, policy):
            found = summed("psum_invariant", jax.make_jaxpr(fn)(weights, x))
            assert found == {"float32", "bfloat16"}, form


# ---------------------------------------------------------------- derivatives of any order


def near(got: Any, want: Any, roundings: float) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(a - b) <= roundings * U * np.linalg.norm(b)


@each_reduce
def test_second_derivatives_and_batches_are_those_of_float32(reduce: str):
    def on_device(w: Any, v: Any, x: Any) -> Any:
        whole = lax.all_gather(w, "data", axis=0, tiled=True)
        return lax.pmean(jnp.square(jnp.tanh(x @ whole) @ v).mean(), "data")

    loss = on_shards(on_device, P("data"), P(), P("data"))
    w, v, x = (value(i, shape, None) for i, shape in enumerate([(8, 16), (16, 8), (32, 8)], 1))
    mixed = pp.auto_mixed(loss, policy=pp.AutoMixedBf16.with_reduce(reduce))

    def tangent_of_gradient(loss: Callable[..., Any]) -> Callable[..., Any]:
        return lambda w, v, x: jax.jvp(lambda *ws: jax.grad(loss, (0, 1))(*ws, x), (w, v), (w, v))

    def twice_backward(loss: Callable[..., Any]) -> Callable[..., Any]:
        def norm(w: Any, v: Any, x: Any) -> Any:
            return sum(jnp.square(g).sum() for g in jax.grad(loss, (0, 1))(w, v, x))

        return jax.grad(norm, (0, 1))

    def batched(loss: Callable[..., Any]) -> Callable[..., Any]:
        gradients = jax.vmap(jax.grad(loss, (0, 1)), (0, None, None))
        return lambda w, v, x: gradients(jnp.stack([w, 2 * w]), v, x)

    for form in (tangent_of_gradient, twice_backward, batched):
        got, want = jax.jit(lambda w, v, x, form=form: (form(mixed)(w, v, x), form(loss)(w, v, x)))(
            w, v, x
        )
        near(got, want, 16)


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_of_weights_that_are_gathered_along_any_dimension(dim: int, tiled: bool):
    def on_device(w: Any, x: Any) -> Any:
        whole = lax.all_gather(w, "data", axis=dim, tiled=tiled)
        whole = whole if tiled else jnp.moveaxis(whole, dim, 0).reshape(-1, 16)
        return lax.pmean(jnp.square(jnp.tanh(x @ whole)).mean(), "data")

    split = P(None, "data") if tiled and dim else P("data")
    loss = on_shards(on_device, split, P("data"))
    w, x = value(1, (8, 16), None), value(0, (32, 8), None)
    want = jax.jit(jax.grad(loss))(w, x)
    for form, fn in compositions(loss, pp.AutoMixedBf16.with_reduce(WIRE)):
        found = sent(jax.make_jaxpr(fn)(w, x))
        assert ("all_to_all", "bfloat16") in found, form
        assert not any(n in SUMS for n, _ in found), form
        near(fn(w, x), want, 8)
