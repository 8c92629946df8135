"""`Bisection`: the equations that must stay in float32, with the runs that show it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from precpass.policy.policy import PrecisionPolicy
from precpass.policy.rules import Rule
from precpass.report.bisect.places import Place, shown
from precpass.view.page import Cell, as_html, folded, page, sheet
from precpass.view.text import Line, plain

__all__ = ["Bisection", "Run", "listed"]


@dataclasses.dataclass(frozen=True)
class Run:
    """One program that `bisect` ran, and the check's answer for its output.

    Attributes:
        number: its number, from 1 on.
        what: the program in words.
        rules: the rules that kept equations in float32; () for an unchanged policy.
        low: the number of equations that were lowered, or whose results were stored in 16 bits.
        error: the error, if the check is a tolerance.
        passed: whether the check passed.
        stopped: why a loop was stopped, or "". The check is not asked then, and has not passed.
        worst: the result that has the error, such as "output[1]" or "blocks[0].bias" of an updated
            module; "" if there is only one result.
    """

    number: int
    what: str
    rules: tuple[Rule, ...]
    low: int
    error: float | None
    passed: bool
    stopped: str = ""
    worst: str = ""

    def __str__(self) -> str:
        _, what, rules, low, error, verdict = self.cells()
        rules = f" {rules}" if 0 < len(self.rules) <= 3 else ""
        error = f", error {error}" if error else ""
        return f"run {self.number}: {what}{rules}: {low} low, {verdict}{error}"

    def cells(self) -> list[str]:
        """Return a table row: number, what, rules, equations lowered, error, and the check."""
        error = "" if self.error is None else f"{self.error:.3g}"
        verdict = self.stopped or ("passes" if self.passed else "fails")
        return [str(self.number), self.what, listed(self.rules), str(self.low), error, verdict]

    def to_dict(self) -> dict[str, Any]:
        """Return the run as JSON values; an error that is not finite is text."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        error = self.error if self.error is None or math.isfinite(self.error) else str(self.error)
        return {**fields, "rules": [repr(rule) for rule in self.rules], "error": error}


@dataclasses.dataclass(frozen=True)
class Bisection:
    """The result of `bisect`: rules for the equations that must stay in float32.

    Attributes:
        policy: the policy with `rules`; unchanged if no rules were found.
        rules: the rules for the equations that must stay in float32; () if the policy passes
            without more.
        found: whether the check passes under `policy`.
        minimal: whether runs have shown that it fails without any one of `rules`.
        verdict: the result in a sentence.
        kept: for each rule the lines that it keeps in float32.
        runs: the runs, in their order.
        tolerance: the check's, if it is a number.
        notes: remarks on the rules.
    """

    policy: PrecisionPolicy
    rules: tuple[Rule, ...]
    found: bool
    minimal: bool
    verdict: str
    kept: tuple[tuple[Place, ...], ...]
    runs: tuple[Run, ...]
    tolerance: float | None = None
    notes: tuple[str, ...] = ()

    def lines(self) -> list[Line]:
        """Return the rules as styled text, each with the lines that it keeps in float32.

        Rules for the same lines, such as those of equal layers, are listed together.
        """
        together: dict[Any, list[tuple[Rule, tuple[Place, ...]]]] = {}
        for rule, places in zip(self.rules, self.kept, strict=True):
            sources = tuple(dict.fromkeys(place.source for place in places))
            together.setdefault(sources, []).append((rule, places))
        lines: list[Line] = []
        for sources, rules in together.items():
            lines += [[("  ", ""), (repr(rule), "wide")] for rule, _ in rules]
            inside = [place for _, places in rules for place in places]
            for source in sources:
                here = [place for place in inside if place.source == source]
                lines.append([("    ", ""), *shown(here, scopes=len(rules) == 1)])
        return [*lines, *([(note, "reason")] for note in self.notes)]

    def __str__(self) -> str:
        return plain([[(self.verdict, "")], *self.lines()])

    def __repr__(self) -> str:
        return f"<Bisection: {self.verdict}>"

    def _repr_html_(self) -> str:
        heads = ["run", "what", "rules", "low", "error", "check"]
        cells = [list(map(Cell, run.cells())) for run in self.runs]
        parts = folded(self.verdict, as_html(self.lines()), is_open=True)
        return page(parts + folded("runs", sheet(heads, cells, texts=(1, 2, 5))))

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values; rules and policy as they print."""
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
            "notes": list(self.notes),
            "kept": kept,
            "runs": [run.to_dict() for run in self.runs],
        }


def listed(rules: Sequence[Rule]) -> str:
    """Rules in brackets, as they print; nothing for none."""
    return f"({', '.join(map(repr, rules))})" if rules else ""
