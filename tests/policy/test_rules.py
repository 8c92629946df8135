"""Rules: what they match, and in which order; test_scopes.py has where JAX moves scopes to."""

import fnmatch
import re
import warnings

import jax
import jax.numpy as jnp
import pytest

import precpass as pp
from precpass import AlwaysF32, AutoMixedBf16, Custom, PrecisionWarning, Rule
from precpass.policy.primitives import TABLE
from precpass.policy.rules import EqnView
from precpass.policy.scopes import clean_scope, innermost_keep
from precpass.types import Action, OpKind, Precision
from tests.support.jaxprs import operand_dtypes, product_dtypes
from tests.support.passes import decided
from tests.support.values import f32, stable_id

X, W = f32(8, 8), f32(8, 8)


def view(**given):
    """An equation as rules see it."""
    fields = {
        "primitive": "dot_general",
        "kind": OpKind.COMPUTE,
        "scope": "model/head/dense",
        "file": "/home/me/attention.py",
        "function": "score",
        "line": 7,
        "shapes": ((8, 8), (8, 8)),
        "dtypes": ("float32", "float32"),
        "out_shapes": ((8, 8),),
        "out_dtypes": ("float32",),
        "params": {},
        "flops": 2.0**10,
    }
    return EqnView(**{**fields, **given})


def lowered(fn, *args, rules=(), policy=AutoMixedBf16):
    """For each product of `fn`, whether the plan lowers it and the jaxpr has it low.

    Whatever warns but a policy that lowered nothing is an error.
    """
    policy = policy.with_rules(*rules)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f"{policy.name} lowered nothing", PrecisionWarning)
        found = pp.inspect(fn, policy)(*args)
    products = [d for _, d, _ in found.decisions() if d.kind is OpKind.COMPUTE]
    planned = [d.action is Action.LOWER for d in products]
    assert [dtype != "float32" for dtype in product_dtypes(found.after)] == planned
    return planned


# ---------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("patterns", "matches"),
    [
        ({"primitive": "dot_general"}, True),
        ({"primitive": "dot_*"}, True),
        ({"primitive": "*"}, True),
        ({"primitive": "tanh"}, False),
        ({"scope": "model"}, True),
        ({"scope": "model/head"}, True),
        ({"scope": "*/head"}, True),
        ({"scope": "*/head/*"}, True),
        ({"scope": "model/h?ad"}, True),
        ({"scope": "head"}, False),
        ({"scope": "*/hea"}, False),
        ({"scope": "model/head/dense/more"}, False),
        ({"function": "score"}, True),
        ({"function": "s*"}, True),
        ({"function": "Score"}, False),
        ({"file": "*/attention.py"}, True),
        ({"file": "attention.py"}, False),
        ({"file": "*/attention.py", "line": 7}, True),
        ({"file": "*/attention.py", "line": 8}, False),
        ({"file": "*/other.py", "line": 7}, False),
        ({"file": "*", "line": 7, "scope": "model/head"}, True),
        ({"file": "*", "line": 7, "scope": "model/tail"}, False),
        ({"min_flops": 2**10}, True),
        ({"min_flops": 2**10 + 1}, False),
        ({"primitive": "tanh", "min_flops": 1}, False),
        ({"where": lambda eqn: eqn.line == 7}, True),
        ({"where": lambda eqn: eqn.line == 8}, False),
        ({"primitive": "dot_general", "scope": "model", "function": "score"}, True),
        ({"primitive": "dot_general", "scope": "model", "function": "other"}, False),
        ({"primitive": "tanh", "scope": "model"}, False),
    ],
    ids=stable_id,
)
def test_a_rule_matches_where_all_of_its_patterns_do(patterns, matches):
    assert Rule(**patterns, precision="f32").matches(view()) is matches


def test_the_primitives_that_a_message_leaves_out_are_counted():
    with pytest.raises(ValueError, match="can never match") as refused:
        Rule(primitive="no_such_thing", precision="f32")
    some, more = re.search(r"TABLE \((.*) and (\d+) more\)", str(refused.value)).groups()
    assert len(some.split(", ")) + int(more) == len(TABLE)


def test_a_scope_pattern_with_a_leading_star_matches_at_the_root_too():
    assert Rule(scope="*/head", precision="f32").matches(view(scope="head"))


@pytest.mark.parametrize("pattern", ["scatter-add", "scatter_add", "scatter[-_]*", "SCATTER*"])
def test_scatter_is_matched_with_a_dash_and_with_an_underscore(pattern):
    if pattern.startswith("S"):  # globs mind the case, so this one can match nothing
        with pytest.raises(ValueError, match="can never match"):
            Rule(primitive=pattern, precision="f32")
        return
    assert Rule(primitive=pattern, precision="f32").matches(view(primitive="scatter-add"))


@pytest.mark.parametrize(
    ("given", "is_region"),
    [
        ({"scope": "*"}, True),
        ({"file": "*", "function": "*"}, True),
        ({"file": "*", "line": 7}, True),
        ({"min_flops": 2**25}, True),
        ({"primitive": "*"}, False),
        ({"scope": "*", "primitive": "tanh"}, False),
        ({"where": lambda eqn: True}, False),
    ],
    ids=stable_id,
)
def test_a_rule_that_names_only_a_place_is_a_region(given, is_region):
    assert Rule(**given, precision="bf16").is_region is is_region


@pytest.mark.parametrize(
    ("stack", "scope"),
    [
        ("", ""),
        ("model/head", "model/head"),
        ("jvp(model)/head", "model/head"),
        ("transpose(jvp(model))/head", "model/head"),
        ("transpose(jvp(model/head))", "model/head"),
        ("vmap(transpose(jvp(model)))/vmap(head)", "model/head"),
        ("model/rematted_computation/head", "model/head"),
        ("checkpoint/model", "checkpoint/model"),  # a user's name: no jaxpr of JAX's has it
        ("jvp()/model", "model"),
        ("model[3]", "model[3]"),
    ],
)
def test_the_marks_of_transforms_are_no_part_of_a_scope(stack, scope):
    assert clean_scope(stack) == scope


@pytest.mark.parametrize(
    ("scope", "precision"),
    [
        ("model", None),
        ("precpass.keep[f32]", Precision.F32),
        ("precpass.keep[f32]/a/precpass.keep[bf16]/b", Precision.BF16),
        ("transpose(jvp(precpass.keep[f16]))", Precision.F16),
    ],
)
def test_the_innermost_keep_of_a_scope_is_found(scope, precision):
    assert innermost_keep(scope) is precision


# ---------------------------------------------------------------- rules in a plan


def two_products(x, w):
    with jax.named_scope("body"):
        h = jnp.tanh(x @ w)
    with jax.named_scope("head"):
        return h @ w


def helper_of_two(x, w):
    return x @ w


def calls_a_helper(x, w):
    return helper_of_two(jnp.tanh(x @ w), w)


FIRST_PRODUCT = two_products.__code__.co_firstlineno + 2
HELPERS_PRODUCT = helper_of_two.__code__.co_firstlineno + 1


@pytest.mark.parametrize(
    ("fn", "patterns", "expected"),
    [
        (two_products, {"primitive": "dot_general"}, [False, False]),
        (two_products, {"scope": "head"}, [True, False]),
        (two_products, {"scope": "*/body"}, [False, True]),
        (two_products, {"scope": "h*d"}, [True, False]),
        (two_products, {"function": "two_products"}, [False, False]),
        (calls_a_helper, {"function": "helper_*"}, [True, False]),
        (calls_a_helper, {"function": "calls_a_helper"}, [False, True]),
        (two_products, {"file": "*/test_rules.py"}, [False, False]),
        (two_products, {"primitive": "dot_general", "scope": "body"}, [False, True]),
        (two_products, {"file": "*/test_rules.py", "line": FIRST_PRODUCT}, [False, True]),
        (calls_a_helper, {"file": "*/test_rules.py", "line": HELPERS_PRODUCT}, [True, False]),
        (two_products, {"where": lambda eqn: "head" in eqn.scope}, [True, False]),
    ],
    ids=lambda value: getattr(value, "__name__", stable_id(value)),
)
def test_a_rule_keeps_exactly_what_it_matches(fn, patterns, expected):
    assert lowered(fn, X, W) == [True, True]
    assert lowered(fn, X, W, rules=[Rule(**patterns, precision="f32")]) == expected


def test_the_reason_of_a_matched_equation_is_the_rule():
    rule = Rule(scope="head", precision="f32")
    found = pp.inspect(two_products, AutoMixedBf16.with_rules(rule))(X, W)
    first, second = decided(found, "dot_general")
    assert repr(rule) in str(second.reason)
    assert repr(rule) not in str(first.reason)


@pytest.mark.parametrize(
    ("order", "expected"), [(("f32", "bf16"), [False, False]), (("bf16", "f32"), [True, True])]
)
def test_the_first_rule_that_matches_wins(order, expected):
    rules = [
        Rule(primitive="dot_general", precision=order[0]),
        Rule(function="two_products", precision=order[1]),
    ]
    # the second rule still matches tanh, so that neither is reported
    assert lowered(two_products, X, W, rules=rules) == expected


def test_rules_added_later_come_first():
    policy = AutoMixedBf16.with_rules(Rule(primitive="dot_general", precision="f32"))
    assert lowered(two_products, X, W, policy=policy) == [False, False]
    head = Rule(scope="head", precision="bf16")
    assert lowered(two_products, X, W, policy=policy.with_rules(head)) == [False, True]


def test_a_rule_lowers_what_a_policy_does_not():
    wide = Custom({})
    assert lowered(two_products, X, W, policy=wide) == [False, False]
    rule = Rule(scope="head", precision="bf16")
    assert lowered(two_products, X, W, rules=[rule], policy=wide) == [False, True]
    assert lowered(two_products, X, W, rules=[rule], policy=AlwaysF32) == [False, True]


def test_a_rule_that_names_a_primitive_lowers_any_kind():
    rule = Rule(primitive="tanh", precision="bf16")
    found = pp.inspect(two_products, AutoMixedBf16.with_rules(rule))(X, W)
    assert operand_dtypes(found.before, "tanh") == ["float32"]
    assert operand_dtypes(found.after, "tanh") == ["bfloat16"]


def test_a_rule_that_names_a_region_lowers_its_products_alone():
    def fn(x, w):
        with jax.named_scope("body"):
            return jnp.exp(jnp.tanh(x @ w)).sum()

    found = pp.inspect(fn, Custom({}).with_rules(Rule(scope="body", precision="bf16")))(X, W)
    assert product_dtypes(found.after) == ["bfloat16"]
    assert operand_dtypes(found.after, "tanh") == ["float32"]
    assert operand_dtypes(found.after, "exp") == ["float32"]
    assert operand_dtypes(found.after, "reduce_sum") == ["float32"]


def test_a_float64_rule_evaluates_in_float64_and_returns_float32():
    rule = Rule(primitive="exp", precision="f64")
    found = pp.inspect(lambda x: jnp.exp(x) + 1, Custom({}).with_rules(rule))(X)
    assert operand_dtypes(found.after, "exp") == ["float64"]
    assert [str(v.aval.dtype) for v in found.after.jaxpr.outvars] == ["float32"]


def test_a_predicate_sees_shapes_dtypes_params_and_the_source():
    seen = []

    def where(eqn):
        seen.append(eqn)
        return eqn.shapes == ((8, 4), (4, 2))

    def fn(x, w, v):
        return (x @ w) @ v

    rule = Rule(where=where, precision="f32")
    assert lowered(fn, f32(8, 8), f32(8, 4), f32(4, 2), rules=[rule]) == [True, False]
    first, second = (eqn for eqn in seen[:2] if eqn.primitive == "dot_general")
    assert (first.shapes, first.out_shapes) == (((8, 8), (8, 4)), ((8, 4),))
    assert (second.dtypes, second.out_dtypes) == (("float32", "float32"), ("float32",))
    assert first.kind is OpKind.COMPUTE
    assert first.params["dimension_numbers"] == (((1,), (0,)), ((), ()))
    assert (first.function, first.line) == ("fn", fn.__code__.co_firstlineno + 1)
    assert fnmatch.fnmatch(first.file, "*/test_rules.py")
