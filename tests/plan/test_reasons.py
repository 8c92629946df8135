"""Every reason for which a plan leaves an equation as it was written, and its remedy."""

import ast
import warnings

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from precpass.plan import reasons
from precpass.types import Action
from tests.support import compositions
from tests.support.values import f32
from tests.test_structure import FILES, parse

X, W = f32(8, 8), f32(8, 8)


def product(x, w):
    return x @ w


def saved(tmp_path):
    pp.inspect(product, "AlwaysF32")(X, W).plan.save(tmp_path / "plan.json")
    return pp.Plan.load(tmp_path / "plan.json")


def region(x, w):
    with pp.keep("f64"):
        y = jnp.arctan(x @ w)
    return y @ w


PLANNED = pp.inspect(region)(X, W).after


def adds_up(x, w):
    return lax.scan(lambda c, row: (c + row, None), x[0], w)[0]


def with_complex(x, w):
    return lax.dot(x, lax.complex(w, w), preferred_element_type=jnp.complex64)


GIVEN = {
    "OFF": (product, None),
    "FIXED": (lambda x, w: pp.auto_mixed(jnp.matmul, policy="AlwaysF32")(x, w), "AutoMixed"),
    "KEEP_REGION": (pp.keep("f32")(product), "AutoMixed"),
    "RULE": (product, pp.AutoMixed.with_rules(pp.Rule(primitive="*", precision="f32"))),
    "SAVED_PLAN": (product, saved),
    "USERS_ORDER": (lambda x, w: lax.dot(x, w, precision="highest"), "AutoMixed"),
    "USERS_CAST": (lambda x, w: x.astype(jnp.bfloat16), "AutoMixed"),
    "USERS_PRECISION": (
        lambda x, w: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16),
        "AutoMixed",
    ),
    "MIXED_TYPES": (with_complex, "AutoMixed"),
    "NOT_RETYPED": (lambda x, w: x.astype(jnp.float64) @ w.astype(jnp.float64), "AutoMixed"),
    "OWN_FUNCTION": (lambda x, w: x.at[0].apply(jnp.sin), "AlwaysBf16"),
    "REACHES": (lambda x, w: jnp.where(x > 0, x, -1e9) @ w, "AutoMixed"),
    "VANISHES": (lambda x, w: (x * 1e-12) @ w, "AutoMixed"),
    "INTEGERS": (
        lambda x, w: jnp.arange(3000.0)[None, :] @ jnp.ones((3000, 8), jnp.float32) + x @ w,
        "AutoMixedBf16",
    ),
    "GRID": (
        lambda x, w: (jnp.arange(3000.0) + 0.5)[None, :] @ jnp.ones((3000, 8)) + x @ w,
        "AutoMixedBf16",
    ),
    "CANCELS": (
        lambda x, w: jax.nn.softmax(x) @ jnp.sinh(jnp.linspace(-20.0, 20.0, 8)),
        "AutoMixedBf16",
    ),
    "NEEDED": (lambda x, w: jnp.floor(x @ w), "AutoMixed"),
    "RANDOM_BITS": (lambda x, w: x + jax.random.normal(jax.random.key(0), (8, 8)), "AlwaysBf16"),
    "PREDICATE": (
        lambda x, w: lax.while_loop(lambda c: (c @ w).sum() < 3, lambda c: c + 1, x),
        "AutoMixed",
    ),
    "ACCUMULATES": (adds_up, "AlwaysBf16"),
    "COTANGENTS": (jax.grad(lambda x, w: (x @ w + w @ x).sum()), "AlwaysBf16"),
    "FULL_PRECISION_SET": (lambda x, w: jnp.exp(x), "AutoMixed"),
    "EXACT_DTYPES": (lambda x, w: jnp.linalg.cholesky(x), "AutoMixed"),
    "FLOAT64_REGION": (lambda x, w: jex.jaxpr_as_fun(PLANNED)(x, w), "AutoMixed"),
    "NO_FLOATS": (lambda x, w: jnp.arange(8) + 1, "AlwaysF32"),
    "COMPLEX": (lambda x, w: lax.complex(x, w) @ lax.complex(w, x), "AutoMixed"),
    "CONSTANTS": (lambda x, w: x + jnp.sin(jnp.ones((8, 8))), "AlwaysBf16"),
    "ELEMENTWISE_PRODUCT": (lambda x, w: jnp.einsum("i,j->ij", x[0], w[0]), "AutoMixed"),
    "SELECTS": (lambda x, w: jnp.sort(x), "AlwaysBf16"),
    "READERS_ROUND": (lambda x, w: x.T.astype(jnp.bfloat16), "AlwaysBf16"),
    "MAY_RUN": (lambda x, w: x + w, "AutoMixed"),
    "PRODUCTS_ALONE": (
        lambda x, w: jnp.sin(x) @ w,
        pp.AlwaysF32.with_rules(pp.Rule(scope="*", file="*", precision="tf32")),
    ),
    "PRESET": (product, "AlwaysF32"),
    "RULE_BY_SIZE": (product, pp.AutoMixed.with_rules(pp.Rule(min_flops=1, precision="f32"))),
}


def sentences(fn, policy, args=(X, W)):
    """The reasons of a plan for what it leaves as it was written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        found = pp.inspect(fn, policy)(*args)
    return {d.reason for d in found.plan.walk() if d.action is Action.KEEP}


def test_each_reason_has_a_program_here():
    # test_explicit_sharding has one on a mesh
    elsewhere = {reasons.TERMS}
    assert {getattr(reasons, name) for name in GIVEN} == set(reasons.ALL) - elsewhere


@pytest.mark.parametrize("name", GIVEN)
def test_a_plan_gives_each_reason_and_its_remedy_is_found(name, tmp_path):
    fn, policy = GIVEN[name]
    reason = getattr(reasons, name)
    policy = policy(tmp_path) if callable(policy) else policy
    in_force = pp.use_policy(None if policy is None else pp.AutoMixed)
    with in_force, jax.enable_x64(name == "NOT_RETYPED"):
        said = sentences(fn, policy)
    given = [found for found in said if found.template is reason]
    assert given, said
    assert {found.remedy() for found in given} == {reason.remedy}


@pytest.mark.parametrize("name", sorted(compositions.PROGRAMS)[::3])
@pytest.mark.parametrize("policy", ["AutoMixed", "AlwaysBf16", "AlwaysF32"])
def test_what_programs_from_elsewhere_leave_wide_has_a_known_reason(name, policy):
    said = sentences(compositions.PROGRAMS[name], policy, (compositions.X, compositions.W))
    # a program whose every equation is changed has none, but under AlwaysF32 each is left
    assert said or policy != "AlwaysF32"
    for reason in said:
        assert reason.template in reasons.ALL, reason


def test_no_reason_to_keep_is_made_up_where_it_is_given():
    written = [
        f"{path.name}:{node.lineno}"
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "keep"
        and any(isinstance(text, ast.Constant | ast.JoinedStr) for text in node.args[2:])
    ]
    assert not written, f"make it a Reason of precpass/plan/reasons.py: {written}"


PRODUCTS = ["OFF", "FIXED", "KEEP_REGION", "RULE", "SAVED_PLAN", "USERS_ORDER"]
PRODUCTS += ["REACHES", "VANISHES", "INTEGERS", "CANCELS", "NEEDED", "PREDICATE", "PRESET"]


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_that_is_left_wide_is_explained_with_its_remedy(name, tmp_path):
    fn, policy = GIVEN[name]
    reason = getattr(reasons, name)
    policy = policy(tmp_path) if callable(policy) else policy
    with pp.use_policy(None if policy is None else pp.AutoMixed):
        found = pp.explain(fn, policy)(X, W)
    assert {wide.remedy for wide in found.wide} == {reason.remedy}
    said = f"to change it: {reason.remedy}" in found.all
    assert said if reason.remedy else "to change it" not in found.all


# ---------------------------------------------------------------- the user's words in a reason


@pytest.mark.parametrize(
    "evidence",
    [
        "overflowed; stored in notes: run 3",
        "as in the saved plan",
        "the user's own precision",
        "inside an auto_mixed function that has a policy of its own",
        "a '{}' and a \"{0}\"",
        "; a constant whose values cannot be read here is unchecked",
    ],
)
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_rules_evidence_is_neither_cut_nor_taken_for_another_reason(evidence, precision):
    rule = pp.Rule(primitive="dot_general", precision=precision, evidence=evidence)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        found = pp.inspect(product, pp.AutoMixed.with_rules(rule))(X, W)
        text = str(pp.explain(product, pp.AutoMixed.with_rules(rule))(X, W))
        mixed = pp.auto_mixed(product, policy=pp.AutoMixed.with_rules(rule))
    (decision,) = found.plan.walk()
    assert str(decision.reason) == repr(rule) == decision.reason.of_compute
    assert decision.reason.template is reasons.RULE
    assert decision.reason.remedy() == reasons.RULE.remedy
    assert decision.decided_by is reasons.DecidedBy.RULE
    if precision == "f32":
        assert repr(rule) in text and reasons.RULE.remedy in text
        assert "lowered nothing" in warned(lambda: mixed.trace(X, W))


def warned(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return " ".join(str(w.message) for w in caught)


def test_evidence_is_kept_where_its_equation_is_stored_low_too():
    def loss(x, w):
        return jnp.arctan(jnp.tanh(x @ w) @ w).sum()

    rule = pp.Rule(primitive="tanh", precision="f32", evidence="seen; stored in f16: notes")
    plan = pp.inspect(jax.grad(loss, 1), pp.AutoMixedBf16.with_rules(rule))(X, W).plan
    of_rule = [d.reason for d in plan.walk() if "notes" in str(d.reason)]
    assert of_rule
    assert {r.of_compute for r in of_rule} == {repr(rule)}


@pytest.mark.parametrize("name", GIVEN)
def test_a_reason_survives_pickling_and_copying(name):
    import copy
    import pickle

    template = getattr(reasons, name)
    reason = template(*map(str, range(template.text.count("{}"))))
    for again in (pickle.loads(pickle.dumps(reason)), copy.deepcopy(reason), copy.copy(reason)):
        assert again == reason and again.template == template
        assert str(again) == str(reason) and hash(again) == hash(reason)
    assert str(reason) == template.text.format(*reason.args)
