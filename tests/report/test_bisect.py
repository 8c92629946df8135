"""`bisect` finds the equations that were planted to break a program, and shows it by runs."""

import inspect as python_inspect
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from precpass.jit.traced import Traced
from tests.support.passes import wide_products, with_outputs

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(4, 8)), jnp.float32)
W = jnp.asarray(RNG.normal(size=(8, 8)) / 3, jnp.float32)


def cancels(x, w):
    """A difference of nearly equal products: wide it is near x @ w, in bfloat16 all rounding."""
    return 1e4 * (x @ (w * 1.0001) - x @ w)  # the culprit


def harmless(x, w):
    return jnp.tanh(x @ w)


CULPRIT = python_inspect.getsourcelines(cancels)[1] + 2


def lines_of(found: pp.report.Bisection) -> list[int]:
    return sorted({place.line for places in found.kept for place in places})


def check_found(found: pp.report.Bisection, fn: Callable[..., Any], *args: Any) -> None:
    """The policy that was found passes where users take it, and the evidence holds together."""
    assert (found.found, found.minimal) == (True, True)
    assert found.tolerance is not None
    assert found.policy.rules == found.rules != ()
    out = pp.auto_mixed(fn, policy=found.policy)(*args)
    assert error(out, jax.jit(fn)(*args)) <= found.tolerance
    reference, low, *others = found.runs
    assert (reference.passed, reference.low, reference.error) == (True, 0, 0.0)
    assert (low.passed, low.rules) == (False, ())
    assert low.low > 0
    for run in others:
        assert run.error is not None
        assert run.passed == (run.error <= found.tolerance)
        assert run.low < low.low
    assert [run.number for run in found.runs] == list(range(1, len(found.runs) + 1))


def error(out: Any, reference: Any) -> float:
    errors = []
    for y, r in zip(jax.tree.leaves(out), jax.tree.leaves(reference), strict=True):
        y, r = np.asarray(y, np.float64), np.asarray(r, np.float64)
        errors.append(np.linalg.norm(y - r) / np.linalg.norm(r))
    return float(max(errors)) if np.isfinite(errors).all() else float("inf")


# ---------------------------------------------------------------- where a culprit stands


def in_scopes(x, w):
    with jax.named_scope("net"):
        for name in "abc":
            with jax.named_scope(name), jax.named_scope("attention"):
                x = cancels(x, w) if name == "b" else harmless(x, w)
    return x


def in_functions(x, w):
    return harmless(cancels(harmless(x, w), w), w)


def in_a_scan(x, w):
    def layer(x, _):
        with jax.named_scope("layer"):
            return harmless(harmless(cancels(x, w), w), w), None

    return harmless(lax.scan(layer, x, length=3)[0], w)


def in_a_branch(x, w):
    return lax.cond(x.sum() < 1e3, cancels, harmless, harmless(x, w), w)


def in_a_checkpoint(x, w):
    return jax.grad(lambda w: jax.checkpoint(cancels)(harmless(x, w), w).sum())(w)


@jax.custom_vjp
def with_a_rule(x, w):
    return harmless(x, w)


def with_a_rule_fwd(x, w):
    return harmless(x, w), (x, cancels(x, w))


def with_a_rule_bwd(residuals, g):
    x, y = residuals
    return jnp.zeros_like(x), x.T @ (g * y)


with_a_rule.defvjp(with_a_rule_fwd, with_a_rule_bwd)


def in_a_rule(x, w):
    return jax.grad(lambda w: with_a_rule(harmless(x, w), w).sum())(w)


PROGRAMS = [in_scopes, in_functions, in_a_scan, in_a_branch, in_a_checkpoint, in_a_rule]


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_a_planted_culprit_is_found(fn):
    found = pp.bisect(fn, "AutoMixedBf16", 0.1)(X, W)
    check_found(found, fn, X, W)
    assert lines_of(found) == [CULPRIT]
    assert all("# the culprit" in place.text for places in found.kept for place in places)


def test_the_culprit_of_one_scope_leaves_the_same_line_low_elsewhere():
    def fn(x, w):
        with jax.named_scope("first"):
            small = cancels(x, w) * 1e-6
        with jax.named_scope("second"):
            return cancels(x, w) + small

    found = pp.bisect(fn, "AutoMixedBf16", 0.01)(X, W)
    check_found(found, fn, X, W)
    assert [place.scope for places in found.kept for place in places] == ["second"]
    assert found.rules == (pp.Rule(scope="second", precision="f32"),)


def test_a_culprit_of_a_backward_rule_is_found_where_its_function_is_called():
    @jax.custom_vjp
    def layer(x, w):
        return harmless(x, w)

    def bwd(residuals, g):
        x, w = residuals
        return g @ w.T, (x.T @ (g * 1.0001) - x.T @ g) * 1e4

    layer.defvjp(lambda x, w: (harmless(x, w), (x, w)), bwd)

    def loss(w):
        h = harmless(X, w)
        h = layer(h, w)  # the call
        return jnp.square(h).sum()

    # JAX gives what a backward rule computes the line of the call that it belongs to
    found = pp.bisect(jax.value_and_grad(loss), "AutoMixedBf16", 0.1)(W)
    check_found(found, jax.value_and_grad(loss), W)
    assert [place.text for places in found.kept for place in places] == [
        "h = layer(h, w)  # the call"
    ]


def test_an_overflow_is_found():
    def fn(x, w):
        with jax.named_scope("large"):
            large = (300.0 * x) @ (300.0 * w)
        with jax.named_scope("small"):
            return large, jnp.tanh(x) @ w

    x, w = 300.0 * (jnp.abs(X) + 1), jnp.abs(W) + 1
    found = pp.bisect(fn, "AutoMixed", lambda out: jnp.isfinite(out[0]).all())(x, w)
    assert found.rules == (pp.Rule(scope="large", precision="f32"),)
    assert [(run.passed, run.error) for run in found.runs[:1]] == [(False, None)]
    assert np.isfinite(pp.auto_mixed(fn, policy=found.policy)(x, w)[0]).all()


def test_elementwise_equations_are_found_where_a_policy_lowers_them():
    def moments(x):
        return jnp.square(x).mean() - jnp.square(x.mean())

    def fn(x):
        return moments(x + 100.0) * jnp.cos(x)

    found = pp.bisect(fn, pp.AlwaysBf16, 0.05)(X)
    check_found(found, fn, X)
    functions = {place.function for places in found.kept for place in places}
    assert "moments" in functions


# ---------------------------------------------------------------- sets of any kind


@pytest.fixture
def seen(monkeypatch):
    """Each run gives, in the place of its output, the indices of the products that are wide."""
    given: list[frozenset[int]] = []

    def run(
        self: Traced, plan: pp.Plan, policy: pp.types.PrecisionPolicy, *_: Any
    ) -> frozenset[int]:
        given.append(wide_products(self, plan, policy))
        return given[-1]

    with_outputs(monkeypatch, run)
    return given


def apart(x, w):
    for i in range(6):
        with jax.named_scope(f"p{i}"):
            x = x @ w
    return x


def numbers(found: pp.report.Bisection) -> set[int]:
    return {int(place.scope[1:]) for places in found.kept for place in places}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("needed", [{4}, {0, 5}, {1, 2, 3}, set(range(6))], ids=str)
def test_all_that_must_stay_wide_is_found(needed, seen):
    found = pp.bisect(apart, None, lambda wide: needed <= wide)(X, W)
    assert (found.found, found.minimal) == (True, True)
    assert numbers(found) == needed
    assert found.policy == pp.AutoMixedBf16.with_rules(*found.rules)


def test_where_all_must_stay_wide_one_rule_says_so(seen):
    found = pp.bisect(apart, None, lambda wide: len(wide) == 6)(X, W)
    assert len(found.rules) == 1
    assert len(found.kept[0]) == 6


@pytest.mark.parametrize("seed", range(5))
def test_the_result_for_a_check_that_is_not_monotone_was_run(seed, seen):
    random = np.random.default_rng(seed)
    table = {frozenset(): False, frozenset(range(6)): True}
    for n in range(1, 6):
        for kept in itertools.combinations(range(6), n):
            table[frozenset(kept)] = random.random() < 0.3
    found = pp.bisect(apart, "AutoMixedBf16", table.__getitem__)(X, W)
    kept = frozenset(numbers(found))
    assert (found.found, found.minimal) == (True, True)
    assert table[kept]
    assert kept in seen
    assert all(not table[kept - {i}] and kept - {i} in seen for i in kept)
    assert len(set(seen)) == len(seen) == len(found.runs), "a program was run twice"
    assert [run.passed for run in found.runs] == [table[s] for s in seen]


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 11])
def test_a_small_budget_gives_the_best_set_so_far(budget, seen):
    needed = {1, 4}
    found = pp.bisect(apart, "AutoMixedBf16", needed.issubset, budget=budget)(X, W)
    assert len(found.runs) == len(seen) <= budget
    assert found.found == (budget >= 2)
    if found.found:
        assert needed <= numbers(found)
        assert len(numbers(found)) == min(len(s) for s in seen if needed <= s)
        assert found.minimal == (f"budget of {budget} runs was spent" not in found.verdict)
        assert not found.minimal or numbers(found) == needed
    else:
        assert (found.rules, found.minimal) == ((), False)
        assert re.search("not found.*budget of 1 run is spent", found.verdict)


# ---------------------------------------------------------------- nothing to find


def test_a_policy_that_passes_has_nothing_to_keep_wide():
    found = pp.bisect(harmless, "AutoMixedBf16", 0.05)(X, W)
    assert (found.found, found.minimal, found.rules) == (True, True, ())
    assert found.policy == pp.AutoMixedBf16
    assert [run.passed for run in found.runs] == [True, True]
    assert "passes as it is" in str(found)


def test_a_check_that_fails_in_float32_too_is_not_found():
    found = pp.bisect(harmless, "AutoMixedBf16", lambda out: False)(X, W)
    assert (found.found, found.minimal, found.rules) == (False, False, ())
    assert found.policy == pp.AutoMixedBf16
    assert "fails in float32 too" in found.verdict
    assert [run.passed for run in found.runs] == [False, False]


def hand_mixed(x, w):
    low = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
    return cancels(low.astype(jnp.float32), w)


def test_what_the_program_itself_has_low_is_told_from_what_the_policy_lowers():
    found = pp.bisect(hand_mixed, "AutoMixedBf16", 1e-4)(X, W)
    assert not found.found
    assert "low in the program itself" in found.verdict
    written = jax.jit(hand_mixed)(X, W)
    alike = pp.bisect(hand_mixed, "AutoMixedBf16", lambda out: error(out, written) < 0.01)(X, W)
    assert alike.found
    assert lines_of(alike) == [CULPRIT]
    # what the user cast stays as it was cast
    assert "bf16" in str(pp.inspect(hand_mixed, alike.policy)(X, W).after)


@pytest.mark.parametrize(("fn", "culprit"), [(harmless, "its outputs in bf16"), (None, "itself")])
def test_outputs_of_the_policys_own_format_are_told_from_what_is_low_before(fn, culprit):
    policy = pp.AutoMixedBf16.with_output("bf16")
    found = pp.bisect(fn or hand_mixed, policy, 1e-5)(X, W)
    assert not found.found
    assert found.verdict.rpartition(" (")[0].endswith(culprit)
    assert found.policy == policy


def test_what_a_rule_cannot_keep_wide_is_no_candidate():
    def fn(x, w):
        with pp.keep("bf16"):
            return cancels(x, w)

    found = pp.bisect(fn, "AutoMixedBf16", lambda out: error(out, W) < 0.1)(jnp.eye(8), W)
    assert not found.found
    assert [run.rules for run in found.runs] == [()]


# ---------------------------------------------------------------- how much is run


def tower(x, ws):
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer_{i}"):
            with jax.named_scope("attention"):
                x = x @ w
            with jax.named_scope("mlp"):
                x = jnp.tanh(x @ w)
    return x


@pytest.mark.release(keep=1)
@pytest.mark.parametrize(("needed", "most"), [({83}, 11), ({83, 20}, 30), ({82, 83}, 30)], ids=str)
def test_64_layers_take_few_runs_and_one_trace(needed, most, seen):
    calls = []

    def fn(x, ws):
        calls.append(None)
        return tower(x, ws)

    ws = jnp.broadcast_to(W, (64, 8, 8))
    found = pp.bisect(fn, "AutoMixedBf16", needed.issubset)(X, ws)
    scopes = {p.scope for places in found.kept for p in places}
    assert scopes == {f"layer_{n // 2}/{'mlp' if n % 2 else 'attention'}" for n in needed}
    assert found.minimal
    assert len(calls) == 1
    assert len(found.runs) == len(set(seen)) == len(seen) <= most


def test_each_run_compiles_one_program():
    compiled = []

    def listen(event, *_, **__):
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        found = pp.bisect(in_functions, "AutoMixedBf16", 0.1)(X, W)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert sum("backend_compile" in event for event in compiled) == len(found.runs)


def test_equal_programs_are_run_once():
    def fn(x, w):
        with jax.named_scope("a"), jax.named_scope("b"), jax.named_scope("c"):
            return cancels(x, w)

    # all scopes down to the one line keep the same wide, which is the reference itself
    found = pp.bisect(fn, "AutoMixedBf16", 0.1)(X, W)
    assert found.rules == (pp.Rule(scope="a/b/c", precision="f32"),)
    assert [run.what for run in found.runs] == [
        "AlwaysF32, the reference",
        "AutoMixedBf16 as it is",
    ]


def test_progress_is_told_of_each_run(seen):
    told = []
    found = pp.bisect(apart, None, lambda wide: 3 in wide, progress=told.append)(X, W)
    assert tuple(told) == found.runs


def test_a_line_in_several_scopes_is_several_places():
    def layers(x, w):
        for i in range(4):
            with jax.named_scope(f"layer_{i}"):
                x = cancels(x, w) if i == 2 else harmless(x, w)
        return x

    def two_lines(x, w):
        return harmless(cancels(x, w), w)

    assert "with 1 of 4 places that it lowers left as written" in str(
        pp.bisect(layers, None, 1e-2)(X, W)
    )
    assert re.search(r"of 2 lines that it lowers", str(pp.bisect(two_lines, None, 1e-2)(X, W)))


# ---------------------------------------------------------------- loops


def test_a_loop_that_never_ends_is_stopped_and_named():
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(64, 64)))[0]
    a = jnp.asarray((rotation * np.linspace(1, 3, 64)) @ rotation.T, jnp.float32)
    b = jnp.ones(64)

    def richardson(a, b):
        def body(state):
            x = state[0] + 0.4 * state[1]
            return x, b - a @ x, state[2] + 1

        def residual_is_large(state):
            return jnp.linalg.norm(state[1]) > 1e-4 * jnp.linalg.norm(b)

        return lax.while_loop(residual_is_large, body, (jnp.zeros_like(b), b, 0))

    trips = int(jax.jit(richardson)(a, b)[2])
    ordered = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="dot_general", precision="bf16"))
    for check in (1e-2, lambda out: int(out[2]) <= trips):
        found = pp.bisect(richardson, ordered, check)(a, b)
        low = next(run for run in found.runs if run.low)
        assert (low.passed, low.error) == (False, None)
        said = rf"test_bisect.py:\d+ was stopped after 1000 trips; float32 needs {trips}$"
        assert re.search(said, str(low))
        assert low.stopped in found.verdict
        assert found.found
        assert len(found.rules) == 1
