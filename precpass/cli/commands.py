"""The commands of the command line: each is one function from options to a report."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Generator
from typing import Any

from precpass.api import explain, inspect
from precpass.cli.errors import has_users_lines
from precpass.cli.progress import Progress
from precpass.cli.specs import drawn, has_shapes
from precpass.cli.target import Refused, unbound
from precpass.devices.targets import target_of
from precpass.plan.plan import Plan
from precpass.policy.policy import PRESETS, PrecisionPolicy
from precpass.report.audit.audit import audit
from precpass.report.bisect.bisect import bisect
from precpass.report.bisect.bisection import Run
from precpass.report.compare.compare import compare
from precpass.report.compare.profile import DEVICES, profile
from precpass.testing import Problems, plan_problems, precision_problems
from precpass.view.diff import between, changes
from precpass.view.inspection import Inspection

__all__ = ["COMMANDS", "Report", "Task", "policy_of"]

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
        fn: the user's function.
        args, kwargs: its arguments.
        policy: the policy; None for the function's own, or the default.
        progress: shows what is going on.
    """

    options: argparse.Namespace
    fn: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    policy: PrecisionPolicy | str | None
    progress: Progress

    @property
    def color(self) -> bool | None:
        """Whether texts are coloured; None colours them on a terminal."""
        return {"auto": None, "always": True, "never": False}[self.options.color]

    def call(
        self, prepared: Callable[..., Any], *, doing: str = "tracing", on_arrays: bool = False
    ) -> Any:
        """The result of a report at the arguments."""
        args, kwargs = self.args, self.kwargs
        if on_arrays:
            if self.options.seed is not None and not has_shapes((args, kwargs)):
                raise Refused("--seed is of what is drawn for shapes, and there are none in --args")
            with _refusing():
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


def policy_of(text: str) -> PrecisionPolicy | str:
    """The policy that an option names: a saved plan's file, or as `PrecisionPolicy.parse`."""
    with _refusing():
        return Plan.load(text) if text.endswith(".json") else PrecisionPolicy.parse(text)


@contextlib.contextmanager
def _refusing() -> Generator[None]:
    """A context in which every error is a refusal of the user's input."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise Refused(str(error)) from None


def _inspect(task: Task, policy: PrecisionPolicy | str | None) -> Callable[..., Inspection]:
    with _refusing():
        return inspect(task.fn, policy, target=task.options.device)


def _explain(task: Task) -> Report:
    with _refusing():
        prepared = explain(task.fn, task.policy, target=task.options.device)
    explanation = task.call(prepared)
    return Report(lambda: explanation.text(color=task.color), explanation.to_dict())


def _diff(task: Task) -> Report:
    options = task.options
    level = options.level or "equations"
    inspection = task.call(_inspect(task, task.policy))
    data = {"policy": inspection.policy_name, "changes": changes(inspection.plan)}
    if options.between is None:
        more = {"color": task.color, "bookkeeping": options.bookkeeping}
        return Report(lambda: inspection.diff(level, **more), data)
    other = task.call(_inspect(task, policy_of(options.between)))
    return Report(lambda: between(inspection.plan, other.plan, level, color=task.color), data)


def _compare(task: Task) -> Report:
    options = task.options
    with _refusing():
        prepared = compare(
            task.fn,
            _rows(task),
            reference=options.reference,
            rounds=options.rounds,
            target=options.device,
            progress=_steps(task),
        )
    comparison = task.call(prepared, doing="the reference", on_arrays=True)
    return Report(lambda: str(comparison), comparison.to_dict())


def _profile(task: Task) -> Report:
    options = task.options
    with _refusing():
        device_names = options.devices
        devices = (
            DEVICES
            if device_names is None
            else [*filter(None, map(str.strip, device_names.split(",")))]
        )
        prepared = profile(
            task.fn,
            _rows(task),
            devices=devices,
            rounds=options.rounds,
            target=options.device,
            progress=_steps(task),
        )
    # Without rounds nothing runs, so shapes suffice.
    runs = options.rounds != 0 and options.device is None
    on_arrays = runs or options.seed is not None
    profiled = task.call(prepared, doing="the float32 program", on_arrays=on_arrays)
    return Report(lambda: str(profiled), profiled.to_dict())


def _rows(task: Task) -> list[tuple[str, PrecisionPolicy | str]]:
    """The policies that are compared, by their texts."""
    policy_texts = task.options.policies
    texts = PRESETS if policy_texts is None else [text.strip() for text in policy_texts.split(";")]
    return [(text, policy_of(text)) for text in texts]


def _steps(task: Task) -> Callable[[str, int, int], None]:
    def said(what: str, done: int, total: int) -> None:
        task.progress.say(f"{what}, step {done + 1} of {total}", done, total)

    return said


def _audit(task: Task) -> Report:
    with _refusing():
        prepared = audit(task.fn, task.policy, target=task.options.device)
    result = task.call(prepared, doing="tracing and compiling")
    status = OK if result.ok else NOT_AS_EXPECTED
    return Report(lambda: result.text(color=task.color), result.to_dict(), status)


def _bisect(task: Task) -> Report:
    budget = task.options.budget

    def said(run: Run) -> None:
        verdict = "passes" if run.passed else "fails"
        text = f"run {run.number} of at most {budget}: {verdict}"
        task.progress.say(text, run.number, budget)

    with _refusing():
        prepared = bisect(
            task.fn, task.policy, task.options.tolerance, budget=budget, progress=said
        )
    bisection = task.call(prepared, on_arrays=True)
    status = OK if bisection.found else NOT_AS_EXPECTED
    return Report(lambda: str(bisection), bisection.to_dict(), status)


def _draw(task: Task) -> Report:
    inspection = task.call(_inspect(task, task.policy))
    task.progress.say("drawing")
    return _wrote(task, inspection.draw(boxes=task.options.boxes).save, "")


def _lock(task: Task) -> Report:
    plan = task.call(_inspect(task, task.policy)).plan
    return _wrote(task, plan.save, f": {plan!r}")


def _wrote(task: Task, save: Callable[[str], None], more: str) -> Report:
    path = task.options.output
    with _refusing():
        save(path)
    return Report(lambda: f"wrote {path}{more}", {"written": path})


def _check(task: Task) -> Report:
    options = task.options
    all_problems: list[Problems] = []
    call = task.fn, task.args
    with _refusing():
        more = {"kwargs": task.kwargs, "target": target_of(options.device)}
    if options.plan:
        with _refusing():
            # The file is read here first, so that an error of the trace is not taken for one of it.
            Plan.load(options.plan)
        with task.calling("tracing"):
            all_problems.append(plan_problems(*call, options.plan, task.policy, **more))
    if options.expect:
        expected = _expected(options.expect)
        with task.calling("tracing"):
            all_problems.append(precision_problems(*call, expected, task.policy, **more))
    data = {
        "ok": not any(all_problems),
        "mismatches": [
            one for problems in all_problems for one in problems.to_dict()["mismatches"]
        ],
        "notes": [note for problems in all_problems for note in problems.notes],
    }
    text = "\n".join(map(str, filter(None, all_problems))) or "as expected"
    return Report(lambda: text, data, NOT_AS_EXPECTED if any(all_problems) else OK)


def _expected(texts: list[str]) -> dict[str, Any]:
    """The patterns, each with the expected precision or numbers of equations."""
    pairs = list(map(_expectation, texts))
    if len(pairs) != len(dict(pairs)):
        raise Refused(f"--expect {' '.join(texts)}: a pattern is given twice")
    return dict(pairs)


def _expectation(text: str) -> tuple[str, Any]:
    pattern, equals, wanted = text.rpartition("=")
    if not equals or not pattern or not wanted:
        raise Refused(
            f"--expect {text!r}: write PATTERN=PRECISION, such as dot_general=bf16, or with "
            "numbers, dot_general=bf16*23,f32*1"
        )
    if "*" not in wanted:
        return pattern, wanted
    counts = [part.partition("*") for part in wanted.replace(" ", "").split(",")]
    if not all(number.isdecimal() for _, _, number in counts):
        raise Refused(f"--expect {text!r}: write a number for each precision, bf16*23,f32*1")
    return pattern, {precision: int(number) for precision, _, number in counts}


COMMANDS: dict[str, tuple[Callable[[Task], Report], str]] = {
    "explain": (_explain, "what runs low, what stays wide and why, and advice"),
    "diff": (_diff, "what a policy changes, by source line"),
    "compare": (_compare, "policies side by side: products, memory, time, error"),
    "profile": (_profile, "what policies take, and gain on other devices by their peaks"),
    "audit": (_audit, "what XLA runs in another precision than planned"),
    "bisect": (_bisect, "what must stay wide for an error below a tolerance"),
    "draw": (_draw, "a picture (SVG), coloured by precision"),
    "lock": (_lock, "write the plan to a file"),
    "check": (_check, "fail where the plan is not the saved or the expected one"),
}
"""For each command its function and its description."""
