"""The commands of the command line: each is one function from options to a report."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from precpass.api import explain, inspect
from precpass.cli.errors import has_users_lines
from precpass.cli.files import refusing
from precpass.cli.inputs import Inputs
from precpass.cli.specs import drawn, has_shapes
from precpass.cli.target import Refused, unbound
from precpass.report.audit.audit import audit
from precpass.report.bisect.bisect import bisect
from precpass.report.bisect.bisection import Run
from precpass.report.compare.compare import compare
from precpass.report.compare.rows import ERRORS, TIMES, columns_of
from precpass.testing import Problems, plan_problems, precision_problems
from precpass.view.diff import between, changes
from precpass.view.inspection import Inspection
from precpass.view.progress import Progress

__all__ = ["COMMANDS", "Report", "Task", "rehearse", "write"]

OK, NOT_AS_EXPECTED = 0, 1


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a command.

    Attributes:
        text: returns it in words, coloured if standard output is a terminal.
        data: the result as JSON values.
        status: the exit status.
    """

    text: Callable[[], str]
    data: Any
    status: int = OK


@dataclasses.dataclass(frozen=True)
class Task:
    """A command with its function and arguments.

    Attributes:
        options: the options of the command line.
        inputs: what they say.
        fn: the user's function.
        args, kwargs: its arguments.
        progress: shows what is going on.
    """

    options: argparse.Namespace
    inputs: Inputs
    fn: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    progress: Progress

    @property
    def color(self) -> bool | None:
        """Whether texts are coloured; None colours them on a terminal."""
        auto = None if self.options.output is None else False
        return {"auto": auto, "always": True, "never": False}[self.options.color]

    def call(
        self, prepared: Callable[..., Any], *, doing: str = "tracing", on_arrays: bool = False
    ) -> Any:
        """The result of a report at the arguments."""
        args, kwargs = self.args, self.kwargs
        if on_arrays:
            if self.options.seed is not None and not has_shapes((args, kwargs)):
                raise Refused("--seed is of what is drawn for shapes, and there are none in --args")
            with refusing():
                args, kwargs = drawn((args, kwargs), self.options.seed or 0)
        with self.calling(doing):
            return prepared(*args, **kwargs)

    @contextlib.contextmanager
    def calling(self, doing: str) -> Generator[None]:
        """A context around a call of the function that refuses arguments it does not take."""
        self.progress.say(doing)
        try:
            yield
        except TypeError as error:
            why = "" if has_users_lines(error) else unbound(self.fn, self.args, self.kwargs)
            if not why:
                raise
            raise Refused(why) from None


def _inspect(task: Task, policy: Any, *, compiled: bool = False) -> Callable[..., Inspection]:
    with refusing():
        return inspect(task.fn, policy, target=task.inputs.target, compiled=compiled)


def _explain(task: Task) -> Report:
    with refusing():
        compiled = not task.options.no_compile
        prepared = explain(
            task.fn, task.inputs.policy, target=task.inputs.target, compiled=compiled
        )
    explanation = task.call(prepared)
    return Report(
        lambda: explanation.text(color=task.color, all=task.options.all), explanation.to_dict()
    )


def _diff(task: Task) -> Report:
    level = task.options.level or "equations"
    shows_compiled = task.inputs.between is None and level != "jaxpr"
    compiled = shows_compiled and not task.options.no_compile
    inspection = task.call(_inspect(task, task.inputs.policy, compiled=compiled))
    made = inspection.compiled
    data = {
        "policy": inspection.policy_name,
        "changes": changes(inspection.plan),
        "compiled": None if made is None else dataclasses.asdict(made),
        "not_compiled": inspection.not_compiled,
    }
    if task.inputs.between is None:
        more = {"color": task.color, "bookkeeping": task.options.bookkeeping}
        return Report(lambda: inspection.diff(level, **more), data)
    other = task.call(_inspect(task, task.inputs.between))
    return Report(lambda: between(inspection.plan, other.plan, level, color=task.color), data)


def _comparing(task: Task) -> Callable[..., Any]:
    options = task.options
    with refusing():
        return compare(
            task.fn,
            task.inputs.rows,
            columns=task.inputs.columns,
            reference=options.reference,
            rounds=options.rounds,
            target=task.inputs.target,
            progress=_steps(task),
        )


def _compare(task: Task) -> Report:
    columns = {*columns_of(task.inputs.columns)}
    is_timed = TIMES & columns and task.options.rounds != 0 and task.inputs.target is None
    on_arrays = bool(ERRORS & columns or is_timed) or task.options.seed is not None
    comparison = task.call(_comparing(task), doing="tracing", on_arrays=on_arrays)
    return Report(lambda: str(comparison), comparison.to_dict())


def _steps(task: Task) -> Callable[[str, int, int], None]:
    def said(what: str, done: int, total: int) -> None:
        task.progress.say(f"{what}, step {done + 1} of {total}", done, total)

    return said


def _audit(task: Task) -> Report:
    with refusing():
        prepared = audit(task.fn, task.inputs.policy, target=task.inputs.target)
    result = task.call(prepared, doing="tracing and compiling")
    status = OK if result.ok else NOT_AS_EXPECTED
    return Report(lambda: result.text(color=task.color), result.to_dict(), status)


def _bisecting(task: Task) -> Callable[..., Any]:
    budget = task.options.budget

    def said(run: Run) -> None:
        verdict = "passes" if run.passed else "fails"
        text = f"run {run.number} of at most {budget}: {verdict}"
        task.progress.say(text, run.number, budget)

    with refusing():
        return bisect(
            task.fn, task.inputs.policy, task.options.tolerance, budget=budget, progress=said
        )


def _bisect(task: Task) -> Report:
    bisection = task.call(_bisecting(task), on_arrays=True)
    status = OK if bisection.found else NOT_AS_EXPECTED
    return Report(lambda: str(bisection), bisection.to_dict(), status)


def _draw(task: Task) -> Report:
    inspection = task.call(_inspect(task, task.inputs.policy))
    task.progress.say("drawing")
    return _wrote(task, inspection.draw(boxes=task.options.boxes).save, "")


def _lock(task: Task) -> Report:
    plan = task.call(_inspect(task, task.inputs.policy)).plan
    return _wrote(task, plan.save, f": {plan!r}")


def _wrote(task: Task, save: Callable[[str], None], more: str) -> Report:
    path = task.options.output
    with refusing():
        save(path)
    return Report(lambda: f"wrote {path}{more}", {"written": path})


def write(report: str, path: str) -> None:
    """Writes a report to a file.

    Raises:
        Refused: if it cannot be written.
    """
    with refusing(f"--output {path}"):
        Path(path).write_text(report + "\n", encoding="utf-8")


def _check(task: Task) -> Report:
    options, expected = task.options, task.inputs.expected
    all_problems: list[Problems] = []
    call = task.fn, task.args
    more = {"kwargs": task.kwargs, "target": task.inputs.target}
    policy = None if options.policy is None else task.inputs.policy
    if options.plan is not None:
        with task.calling("tracing"):
            all_problems.append(plan_problems(*call, options.plan, policy, **more))
    if expected:
        with task.calling("tracing"):
            all_problems.append(precision_problems(*call, expected, policy, **more))
    data = {
        "ok": not any(all_problems),
        "mismatches": [
            one for problems in all_problems for one in problems.to_dict()["mismatches"]
        ],
        "notes": [note for problems in all_problems for note in problems.notes],
    }
    text = "\n".join(map(str, filter(None, all_problems))) or "as expected"
    return Report(lambda: text, data, NOT_AS_EXPECTED if any(all_problems) else OK)


_PREPARED: dict[str, Callable[[Task], Callable[..., Any]]] = {
    "compare": _comparing,
    "bisect": _bisecting,
}
"""The commands whose reports judge their options when they are prepared."""


def rehearse(options: argparse.Namespace, inputs: Inputs, progress: Progress) -> None:
    """Prepares a command's report for a function that stands in for the user's.

    Raises:
        Refused: for options that the report does not take.
    """

    def stand_in(*args: Any) -> Any:
        return args

    if (prepared := _PREPARED.get(options.command)) is not None:
        prepared(Task(options, inputs, stand_in, [], {}, progress))


COMMANDS: dict[str, tuple[Callable[[Task], Report], str]] = {
    "explain": (_explain, "what runs in low precision, what does not and why, and what to change"),
    "diff": (_diff, "what a policy changes, by module and line"),
    "compare": (_compare, "policies side by side: products, memory, time, error"),
    "audit": (_audit, "what XLA runs in another precision than planned"),
    "bisect": (_bisect, "what must stay in float32 for an error below a tolerance"),
    "draw": (_draw, "a picture (SVG), coloured by precision"),
    "lock": (_lock, "write the plan to a file, for --plan"),
    "check": (_check, "fail where the plan is not the saved or the expected one"),
}
"""For each command its function and its description."""
