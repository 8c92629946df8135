"""`bisect` on functions, policies and checks of every kind, and what it says of bad ones."""

import json
import pickle
import warnings
import xml.etree.ElementTree as ET
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import precpass as pp
from tests.support.passes import wide_products, with_outputs

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(8, 8)) / 3, jnp.float32)


def cancels(x, w):
    return 1e4 * (x @ (w * 1.0001) - x @ w)  # the culprit


def net(x, w):
    with jax.named_scope("body"):
        h = jnp.tanh(x @ w)
    with jax.named_scope("head"):
        return cancels(h, w)


def is_f32(out: Any) -> bool:
    return bool(np.linalg.norm(out - jax.jit(net)(X, W)) < 0.1 * np.linalg.norm(out))


def scopes_of(found: pp.report.Bisection) -> set[str]:
    return {place.scope for places in found.kept for place in places}


@pytest.fixture(scope="module")
def found() -> pp.report.Bisection:
    return pp.bisect(net, "AutoMixedBf16", 0.1)(X, W)


# ---------------------------------------------------------------- the result


def test_the_result_reads_as_a_few_lines(found):
    verdict, rule, place = str(found).splitlines()
    assert "fails (error " in verdict and "> 0.1); it passes (error " in verdict
    assert "1 of 2 lines" in verdict and f"({len(found.runs)} runs)" in verdict
    assert rule == "  Rule(scope='head', precision='f32')"
    assert "test_bisect_inputs.py:" in place and "# the culprit" in place
    assert place.endswith("(2 dot_general)")
    first, second, third = map(str, found.runs[:3])
    assert first == "run 1: AlwaysF32, the reference: 0 low, passes, error 0"
    assert second.startswith("run 2: AutoMixedBf16 as it is: 3 low, fails, error ")
    assert "Rule(scope=" in third


def test_the_result_is_json_and_pickles(found):
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["found"] is data["minimal"] is True
    assert data["policy"] == repr(found.policy)
    assert [kept["rule"] for kept in data["kept"]] == list(map(repr, found.rules))
    (line,) = data["kept"][0]["lines"]
    assert (line["function"], line["scope"], line["primitives"]) == (
        "cancels",
        "head",
        [["dot_general", 2]],
    )
    assert "# the culprit" in line["text"]
    assert [run["passed"] for run in data["runs"]] == [run.passed for run in found.runs]
    assert pickle.loads(pickle.dumps(found)) == found


def test_an_error_without_bound_is_text_in_json():
    found = pp.bisect(lambda x, w: x @ w, "AutoMixed", 0.1, budget=2)(1e30 * X, W)
    errors = [run["error"] for run in found.to_dict()["runs"]]
    json.dumps(found.to_dict(), allow_nan=False)
    assert errors == [0.0, "inf"]
    assert "not finite" in found.verdict and "error inf" not in found.verdict


def test_a_result_that_is_nowhere_finite_in_float32_is_compared_too():
    def fn(x, w):
        with jax.named_scope("a"):
            return jnp.where(x > 0, jnp.inf, cancels(x, w)), jnp.nan * x

    found = pp.bisect(fn, "AutoMixedBf16", 0.1)(X, W)
    assert found.found and found.rules
    assert all(run.error is not None and np.isfinite(run.error) for run in found.runs)


def test_the_worst_result_counts():
    def fn(x, w):
        with jax.named_scope("large"):
            large = 1e6 * jnp.tanh(x @ w)
        with jax.named_scope("small"):
            return {"large": large, "small": 1e-6 * cancels(x, w), "index": x.argmax()}

    found = pp.bisect(fn, "AutoMixedBf16", 0.1)(X, W)
    assert scopes_of(found) == {"small"}


def test_equal_lines_of_several_rules_stand_once(monkeypatch):
    def fn(x, w):
        for i in range(4):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w)
        return x

    with_outputs(monkeypatch, wide_products)
    two = pp.bisect(fn, None, {1, 3}.issubset)(X, W)
    _, *rules, line = str(two).splitlines()
    scopes = ("layer_1", "layer_3")
    assert rules == [f"  Rule(scope={scope!r}, precision='f32')" for scope in scopes]
    assert line.endswith("x = jnp.tanh(x @ w)  (2 dot_general)")
    # one rule for all says which they are
    every = pp.bisect(fn, None, set(range(4)).issubset)(X, W)
    _, rule, line = str(every).splitlines()
    assert rule == "  Rule(file='*', precision='f32')"
    assert line.endswith("(4 dot_general in layer_0, layer_1, layer_2, layer_3)")


def test_the_result_is_a_page_that_says_the_same_and_shows_the_runs(found):
    root = ET.fromstring(found._repr_html_())
    text = " ".join("".join(root.itertext()).split())
    for line in str(found).splitlines():
        assert " ".join(line.split()) in text
    (table,) = root.iter("table")
    rows = [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
    assert rows[0] == ["run", "what", "rules", "low", "error", "check"]
    assert rows[1:] == [run.cells() for run in found.runs]
    assert repr(found) == f"<Bisection: {found.verdict}>"


# ---------------------------------------------------------------- policies


def test_the_policys_own_rules_stay_behind_those_that_are_found():
    own = pp.Rule(primitive="tanh", precision="bf16")
    found = pp.bisect(net, pp.AutoMixedBf16.with_rules(own), 0.1)(X, W)
    assert found.policy.rules == (*found.rules, own)
    assert scopes_of(found) == {"head"}


def test_float64_that_the_policy_asks_for_stays():
    own = pp.Rule(scope="head", primitive="mul", precision="f64")
    found = pp.bisect(net, pp.AutoMixedBf16.with_rules(own), is_f32)(X, W)
    assert found.policy.rules == (own, *found.rules)
    assert scopes_of(found) == {"head"}
    after = str(pp.inspect(net, found.policy)(X, W).after)
    assert "f64" in after


def test_a_float64_program_keeps_float64_products():
    with jax.enable_x64(True):
        x, w = X.astype(jnp.float64), W.astype(jnp.float64)

        def fn(x, w):
            with jax.named_scope("body"):
                h = jnp.tanh(x @ w)
            with jax.named_scope("head"):
                return 1e6 * (h @ (w * (1 + 1e-6)) - h @ w)

        policy = pp.Custom({pp.types.OpKind.COMPUTE: "f32"}).with_retypes("f64")
        found = pp.bisect(fn, policy, 1e-2)(x, w)
        assert found.rules == (pp.Rule(scope="head", precision="f64"),)
        np.testing.assert_allclose(pp.auto_mixed(fn, policy=found.policy)(x, w), fn(x, w), 1e-2)


def test_the_policy_of_the_region_and_of_the_function_count(monkeypatch):
    with_outputs(monkeypatch, lambda *_: [X])
    with pp.use_policy("AutoMixed"):
        assert pp.bisect(net, None, 0.1)(X, W).policy == pp.AutoMixed
    mixed = pp.auto_mixed(net, policy="AutoMixedConservative")
    assert pp.bisect(mixed, None, 0.1)(X, W).policy == pp.AutoMixedConservative
    assert pp.bisect(mixed, "AutoMixed", 0.1)(X, W).policy == pp.AutoMixed


def test_an_output_format_is_part_of_each_run():
    dtypes = []

    def check(out):
        dtypes.append(str(out.dtype))
        return is_f32(out.astype(jnp.float32))

    found = pp.bisect(net, pp.AutoMixedBf16.with_output("bf16"), check)(X, W)
    assert scopes_of(found) == {"head"}
    assert set(dtypes) == {"bfloat16"}


# ---------------------------------------------------------------- functions


def test_static_arguments_methods_and_donation():
    class Model:
        scale = 1.0

        @pp.auto_mixed(static_argnums=2, donate_argnums=1)
        def apply(self, w, act, *, x):
            return net(getattr(jnp, act)(x), w) * self.scale

    jax.tree_util.register_static(Model)
    model, w = Model(), jnp.array(W)
    found = pp.bisect(model.apply, None, 0.1)(w, "tanh", x=X)
    assert scopes_of(found) == {"head"}
    assert not w.is_deleted()


def test_a_modules_state_is_left_as_it_was():
    class Net(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(W)
            self.calls = nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.calls[...] += 1
            return net(x, self.w[...])

    module = Net()
    outs = []

    def check(out):
        outs.append(out)
        return is_f32(out)

    found = pp.bisect(lambda m, x: m(x), "AutoMixedBf16", check)(module, X)
    assert scopes_of(found) == {"head"}
    assert len(outs) == len(found.runs)
    assert float(module.calls[...]) == 0


def test_a_result_that_is_no_array_is_handed_to_the_check():
    found = pp.bisect(
        lambda x, w: {"y": net(x, w), "unit": "m"},
        "AutoMixedBf16",
        lambda out: out["unit"] == "m" and is_f32(out["y"]),
    )(X, W)
    assert scopes_of(found) == {"head"}


def test_python_numbers_and_numpy_arrays_are_arguments():
    found = pp.bisect(lambda x, w, s: net(x, w) * s, None, 0.1)(np.asarray(X), np.asarray(W), 2.0)
    assert scopes_of(found) == {"head"}


class TwoLayers(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.tanh(linen.Dense(8, name="body", use_bias=False)(x))
        return linen.Dense(8, name="head", use_bias=False)(x)


@pytest.mark.parametrize("layer", [0, 1])
def test_layers_of_a_library_are_told_apart_by_their_scopes(layer, monkeypatch):
    with_outputs(monkeypatch, wide_products)
    params = {"params": {"body": {"kernel": W}, "head": {"kernel": W}}}
    found = pp.bisect(TwoLayers().apply, "AutoMixedBf16", {layer}.issubset)(params, X)
    scope = ("TwoLayers/body", "TwoLayers/head")[layer]
    assert found.rules == (pp.Rule(scope=scope, precision="f32"),)
    # the two products share one line of flax's own
    ((place,),) = found.kept
    assert "flax" in place.file


# ---------------------------------------------------------------- warnings and errors


def test_the_users_warnings_are_shown_once_and_there_are_no_others(monkeypatch):
    with_outputs(monkeypatch, wide_products)
    unmatched = pp.Rule(scope="nowhere", precision="f32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        policy = pp.AutoMixedBf16.with_rules(unmatched)
        found = pp.bisect(net, policy, {1, 2}.issubset)(X, W)
    assert scopes_of(found) == {"head"}
    (only,) = caught
    assert only.category is pp.PrecisionWarning
    assert "Rule(scope='nowhere', precision='f32') matched no equation of net" in str(only.message)
    assert only.filename == __file__


def test_an_error_of_the_check_is_shown_as_it_is_with_the_run():
    error = KeyError("mine")
    calls = []

    def check(out):
        calls.append(out)
        if len(calls) == 2:
            raise error
        return False

    with pytest.raises(KeyError) as caught:
        pp.bisect(net, "AutoMixedBf16", check)(X, W)
    assert caught.value is error
    (note,) = error.__notes__
    assert "run 2" in note and "as it was written" in note and "Rule(file='*'" in note


def test_an_error_of_the_function_is_shown_as_it_is():
    def fn(x):
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine") as caught:
        pp.bisect(fn, None, 0.1)(X)
    assert not any("bisect" in note for note in getattr(caught.value, "__notes__", []))


@pytest.mark.parametrize("check", [None, "0.1", True, [0.1]], ids=repr)
def test_a_check_that_is_none_is_refused(check):
    with pytest.raises(TypeError, match=r"check=.*neither a tolerance.*nor a function"):
        pp.bisect(net, None, check)


@pytest.mark.parametrize("check", [-1.0, float("nan"), float("inf"), np.float32(-2)], ids=repr)
def test_a_tolerance_that_nothing_can_meet_is_refused(check):
    with pytest.raises(ValueError, match=r"check=.*tolerance"):
        pp.bisect(net, None, check)


@pytest.mark.parametrize("budget", [0, -1, 2.5, True, None], ids=repr)
def test_a_budget_that_is_no_number_of_runs_is_refused(budget):
    with pytest.raises(ValueError, match=r"budget=.*at least 1"):
        pp.bisect(net, None, 0.1, budget=budget)


NO_BOOLS = [None, 0.25, 1, "yes", [True], {"passed": True}, [[1], [2, 3]], np.ones(2, bool)]


@pytest.mark.parametrize("verdict", [*NO_BOOLS, np.float32(1), jax.random.key(0)], ids=repr)
def test_a_check_that_returns_no_bool_is_refused(verdict, monkeypatch):
    with_outputs(monkeypatch, lambda *_: X)
    with pytest.raises(TypeError, match="not a bool: return one"):
        pp.bisect(net, None, lambda out: verdict)(X, W)


@pytest.mark.parametrize(
    "kind", [bool, np.bool_, np.asarray, jnp.asarray], ids=lambda k: k.__name__
)
def test_a_bool_of_any_library_is_a_verdict(kind, monkeypatch):
    with_outputs(monkeypatch, wide_products)
    found = pp.bisect(net, None, lambda wide: kind({1, 2} <= wide))(X, W)
    assert scopes_of(found) == {"head"}
    assert {type(run.passed) for run in found.runs} == {bool}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("number", [np.float32, np.float64, Fraction], ids=lambda n: n.__name__)
def test_a_tolerance_may_be_a_number_of_any_library(number, monkeypatch):
    def run(*given):
        return [X if {1, 2} <= wide_products(*given) else 2 * X]

    with_outputs(monkeypatch, run)
    found = pp.bisect(net, "AutoMixedBf16", number(0.5), budget=np.int64(50))(X, W)
    assert {type(run.passed) for run in found.runs} == {bool}
    assert type(found.tolerance) is float
    assert scopes_of(found) == {"head"}
    assert json.loads(json.dumps(found.to_dict()))["runs"][0]["passed"] is True


def test_a_tolerance_asks_for_a_floating_result():
    with pytest.raises(ValueError, match=r"no floating results.*0\.1.*bool"):
        pp.bisect(lambda x, w: (x @ w).argmax(), None, 0.1)(X, W)


def test_arguments_without_values_are_refused():
    with pytest.raises(TypeError, match="ShapeDtypeStruct"):
        pp.bisect(net, None, 0.1)(jax.ShapeDtypeStruct((4, 8), jnp.float32), W)


def test_a_bisection_inside_of_a_trace_is_refused():
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(lambda x: pp.bisect(net, None, 0.1)(x, W).found)(X)


def test_a_pass_that_is_switched_off_is_said_so():
    with pp.use_policy(None), pytest.raises(RuntimeError, match="switched off"):
        pp.bisect(net, "AutoMixedBf16", 0.1)(X, W)


def test_an_unknown_policy_is_refused_before_any_run():
    with pytest.raises(ValueError, match="unknown policy 'Mixed'"):
        pp.bisect(net, "Mixed", 0.1)(X, W)


class Weight(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(W)


def updates_a_module(model):
    model.w[...] = X.T @ jnp.tanh(X @ model.w[...])
    return jnp.float32(1.0)


def updates_a_reference(w):
    w[...] = X.T @ jnp.tanh(X @ w[...])
    return jnp.float32(1.0)


def first_of_three(x, w):
    return {"good": x + 1.0, "bad": (x @ w, w)}


def a_model_and_a_result(model, x):
    model.w[...] = model.w[...] + 1.0
    return x, x @ model.w[...]


@pytest.mark.parametrize(
    ("fn", "args", "named"),
    [
        (first_of_three, (X, W), "output['bad'][0]"),
        (updates_a_module, (Weight(),), "w"),
        (a_model_and_a_result, (Weight(), X), "output[1]"),
        (updates_a_reference, (jax.new_ref(W),), "a reference"),
        (jnp.matmul, (X, W), ""),
    ],
)
def test_the_result_that_fails_is_named(fn, args, named):
    found = pp.bisect(fn, "AutoMixedBf16", 1e-6)(*args)
    first = found.runs[1]
    assert (first.worst, first.to_dict()["worst"]) == (named, named)
    where = f" > 1e-06 in {named}); it passes" if named else " > 1e-06); it passes"
    assert where in found.verdict


@pytest.mark.parametrize(
    ("fn", "argument"),
    [(updates_a_module, Weight), (updates_a_reference, lambda: jax.new_ref(W))],
    ids=["module", "reference"],
)
def test_what_a_call_updates_in_place_counts(fn, argument):
    given = argument()
    found = pp.bisect(fn, "AutoMixedBf16", 1e-6)(given)
    assert found.found and found.rules and found.runs[1].error > 1e-4
    kept = given[...] if isinstance(given, jax.Ref) else given.w[...]
    np.testing.assert_array_equal(kept, W)
