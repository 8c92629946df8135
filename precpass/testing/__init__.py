"""Assertions for the tests of your programs: which equations run in which precision.

    def test_the_model_stays_low():
        assert_precision(train_step, (state, batch), {"dot_general": "bf16", "*/head": "f32"})
        assert_plan(train_step, (state, batch), Path(__file__).with_name("model.precision.json"))

Both fail with the difference as their message, and run nothing. If you intended the difference,
`PRECPASS_UPDATE_PLANS=1 pytest` writes the files of plans anew.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from precpass.api import inspect
from precpass.jaxpr import Source
from precpass.plan.file import Named, Names, differences, equations, locked_precision
from precpass.plan.plan import Plan
from precpass.plan.reasons import Reason
from precpass.policy.policy import PolicyLike
from precpass.policy.precision import Precision
from precpass.policy.scopes import clean_scope
from precpass.policy.warned import quietly
from precpass.testing.patterns import Pattern
from precpass.units import are, counted
from precpass.view.rows import alike
from precpass.view.text import heading, plain

__all__ = [
    "Mismatch",
    "Problems",
    "assert_plan",
    "assert_precision",
    "plan_problems",
    "precision_problems",
]

Expected = Mapping[Any, Precision | str | Mapping[Any, int]]

UPDATE = "PRECPASS_UPDATE_PLANS"
"""The environment variable under which `assert_plan` writes files instead of reading them."""


def assert_precision(
    fn: Callable[..., Any],
    args: Sequence[Any],
    expected: Expected,
    policy: PolicyLike | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    target: Any = None,
) -> None:
    """Fail if a function's equations would not run in the expected precisions.

    Args:
        fn: a function, or the result of `auto_mixed`, whose policy is the default.
        args: its positional arguments, arrays or `jax.ShapeDtypeStruct`s.
        expected: pattern -> precision, or pattern -> {precision: number of equations} for all
            equations that the pattern matches. The precision is that of the computation, in
            whatever format results are stored. A pattern is a primitive ("dot_general", "reduce_*")
            or an `OpKind`, for all such equations; or a name scope ("*/head"), a file or a line of
            it ("model.py:41"), for all matrix products there. The last pattern that an equation
            matches counts. The equations of a body count once for each scope in which it is called.
        policy: as for `auto_mixed`.
        kwargs: the keyword arguments.
        target: the device that the program is planned for, as for `inspect`. A plan depends on the
            platform: without a target, expect the plan of the machine that the test runs on.

    Raises:
        AssertionError: with the equations that differ, by source line, each with its reason.
        TypeError: if the arguments are not a tuple or list.
        ValueError: for a pattern that matches no equation, or an unknown precision.

    Examples:
        >>> import jax.numpy as jnp
        >>> def f(x):
        ...     return jnp.tanh(x @ x) @ x
        >>> assert_precision(f, [jnp.ones((4, 4))], {"dot_general": "bf16", "tanh": "f32"})
        >>> assert_precision(f, [jnp.ones((4, 4))], {"dot_general": {"bf16": 2}})
    """
    __tracebackhide__ = True
    problems = precision_problems(fn, args, expected, policy, kwargs=kwargs, target=target)
    if problems:
        raise AssertionError(str(problems))


def assert_plan(
    fn: Callable[..., Any],
    args: Sequence[Any],
    path: str | os.PathLike[str],
    policy: PolicyLike | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    target: Any = None,
) -> None:
    """Fail if a function's plan differs from a saved one.

    With PRECPASS_UPDATE_PLANS=1 in the environment the file is written instead, unless it has the
    same plan already; review its difference then.

    Args:
        fn: as for `assert_precision`.
        args: as for `assert_precision`.
        path: a file that `plan.save` or `precpass lock` wrote.
        policy: as for `auto_mixed`.
        kwargs: the keyword arguments.
        target: as for `assert_precision`.

    Raises:
        AssertionError: with the equations whose precision differs, each with its reason, and those
            that only the file or only the program has.
        ValueError: for a file that is not a plan, or is the plan of another program.
        FileNotFoundError: if there is no file.
    """
    __tracebackhide__ = True
    update = f"{UPDATE}=1 in the environment writes {os.fspath(path)} anew"
    if os.environ.get(UPDATE, "0") not in ("", "0"):
        _write(fn, args, path, policy, kwargs, target)
        return
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no plan to compare with: {update}")
    problems = plan_problems(fn, args, path, policy, kwargs=kwargs, target=target)
    if problems:
        raise AssertionError(f"{problems}\nif this is meant: {update}")


def _write(fn: Any, args: Any, path: Any, policy: Any, kwargs: Any, target: Any) -> None:
    try:
        if not plan_problems(fn, args, path, policy, kwargs=kwargs, target=target):
            return  # leave an equal plan alone: its file names the release that wrote it
    except (FileNotFoundError, ValueError):
        pass
    _plan(fn, policy, args, kwargs, target).save(path)


# ---------------------------------------------------------------- problems


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """Equal equations that run in another precision than expected.

    Attributes:
        source: your source line.
        module: the path of the module that it calls; "" outside of modules.
        scope: the name scopes around them.
        primitive: the name of their primitive.
        operands: their types.
        compute: the precision that they run in.
        wanted: the expectation, in words.
        reason: the plan's reason for their precision.
        times: the number of equations.
    """

    source: Source
    module: str
    scope: str
    primitive: str
    operands: tuple[str, ...]
    compute: str
    wanted: str
    reason: Reason
    times: int = 1

    @property
    def remedy(self) -> str | None:
        """How to change their precision; None if nobody would want to."""
        is_low = any(str(p) == self.compute for p in Precision if p.is_low or p.is_scaled)
        return self.reason.remedy(is_low=is_low)

    def __str__(self) -> str:
        what = " ".join((self.primitive, *self.operands))
        scope = f" in {self.scope}" if self.scope else ""
        times = f"  ({self.times} times)" if self.times > 1 else ""
        return f"{what}{scope}: in {self.compute}, {self.wanted}  [{self.reason}]{times}"


@dataclasses.dataclass(frozen=True)
class Problems:
    """All differences from the expectation; false if there are none.

    Attributes:
        mismatches: equations in another precision than expected.
        against: the name of the expectation in messages, such as "expected".
        notes: all other differences.
    """

    mismatches: tuple[Mismatch, ...] = ()
    against: str = ""
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.mismatches or self.notes)

    def __str__(self) -> str:
        return plain([(line, "")] for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield from self.notes
        if total := sum(found.times for found in self.mismatches):
            yield f"{counted(total, 'equation')} {are(total)} not in the precision {self.against}"
        by_line: dict[tuple[Source, str], list[Mismatch]] = {}
        for found in self.mismatches:
            by_line.setdefault((found.source, found.module), []).append(found)
        for place, there in by_line.items():
            yield "".join(text for text, _ in heading(*place))
            yield from (f"  {found}" for found in _folded(there))
            for what in dict.fromkeys(filter(None, (found.remedy for found in there))):
                yield f"    to change it: {what}"

    def to_dict(self) -> dict[str, Any]:
        """Return the problems as JSON values."""
        mismatches = [
            {**dataclasses.asdict(mismatch), "reason": str(mismatch.reason)}
            for mismatch in self.mismatches
        ]
        return {"ok": not self, "mismatches": mismatches, "notes": list(self.notes)}


def _mismatches(found: list[tuple[Named, str]]) -> tuple[Mismatch, ...]:
    times: Counter[Mismatch] = Counter()
    for (info, decision, scope, _), wanted in found:
        operands = tuple(map(str, info.operands))
        site = info.site
        place = site.source, site.module, clean_scope(scope), info.primitive, operands
        runs_in = decision.product.scaled or decision.compute
        times[Mismatch(*place, str(runs_in), wanted, decision.reason)] += 1
    return tuple(dataclasses.replace(one, times=n) for one, n in times.items())


def _folded(mismatches: list[Mismatch]) -> list[Mismatch]:
    """Mismatches of one line, with those in one that differ only by the numbers in their scopes.

    The layers of a model are then one line, in the scope "layer_*".
    """
    by_group: dict[Mismatch, list[Mismatch]] = {}
    for found in mismatches:
        group = dataclasses.replace(found, scope=alike(found.scope), times=1)
        by_group.setdefault(group, []).append(found)
    folded: list[Mismatch] = []
    for group, found in by_group.items():
        scopes = {one.scope for one in found}
        scope = group.scope if len(scopes) > 1 else scopes.pop()
        times = sum(one.times for one in found)
        folded.append(dataclasses.replace(group, scope=scope, times=times))
    return folded


def plan_problems(
    fn: Callable[..., Any],
    args: Sequence[Any],
    path: str | os.PathLike[str],
    policy: PolicyLike | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    target: Any = None,
) -> Problems:
    """Return the problems with which `assert_plan` would fail."""
    lock = Plan.load(path).lock
    plan = _plan(fn, policy, args, kwargs, target)
    assert lock is not None and plan.origin is not None
    names = Names()
    wrong: list[tuple[Named, str]] = []
    for named in equations(plan, plan.origin.scope):
        key = names.add(named.scope, named.function, named.info.primitive, named.info.source.place)
        saved = lock.precision_of(*key)
        if saved is not None and locked_precision(named.decision) not in (None, saved):
            wrong.append((named, f"not {saved} as it was saved"))
    texts = differences(lock, names, plan.origin.name, "the policy")
    against = f"that {os.fspath(path)} says"
    return Problems(_mismatches(wrong), against, tuple(texts))


def precision_problems(
    fn: Callable[..., Any],
    args: Sequence[Any],
    expected: Expected,
    policy: PolicyLike | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    target: Any = None,
) -> Problems:
    """Return the problems with which `assert_precision` would fail."""
    if not isinstance(expected, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
        raise TypeError(f"expected is a dict, pattern -> precision, not {expected!r}")
    if not expected:
        raise ValueError("nothing is expected: give patterns, such as {'dot_general': 'bf16'}")
    patterns = [Pattern.parse(*item) for item in expected.items()]
    plan = _plan(fn, policy, args, kwargs, target)
    assert plan.origin is not None
    belongs: dict[int, list[Named]] = {i: [] for i in range(len(patterns))}
    matched = set[int]()
    for named in equations(plan, plan.origin.scope):
        matching = [i for i, pattern in enumerate(patterns) if pattern.concerns(named)]
        matched.update(matching)
        if matching:
            belongs[matching[-1]].append(named)
    if unmatched := [p.text for i, p in enumerate(patterns) if i not in matched]:
        raise ValueError(
            f"no equation matches {', '.join(unmatched)}: a pattern is a primitive of the "
            "program, or a name scope, a file or a line (model.py:41) with products inside"
        )
    wrong = [matching for i, p in enumerate(patterns) for matching in p.wrong(belongs[i])]
    notes = [note for i, p in enumerate(patterns) for note in p.miscounts(belongs[i])]
    return Problems(_mismatches(wrong), "expected", tuple(notes))


def _plan(fn: Any, policy: Any, args: Any, kwargs: Mapping[str, Any] | None, target: Any) -> Plan:
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise TypeError(
            f"args is the tuple of the positional arguments, ({type(args).__name__},) for one "
            f"argument, and not the {type(args).__name__} itself"
        )
    with quietly():
        return inspect(fn, policy, target=target, compiled=False)(*args, **(kwargs or {})).plan
