"""Random programs under every policy: contract lines 1, 2, 3, 5, 7 and 11, gradients too.

`random_programs` draws them, `policy_checks` says what must hold and holds the results against
two interpreters (`oracle`): one that follows the plan, and one that disturbs float32's products.
`scripts/sweep programs` draws 20,000.
"""

import dataclasses
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import strategies as st

import precpass as pp
from precpass.policy import primitives
from precpass.rewrite.low_product import Bilinear
from tests.support.passes import quiet
from tests.support.policy_checks import FORMS, POLICIES, Case, case_of
from tests.support.random_programs import INGREDIENTS, SETTINGS, Program, Step, numbered, programs

pytestmark = pytest.mark.programs

fixed = hypothesis.settings(SETTINGS, max_examples=16)
of_policies, of_forms = st.sampled_from([*POLICIES]), st.sampled_from([*FORMS])


@pytest.mark.release(keep=3)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_random_program(policy: str):
    @fixed
    @hypothesis.given(programs())
    def check(program: Program):
        case_of(program, policy, twice=True).check()

    check()


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("inside", [True, False], ids=["auto_mixed(grad)", "grad(auto_mixed)"])
def test_the_gradient_of_a_random_program(inside: bool):
    @fixed
    @hypothesis.given(programs(), of_policies)
    def check(program: Program, policy: str):
        case_of(program, policy, "grad", inside).check()

    check()


@hypothesis.settings(fixed, max_examples=10)
@hypothesis.given(programs(), of_policies, st.sampled_from(["jvp", "vmap"]), st.booleans())
def test_other_transforms_of_a_random_program(
    program: Program, policy: str, form: str, inside: bool
):
    case_of(program, policy, form, inside).check()


@fixed
@hypothesis.given(programs(x64=True), of_policies, of_forms)
def test_a_random_program_with_float64(program: Program, policy: str, form: str):
    case_of(program, policy, form).check()


@hypothesis.settings(fixed, max_examples=4)
@hypothesis.given(programs(), of_policies, st.sampled_from(["value", "grad"]))
def test_a_random_program_compiled(program: Program, policy: str, form: str):
    case_of(program, policy, form, compiled=True).check()


@pytest.mark.release
@pytest.mark.parametrize("target", ["h100", "tpu v5e"])
def test_random_programs_are_right_as_they_are_planned_for_an_accelerator(target: str):
    """Results in 16 bits, what fusions write, and bfloat16 border copies, run on this CPU."""
    policies = [name for name in POLICIES if name not in ("AlwaysF32", "sums", "movement")]

    @hypothesis.settings(fixed, max_examples=80)
    @hypothesis.given(programs(), st.sampled_from(policies), of_forms)
    def check(program: Program, policy: str, form: str):
        case_of(program, policy, form, target=target).check()

    check()


# ---------------------------------------------------------------- the programs themselves


def test_every_ingredient_makes_programs():
    inner = (Step("product"),)
    for name, what in INGREDIENTS.items():
        for number in range(8):
            case = case_of(Program((Step(name, number, (inner,) * what.bodies),), x64=what.x64))
            with jax.enable_x64(what.x64):
                jax.eval_shape(case.fn, *case.args)


def test_the_programs_have_products_to_lower_and_are_compared():
    outcomes = [case_of(program).check() for program in numbered(programs(), 12)]
    assert sum(bool(outcome.skipped) for outcome in outcomes) <= 1
    assert sum(outcome.compared for outcome in outcomes) >= 6
    assert sum(outcome.lowered for outcome in outcomes) >= 15


def test_a_failure_shrinks_to_its_cause():
    found = hypothesis.find(programs(), lambda program: "masked" in program.names(), settings=fixed)
    assert found == Program((Step("masked"),))


def test_the_sweep_reports_what_it_ran():
    script = Path(__file__).parents[2] / "scripts" / "sweep_programs.py"
    command = [sys.executable, str(script), "--programs", "6", "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 programs" in done.stdout and "0 failures" in done.stdout


# ---------------------------------------------------------------- programs that once failed

X, W = jax.random.normal(jax.random.key(0), (3, 4)), jax.random.normal(jax.random.key(1), (4, 4))


def scaled(eps: float) -> Any:
    """Scaled to nothing in float16, and back."""
    return lambda x, w: (jnp.sum((x * eps) @ (w / 4) * (1 / eps)), ())


def scaled_in_a_loop(x: Any, w: Any) -> Any:
    body = lambda _, x: jnp.tanh((x * 1e-30) @ (w / 4) * 1e30)  # noqa: E731
    return jax.lax.fori_loop(0, 1, body, x)


def bits_of_a_product(x: Any, w: Any) -> Any:
    return jax.lax.bitcast_convert_type((x @ w)[0], jnp.int32) & 3


def power_without_dimensions(x: Any, w: Any) -> Any:
    return jax.checkpoint(lambda x: jnp.power(jnp.abs(x[0, 0]) + 0.5, 1.5))(x), x @ w


@jax.custom_jvp
def ragged(x: Any, w: Any) -> Any:
    return jax.lax.ragged_dot(x, jnp.stack([w, w]), jnp.array([1, 2], jnp.int32))


ragged.defjvp(lambda p, t: (ragged(*p), t[0] @ p[1]))
FOUND = [
    # the result of a power without dimensions was not rounded by the oracle
    Case(power_without_dimensions, (X, W), "AlwaysBf16"),
    # integers made of the bits of a product's result
    Case(bits_of_a_product, (X, W), "AutoMixedF16"),
    # JAX's transpose of a ragged product takes no symbolic zero
    Case(lambda x, w: (jnp.sum(ragged(x, w)), ()), (X, W), form="grad", inside=False),
    Case(scaled(1e-6), (X, W), "AlwaysBf16", "grad"),
    Case(scaled(1e-30), (X, W), "AutoMixedConservativeF16", "grad"),
    Case(scaled(1e-12), (X, W), "AutoMixedF16", "grad", inside=False),
    Case(scaled(1e-30), (X, W), "AutoMixedF16", "grad", inside=False, x64=True),
    Case(scaled(1e-30), (X, W), "AutoMixedConservativeF16"),
    Case(scaled_in_a_loop, (X, W), "AutoMixedF16"),
    # what a branch saves shares its place with what the other one does
    case_of(
        Program((Step("cond", 0, ((Step("helper"),), (Step("positions", 5),))),)),
        "AlwaysF16",
        "grad",
        True,
    ),
]


@pytest.mark.parametrize("case", FOUND)
def test_a_program_that_once_failed(case: Case):
    with quiet():
        assert not case.check().skipped


# ---------------------------------------------------------------- the checks themselves


def dots(x: Any, w: Any) -> Any:
    step = lambda h, _: (jnp.tanh(h @ w), None)  # noqa: E731
    return jnp.sum(jax.lax.scan(step, x @ w, None, length=2)[0]), ()


def table(x: Any, w: Any) -> Any:
    at = jnp.arange(4, dtype=jnp.float32) + 300
    return (at[:, None] + jnp.arange(3, dtype=jnp.float32)[None]).T @ (w / 301) + x


def sums(x: Any, w: Any) -> Any:
    return jnp.sum(jnp.tanh(w), axis=0), jnp.sum(x), x @ w


DOT = Case(dots, (X, W))


def test_the_oracle_sees_a_product_that_is_rounded_twice(monkeypatch: Any):
    DOT.check()
    monkeypatch.setattr(Bilinear, "sums_in", property(lambda self: self.low))
    with pytest.raises(AssertionError, match="is not what the plan says"):
        DOT.check()


def test_the_oracle_sees_a_sum_that_is_taken_low(monkeypatch: Any):
    op, case = primitives.op("reduce_sum"), Case(sums, (X, W), "AlwaysBf16")
    case.check()
    monkeypatch.setitem(primitives.ROWS, "reduce_sum", dataclasses.replace(op, accumulates=False))
    with pytest.raises(AssertionError, match="is not what the plan says"):
        case.check()


def test_a_missing_guard_is_seen(monkeypatch: Any):
    case = Case(table, (X, W))
    case.check()
    monkeypatch.setattr("precpass.planner.guards.why_out_of_range", lambda *_: None)
    with pytest.raises(AssertionError, match="lost in bf16"):
        case.check()


def test_a_gradient_that_is_wrong_is_seen(monkeypatch: Any):
    right, case = Bilinear.tangent, dataclasses.replace(DOT, form="grad", inside=False)

    def wrong(self: Any, *args: Any) -> Any:
        return right(self, *args) * jnp.asarray(1.1, self.dtype)

    case.check()
    monkeypatch.setattr("precpass.rewrite.low_product.Bilinear.tangent", wrong)
    with pytest.raises(AssertionError, match="deviates by"):
        case.check()


def low(x: Any, w: Any) -> Any:
    return (x @ w).astype(jnp.bfloat16)


def warning(x: Any, w: Any) -> Any:
    warnings.warn("not today", UserWarning, stacklevel=1)
    return x @ w


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda x, w: x @ w * 1.1, "deviates by"),
        (lambda x, w: (x @ w).at[0, 0].set(jnp.inf), "not finite"),
        (low, "bfloat16"),
        (lambda x, w: [x @ w], "PyTreeDef"),
        (warning, "not today"),
    ],
)
def test_a_pass_that_is_wrong_is_seen(monkeypatch: Any, wrong: Any, text: str):
    case = Case(lambda x, w: x @ w, (X, W), inside=False, compiled=True)
    case.check()
    monkeypatch.setattr(pp, "auto_mixed", lambda fn, policy: jax.jit(wrong))
    with pytest.raises(AssertionError, match=text):
        case.check()
