"""The diff: complete against an independent walk of both jaxprs, nested, in three levels."""

import os
import re
import sys
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from precpass import jaxpr as ir
from precpass.policy.precision import Precision
from precpass.types import Action
from precpass.view.rows import rows
from tests.support import compositions
from tests.support.jaxprs import walk
from tests.support.values import f32

X, W = f32(8, 8), f32(8, 8)


def block(x, w):
    h = jnp.tanh(x @ w)
    return jax.nn.softmax(h @ w.T) + x


def scanned(x, w):
    y, _ = lax.scan(lambda c, _: (block(c, w), None), x, length=3)
    return jnp.square(y).mean()


@jax.custom_vjp
def doubled(x, w):
    return 2 * (x @ w)


doubled.defvjp(lambda x, w: (doubled(x, w), (x, w)), lambda r, g: (2 * g @ r[1].T, r[0].T @ g * 2))


@jax.jit
def shared(x, w):
    return jnp.arctan(x @ w)


def hand_mixed(x, w):
    low = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
    return (low.astype(jnp.float32) @ w).astype(jnp.bfloat16).astype(jnp.float32).sum()


def kept_product(x, w):
    """The first product is kept for the backward pass, and read by products alone."""
    return lax.scan(lambda c, _: ((c @ w) @ w, None), x, length=3)[0].sum()


def passed_on(x, w):
    """What the loop keeps crosses a branch that hands it through."""

    def step(c, _):
        h = jnp.tanh(c @ w)
        g = lax.cond(c[0, 0] > 2, lambda h: h, lambda h: 2 * h, h)
        return g @ w + h @ w, None

    return lax.scan(step, x, length=3)[0].sum()


PROGRAMS = {
    "gradient of a scan": jax.grad(scanned, 1),
    "remat": jax.grad(jax.checkpoint(lambda x, w: block(block(x, w), w).sum()), 1),
    "custom rule": lambda x, w: doubled(x, w).sum(),
    "shared": lambda x, w: shared(shared(x, w), w) + shared(x, w + 1),
    "branches": lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: block(x, w)),
    "while": lambda x, w: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ w), (0, x)
    ),
    "mixed by hand": hand_mixed,
    "mixed by hand, gradient": jax.grad(hand_mixed, 1),
    "result handed on": lambda x, w: (x @ w, jnp.tanh(x @ w), x),
    "stored product": jax.grad(kept_product, 1),
    "a branch without equations": jax.grad(passed_on, 1),
}
POLICIES = [pp.AutoMixedBf16, pp.AlwaysBf16, pp.AlwaysF32]
each_program = pytest.mark.parametrize("name", PROGRAMS)
each_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)


def casts(equations):
    found = Counter()
    for eqn in equations:
        if eqn.primitive.name == "convert_element_type":
            before, after = (Precision.of(v.aval.dtype) for v in (eqn.invars[0], eqn.outvars[0]))
            if before and after and before is not after:
                found[f"{before} -> {after}[{','.join(map(str, eqn.outvars[0].aval.shape))}]"] += 1
    return found


def crossing(equations):
    """The shapes of what equations with bodies are given, and give, on 16 bits."""
    found = Counter()
    for eqn in equations:
        if ir.bodies(eqn):
            for is_operand, atoms in ((True, eqn.invars), (False, eqn.outvars)):
                low = [v.aval.shape for v in atoms if v.aval.dtype == np.uint16]
                found.update((is_operand, shape) for shape in low)
    return found


def inspected(fn, policy, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        return pp.inspect(fn, policy)(*args)


def assert_complete(found):
    """Every changed equation, cast, rounded value and crossing appears exactly once."""
    before, after = list(walk(found.before)), list(walk(found.after))
    entered = {id(e) for e in before if ir.bodies(e)}
    # an equation that stays makes the same variables
    staying = {id(v) for e in after for v in e.outvars}
    replaced = Counter(
        ir.name_of(e)
        for e in before
        if id(e) not in entered and e.outvars and id(e.outvars[0]) not in staying
    )
    said = [row for row in rows(found.plan) if row.decision.action is not Action.ENTER]
    assert len({id(row.info) for row in said}) == len(said)
    changed = [
        row
        for row in said
        if row.decision.action is not Action.KEEP or row.decision.product.exchanged
    ]
    # what is stored low says so, and so does what crosses a border
    stored = [row for row in said if row.decision.stores_low]
    assert all(row.changes and "stored in" in str(row.decision.reason) for row in stored)
    assert all(len(row.decision.stored) == len(row.info.results) for row in stored)
    entering = [row for row in rows(found.plan) if row.decision.action is Action.ENTER]
    crossed = [c for row in entering for c in row.info.crossed]
    assert all(row.changes for row in entering if row.info.crossed)
    beside = crossing(after)
    beside.subtract(crossing(before))
    assert Counter((c.is_operand, c.value.shape) for c in crossed) == +beside
    # each is rounded where it is defined, and wherever it comes across a border alone
    plans = {id(p): p for row in entering for p in row.decision.inner}.values()
    rounded = sum(p is not None for row in stored for p in row.decision.stored)
    rounded += sum(
        border_copy.rounds for plan in plans for border_copy in plan.border_copies.operands
    )
    rounded += sum(c.alone for c in crossed if not c.is_operand)
    assert rounded == sum(map(ir.is_rounded, after))
    names = Counter(row.info.primitive for row in changed)
    assert not replaced - names
    # a sum of low values is taken wide as it was, and rounded behind
    for name in names - replaced:
        same = [row for row in changed if row.info.primitive == name]
        assert all(
            any(c.after.dtype == str(row.decision.compute) for c in row.info.casts) for row in same
        )
    inserted, removed = Counter(), Counter()
    for row in rows(found.plan):
        for cast in row.info.casts:
            counts = {"inserted": inserted, "removed": removed}.get(cast.what, Counter())
            counts[str(cast)] += 1
    expected = casts(before)
    expected.update(inserted)
    expected.subtract(removed)
    assert {k: n for k, n in expected.items() if n} == dict(casts(after))


def said(text):
    """The number of equations that a diff lists, and its casts by what happened to them."""
    total, counted = 0, Counter()
    for line in text.splitlines()[1:]:
        if not re.search(r"\](  \(\d+ times\))?$", line):
            continue
        times = re.search(r"\((\d+) times\)$", line)
        total += int(times[1]) if times else 1
        for what, n in re.findall(r"-> \S+ (inserted|moved|removed)(?: \(x(\d+)\))?", line):
            counted[what] += int(n or 1)
    return total, counted


@each_program
@each_policy
def test_the_diff_is_complete(name, policy):
    found = inspected(PROGRAMS[name], policy, X, W)
    assert_complete(found)
    listed = [row for row in rows(found.plan) if row.changes]
    total, counted = said(found.diff())
    assert total == len(listed)
    assert counted == Counter(cast.what for row in listed for cast in row.info.casts)


@pytest.mark.parametrize("name", sorted(compositions.PROGRAMS)[::4])
def test_the_diff_of_programs_from_elsewhere_is_complete(name):
    program = compositions.PROGRAMS[name]
    found = inspected(program, pp.AutoMixedBf16, compositions.X, compositions.W)
    assert (found.after is not found.before) == bool(found.plan.changes)
    if found.plan.changes:
        assert_complete(found)


def test_what_a_policy_changes_is_there_at_all():
    found = pp.inspect(PROGRAMS["gradient of a scan"])(X, W)
    low = [row for row in rows(found.plan) if row.decision.action is Action.LOWER]
    assert {row.info.primitive for row in low} == {"dot_general"}
    assert len(low) == 6
    assert {row.calls for row in low} == {3.0}
    inserted = sum(len(row.info.casts) for row in rows(found.plan))
    assert inserted == sum(casts(walk(found.after)).values()) > 0


def test_bodies_are_indented_under_their_loop_with_its_trips():
    lines = pp.inspect(PROGRAMS["gradient of a scan"])(X, W).diff().splitlines()
    loops = [i for i, line in enumerate(lines) if line.startswith("scan, 3 trips")]
    assert len(loops) == 2
    assert "backward" in lines[loops[1]] and "backward" not in lines[loops[0]]
    assert "lax.scan(" in lines[loops[0]]
    assert re.match(r"  \S*test_diff.py:\d+ block  h = jnp.tanh\(x @ w\)$", lines[loops[0] + 1])
    assert lines[loops[0] + 2].startswith("    dot_general f32[8,8] f32[8,8] -> f32[8,8]: in bf16")


def test_branches_and_rules_are_indented_under_theirs():
    text = pp.inspect(PROGRAMS["branches"])(X, W).diff()
    assert "cond, branch 0" in text and "cond, branch 1" in text
    text = pp.inspect(PROGRAMS["custom rule"])(X, W).diff()
    assert text.splitlines()[1].startswith("custom_vjp_call")


def test_a_cast_that_stands_elsewhere_is_moved():
    def fn(x, w):
        low = x.astype(jnp.bfloat16)
        return low, low.astype(jnp.float32) @ w

    found = pp.inspect(fn, "AlwaysF32")(X, W)
    assert_complete(found)
    first = fn.__code__.co_firstlineno
    why = "[AlwaysF32 computes in float32 what was written in 16 bits]"
    totals, *lines = [line.strip() for line in found.diff().splitlines()]
    assert f":{first + 1} fn  low = x.astype(jnp.bfloat16)" in lines[0]
    assert lines[1].startswith("convert_element_type f32[8,8] -> bf16[8,8]: cast moved; cast ")
    assert "f32 -> bf16[8,8] moved" in lines[1] and lines[1].endswith(why)
    assert totals.endswith("; 1 cast moved, 1 cast removed")


def test_a_cast_that_is_made_again_in_its_place_is_no_change():
    def low(x, w):
        return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)

    def wide_beside(x, w):
        a = x.astype(jnp.bfloat16)
        return a @ w.astype(jnp.bfloat16), (a * 2).astype(jnp.float32)

    policy = pp.AlwaysF32.with_rules(pp.Rule(primitive="dot_general", precision="bf16"))
    found = pp.inspect(low, policy)(X, W)
    assert str(found.before) == str(found.after)
    same = "AlwaysF32: 0 of 4 equations lowered, 0 widened, 4 as written"
    assert found.diff() == found.diff("lines") == same
    assert pp.report.between(found.plan, pp.inspect(low)(X, W).plan) == "0 of 4 equations differ"
    found = pp.inspect(wide_beside, policy)(X, W)
    assert_complete(found)
    assert found.diff().splitlines()[0].endswith("2 widened, 3 as written; 1 cast removed")


def test_the_whole_text_of_a_small_program():
    def two(x, w):
        with jax.named_scope("body"):
            h = jnp.tanh(x @ w)
        return lax.scan(lambda c, _: (c @ w, None), h, length=3)[0]

    file, line = "tests/view/test_diff.py", two.__code__.co_firstlineno
    found = pp.inspect(two)(X, W)
    change = (
        "dot_general f32[8,8] f32[8,8] -> f32[8,8]: in bf16, accumulated in f32; "
        "cast f32 -> bf16[8,8] inserted (x2)  [AutoMixedBf16: compute in bf16]"
    )
    scan = "return lax.scan(lambda c, _: (c @ w, None), h, length=3)[0]"
    text = f"""\
AutoMixedBf16: 2 of 3 equations lowered, 0 widened, 1 as written; 3 casts inserted
{file}:{line + 2} two  h = jnp.tanh(x @ w)
  {change}
{file}:{line + 3} two  {scan}
  scan f32[8,8] f32[8,8] -> f32[8,8]: 1 operand is passed in 16 bits too (bf16[8,8]), cast once \
outside  [entered]
scan, 3 trips  {file}:{line + 3} two  {scan}
  {file}:{line + 3} <lambda>  {scan}
    {change.replace(" (x2)", "")}"""
    # the path is that from the folder of the run
    path = os.path.relpath(__file__)
    assert found.diff() == text.replace(file, path)


def test_one_line_per_source_line():
    found = pp.inspect(PROGRAMS["gradient of a scan"])(X, W)
    lines = found.diff("lines").splitlines()
    per_line = [line for line in lines if line.startswith("    ")]
    headings = [line for line in lines if "test_diff.py" in line and line.startswith("  ")]
    assert len(per_line) == len(headings) == 4
    # what stays beside a cast is not named
    assert re.match(r" *dot_general in bf16, accumulated in f32 \(x2\).*; cast", per_line[2])
    # what of tanh is kept for the backward pass is another equation by JAX's version
    assert re.search(r"\w+ stays in f32, stored in bf16", per_line[0])
    assert re.match(
        r"  scan: 2 operands are passed in 16 bits too \(bf16\[8,8\] \(x2\)\), cast", lines[2]
    )


def test_another_level_is_an_error():
    with pytest.raises(
        ValueError, match=r"no level 'all': legal are 'lines', 'equations', 'jaxpr'"
    ):
        pp.inspect(lambda x: x @ x)(X).diff("all")


def test_the_policys_output_is_in_the_diff():
    found = pp.inspect(lambda x: x @ x, pp.AutoMixedBf16.with_output("f16"))(X)
    assert "outputs  1 f32 -> f16: the policy's output" in found.diff()
    assert found.diff().splitlines()[0].endswith("; 2 casts inserted")
    plain = pp.inspect(lambda x: x @ x)(X)
    text = pp.report.between(plain.plan, found.plan)
    assert text == "0 of 1 equations differ\noutputs  their own format | f16"
    assert [a.dtype for a in found.after.out_avals] == [np.float16]


def test_colour_in_a_terminal_and_none_in_a_pipe(monkeypatch):
    found = pp.inspect(lambda x: x @ x)(X)
    assert "\x1b[" in found.diff(color=True)
    assert "\x1b[" not in found.diff(color=False)
    assert re.sub(r"\x1b\[[\d;]*m", "", found.diff(color=True)) == found.diff(color=False)
    assert "\x1b[" not in found.diff()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in found.diff()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in found.diff()
