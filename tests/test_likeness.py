"""Equations that are decided alike are judged once, and no others are taken for them."""

import jax
import jax.numpy as jnp
import pytest
import random_flow  # noqa: F401 -- fills the ingredients
import random_ops  # noqa: F401 -- likewise
from random_programs import build, seeded_program

import precpass as pp
from precpass import planner
from precpass.planner import make_plan


@pytest.fixture
def judged(monkeypatch):
    """Each equation that is judged for itself, by its name."""
    found = []
    decide = planner.Planner._decided

    def counted(self, row, *args):
        found.append(self.graph.eqns[row].primitive.name)
        return decide(self, row, *args)

    monkeypatch.setattr(planner.Planner, "_decided", counted)
    return found


def layers(count):
    def fn(x, ws):
        for w in ws:
            x = jnp.tanh(x @ w)
            x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(jnp.square(x).sum(-1)[:, None])
        return x.sum()

    x, ws = jnp.ones((4, 8)), [jnp.ones((8, 8))] * count
    return jax.make_jaxpr(jax.grad(fn, argnums=1))(x, ws)


@pytest.mark.parametrize("policy", [pp.AutoMixedBf16, pp.AlwaysBf16], ids=lambda p: p.name)
def test_more_layers_are_more_products_to_judge_and_nothing_else(policy, judged):
    counts = []
    for count in (4, 40):
        judged.clear()
        jaxpr = layers(count)
        make_plan(jaxpr, policy)
        products = judged.count("dot_general")
        assert products >= 2 * count
        counts.append(len(judged) - products)
    assert counts[1] == counts[0] > 5


POLICIES = {
    **{p.name: p for p in (pp.AutoMixedBf16, pp.AutoMixed, pp.AlwaysBf16, pp.AlwaysF16)},
    "some kinds": pp.Custom({"elementwise": "bf16", "reduction": "f16"}),
    "float64": pp.Custom({"elementwise": "f64", "compute": "bf16"}),
}


@pytest.fixture(scope="module")
def jaxprs():
    """Random programs, and their gradients."""
    found = []
    for index in range(1, 40):
        program = seeded_program(0, index)
        fn, _log = build(program)
        with program.context():
            found.append(jax.make_jaxpr(fn)(*program.args()))
            loss = jax.grad(lambda *xs, fn=fn: fn(*xs)[0])
            found.append(jax.make_jaxpr(loss)(*program.args()))
    return found


@pytest.mark.programs
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_plan_is_that_of_equations_judged_one_by_one(policy, jaxprs, monkeypatch):
    together = [make_plan(jaxpr, policy) for jaxpr in jaxprs]
    monkeypatch.setattr(planner, "likeness", lambda *_, **__: None)
    assert [make_plan(jaxpr, policy) for jaxpr in jaxprs] == together


def test_what_a_cast_reads_is_judged_by_itself(judged):
    def fn(x):
        return [x.T.astype(jnp.bfloat16) @ jnp.ones((4, 4), jnp.bfloat16), x.T + 1.0, x.T * 2.0]

    plan = make_plan(jax.make_jaxpr(fn)(jnp.ones((4, 4))), pp.AutoMixedBf16)
    assert judged.count("transpose") == 2
    reasons = [d.reason for d in plan.decisions]
    assert any("round" in reason for reason in reasons)


@pytest.mark.parametrize("ordered_first", [False, True])
def test_what_the_user_ordered_is_said_of_that_equation_alone(ordered_first):
    def fn(x, w):
        y = x @ w
        orders = [{}, {"out_dtype": jnp.float32}]
        return [jax.lax.mul(y, y, **k) for k in (reversed(orders) if ordered_first else orders)]

    jaxpr = jax.make_jaxpr(fn)(jnp.ones((8, 8)), jnp.ones((8, 8)))
    _, *said = (d.reason for d in make_plan(jaxpr, pp.AutoMixedBf16).decisions)
    assert ["out_dtype=float32" in why for why in said] == [ordered_first, not ordered_first]
