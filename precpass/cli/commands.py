"""What each command of the command line does: one function, from options to an exit status."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from typing import Any

from precpass.api import explain, inspect
from precpass.cli.progress import Progress
from precpass.cli.specs import drawn
from precpass.cli.target import Refused
from precpass.plan import Plan
from precpass.policy import PRESETS, PrecisionPolicy
from precpass.report.audit import audit
from precpass.report.bisect import bisect
from precpass.report.bisection import Run
from precpass.report.compare import compare
from precpass.testing import plan_problems, precision_problems
from precpass.view.diff import between, changes

__all__ = ["COMMANDS", "Task"]

OK, NOT_AS_EXPECTED = 0, 1


@dataclasses.dataclass(frozen=True)
class Task:
    """A command with its function and arguments.

    Attributes:
        options: of the command line.
        fn: the user's function.
        args, kwargs: its arguments.
        policy: the policy; None for the function's own, or the default.
        color: whether texts are coloured; None for a decision by where they go.
        progress: the line that says what is going on.
    """

    options: argparse.Namespace
    fn: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    policy: PrecisionPolicy | str | None
    color: bool | None
    progress: Progress

    def call(self, prepared: Callable[..., Any], *, on_arrays: bool = False) -> Any:
        """The result of a report at the arguments."""
        args, kwargs = self.args, self.kwargs
        if on_arrays:
            args, kwargs = drawn((args, kwargs), self.options.seed)
        return prepared(*args, **kwargs)

    def say(self, text: str, data: Any) -> None:
        """Prints a report as text, or as JSON where that is asked for."""
        print(json.dumps(data, indent=1) if self.options.json else text)


def policy_of(text: str) -> PrecisionPolicy | str:
    """The policy that an option names: a saved plan's file, or as `PrecisionPolicy.parse`."""
    try:
        return Plan.load(text) if text.endswith(".json") else PrecisionPolicy.parse(text)
    except (OSError, ValueError) as error:
        raise Refused(str(error)) from None


def _explain(task: Task) -> int:
    found = task.call(explain(task.fn, task.policy))
    task.say(found.text(color=task.color), found.to_dict())
    return OK


def _diff(task: Task) -> int:
    found = task.call(inspect(task.fn, task.policy))
    level = task.options.level
    if task.options.between is None:
        data = {"policy": found.policy_name, "changes": changes(found.plan)}
        task.say(found.diff(level, color=task.color), data)
        return OK
    if level == "jaxpr":
        raise Refused("--between compares plans: give --level lines or --level equations")
    if task.options.json:
        raise Refused("--between has no JSON: take the diff of each policy")
    other = task.call(inspect(task.fn, policy_of(task.options.between)))
    print(between(found.plan, other.plan, level, color=task.color))
    return OK


def _compare(task: Task) -> int:
    options = task.options
    policies = options.policies.split(";") if options.policies else list(PRESETS)
    rows = [policy_of(text.strip()) for text in policies]

    def said(what: str, done: int, total: int) -> None:
        task.progress.say(f"{what}, {done} of {total}")

    prepared = compare(
        task.fn, rows, reference=options.reference, rounds=options.rounds, progress=said
    )
    found = task.call(prepared, on_arrays=True)
    task.say(str(found), found.to_dict())
    return OK


def _audit(task: Task) -> int:
    found = task.call(audit(task.fn, task.policy))
    task.say(found.text(color=task.color), found.to_dict())
    return OK if found.ok else NOT_AS_EXPECTED


def _bisect(task: Task) -> int:
    options = task.options

    def said(run: Run) -> None:
        task.progress.say(f"bisecting: run {run.number} of at most {options.budget}")

    prepared = bisect(task.fn, task.policy, options.tolerance, budget=options.budget, progress=said)
    found = task.call(prepared, on_arrays=True)
    task.say(str(found), found.to_dict())
    return OK if found.found else NOT_AS_EXPECTED


def _draw(task: Task) -> int:
    picture = task.call(inspect(task.fn, task.policy)).draw(boxes=task.options.boxes)
    picture.save(task.options.output)
    task.say(f"wrote {task.options.output}", {"written": task.options.output})
    return OK


def _lock(task: Task) -> int:
    plan = task.call(inspect(task.fn, task.policy)).plan
    plan.save(task.options.output)
    task.say(f"wrote {task.options.output}: {plan!r}", {"written": task.options.output})
    return OK


def _check(task: Task) -> int:
    options = task.options
    if not options.plan and not options.expect:
        raise Refused("check needs --plan FILE or --expect PATTERN=PRECISION")
    problems: list[str] = []
    if options.plan:
        problems.append(plan_problems(task.fn, task.args, options.plan, task.policy, **task.kwargs))
    if options.expect:
        expected = dict(_expected(text) for text in options.expect)
        found = precision_problems(task.fn, task.args, expected, task.policy, **task.kwargs)
        problems.append(found)
    text = "\n".join(filter(None, problems))
    task.say(text or "as expected", {"ok": not text, "problems": text})
    return NOT_AS_EXPECTED if text else OK


def _expected(text: str) -> tuple[str, str]:
    pattern, equals, precision = text.rpartition("=")
    if not equals:
        raise Refused(f"--expect {text!r}: write PATTERN=PRECISION, such as dot_general=bf16")
    return pattern, precision


COMMANDS: dict[str, tuple[Callable[[Task], int], str]] = {
    "explain": (_explain, "what runs low, what stays wide and why, and advice"),
    "diff": (_diff, "what a policy changes, by source line"),
    "compare": (_compare, "policies side by side: products, memory, time, error"),
    "audit": (_audit, "what XLA runs in another precision than planned"),
    "bisect": (_bisect, "what must stay wide for an error to stay below a tolerance"),
    "draw": (_draw, "a picture (SVG), coloured by precision"),
    "lock": (_lock, "write the plan to a file"),
    "check": (_check, "fail where the plan is not the saved or the expected one"),
}
"""Each command: what it does, and that in words."""
