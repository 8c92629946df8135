"""`inspect`: before, plan, after, diff and graph, for whatever arguments a function takes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import networkx as nx
import pytest
from jax import lax

import precpass as pp
from precpass import AlwaysF32, AutoMixed, AutoMixedBf16, Custom, PrecisionWarning
from precpass.types import Action, OpKind
from tests.support.jaxprs import assert_well_typed, product_dtypes
from tests.support.values import f32, stable_id

X, W = f32(8, 8), f32(8, 8)


def mlp(x, w):
    h = jnp.tanh(x @ w)
    return (h @ w).sum()


@jax.jit
def layer(x, w):
    return jnp.tanh(x @ w)


def layers(x, w):
    for _ in range(3):
        x = layer(x, w)
    return lax.scan(lambda h, _: (h @ w, None), x, length=4)[0].sum()


PROGRAMS = {
    "flat": mlp,
    "shared and scanned": layers,
    "gradient": jax.value_and_grad(layers, 1),
    "remat": jax.grad(jax.checkpoint(mlp), 1),
    "cond": lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x),
}
each_program = pytest.mark.parametrize("name", PROGRAMS)
ELEMENTWISE = Custom({"compute": "bf16", "elementwise": "bf16", "reduction": "bf16"})
each_policy = pytest.mark.parametrize(
    "policy", [AutoMixedBf16, AutoMixed, ELEMENTWISE], ids=stable_id
)


# ---------------------------------------------------------------- before, plan, after


def test_before_is_the_program_as_it_is_written():
    found = pp.inspect(mlp)(X, W)
    assert str(found.before) == str(jax.make_jaxpr(mlp)(X, W))
    assert product_dtypes(found.before) == ["float32"] * 2


def test_after_is_the_program_that_runs():
    found = pp.inspect(mlp)(X, W)
    assert product_dtypes(found.after) == ["bfloat16"] * 2
    assert str(pp.auto_mixed(mlp).trace(X, W).jaxpr) == str(found.after)


@each_program
@each_policy
def test_the_border_of_after_is_that_of_before(name, policy):
    found = pp.inspect(PROGRAMS[name], policy)(X, W)
    assert found.after is not found.before
    for border in ("in_avals", "out_avals"):
        assert getattr(found.after, border) == getattr(found.before, border)
    assert_well_typed(found.after)


def test_a_plan_counts_the_equations_of_shared_bodies_once():
    found = pp.inspect(layers)(X, W)
    counts = found.plan.count()
    # one product in the layer that is called three times, one in the scan
    assert counts[OpKind.COMPUTE, Action.LOWER] == 2
    assert repr(found.plan).startswith("<Plan: 2 of 2 products lowered")


def test_equal_programs_have_equal_plans_and_other_policies_have_others():
    plan = pp.inspect(layers)(X, W).plan
    assert plan == pp.inspect(layers)(X, W).plan
    assert hash(plan) == hash(pp.inspect(layers)(X, W).plan)
    assert plan != pp.inspect(layers, AutoMixed)(X, W).plan


def test_a_plan_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        pp.inspect(mlp)(X, W).plan.border = ()


def test_an_output_precision_changes_the_outputs_alone():
    found = pp.inspect(mlp, AlwaysF32.with_output("bf16"))(X, W)
    assert product_dtypes(found.after) == ["float32"] * 2
    assert [a.dtype for a in found.after.out_avals] == [jnp.bfloat16]


def test_inspecting_runs_nothing():
    ran = []

    def fn(x):
        jax.debug.callback(lambda: ran.append(1))
        return x @ x

    pp.inspect(fn)(jnp.ones((4, 4)))
    jax.effects_barrier()
    assert ran == []


# ---------------------------------------------------------------- diff


def test_equal_changes_of_a_line_are_counted():
    def fn(x, w):
        for _ in range(3):
            x = x @ w
        return x

    (change,) = (line for line in pp.inspect(fn)(X, W).diff().splitlines() if "dot_gen" in line)
    assert change.endswith("(3 times)")


def test_text_and_repr_are_short():
    found = pp.inspect(mlp)(X, W)
    assert str(found) == found.diff()
    assert repr(found) == f"<Inspection under AutoMixedBf16: {found.plan!r}>"


def test_the_graph_is_a_networkx_graph_of_before():
    found = pp.inspect(layers)(X, W)
    graph = found.graph
    assert isinstance(graph, nx.MultiDiGraph)
    products = [d for _, d in graph.nodes(data=True) if d.get("primitive") == "dot_general"]
    assert sorted(d["calls"] for d in products) == [3, 4]


# ---------------------------------------------------------------- arguments


def test_arrays_and_shapes_give_the_same_plan():
    shapes = pp.inspect(mlp)(X, W)
    arrays = pp.inspect(mlp)(jnp.ones((8, 8)), jnp.ones((8, 8)))
    assert shapes.plan == arrays.plan
    assert str(shapes.after) == str(arrays.after)


def test_keywords_defaults_and_pytrees_are_taken():
    def fn(params, x, *, scale=2.0):
        h = x @ params["w"]
        return {"out": h * scale, "aux": (h.sum(), params["b"])}

    found = pp.inspect(fn)({"w": W, "b": f32(3)}, x=X, scale=jnp.float32(3.0))
    assert product_dtypes(found.after) == ["bfloat16"]
    assert len(found.after.in_avals) == 4
    assert [a.shape for a in found.after.out_avals] == [(), (3,), (8, 8)]
    assert len(pp.inspect(fn)({"w": W, "b": f32(3)}, x=X).after.in_avals) == 3


@pytest.mark.parametrize(
    "option", [{"static_argnums": 1}, {"static_argnames": "depth"}], ids=stable_id
)
def test_static_arguments_of_auto_mixed_are_static(option):
    def fn(x, depth):
        for _ in range(depth):
            x = x @ x
        return x

    mixed = pp.auto_mixed(fn, **option)
    assert product_dtypes(pp.inspect(mixed)(X, 3).after) == ["bfloat16"] * 3


def test_methods_and_partials_are_taken():
    @jax.tree_util.register_static
    class Model:
        w = jnp.ones((8, 8))

        @pp.auto_mixed
        def call(self, x):
            return x @ self.w

        def plain(self, x):
            return x @ self.w

    model = Model()
    assert product_dtypes(pp.inspect(model.plain)(X).after) == ["bfloat16"]
    assert product_dtypes(pp.inspect(Model.call)(model, X).after) == ["bfloat16"]
    # bound, it is still the result of auto_mixed: `before` is what the user wrote
    assert product_dtypes(pp.inspect(model.call)(X).before) == ["float32"]
    assert product_dtypes(pp.inspect(model.call)(X).after) == ["bfloat16"]
    assert product_dtypes(pp.inspect(functools.partial(mlp, w=jnp.ones((8, 8))))(X).after) == [
        *["bfloat16"] * 2
    ]


def test_the_policy_of_auto_mixed_counts_and_another_may_be_asked_for():
    mixed = pp.auto_mixed(mlp, policy=AutoMixed)
    assert pp.inspect(mixed)(X, W).policy is AutoMixed
    assert product_dtypes(pp.inspect(mixed)(X, W).after) == ["float16"] * 2
    assert product_dtypes(pp.inspect(mixed, "AutoMixedBf16")(X, W).after) == ["bfloat16"] * 2
    # and the function keeps its own
    assert mixed.policy is AutoMixed


def test_the_default_policy_is_the_one_in_force():
    inspected = pp.inspect(mlp)
    with pp.use_policy("AutoMixed"):
        assert inspected(X, W).policy == AutoMixed
    assert inspected(X, W).policy == AutoMixedBf16


def test_a_keep_region_around_the_call_is_seen():
    with pp.keep("f32"), pytest.warns(PrecisionWarning, match="lowered nothing"):
        found = pp.inspect(mlp)(X, W)
    assert found.after is found.before
    assert found.scope == "precpass.keep[f32]"
