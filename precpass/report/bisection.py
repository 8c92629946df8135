"""`Bisection`: what must stay wide for a check to pass, with the runs that show it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from precpass.policy import PrecisionPolicy
from precpass.report.places import Place
from precpass.rules import Rule

__all__ = ["Bisection", "Run", "listed"]


@dataclasses.dataclass(frozen=True)
class Run:
    """One program that was run, and what the check said of its output.

    Attributes:
        number: the first one has 1.
        what: what was run, in words.
        rules: the rules that kept something wide; () for a policy as it is.
        low: how many equations were lowered.
        error: the error, where the check is a tolerance.
        passed: whether the check passed.
    """

    number: int
    what: str
    rules: tuple[Rule, ...]
    low: int
    error: float | None
    passed: bool

    def __str__(self) -> str:
        error = "" if self.error is None else f", error {self.error:.3g}"
        verdict = "passes" if self.passed else "fails"
        rules = f" {listed(self.rules)}" if 0 < len(self.rules) <= 3 else ""
        return f"run {self.number}: {self.what}{rules}: {self.low} low, {verdict}{error}"

    def to_dict(self) -> dict[str, Any]:
        """The run as values that `json.dumps` takes; an error that is not finite is text."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        error = self.error if self.error is None or math.isfinite(self.error) else str(self.error)
        return {**fields, "rules": [repr(rule) for rule in self.rules], "error": error}


@dataclasses.dataclass(frozen=True)
class Bisection:
    """What must stay wide under a policy for a check to pass.

    Attributes:
        policy: the policy with `rules`; as it was where nothing was found.
        rules: what must stay wide: () where the policy passes as it is.
        found: whether the check passes under `policy`.
        minimal: whether, as was run, it fails without any one of `rules`.
        verdict: the result in a sentence.
        kept: for each rule the lines that it keeps wide.
        runs: the evidence, in the order in which it was found.
        tolerance: that of the check, where it is a number.
    """

    policy: PrecisionPolicy
    rules: tuple[Rule, ...]
    found: bool
    minimal: bool
    verdict: str
    kept: tuple[tuple[Place, ...], ...]
    runs: tuple[Run, ...]
    tolerance: float | None = None

    def __str__(self) -> str:
        lines = [self.verdict]
        for rule, places in zip(self.rules, self.kept, strict=True):
            lines.append(f"  {rule!r}")
            lines += [f"    {place}" for place in places]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The result as values that `json.dumps` takes; rules and policy as they print."""
        kept = [
            {
                "rule": repr(rule),
                "lines": [{**dataclasses.asdict(place), "text": place.text} for place in places],
            }
            for rule, places in zip(self.rules, self.kept, strict=True)
        ]
        return {
            "policy": repr(self.policy),
            "found": self.found,
            "minimal": self.minimal,
            "verdict": self.verdict,
            "tolerance": self.tolerance,
            "kept": kept,
            "runs": [run.to_dict() for run in self.runs],
        }


def listed(rules: Sequence[Rule]) -> str:
    """Rules in brackets, as they print; nothing for none."""
    return f"({', '.join(map(repr, rules))})" if rules else ""
