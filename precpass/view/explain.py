"""What a policy does to a program, what it leaves wide and why, and what to do about it."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from precpass.graph import NOMINAL_SIZE, Graph
from precpass.jaxpr import Source
from precpass.measure import LOW_FORMATS, Counts, count
from precpass.opkinds import OpKind
from precpass.plan import Action, Decision, Plan
from precpass.precision import Precision
from precpass.residuals import has_backward, kept_bytes
from precpass.view.advice import Advice, advice
from precpass.view.rows import Row, rows
from precpass.view.text import Line, as_html, heading, page, rendered

__all__ = ["Explanation", "Verdict", "Wide", "explained"]

_REMEDIES = (
    (r"keep\(", "leave the keep region, or narrow it"),
    (r"Rule\(", "change that rule of the policy"),
    (r"the user's own precision", "make all its operands float32, or cast them yourself"),
    (r"its operands have different types", "find what promotes one of them and cast it"),
    (r"the user's order", "leave the order out, or make it by a Rule"),
    (r".*reaches|.*vanishes", "scale the values, or use bfloat16, which has float32's range"),
    (r".*integers up to", "keep it so: positions and counts need the digits"),
    (r"an elementwise product", "nothing to gain: it sums over nothing"),
    (r"of an auto_mixed function", "change the policy of that function"),
    (r"decides whether a loop", "nothing: a predicate in low precision loops wrongly often"),
    (r".*is not in the policy's retypes", "add the format by policy.with_retypes(...)"),
    (r"follows random bits", "nothing: samplers lose their digits in low precision"),
    (r"applies the user's own", "write the function outside of .apply"),
    (r"precpass is switched off", "leave use_policy(None), and unset PRECPASS"),
    (r"accumulates in a loop", "nothing: a carry that adds up loses what it adds"),
    (r"no floating-point values", "nothing: it has no floating-point values"),
    (r"made of constants alone", "nothing: it is computed once"),
    (r"\w+: \w+ in f32", "ask for a low format by Custom({...}) or a Rule"),
)
"""How to change what a reason says, by how the reason begins."""


def remedy(reason: str) -> str:
    """How a user changes a decision of this reason."""
    found = (text for pattern, text in _REMEDIES if re.match(pattern, reason))
    return next(found, "order another precision by a Rule")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A policy's effect in figures.

    Attributes:
        before, after: what the two programs compute (`precpass.measure.Counts`): products,
            casts, FLOPs and bytes by format.
        narrowed: the products that the policy runs in float32, and the program in float64.
        left_wide: the products that stay as they were written, and are not low.
        kept_before, kept_after: the bytes that the forward pass keeps for the backward
            pass (`precpass.residuals`); 0 in a program without one.
    """

    before: Counts
    after: Counts
    narrowed: int
    left_wide: int
    kept_before: float
    kept_after: float

    def lines(self) -> Iterator[Line]:
        """The figures in words."""
        after = self.after
        yield [
            (f"{after.low} of {after.products} products low", "low"),
            (f", {self.narrowed} narrowed to f32" if self.narrowed else "", "low"),
            (f", {self.left_wide} left wide", "wide" if self.left_wide else ""),
            (f"; {after.low_flops:.1%} of the FLOPs in low precision", ""),
        ]
        casts, made = after.casts - self.before.casts, after.cast_bytes - self.before.cast_bytes
        yield [
            (f"{_size(after.low_bytes)} held low", ""),
            (f"; {abs(casts)} casts {'more' if casts >= 0 else 'fewer'} than written", "cast"),
            (f", which make {_size(abs(made))} {'more' if made >= 0 else 'less'}", ""),
        ]
        if self.kept_before or self.kept_after:
            yield [
                (f"kept for the backward pass: {_size(self.kept_after)}", ""),
                (f" ({_size(self.kept_before)} as written)", "reason"),
            ]


@dataclasses.dataclass(frozen=True)
class Wide:
    """Equal products that a policy leaves wide.

    Attributes:
        source: the user's line.
        scope: the name scopes around them.
        what: primitive, operands and results.
        reason: why they stay wide.
        remedy: how to change it.
        times: the number of equations.
    """

    source: Source
    scope: str
    what: str
    reason: str
    remedy: str
    times: int


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a policy does to a program, in words and figures.

    Attributes:
        name: the function's.
        policy: the policy's name.
        verdict: the figures.
        wide: the products that stay wide, those of one line together.
        others: (kind, reason, number) of all other equations that stay as written.
        unmatched: the rules that matched no equation.
        notes: what the user should know.
        advice: what the graph suggests, and about how many equations.
    """

    name: str
    policy: str
    verdict: Verdict
    wide: tuple[Wide, ...]
    others: tuple[tuple[str, str, int], ...]
    unmatched: tuple[str, ...]
    notes: tuple[str, ...]
    advice: tuple[tuple[Advice, int], ...]

    def lines(self) -> list[Line]:
        """The explanation as styled text."""
        return list(self._lines())

    def _lines(self) -> Iterator[Line]:
        yield [(f"{self.name} under {self.policy}", "where")]
        yield from ([("  ", ""), *line] for line in self.verdict.lines())
        if self.wide:
            yield [("products left wide", "frame")]
        for wide in self.wide:
            yield [("  ", ""), *heading(wide.source)]
            times = f" ({wide.times} times)" if wide.times > 1 else ""
            scope = f" in {wide.scope}" if wide.scope else ""
            yield [(f"    {wide.what}{scope}{times}: ", ""), (wide.reason, "wide")]
            yield [(f"      to change it: {wide.remedy}", "reason")]
        if self.others:
            yield [("all else that stays as written", "frame")]
        for kind, reason, n in self.others:
            yield [(f"  {n} {kind.replace('_', ' ')}: ", ""), (reason, "reason")]
        if self.unmatched:
            yield [("rules that matched no equation", "frame")]
        yield from ([(f"  {rule}", "wide")] for rule in self.unmatched)
        if self.notes:
            yield [("notes", "frame")]
        yield from ([(f"  {note}", "")] for note in self.notes)
        if self.advice:
            yield [("advice", "frame")]
        for item, n in self.advice:
            yield [("  ", ""), *heading(item.source)]
            yield [(f"    {item.text}{f' ({n} times)' if n > 1 else ''}", "")]

    def text(self, *, color: bool | None = None) -> str:
        """The explanation as text, coloured as `Inspection.diff` is."""
        return rendered(self.lines(), color)

    def to_dict(self) -> dict[str, Any]:
        """The explanation as values that JSON has."""
        found = dataclasses.asdict(self)
        found["verdict"]["low_flops"] = self.verdict.after.low_flops
        found["advice"] = [
            {"source": item.source.__dict__, "text": item.text, "times": n}
            for item, n in self.advice
        ]
        return found

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return page(as_html(self.lines()))


def explained(
    before: Any,
    plan: Plan,
    after: Any,
    decided: dict[int, Decision],
    name: str,
    policy: str,
) -> Explanation:
    """The explanation of a program.

    Args:
        before: its jaxpr.
        plan: its plan, made by `inspect`.
        after: the rewritten jaxpr.
        decided: the decision for each equation of `before`, by the equation's identity.
        name: the function's.
        policy: the policy's.
    """
    found = list(rows(plan))
    wide = tuple(_wide(found))
    narrowed = sum(_is_product(r) and r.decision.compute is Precision.F32 for r in _lowered(found))
    kept = (kept_bytes(before), kept_bytes(after)) if has_backward(before) else (0.0, 0.0)
    return Explanation(
        name,
        policy,
        Verdict(count(before), count(after), narrowed, sum(w.times for w in wide), *kept),
        wide,
        tuple(_others(found)),
        tuple(map(repr, plan.unmatched)),
        (*plan.notes, *_assumptions(found)),
        tuple(advice(Graph.build(before), decided)),
    )


def _assumptions(found: list[Row]) -> Iterator[str]:
    """What the figures take for granted."""
    bodies = [body for row in found for body in row.site.bodies]
    if any(body.trips is None for body in bodies):
        yield f"figures: {NOMINAL_SIZE} trips of each loop whose number only run time knows"
    values = (v for row in found for v in (*row.site.operands, *row.site.results))
    if any(isinstance(d, str) for value in values for d in value.shape):
        yield f"figures: {NOMINAL_SIZE} for each symbolic dimension"
    if any(row.site.primitive == "cond" for row in found):
        yield "figures: all branches of a cond count, though one of them runs"


def _lowered(found: list[Row]) -> Iterator[Row]:
    return (row for row in found if row.decision.action is Action.LOWER)


def _is_product(row: Row) -> bool:
    return row.decision.kind is OpKind.COMPUTE and row.decision.compute is not None


def _stays_wide(row: Row) -> bool:
    lowered = row.decision.action is Action.LOWER
    sums = not row.decision.reason.startswith("an elementwise product")
    is_low = all(operand.dtype in LOW_FORMATS for operand in row.site.operands[:2])
    return _is_product(row) and sums and not lowered and not is_low


def _wide(found: list[Row]) -> Iterator[Wide]:
    counts: Counter[tuple[Source, str, str, str]] = Counter()
    for row in found:
        if _stays_wide(row):
            operands, results = (
                " ".join(map(str, v)) for v in (row.site.operands, row.site.results)
            )
            what = f"{row.site.primitive} {operands} -> {results}"
            counts[row.site.source, row.scope, what, row.decision.reason] += 1
    for (source, scope, what, reason), n in counts.items():
        yield Wide(source, scope, what, reason, remedy(reason), n)


def _others(found: list[Row]) -> Iterator[tuple[str, str, int]]:
    kept = [
        row.decision for row in found if row.decision.action is Action.KEEP and not _stays_wide(row)
    ]
    counts = Counter((str(d.kind), d.reason) for d in kept if d.compute is not None)
    for (kind, reason), n in counts.most_common():
        yield kind, reason, n


def _size(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} bytes"
