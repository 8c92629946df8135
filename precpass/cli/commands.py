"""The commands of the command line: each is one function from a task to a report."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Generator
from typing import Any

import jax

from precpass.api import explain, inspect
from precpass.cli.errors import Refused, refusing
from precpass.cli.target import drawn, unbound
from precpass.policy.policy import PrecisionPolicy
from precpass.report.audit.audit import audit
from precpass.report.bisect.bisect import bisect
from precpass.report.bisect.bisection import Run
from precpass.report.compare.compare import compare
from precpass.report.compare.rows import ERRORS, TIMES, columns_of
from precpass.testing import Problems, plan_problems, precision_problems
from precpass.view.diff import between, changes
from precpass.view.inspection import Inspection
from precpass.view.progress import Progress

__all__ = ["COMMANDS", "Report", "Task", "rehearse"]


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a command.

    Attributes:
        text: returns it in words, coloured if standard output is a terminal.
        data: the result as JSON values.
        ok: whether it is as expected.
    """

    text: Callable[[], str]
    data: Any
    ok: bool = True


class _Rehearsed(Exception):
    """Raised where a rehearsal ends: before the function is called."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A command with its function and arguments.

    Attributes:
        options: the options of the command line.
        progress: shows what is going on.
        policy: the policy of --policy or of --plan; None if neither is given.
        between: the other policy of `diff`.
        rows: the policies of `compare`, each with its name.
        columns: the names of its columns; None for those of the default.
        expected: the patterns of `check`, each with the expected precision or numbers.
        target: the device of --target, a `precpass.devices.targets.Target`.
        fn: the user's function; a stand-in in a rehearsal.
        args, kwargs: its arguments.
        is_rehearsal: whether only the options are judged.
    """

    options: argparse.Namespace
    progress: Progress
    policy: PrecisionPolicy | None
    between: PrecisionPolicy | None
    rows: list[tuple[str, PrecisionPolicy]]
    columns: tuple[str, ...] | None
    expected: dict[str, Any]
    target: Any
    fn: Callable[..., Any]
    args: list[Any] = dataclasses.field(default_factory=list[Any])
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    is_rehearsal: bool = False

    @property
    def color(self) -> bool | None:
        """Whether texts are coloured; None colours them on a terminal."""
        auto = None if self.options.output is None else False
        return {"always": True, "never": False}.get(self.options.color, auto)

    def run(
        self,
        report: Callable[..., Callable[..., Any]],
        *what: Any,
        doing: str = "tracing",
        on_arrays: bool = False,
        **how: Any,
    ) -> Any:
        """The result of a report, such as `explain`, of the function at the arguments."""
        with refusing():
            prepared = report(self.fn, *what, **how)
        with self.calling(doing):
            args, kwargs = self._drawn() if on_arrays else (self.args, self.kwargs)
            return prepared(*args, **kwargs)

    def _drawn(self) -> tuple[list[Any], dict[str, Any]]:
        given, seed = (self.args, self.kwargs), self.options.seed
        has_shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(given))
        if seed is not None and not has_shapes:
            raise Refused("--seed is of what is drawn for shapes, and there are none in --args")
        with refusing():
            return drawn(given, seed or 0)

    @contextlib.contextmanager
    def calling(self, doing: str) -> Generator[None]:
        """A context around a call of the function that refuses arguments it does not take."""
        if self.is_rehearsal:
            raise _Rehearsed
        self.progress.say(doing)
        try:
            yield
        except TypeError as error:
            if why := unbound(self.fn, self.args, self.kwargs):
                raise Refused(why) from None
            raise error

    def inspect(self, policy: Any, *, compiled: bool = False) -> Inspection:
        """The inspection of the function under a policy."""
        return self.run(inspect, policy, target=self.target, compiled=compiled)

    def step(self, what: str, done: int, total: int) -> None:
        """Shows a step of a report."""
        self.progress.say(f"{what}, step {done + 1} of {total}", done, total)


def rehearse(task: Task) -> None:
    """Runs a command up to the call of the function, for which there is a stand-in.

    Raises:
        Refused: for options that the report does not take.
    """
    with contextlib.suppress(_Rehearsed):
        COMMANDS[task.options.command](dataclasses.replace(task, is_rehearsal=True))


def _explain(task: Task) -> Report:
    policy, target, options = task.policy, task.target, task.options
    found = task.run(explain, policy, target=target, compiled=not options.no_compile)
    return Report(lambda: found.text(color=task.color, all=options.all), found.to_dict())


def _diff(task: Task) -> Report:
    options, other = task.options, task.between
    level = options.level or "equations"
    compiled = other is None and level != "jaxpr" and not options.no_compile
    found = task.inspect(task.policy, compiled=compiled)
    data = {
        "policy": found.policy_name,
        "changes": changes(found.plan),
        "compiled": None if found.compiled is None else dataclasses.asdict(found.compiled),
        "not_compiled": found.not_compiled,
    }
    if other is None:
        more: dict[str, Any] = {"color": task.color, "bookkeeping": options.bookkeeping}
        return Report(lambda: found.diff(level, **more), data)
    plan = task.inspect(other).plan
    return Report(lambda: between(found.plan, plan, level, color=task.color), data)


def _compare(task: Task) -> Report:
    columns, rounds = set(columns_of(task.columns)), task.options.rounds
    is_timed = TIMES & columns and rounds != 0 and task.target is None
    comparison = task.run(
        compare,
        task.rows,
        columns=task.columns,
        reference=task.options.reference,
        rounds=rounds,
        target=task.target,
        progress=task.step,
        # What runs nothing takes shapes.
        on_arrays=bool(ERRORS & columns or is_timed) or task.options.seed is not None,
    )
    return Report(lambda: str(comparison), comparison.to_dict())


def _audit(task: Task) -> Report:
    target = task.target
    result = task.run(audit, task.policy, target=target, doing="tracing and compiling")
    return Report(lambda: result.text(color=task.color), result.to_dict(), result.ok)


def _bisect(task: Task) -> Report:
    tolerance, budget = task.options.tolerance, task.options.budget

    def said(run: Run) -> None:
        verdict = "passes" if run.passed else "fails"
        text = f"run {run.number} of at most {budget}: {verdict}"
        task.progress.say(text, run.number, budget)

    policy = task.policy
    found = task.run(bisect, policy, tolerance, budget=budget, progress=said, on_arrays=True)
    return Report(lambda: str(found), found.to_dict(), found.found)


def _draw(task: Task) -> Report:
    inspection = task.inspect(task.policy)
    task.progress.say("drawing")
    return _saved(task, inspection.draw(boxes=task.options.boxes).save, "")


def _lock(task: Task) -> Report:
    plan = task.inspect(task.policy).plan
    return _saved(task, plan.save, f": {plan!r}")


def _saved(task: Task, save: Callable[[str], None], more: str) -> Report:
    path = task.options.output
    with refusing():
        save(path)
    return Report(lambda: f"wrote {path}{more}", {"written": path})


def _check(task: Task) -> Report:
    options = task.options
    policy = None if options.policy is None else task.policy
    more: dict[str, Any] = {"kwargs": task.kwargs, "target": task.target}
    found: list[Problems] = []
    with task.calling("tracing"):
        if options.plan:
            found.append(plan_problems(task.fn, task.args, options.plan, policy, **more))
        if task.expected:
            found.append(precision_problems(task.fn, task.args, task.expected, policy, **more))
    data = {
        "ok": not any(found),
        "mismatches": [one for problems in found for one in problems.to_dict()["mismatches"]],
        "notes": [note for problems in found for note in problems.notes],
    }
    text = "\n".join(map(str, filter(None, found))) or "as expected"
    if options.plan and found[0]:
        text += "\nif this is meant, save the plan again by precpass lock"
    return Report(lambda: text, data, not any(found))


COMMANDS: dict[str, Callable[[Task], Report]] = {
    "explain": _explain,
    "diff": _diff,
    "compare": _compare,
    "audit": _audit,
    "bisect": _bisect,
    "draw": _draw,
    "lock": _lock,
    "check": _check,
}
