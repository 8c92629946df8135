"""Equations that ask the same query are decided once, and no others are taken for them."""

import jax
import jax.numpy as jnp
import pytest

import precpass as pp
from precpass.planner import planner
from precpass.planner.planner import make_plan
from precpass.policy.scopes import FIXED_SCOPE


@pytest.fixture
def decided(monkeypatch):
    """The primitive of each query that is decided."""
    found = []
    decide = planner.decide

    def counted(query, **kwargs):
        found.append(query.primitive)
        return decide(query, **kwargs)

    monkeypatch.setattr(planner, "decide", counted)
    return found


def layers(count):
    def fn(x, ws):
        for w in ws:
            x = jnp.tanh(x @ w)
            x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(jnp.square(x).sum(-1)[:, None])
        return x.sum()

    x, ws = jnp.ones((4, 8)), [jnp.ones((8, 8))] * count
    return jax.make_jaxpr(jax.grad(fn, argnums=1))(x, ws)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("policy", [pp.AutoMixedBf16, pp.AlwaysBf16], ids=lambda p: p.name)
def test_more_layers_are_no_more_to_decide(policy, decided):
    counts = []
    for count in (4, 40):
        decided.clear()
        make_plan(layers(count), policy)
        counts.append(len(decided))
    assert counts[1] == counts[0] > 5


POLICIES = {
    **{p.name: p for p in (pp.AutoMixedBf16, pp.AutoMixed, pp.AlwaysBf16, pp.AlwaysF16)},
    "some kinds": pp.Custom({"elementwise": "bf16", "reduction": "f16"}),
    "float64": pp.Custom({"elementwise": "f64", "compute": "bf16"}),
}


def _times_in(scope):
    def times(x, _low, _key):
        with scope():
            return x * 3.0

    return times


def _times(x, _low, _key):
    return x * 3.0


# the first of each pair is an equation like the second but for what is named
PAIRS = {
    "region": (_times_in(lambda: pp.keep("f32")), _times),
    "a policy of its own": (_times_in(lambda: jax.named_scope(FIXED_SCOPE)), _times),
    "dtype": (lambda _x, low, _key: low * 3, _times),
    "what is known of an operand": (lambda x, *_: x * 1e9, _times),
    "what is known of the result": (
        lambda x, *_: jnp.clip(x, -10.0, 10.0) ** 6,
        lambda x, *_: jnp.clip(x, -10.0, 10.0) ** 2,
    ),
    "how an operand is held": (lambda x, *_: x + x == x + x, lambda x, *_: x == x),
    "sampler": (
        lambda x, _low, key: jax.random.multivariate_normal(key, x[0], jnp.eye(4)),
        lambda x, *_: x[0] + x[1],
    ),
    "the user's own function": (
        lambda x, *_: x.at[jnp.arange(2)].apply(jnp.tanh),
        lambda x, *_: x.at[jnp.arange(2)].set(jnp.zeros((2, 4))),
    ),
}


@pytest.mark.release(keep=3)
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("step", [1, -1], ids=["first", "last"])
def test_what_one_thing_tells_apart_is_decided_as_if_alone(name, step):
    x = jnp.ones((4, 4))
    args = x, x.astype(jnp.bfloat16), jax.random.key(0)
    pair = PAIRS[name][::step]

    def together(*args):
        return [one(*args) for one in pair]

    for policy in POLICIES.values():
        plans = [make_plan(jax.make_jaxpr(fn)(*args), policy) for fn in (*pair, together)]
        one, other, both = ([d for d in plan.walk() if not d.inner] for plan in plans)
        assert set(both) == {*one, *other}


@pytest.mark.parametrize("first", [0, 1])
def test_what_no_one_can_check_is_said_of_that_equation_alone(first):
    def fn(c, x):
        return [-x, *[v * 3.0 for v in ((c, x), (x, c))[first]]]

    jaxpr, said = jax.make_jaxpr(fn)(1.0, 2.0), []

    def outer(c):
        plan = make_plan(jaxpr, pp.AlwaysBf16, closed_over=[c])
        said.extend("unchecked" in str(d.reason) for d in plan.decisions)
        return c

    jax.make_jaxpr(outer)(1.0)
    assert said == [False, first == 0, first == 1]


def test_what_a_cast_reads_is_decided_by_itself(decided):
    def fn(x):
        return [x.T.astype(jnp.bfloat16) @ jnp.ones((4, 4), jnp.bfloat16), x.T + 1.0, x.T * 2.0]

    plan = make_plan(jax.make_jaxpr(fn)(jnp.ones((4, 4))), pp.AutoMixedBf16)
    assert decided.count("transpose") == 2
    reasons = [str(d.reason) for d in plan.decisions]
    assert any("round" in reason for reason in reasons)


@pytest.mark.parametrize("ordered_first", [False, True])
def test_what_the_user_ordered_is_said_of_that_equation_alone(ordered_first):
    def fn(x, w):
        y = x @ w
        orders = [{}, {"out_dtype": jnp.float32}]
        return [jax.lax.mul(y, y, **k) for k in (reversed(orders) if ordered_first else orders)]

    jaxpr = jax.make_jaxpr(fn)(jnp.ones((8, 8)), jnp.ones((8, 8)))
    _, *said = (str(d.reason) for d in make_plan(jaxpr, pp.AutoMixedBf16).decisions)
    assert ["out_dtype=float32" in why for why in said] == [ordered_first, not ordered_first]
