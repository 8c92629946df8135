"""Scopes, rules and keep regions end to end: under transforms, in shared bodies, in what order."""

import glob
import warnings

import jax
import jax.numpy as jnp
import pytest

import precpass as pp
from precpass import (
    AlwaysBf16,
    AlwaysF32,
    AutoMixed,
    AutoMixedBf16,
    Custom,
    PrecisionWarning,
    Rule,
    jaxpr as ir,
)
from precpass.analysis.graph import Graph
from precpass.analysis.residuals import kept_bytes
from precpass.policy.scopes import clean_scope, is_backward
from tests.support.jaxprs import PRODUCTS, low_products, named, operand_dtypes, product_dtypes, walk
from tests.support.passes import decided
from tests.support.values import f32, stable_id

HEAD = Rule(scope="*/head", precision="f32")
# Every product of the body, forward or backward, has a dimension of 16; none of the head has.

X, W, V = f32(8, 16), f32(16, 12), f32(12, 12)
SQUARE = f32(8, 8)


def is_body(eqn):
    return any(16 in v.aval.shape for v in (*eqn.invars[:2], *eqn.outvars))


def split_products(jaxpr):
    """The dtypes of the body's products and those of the head's."""
    products = [e for e in walk(jaxpr) if e.primitive.name in PRODUCTS]
    found = {True: [], False: []}
    for eqn in products:
        found[is_body(eqn)].append(str(eqn.invars[0].aval.dtype))
    return found[True], found[False]


def flat(x, w, v):
    h = x @ w
    with jax.named_scope("head"):
        return jnp.tanh(h) @ v


def scope_in_a_scan(x, w, v):
    def step(h, _):
        with jax.named_scope("head"):
            return jnp.tanh(h @ v), None

    return jax.lax.scan(step, x @ w, length=3)[0]


def scan_in_a_scope(x, w, v):
    h = x @ w
    with jax.named_scope("head"):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ v), None), h, length=3)[0]


def in_a_remat(x, w, v):
    return jax.checkpoint(flat)(x, w, v)


def remat_in_a_scope(x, w, v):
    h = x @ w
    with jax.named_scope("head"):
        return jax.checkpoint(lambda h: jnp.tanh(h @ v))(h)


def in_a_branch(x, w, v):
    h = x @ w
    with jax.named_scope("head"):
        return jax.lax.cond(h[0, 0] > 0, lambda h: h @ v, lambda h: -h, h)


@jax.custom_jvp
def custom_head(h, v):
    return h @ v


@custom_head.defjvp
def custom_head_jvp(primals, tangents):
    (h, v), (dh, dv) = primals, tangents
    return custom_head(h, v), dh @ v + h @ dv


def in_a_custom_jvp(x, w, v):
    h = x @ w
    with jax.named_scope("head"):
        return custom_head(h, v)


def in_nested_scopes(x, w, v):
    with jax.named_scope("model"):
        h = x @ w
        with jax.named_scope("head"), jax.named_scope("dense"):
            return h @ v


PROGRAMS = [
    flat,
    scope_in_a_scan,
    scan_in_a_scope,
    in_a_remat,
    remat_in_a_scope,
    in_a_branch,
    in_a_custom_jvp,
    in_nested_scopes,
]


def squared_loss(fn):
    return lambda w, v, x: (fn(x, w, v) ** 2).sum()


TRANSFORMS = {
    "plain": lambda fn: (fn, (X, W, V)),
    "jit": lambda fn: (jax.jit(fn), (X, W, V)),
    "vmap": lambda fn: (jax.vmap(fn, (0, None, None)), (f32(2, 8, 16), W, V)),
    "jvp": lambda fn: (lambda *xs: jax.jvp(fn, xs, xs), (X, W, V)),
    "grad": lambda fn: (jax.grad(squared_loss(fn), (0, 1)), (W, V, X)),
    "vmap of grad": lambda fn: (
        jax.vmap(jax.grad(squared_loss(fn), (0, 1)), (None, None, 0)),
        (W, V, f32(2, 8, 16)),
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_a_scope_is_found_under_every_transform(fn, transform):
    transformed, args = TRANSFORMS[transform](fn)
    found = pp.inspect(transformed, AutoMixedBf16.with_rules(HEAD))(*args)
    body, head = split_products(found.after)
    assert set(body) == {"bfloat16"}
    assert set(head) == {"float32"}
    # and nothing but the rule keeps the head wide
    body, head = split_products(pp.inspect(transformed, AutoMixedBf16)(*args).after)
    assert set(body) == set(head) == {"bfloat16"}


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_a_scope_is_found_when_the_gradient_is_taken_outside(fn):
    mixed = pp.auto_mixed(fn, policy=AutoMixedBf16.with_rules(HEAD))
    gradient = jax.make_jaxpr(jax.grad(squared_loss(mixed), (0, 1)))(W, V, X)
    body, head = split_products(gradient)
    assert set(body) == {"bfloat16"}
    assert set(head) == {"float32"}


# ---------------------------------------------------------------- shared bodies


@jax.jit
def layer(x, w):
    return jnp.tanh(x @ w)


def two_calls(x, w):
    h = layer(x, w)
    with jax.named_scope("head"):
        return layer(h, w)


def test_a_shared_body_is_split_where_a_rule_tells_its_calls_apart():
    found = pp.inspect(two_calls, AutoMixedBf16.with_rules(HEAD))(SQUARE, SQUARE)
    first, second = (e.params["jaxpr"] for e in named(found.before, "jit"))
    assert first is second, "JAX gives both calls one jaxpr"
    assert product_dtypes(found.after) == ["bfloat16", "float32"]


def test_a_shared_body_stays_shared_where_no_rule_tells_its_calls_apart():
    rule = Rule(primitive="tanh", precision="bf16")
    found = pp.inspect(two_calls, AutoMixedBf16.with_rules(rule))(SQUARE, SQUARE)
    first, second = (e.params["jaxpr"] for e in named(found.after, "jit"))
    assert first is second
    assert product_dtypes(first) == operand_dtypes(first, "tanh") == ["bfloat16"]


def test_calls_under_scopes_that_a_rule_judges_alike_share_one_rewrite():
    def fn(x, w):
        for i in range(3):
            with jax.named_scope(f"layer{i}"):
                x = layer(x, w)
        with jax.named_scope("head"):
            return layer(x, w)

    found = pp.inspect(fn, AutoMixedBf16.with_rules(HEAD))(SQUARE, SQUARE)
    *layers, head = (e.params["jaxpr"] for e in named(found.after, "jit"))
    assert all(inner is layers[0] for inner in layers)
    assert product_dtypes(layers[0]) == ["bfloat16"]
    assert product_dtypes(head) == ["float32"]


# ---------------------------------------------------------------- unmatched rules


def test_a_rule_that_matched_nothing_is_warned_of_and_in_the_plan():
    nowhere = Rule(scope="*/tail", precision="f32")
    policy = AutoMixedBf16.with_rules(HEAD, nowhere)
    with pytest.warns(PrecisionWarning) as caught:
        found = pp.inspect(flat, policy)(X, W, V)
    (warning,) = caught
    assert repr(nowhere) in str(warning.message)
    assert "flat" in str(warning.message)
    assert found.plan.unmatched == (nowhere,)


def test_calling_warns_of_an_unmatched_rule_once_per_trace():
    nowhere = Rule(function="nobody", precision="f32")
    mixed = pp.auto_mixed(flat, policy=AutoMixedBf16.with_rules(nowhere))
    args = [jnp.ones(s.shape) for s in (X, W, V)]
    with pytest.warns(PrecisionWarning, match="nobody"):
        mixed(*args)
    mixed(*args)  # a warning is an error here, so the second call does not warn


def test_a_rule_that_matches_inside_a_body_is_matched():
    rule = Rule(primitive="tanh", scope="head", precision="bf16")
    found = pp.inspect(scan_in_a_scope, AutoMixedBf16.with_rules(rule))(X, W, V)
    assert found.plan.unmatched == ()
    assert operand_dtypes(found.after, "tanh") == ["bfloat16"]


def test_a_rule_behind_a_broader_one_is_reported():
    broad, narrow = Rule(primitive="*", precision="f32"), HEAD
    with pytest.warns(PrecisionWarning, match="head"):
        found = pp.inspect(flat, Custom({}).with_rules(broad, narrow))(X, W, V)
    assert found.plan.unmatched == (narrow,)


# ---------------------------------------------------------------- keep


def kept_head(precision):
    def fn(x, w, v):
        h = x @ w
        with pp.keep(precision):
            return jnp.tanh(h) @ v

    return fn


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_keep_region_is_found_under_every_transform(transform):
    transformed, args = TRANSFORMS[transform](kept_head("f32"))
    body, head = split_products(pp.inspect(transformed, AutoMixedBf16)(*args).after)
    assert set(body) == {"bfloat16"}
    assert set(head) == {"float32"}


@pytest.mark.parametrize("policy", [AlwaysBf16, AutoMixedBf16, AutoMixed], ids=stable_id)
def test_keep_f32_leaves_everything_inside_as_it_was_written(policy):
    def fn(x, w):
        with pp.keep("f32"):
            return jnp.exp(x @ w).sum(0) * 2

    with pytest.warns(PrecisionWarning, match="lowered nothing"):
        found = pp.inspect(fn, policy)(X, W)
    assert found.after is found.before


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("f16", "float16")])
def test_keep_lowers_the_products_of_a_region_in_an_always_f32_program(precision, dtype):
    found = pp.inspect(kept_head(precision), AlwaysF32)(X, W, V)
    assert split_products(found.after) == (["float32"], [dtype])
    assert operand_dtypes(found.after, "tanh") == ["float32"]
    assert str(decided(found, "dot_general")[1].reason) == f"keep({precision!r})"


def test_keep_beats_rules():
    with pytest.warns(PrecisionWarning, match="matched no equation"):
        policy = AutoMixedBf16.with_rules(Rule(primitive="tanh", precision="bf16"))
        found = pp.inspect(kept_head("f32"), policy)(X, W, V)
    assert operand_dtypes(found.after, "tanh") == ["float32"]
    policy = AutoMixedBf16.with_rules(Rule(primitive="dot_general", precision="f32"))
    found = pp.inspect(kept_head("bf16"), policy)(X, W, V)
    assert split_products(found.after) == (["float32"], ["bfloat16"])


@pytest.mark.parametrize(
    ("outer", "inner", "dtypes"),
    [("f32", "bf16", ["float32", "bfloat16"]), ("bf16", "f32", ["bfloat16", "float32"])],
)
def test_the_innermost_keep_wins(outer, inner, dtypes):
    def fn(x, w, v):
        with pp.keep(outer):
            h = x @ w
            with pp.keep(inner):
                return h @ v

    for policy in (AutoMixedBf16, AlwaysF32):
        assert product_dtypes(pp.inspect(fn, policy)(X, W, V).after) == dtypes


def test_a_scope_rule_leaves_a_keep_region_in_that_scope():
    def fn(x, w, v):
        with pp.keep("f32"), jax.named_scope("head"):
            h = x @ w
        with jax.named_scope("head"):
            return h @ v

    found = pp.inspect(fn, Custom({}).with_rules(Rule(scope="head", precision="bf16")))(X, W, V)
    assert split_products(found.after) == (["float32"], ["bfloat16"])


def test_a_predicate_sees_the_users_scope_and_nothing_more():
    seen = []
    rule = Rule(where=lambda eqn: bool(seen.append(eqn.scope)), precision="f32")
    with pytest.warns(PrecisionWarning, match="matched no equation"):
        pp.inspect(flat, AutoMixedBf16.with_rules(rule))(X, W, V)
    assert set(seen) == {"", "head"}


def test_a_jitted_function_called_inside_and_outside_a_keep_region_is_both():
    def fn(x, w):
        h = layer(x, w)
        with pp.keep("f32"):
            return layer(h, w)

    found = pp.inspect(fn, AutoMixedBf16)(SQUARE, SQUARE)
    assert product_dtypes(found.after) == ["bfloat16", "float32"]


# ---------------------------------------------------------------- names that JAX uses too

MARKS = (
    "transpose(x)",
    "jvp(head)",
    "vmap(a)",
    "rows(2)",
    ")(",
    "transpose(jvp(",
    "f(g(h))",
    "checkpoint",
)


def named_so(name):
    def loss(x, w):
        with jax.named_scope("model"), jax.named_scope(name):
            return jnp.tanh(x @ w).sum()

    return loss


@pytest.mark.parametrize("name", MARKS)
def test_a_users_scope_is_not_taken_for_a_mark_of_jaxs(name):
    x, w = jnp.ones((4, 8)), jnp.ones((8, 8))
    fn, plain = named_so(name), named_so("other")
    explained = pp.explain(fn)(x, w)
    assert str(explained).replace(name, "other") == str(pp.explain(plain)(x, w))
    (eqn, *_) = jax.make_jaxpr(fn)(x, w).jaxpr.eqns
    assert not is_backward(ir.scope_of(eqn))
    assert clean_scope(ir.scope_of(eqn)) == f"model/{name}"
    gradient = jax.make_jaxpr(jax.grad(fn, (0, 1)))(x, w)
    (reference,) = (jax.make_jaxpr(jax.grad(plain, (0, 1)))(x, w),)
    backward = [is_backward(ir.scope_of(e)) for e in gradient.jaxpr.eqns]
    assert backward == [is_backward(ir.scope_of(e)) for e in reference.jaxpr.eqns]
    assert any(backward) and not all(backward)
    assert kept_bytes(gradient) == kept_bytes(reference) > 0
    scopes = {clean_scope(ir.scope_of(e)) for e in gradient.jaxpr.eqns}
    assert scopes == {f"model/{name}"}


@pytest.mark.parametrize("name", MARKS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.grad, jax.checkpoint], ids=stable_id)
def test_a_rule_addresses_a_scope_by_the_name_that_the_user_wrote(name, wrap):
    x, w = jnp.ones((4, 8)), jnp.ones((8, 8))
    rule = pp.Rule(scope=f"*/{glob.escape(name)}", precision="f32")
    policy = pp.AutoMixedBf16.with_rules(rule)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        found = pp.inspect(wrap(named_so(name)), policy)(x, w)
    assert found.plan.unmatched == ()
    assert low_products(found.after) == []


def test_what_is_shown_has_the_name_as_it_was_written():
    x, w = jnp.ones((4, 8)), jnp.ones((8, 8))
    fn = jax.grad(named_so("rows(2)"))
    found = pp.inspect(fn)(x, w)
    drawn = Graph.build(found.before).to_networkx()
    shown = [
        *(str(node.get("scope")) for _, node in drawn.nodes.data()),
        pp.explain(fn, pp.AutoMixedBf16.with_rules(pp.Rule(scope="*", precision="f32")))(x, w).all,
        str(pp.monitor(fn)(x, w)[1].summary()),
        str(found.diff()),
    ]
    assert any("rows(2)" in text for text in shown[:-3])
    assert "rows(2)" in shown[-3]
    assert not any("\ue000" in text for text in shown)
