"""Nothing is silent. Every equation is in the plan with a reason and a source line; a policy that
lowered nothing warns; a rule that never matched is reported; an unknown or unentered primitive that
contains products warns."""

import inspect as python_inspect
import re
import warnings

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.interpreters import mlir

import precpass as pp
from tests.support.example_programs import PROGRAMS, Program, attention, mlp_args, mlp_loss
from tests.support.jaxprs import inner_jaxprs, low_products, named, opened, products, walk
from tests.support.passes import LOWERING, POLICIES, look, run

each_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)


def matched(jaxpr, plan):
    """Equations and decisions side by side, by the test's own view of what is a body."""
    eqns = opened(jaxpr).eqns
    assert len(eqns) == len(plan.decisions)
    for eqn, decision in zip(eqns, plan.decisions, strict=True):
        yield eqn, decision
        bodies = inner_jaxprs(eqn)
        if decision.kind is pp.types.OpKind.BOUNDARY and not decision.inner:
            assert not bodies or decision.action is pp.types.Action.KEEP
            continue
        assert len(decision.inner) == len(bodies), eqn.primitive
        for body, inner in zip(bodies, decision.inner, strict=True):
            yield from matched(body, inner)


def messages(fn, policy, *args):
    """The package's warnings while a function is inspected."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", pp.PrecisionWarning)
        pp.inspect(fn, policy)(*args)
    return [str(w.message) for w in caught if issubclass(w.category, pp.PrecisionWarning)]


def everything(x, w):
    """One of each kind of body, and an opaque equation."""
    h, _ = lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)
    h = lax.cond(h[0, 0] > 0, lambda h: h @ w, jnp.sin, h)
    h = lax.while_loop(lambda h: jnp.sum(h) > 1e9, lambda h: h @ w, h)
    h = jax.checkpoint(lambda h: jax.nn.relu(h @ w))(h)
    h = jax.nn.softmax(h) + jax.random.normal(jax.random.key(0), h.shape)
    return attention(h, w, lax.linalg.cholesky(h @ h.T + 9 * jnp.eye(4)))


def gradient(x, w):
    return jax.grad(lambda w: jax.checkpoint(attention)(jnp.tanh(x @ w), w, x).sum())(w)


EVERY = (
    *PROGRAMS,
    *(Program(f.__name__, f, lambda: (jnp.eye(4), jnp.eye(4))) for f in (everything, gradient)),
)


@pytest.mark.release(keep=2)
@each_policy
@pytest.mark.parametrize("program", EVERY, ids=lambda p: p.name)
def test_every_equation_is_in_the_plan_with_a_reason(program: Program, policy):
    with program.context():
        inspection = look(program.fn, policy, *program.args())
    found = list(matched(inspection.before, inspection.plan))
    assert {id(e) for e, _ in found} == {id(e) for e in walk(inspection.before)}
    for eqn, decision in found:
        assert str(decision.reason).strip(), eqn
        assert decision.kind in pp.types.OpKind
        assert len(decision.stored) == len(eqn.outvars)


# ---------------------------------------------------------------- source lines


def two_layers(x, w):
    h = x @ w  # first product
    h = jnp.where(h > 0, h, 0.0)

    def body(h, _):
        return h @ w, None  # second product

    return lax.scan(body, h, None, length=2)[0]


def line_of(comment):
    lines, start = python_inspect.getsourcelines(two_layers)
    return start + next(i for i, text in enumerate(lines) if comment in text)


def test_every_equation_has_a_source_line():
    """Also those inside a body and inside jnp's own functions: the user's line."""
    inspection = look(two_layers, pp.AutoMixedBf16, jnp.eye(4), jnp.eye(4))
    nodes = [d for n, d in inspection.graph.nodes(data=True) if n[0] == "eqn"]
    assert len(nodes) == len(list(walk(inspection.before)))
    first, count = (
        python_inspect.getsourcelines(two_layers)[1],
        len(python_inspect.getsourcelines(two_layers)[0]),
    )
    for node in nodes:
        file, _, line = node["source"].rpartition(":")
        assert file == __file__, node
        assert first <= int(line) < first + count, node
    lines = [n["source"] for n in nodes if n["primitive"] == "dot_general"]
    assert lines == [f"{__file__}:{line_of('first')}", f"{__file__}:{line_of('second')}"]


def test_the_diff_shows_each_change_under_its_line():
    text = look(two_layers, pp.AutoMixedBf16, jnp.eye(4), jnp.eye(4)).diff()
    for comment in ("first product", "second product"):
        place = rf"test_11_nothing_is_silent\.py:{line_of(comment)} .*{comment}\n +dot_general"
        assert re.search(place, text), text


# ---------------------------------------------------------------- warnings


SELECTS = {
    "sort": lax.sort,
    "cummax": lax.cummax,
    "fft": jnp.fft.fft,
    "bits": lambda x: -x.view("i4"),
}


@pytest.mark.parametrize("policy", LOWERING, ids=lambda p: p.name)
@pytest.mark.parametrize("name", SELECTS)
def test_a_policy_that_lowered_nothing_warns(name, policy):
    """Programs in which no policy may lower anything."""
    found = messages(SELECTS[name], policy, jnp.ones(4))
    assert len(found) == 1 and policy.title in found[0] and "lowered nothing" in found[0]


def test_an_order_for_a_float64_product_that_the_policy_may_not_change_warns():
    def kept(x, w):
        with pp.keep("bf16"):
            return x @ w

    ruled = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="dot_general", precision="bf16"))
    with jax.enable_x64(True):
        x, w = jnp.ones((4, 8), np.float64), jnp.ones((8, 8), np.float64)
        for fn, policy in ((kept, pp.AutoMixedBf16), (jnp.matmul, ruled)):
            said = "stays in float64: .* asks for bf16.*Allow it by policy.with_retypes"
            assert any(re.search(said, text) for text in messages(fn, policy, x, w))
        # a preset asks for nothing, and what it may change is changed
        assert not any("asks for" in text for text in messages(jnp.matmul, "AutoMixedBf16", x, w))
        allowed = ruled.with_retypes("f64", "f32")
        assert not any("asks for" in text for text in messages(jnp.matmul, allowed, x, w))
        low = jnp.ones((4, 8), np.float16), jnp.ones((8, 8), np.float16)
        assert not any("asks for" in text for text in messages(jnp.matmul, ruled, *low))


def test_it_warns_when_it_is_called_and_says_why():
    def only_highest(x):
        return jnp.matmul(x, x, precision=lax.Precision.HIGHEST)

    with pytest.warns(pp.PrecisionWarning, match=r"lowered nothing in only_highest.*HIGHEST"):
        pp.auto_mixed(only_highest)(jnp.eye(4))
    with pytest.warns(pp.PrecisionWarning, match="no products"):
        pp.auto_mixed(lambda x: x + 1)(jnp.ones(4))


@each_policy
def test_it_does_not_warn_where_something_was_lowered_or_nothing_was_asked_for(policy):
    assert messages(mlp_loss, policy, *mlp_args()) == []
    if policy is pp.AlwaysF32:
        assert messages(lambda x: x + 1, policy, jnp.ones(4)) == []


@each_policy
@pytest.mark.parametrize(
    "pattern",
    [
        {"scope": "nowhere"},
        {"function": "not_here"},
        {"file": "*/x.py"},
        {"primitive": "conv_general_dilated"},
        {"where": lambda eqn: False},
    ],
    ids=lambda p: next(iter(p)),
)
def test_a_rule_that_never_matched_is_reported(pattern, policy):
    rule = pp.Rule(**pattern, precision="f32")
    used = pp.Rule(primitive="tanh", precision="f32")
    ruled = policy.with_rules(rule, used)
    found = messages(mlp_loss, ruled, *mlp_args())
    assert len(found) == 1 and repr(rule) in found[0] and "matched no equation" in found[0]
    assert look(mlp_loss, ruled, *mlp_args()).plan.unmatched == (rule,)


def _product_kernel(x_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], x_ref[...])


def with_kernel(x):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(_product_kernel, out, interpret=True)(x @ x)


@pytest.mark.parametrize("policy", LOWERING, ids=lambda p: p.name)
def test_an_unentered_primitive_that_contains_products_warns(policy):
    found = messages(with_kernel, policy, jnp.eye(4))
    assert len(found) == 1
    assert "pallas_call" in found[0] and "1 product" in found[0] and __file__ in found[0]
    assert look(with_kernel, policy, jnp.eye(4)).plan.notes == tuple(found)


def test_one_without_products_does_not():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    def f(x):
        return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x @ x)

    assert messages(f, pp.AutoMixedBf16, jnp.eye(4)) == []


def primitive_of(name, fn):
    """A primitive as a library makes one: JAX knows its results and its lowering, no jaxpr."""
    made = jex.Primitive(name)
    made.def_abstract_eval(lambda x, **_: jax.core.ShapedArray(x.shape, x.dtype))
    mlir.register_lowering(made, mlir.lower_fun(fn, multiple_results=False))
    return made


CALLED = primitive_of("called", lambda x: jax.pure_callback(lambda x: x @ x, x, x))
UNKNOWN = {
    "a product": (primitive_of("opaque", lambda x: jnp.tanh(x) @ x @ x), "2 product"),
    "Python": (CALLED, "calls Python"),
    "Python and more": (primitive_of("more", lambda x: jnp.sin(CALLED.bind(x))), None),
    "neither": (primitive_of("plain", jnp.sin), None),
    "no lowering": (primitive_of("unlowered", lambda x: x.no_such_attribute), None),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_primitive_that_shows_no_jaxpr_is_judged_by_its_lowering(name):
    primitive, wanted = UNKNOWN[name]
    found = messages(lambda x: primitive.bind(x @ x), pp.AutoMixedBf16, jnp.eye(4))
    if wanted is None:
        assert found == []
    else:
        assert len(found) == 1
        assert primitive.name in found[0] and wanted in found[0] and __file__ in found[0]


def test_judging_adds_nothing_to_the_trace_around_it():
    primitive = UNKNOWN["a product"][0]
    traced = jax.make_jaxpr(lambda x: run(primitive.bind, pp.AutoMixedBf16, x + 1))(jnp.eye(4))
    assert len(products(traced)) == 0
    assert len(named(traced, "opaque")) == 1


def test_a_rule_warns_when_it_is_traced_and_says_no_more_than_once():
    layer = jax.custom_vjp(lambda x: jnp.arctan(x @ x))
    layer.defvjp(lambda x: (layer(x), x), lambda x, g: (with_kernel(x) * g,))

    def f(x):
        return layer(layer(x)).sum()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.jit(jax.grad(pp.auto_mixed(f))).lower(jnp.eye(4))
    (text,) = (str(w.message) for w in caught if issubclass(w.category, pp.PrecisionWarning))
    assert "pallas_call" in text and "1 product" in text
    assert caught[0].filename == __file__


def test_products_of_a_hi_primitive_are_entered():
    def rooted(a, x):
        y = lax.custom_root(
            lambda y: a @ y - x,
            x,
            lambda f, y0: y0 - f(y0),
            lambda g, y: y - g(y),
        )
        return jnp.sum((a @ a) @ y)

    args = jnp.eye(4), jnp.ones(4)
    inspection = look(rooted, pp.AutoMixedBf16, *args)
    assert messages(rooted, pp.AutoMixedBf16, *args) == []
    low = len(low_products(inspection.after))
    assert low == len(products(inspection.after)) == len(products(inspection.before)) > 2
