"""Random programs under every policy: contract lines 1, 2, 3, 5, 7 and 11, gradients too.

`random_programs` draws them, `random_checks` says what must hold and holds the results
against two interpreters (`oracle`): one that follows the plan, and one that disturbs
float32's products. `scripts/sweep_programs.py` runs 20,000.
"""

import collections
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from precpass.policy import primitives
from precpass.rewrite.low_product import Bilinear
from tests.support import random_checks, random_flow, random_ops, random_pieces
from tests.support.passes import quiet
from tests.support.random_checks import FORMS, POLICIES, Case, swept_case
from tests.support.random_programs import INGREDIENTS, Program, Step, programs, seeded_program
from tests.support.random_shrink import shrunk

pytestmark = pytest.mark.programs

fixed = hypothesis.settings(
    derandomize=True,
    database=None,
    max_examples=16,
    deadline=None,
    phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    suppress_health_check=list(hypothesis.HealthCheck),
)
"""The same programs in every run."""


@pytest.mark.release(keep=3)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_random_program(policy: str):
    @fixed
    @hypothesis.given(programs())
    def check(program: Program):
        Case(program, policy, twice=True).check()

    check()


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("inside", [True, False], ids=["auto_mixed(grad)", "grad(auto_mixed)"])
def test_the_gradient_of_a_random_program(inside: bool):
    @fixed
    @hypothesis.given(programs(), st.sampled_from(list(POLICIES)))
    def check(program: Program, policy: str):
        Case(program, policy, "grad", inside).check()

    check()


@hypothesis.settings(fixed, max_examples=10)
@hypothesis.given(
    programs(), st.sampled_from(["jvp", "vmap"]), st.sampled_from(list(POLICIES)), st.booleans()
)
def test_other_transforms_of_a_random_program(
    program: Program, form: str, policy: str, inside: bool
):
    Case(program, policy, form, inside).check()


@fixed
@hypothesis.given(programs(x64=True), st.sampled_from(list(POLICIES)), st.sampled_from([*FORMS]))
def test_a_random_program_with_float64(program: Program, policy: str, form: str):
    Case(program, policy, form).check()


@hypothesis.settings(fixed, max_examples=4)
@hypothesis.given(programs(), st.sampled_from(list(POLICIES)), st.sampled_from(["value", "grad"]))
def test_a_random_program_compiled(program: Program, policy: str, form: str):
    Case(program, policy, form, compiled=True).check()


# ---------------------------------------------------------------- the programs themselves


def test_every_ingredient_is_drawn_and_the_programs_have_products_to_lower():
    drawn = collections.Counter(name for i in range(600) for name in seeded_program(0, i).names())
    assert set(drawn) == set(INGREDIENTS)
    outcomes = [swept_case(0, index).check() for index in range(60)]
    assert sum(bool(outcome.skipped) for outcome in outcomes) <= 3
    assert sum(outcome.decided and outcome.finite for outcome in outcomes) >= 50
    assert sum(outcome.lowered for outcome in outcomes) >= 60


@pytest.mark.release
@pytest.mark.parametrize("target", ["h100", "tpu v5e"])
def test_random_programs_are_right_as_they_are_planned_for_an_accelerator(target: str):
    """Results in 16 bits, what fusions write, and bfloat16 border copies, run on this CPU."""
    lowered = 0
    for index in range(80):
        case = dataclasses.replace(swept_case(7, index), compiled=False, target=target)
        if case.policy in ("AlwaysF32", "Custom"):
            case = dataclasses.replace(case, policy="AutoMixedBf16")
        lowered += case.check().lowered
    assert lowered >= 60


def test_a_program_is_rebuilt_from_its_print():
    names = {"Case": Case, "Program": Program, "Step": Step}
    for index in range(20):
        case = swept_case(1, index)
        assert eval(repr(case), names) == case


def test_a_failure_shrinks_to_its_cause():
    program = seeded_program(0, 3)
    program = dataclasses.replace(program, steps=(*program.steps, Step("masked", (5, 9))))
    small = shrunk(program, lambda candidate: "masked" in candidate.names())
    assert small == Program((Step("masked", (0, 0)),))


# ---------------------------------------------------------------- programs that once failed

FOUND = [
    # the result of a power without dimensions was not rounded by the oracle
    Case(
        Program((Step("remat", (), ((Step("elementwise", (20, 47)),),)), Step("matmul")), seed=27),
        "AlwaysBf16",
    ),
    # in two runs the disturbances of its one number cancelled
    Case(
        Program((Step("bits", (49, 0, 23)), Step("positions", (0, 46, 52))), seed=33),
        form="jvp",
        inside=False,
    ),
    # integers made of the bits of a product's result
    Case(
        Program((Step("linear_solve", (19,)), Step("integers", (0, 13))), seed=13), "AutoMixedF16"
    ),
    # a whole number that was rounded before
    Case(Program((Step("epsilon", (0, 10, 7)),)), "AlwaysBf16", "grad"),
    # JAX's transpose of a ragged product takes no symbolic zero
    Case(
        Program((Step("custom_jvp", (40,), ((Step("ragged_product"),),)),)),
        form="grad",
        inside=False,
    ),
    # scaled to nothing in float16, and back
    Case(
        Program((Step("epsilon", (0, 56, 7)), Step("einsum"))), "AutoMixedConservativeF16", "grad"
    ),
    Case(Program((Step("epsilon", (0, 0, 59)),)), "AutoMixedF16", "grad", inside=False),
    Case(Program((Step("epsilon", (0, 0, 31)),), x64=True), "AutoMixedF16", "grad", inside=False),
    Case(
        Program((Step("kept", (0,), ((Step("epsilon", (0, 0, 23)),),)),)),
        "AutoMixedConservativeF16",
    ),
    Case(Program((Step("fori", (), ((Step("epsilon", (0, 0, 39)),),)),), seed=44), "AutoMixedF16"),
]


@pytest.mark.parametrize("case", FOUND)
def test_a_program_that_once_failed(case: Case):
    with quiet():
        case.check()


# ---------------------------------------------------------------- the checks themselves

DOT = Program((Step("dot"), Step("scan", (), ((Step("dot"),),))))


def test_the_oracle_sees_a_product_that_is_rounded_twice(monkeypatch):
    Case(DOT, "AutoMixedBf16").check()
    monkeypatch.setattr(
        "precpass.rewrite.low_product.Bilinear.sums_in", property(lambda self: self.low)
    )
    with pytest.raises(AssertionError, match="is not what the plan says"):
        Case(DOT, "AutoMixedBf16").check()


def test_the_oracle_sees_a_sum_that_is_taken_low(monkeypatch):
    op = primitives.op("reduce_sum")
    program = Program((Step("reduction"), Step("dot")))
    Case(program, "AlwaysBf16").check()
    monkeypatch.setitem(primitives.ROWS, "reduce_sum", dataclasses.replace(op, accumulates=False))
    with pytest.raises(AssertionError, match="is not what the plan says"):
        Case(program, "AlwaysBf16").check()


def test_a_missing_guard_is_seen(monkeypatch):
    program = Program((Step("positions", (1, 1)),))
    Case(program, "AutoMixedBf16").check()
    monkeypatch.setattr("precpass.planner.guards.why_out_of_range", lambda *_: None)
    with pytest.raises(AssertionError, match="lost in bf16"):
        Case(program, "AutoMixedBf16").check()


def test_a_gradient_that_is_wrong_is_seen(monkeypatch):
    right = Bilinear.tangent

    def wrong(self, *args):
        return right(self, *args) * jnp.asarray(1.1, self.dtype)

    Case(DOT, "AutoMixedBf16", "grad", inside=False).check()
    monkeypatch.setattr("precpass.rewrite.low_product.Bilinear.tangent", wrong)
    with pytest.raises(AssertionError, match="deviates by"):
        Case(DOT, "AutoMixedBf16", "grad", inside=False).check()


def test_the_sweep_reports_what_it_ran():
    script = Path(__file__).parents[2] / "scripts" / "sweep_programs.py"
    command = [sys.executable, str(script), "--programs", "6", "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 programs" in done.stdout and "0 failures" in done.stdout


def test_ingredients_come_from_every_module():
    modules = {what.run.__module__ for what in INGREDIENTS.values()}
    assert modules == {m.__name__ for m in (random_ops, random_pieces, random_flow)}
    assert np.isfinite(random_checks.NEAR)
