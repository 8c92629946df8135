"""A plan that changes nothing gives back the original jaxpr object (AlwaysF32 on a float32
program). A rewritten product is recognised by its form and left alone: `auto_mixed(auto_mixed(f))`
under one policy has the text of `auto_mixed(f)`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import precpass as pp
from tests.support.example_programs import PROGRAMS, Program, attention, mlp_args, mlp_loss
from tests.support.jaxprs import low_products, walk
from tests.support.passes import LOWERING, POLICIES, look, quiet
from tests.support.values import normal

each_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)

FLOAT32 = [p for p in PROGRAMS if p.name not in ("bfloat16", "float16")]


def layers(x, w):
    """Products in every kind of body, and sums, copies and shared values between them."""

    def body(h, row):
        h = jnp.tanh(h @ w + row)
        return h, (h @ h.T).sum()

    h, sums = lax.scan(jax.checkpoint(body), x, jnp.broadcast_to(x[:1], (3, *x.shape)))
    h = lax.cond(sums[0] > 0, lambda h: h @ w, lambda h: jax.nn.relu(h) @ w, h)
    h = lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] @ w), (0, h))[1]
    return jnp.mean(jnp.cumsum(h.T.reshape(-1)) + jax.nn.softmax(h).reshape(-1)) + sums.sum()


def _square(n):
    return jnp.asarray(normal(0, n, n)) * 0.3, jnp.asarray(normal(1, n, n)) * 0.3


NESTED = {
    **{p.name: (p.fn, p.args) for p in PROGRAMS if not p.x64},
    "layers": (layers, lambda: _square(4)),
    "gradient of layers": (
        jax.grad(lambda x, w: jnp.sum(jax.nn.gelu(x @ w) @ w), 1),
        lambda: _square(4),
    ),
    "gradient of attention": (
        jax.grad(lambda q, k, v: attention(q, k, v).sum(), (0, 1, 2)),
        lambda: tuple(jnp.asarray(normal(s, 6, 8)) for s in range(3)),
    ),
    "gradient of a scan": (
        jax.grad(lambda w, xs: lax.scan(lambda h, x: (jnp.tanh(h @ w + x), h), xs[0], xs)[0].sum()),
        lambda: (_square(4)[0], jnp.asarray(normal(2, 5, 4, 4))),
    ),
    "convolution": (
        lambda x, k: lax.conv(x, k, (1, 1), "SAME").sum(),
        lambda: (jnp.asarray(normal(0, 1, 2, 5, 5)), jnp.asarray(normal(1, 3, 2, 3, 3))),
    ),
    "vmapped custom rule": (
        jax.vmap(lambda x, w: jax.nn.relu(x @ w), (0, None)),
        lambda: (jnp.asarray(normal(0, 3, 4, 4)), _square(4)[1]),
    ),
}
HALF = ("bfloat16", "float16")


def _cast_inside(fn):
    low = jnp.bfloat16 if fn is NESTED["bfloat16"][0] else jnp.float16
    return lambda x: jax.tree.map(lambda y: y.astype(np.float32), fn(x.astype(low)))


each_nested = pytest.mark.parametrize("name", NESTED)


@pytest.mark.parametrize("program", FLOAT32, ids=lambda p: p.name)
def test_a_plan_that_changes_nothing_gives_back_the_original_jaxpr_object(program: Program):
    with program.context():
        inspection = look(program.fn, pp.AlwaysF32, *program.args())
    assert inspection.after is inspection.before
    assert not inspection.plan.changes


@pytest.mark.parametrize("policy", LOWERING, ids=lambda p: p.name)
def test_other_policies_too_where_nothing_is_to_be_changed(policy):
    only_user = look(lambda x: jnp.maximum(x @ x, x), policy, jnp.ones((4, 4), jnp.bfloat16))
    assert only_user.after is only_user.before
    rule = policy.with_rules(pp.Rule(where=lambda eqn: True, precision="f32"))
    ruled = look(mlp_loss, rule, *mlp_args())
    assert ruled.after is ruled.before


@pytest.mark.parametrize("policy", LOWERING, ids=lambda p: p.name)
def test_an_untouched_body_is_the_original_object_too(policy):
    """A float32 subfunction without anything to lower is not traced again."""

    @jax.jit
    def inner(n):
        return jnp.cumsum(n) + 1

    def f(x, n):
        return x @ x, inner(n)

    inspection = look(f, policy, jnp.ones((4, 4)), jnp.arange(4))
    held = [
        [
            e.params["jaxpr"]
            for e in walk(j)
            if e.primitive.name == "jit" and e.params["name"] == "inner"
        ]
        for j in (inspection.before, inspection.after)
    ]
    assert held[0][0] is held[1][0]


@each_policy
@each_nested
def test_auto_mixed_of_auto_mixed_has_the_text_of_auto_mixed(name, policy):
    fn, make = NESTED[name]
    args = make()
    with quiet():
        once = jax.make_jaxpr(pp.auto_mixed(fn, policy=policy))(*args)
        twice = jax.make_jaxpr(pp.auto_mixed(pp.auto_mixed(fn, policy=policy), policy=policy))(
            *args
        )
    assert str(twice) == str(once)


@each_policy
@each_nested
def test_also_where_the_inner_one_is_called_inside_another_function(name, policy):
    fn, make = NESTED[name]
    if policy is pp.AlwaysF32 and name in HALF:
        # its order reaches the border of the inner call, which the inner pass could not move
        fn = _cast_inside(fn)
    args = [x.astype(np.float32) for x in make()] if name in HALF else make()
    inspection = look(lambda *a: pp.auto_mixed(fn, policy=policy)(*a), policy, *args)
    assert str(inspection.after) == str(inspection.before)


@each_policy
@each_nested
def test_the_pass_over_what_it_wrote_finds_nothing_to_do(name, policy):
    fn, make = NESTED[name]
    args = make()
    after = look(fn, policy, *args).after
    again = look(jaxpr_as_fun(after), policy, *jax.tree.leaves(args))
    assert str(again.after) == str(again.before)


@pytest.mark.parametrize("policy", LOWERING, ids=lambda p: p.name)
def test_gradients_of_a_rewritten_function_are_left_alone_too(policy):
    """The outer pass sees the carriers' tangents, transposed, and finds nothing to do."""
    params, batch = mlp_args()

    def step(params, batch):
        return jax.grad(pp.auto_mixed(mlp_loss, policy=policy))(params, batch)

    inspection = look(step, policy, params, batch)
    assert len(low_products(inspection.after)) == len(low_products(inspection.before)) >= 5


def test_under_another_policy_the_inner_products_keep_theirs():
    """Recognised by form: an outer float16 policy does not touch bfloat16 products."""
    x = jnp.asarray(normal(0, 8, 8))
    outer = look(
        lambda x: pp.auto_mixed(lambda x: x @ x, policy="AutoMixedBf16")(x), "AutoMixed", x
    )
    assert len(low_products(outer.after, jnp.bfloat16)) == 1
    assert low_products(outer.after, np.float16) == []
