"""`between`: where two plans of one program differ."""

import re

import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from precpass.types import Action
from precpass.view.rows import rows
from tests.view.test_diff import PROGRAMS, W, X, each_program, inspected, said, scanned


def listed_in(text):
    """How many equations the last line of a comparison says that differ, entered ones too."""
    n, entered = re.search(r"(\d+) of \d+ equations differ(?:, and (\d+) that)?", text).groups()
    return int(n) + int(entered or 0)


@each_program
def test_a_plan_does_not_differ_from_itself(name):
    plans = [inspected(PROGRAMS[name], pp.AutoMixedBf16, X, W).plan for _ in range(2)]
    assert plans[0] == plans[1]
    text = pp.report.between(*plans)
    assert re.fullmatch(r"0 of \d+ equations differ", text)


@each_program
def test_two_policies_differ_where_their_plans_do(name):
    plans = [inspected(PROGRAMS[name], p, X, W).plan for p in (pp.AutoMixedBf16, pp.AlwaysBf16)]
    text = pp.report.between(*plans)
    total, _ = said(text)
    assert listed_in(text) == total
    fates = [
        [(d.action, d.compute, d.stored, [p.border_copies for p in d.inner]) for d in plan.walk()]
        for plan in plans
    ]
    assert (total > 0) == (fates[0] != fates[1])


@each_program
def test_a_pass_that_is_switched_off_differs_in_all_that_a_policy_changes(name):
    on = inspected(PROGRAMS[name], pp.AutoMixedBf16, X, W)
    with pp.use_policy(None):
        off = inspected(PROGRAMS[name], None, X, W)
    assert off.after is off.before
    assert off.diff().startswith("switched off: 0 of ")
    changes = sum(row.changes for row in rows(on.plan))
    for plans in ((off.plan, on.plan), (on.plan, off.plan)):
        text = pp.report.between(*plans)
        assert said(text)[0] == changes
        entered = sum(row.decision.action is Action.ENTER for row in rows(on.plan))
        everything = sum(1 for _ in rows(on.plan)) - entered
        crossed = sum(bool(row.info.crossed) for row in rows(on.plan))
        cast = sum(
            bool(row.info.casts) and not row.info.crossed
            for row in rows(on.plan)
            if row.decision.action is Action.ENTER
        )
        n = crossed + cast
        entered = f", and {n} that {'is' if n == 1 else 'are'} entered" if n else ""
        assert text.splitlines()[0] == f"{changes - n} of {everything} equations differ{entered}"


def test_what_both_policies_lower_is_told_apart_by_its_format():
    plans = [pp.inspect(scanned, p)(X, W).plan for p in ("AutoMixed", "AutoMixedBf16")]
    lines = pp.report.between(*plans).splitlines()
    assert sum("in f16, accumulated in f32 | in bf16, accumulated in f32" in x for x in lines) == 2
    assert "1 operand is passed in 16 bits too (f16[8,8]), cast once outside | " in lines[2]
    assert lines[3].startswith("scan, 3 trips")
    assert lines[0].endswith(", and 1 that is entered")
    lines = pp.report.between(*plans, level="lines").splitlines()
    assert lines[5].startswith("    dot_general: in f16")
    assert lines[0].startswith("2 of ")


def test_plans_of_two_programs_are_an_error():
    one, other = (pp.inspect(fn)(X).plan for fn in (lambda x: x @ x, lambda x: (x @ x).T))
    with pytest.raises(ValueError, match="plans of two programs: one has 1 equation"):
        pp.report.between(one, other)
    other = pp.inspect(lambda x: x[:4] @ x)(X).plan
    third = pp.inspect(lambda x: x[:2] @ x)(X).plan
    with pytest.raises(ValueError, match=r"plans of two programs: .* in one is "):
        pp.report.between(other, third)


def test_plans_of_programs_that_enter_other_bodies_are_an_error():
    def scanned(n):
        return lambda x: lax.scan(lambda c, _: (c @ c, None), x, length=n)[0]

    def switched(n):
        return lambda x: lax.switch(jnp.int32(x[0, 0]), [lambda: x @ x] * n)

    three, four = (pp.inspect(scanned(n))(X).plan for n in (3, 4))
    text = r"two programs: scan .* \(scan, 3 trips\) at .* \(scan, 4 trips\) at "
    with pytest.raises(ValueError, match=text):
        pp.report.between(three, four)
    two, three = (pp.inspect(switched(n))(X).plan for n in (2, 3))
    text = r"two programs: cond .* cond, branch 1\) at .* cond, branch 2\) at "
    with pytest.raises(ValueError, match=text):
        pp.report.between(two, three)


def test_a_plan_without_places_says_where_to_get_one():
    plan = pp.inspect(lambda x: x @ x)(X).plan
    with pytest.raises(ValueError, match=r"take the .plan of\s+precpass.inspect"):
        pp.report.between(plan, pp.Plan(plan.decisions))


def test_what_is_no_plan_is_named():
    found = pp.inspect(scanned)(X, W)
    with pytest.raises(TypeError, match=r"between compares plans, not <Inspection under AutoMixed"):
        pp.report.between(found.plan, found)  # pyright: ignore[reportArgumentType]
