"""For the tests of programs that use precpass: what must stay low, and what must stay wide.

    def test_the_model_stays_low():
        assert_precision(train_step, (state, batch), {"dot_general": "bf16", "*/head": "f32"})
        assert_plan(train_step, (state, batch), "model.precision.json")

Both fail with the difference as their message, and run nothing.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from precpass.api import inspect
from precpass.lock import Names
from precpass.opkinds import TABLE, OpKind
from precpass.plan import Decision, Plan
from precpass.planfile import equations, locked_precision
from precpass.policy import PrecisionPolicy, PrecisionWarning
from precpass.precision import Precision
from precpass.rules import EqnView, Rule
from precpass.site import Site
from precpass.view.rows import Row, rows
from precpass.view.text import heading, plain

__all__ = ["assert_plan", "assert_precision", "plan_problems", "precision_problems"]

Expected = Mapping[str, Precision | str]


def assert_precision(
    fn: Callable[..., Any],
    args: Sequence[Any],
    expected: Expected,
    policy: PrecisionPolicy | str | None = None,
    **kwargs: Any,
) -> None:
    """Fails where a function's equations would not run in the precisions that are expected.

    Args:
        fn: a function, or the result of `auto_mixed`, whose policy then counts.
        args: its positional arguments, arrays or `jax.ShapeDtypeStruct`s.
        expected: pattern -> precision. A pattern is a primitive ("dot_general",
            "reduce_*"): all of these; or a name scope ("*/head"): all products inside.
            The last pattern that an equation matches counts.
        policy: as for `auto_mixed`.
        kwargs: the keyword arguments.

    Raises:
        AssertionError: with the equations that differ, by source line, each with its reason.
        ValueError: for a pattern that matches no equation, or an unknown precision.

    Example:
        >>> import jax.numpy as jnp
        >>> assert_precision(lambda x: x @ x, [jnp.ones((4, 4))], {"dot_general": "bf16"})
    """
    __tracebackhide__ = True
    text = precision_problems(fn, args, expected, policy, **kwargs)
    if text:
        raise AssertionError(text)


def assert_plan(
    fn: Callable[..., Any],
    args: Sequence[Any],
    path: str | os.PathLike[str],
    policy: PrecisionPolicy | str | None = None,
    **kwargs: Any,
) -> None:
    """Fails where a function's plan is not the saved one.

    Args:
        fn: as of `assert_precision`.
        args: as there.
        path: what `plan.save` wrote.
        policy: as for `auto_mixed`.
        kwargs: the keyword arguments.

    Raises:
        AssertionError: with the equations whose precision differs, each with its reason,
            and those that the file and the program do not share.
        ValueError: for a file that is no plan, or one of another program.
    """
    __tracebackhide__ = True
    text = plan_problems(fn, args, path, policy, **kwargs)
    if text:
        raise AssertionError(text)


def precision_problems(
    fn: Callable[..., Any],
    args: Sequence[Any],
    expected: Expected,
    policy: PrecisionPolicy | str | None = None,
    **kwargs: Any,
) -> str:
    """The message of `assert_precision`; "" where all is as it is expected."""
    if not expected:
        raise ValueError("nothing is expected: give patterns, such as {'dot_general': 'bf16'}")
    rules = [_rule(pattern, precision) for pattern, precision in expected.items()]
    patterns, matched = list(expected), set[int]()
    wrong: list[_Wrong] = []
    for row in rows(_plan(fn, policy, args, kwargs)):
        found = [i for i, rule in enumerate(rules) if _concerns(rule, row)]
        matched.update(found)
        if found and row.decision.compute is not rules[found[-1]].precision:
            asked = f"{rules[found[-1]].precision} as {patterns[found[-1]]!r} asks"
            wrong.append(_Wrong(row.site, row.decision, asked))
    if unmatched := [patterns[i] for i in range(len(rules)) if i not in matched]:
        raise ValueError(
            f"no equation matches {', '.join(map(repr, unmatched))}: a pattern is a primitive of "
            "the program, or a name scope with products inside"
        )
    return "\n".join(_said(wrong, "expected"))


def plan_problems(
    fn: Callable[..., Any],
    args: Sequence[Any],
    path: str | os.PathLike[str],
    policy: PrecisionPolicy | str | None = None,
    **kwargs: Any,
) -> str:
    """The message of `assert_plan`; "" where the plan is the saved one."""
    lock = Plan.load(path).lock
    plan = _plan(fn, policy, args, kwargs)
    assert lock is not None and plan.origin is not None
    names = Names()
    wrong: list[_Wrong] = []
    for site, decision, scope, function in equations(plan, plan.origin.scope):
        key = names.add(scope, function, site.primitive)
        saved = lock.of(*key)
        if saved is not None and locked_precision(decision) not in (None, saved):
            wrong.append(_Wrong(site, decision, f"{saved} as it was saved"))
    complaints = lock.complaints(names.counts, plan.origin.name, "the policy")
    return "\n".join([*_said(wrong, f"that {os.fspath(path)} says"), *complaints])


def _plan(fn: Any, policy: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        return inspect(fn, policy)(*args, **kwargs).plan


def _rule(pattern: str, precision: Precision | str) -> Rule:
    if "/" not in pattern:
        try:
            return Rule(primitive=pattern, precision=precision)
        except ValueError:
            Precision.parse(precision)
    return Rule(scope=pattern, precision=precision)


def _concerns(rule: Rule, row: Row) -> bool:
    site, decision = row.site, row.decision
    if decision.inner or decision.compute is None:
        return False
    if rule.primitive is None and decision.kind is not OpKind.COMPUTE:
        return False
    kind = TABLE[site.primitive].kind if site.primitive in TABLE else decision.kind
    source = site.source
    place = (source.file, source.function, source.line)
    return rule.matches(EqnView(site.primitive, kind, row.scope, *place, (), (), (), (), {}))


class _Wrong(NamedTuple):
    """An equation that runs in another precision than the one wanted, in words."""

    site: Site
    decision: Decision
    wanted: str


def _said(wrong: list[_Wrong], where: str) -> Iterator[str]:
    if wrong:
        yield f"{len(wrong)} equations are not in the precision {where}"
    source = None
    for site, decision, wanted in wrong:
        if site.source != source:
            source = site.source
            yield plain([heading(source)])
        operands = " ".join(map(str, site.operands))
        what = f"{site.primitive} {operands}: in {decision.compute}, not {wanted}"
        yield f"  {what}  [{decision.reason}]"
