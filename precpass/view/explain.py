"""`explain`: what a policy does to a program, what stays in float32, and how to change that."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.analysis.liveness import unread
from precpass.analysis.residuals import kept_bytes
from precpass.analysis.sizes import NOMINAL_SIZE
from precpass.jaxpr import Source
from precpass.measure.counts import LOW_FORMATS, Counts, count
from precpass.plan import reasons
from precpass.plan.plan import Action, Decision, Plan
from precpass.plan.reasons import Reason
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind
from precpass.units import counted, sized
from precpass.view.advice import Advice, advice
from precpass.view.compiled import Compiled, compiled_lines
from precpass.view.explain_page import explanation_page
from precpass.view.rows import Row, alike, rows
from precpass.view.text import Line, heading, rendered, titled
from precpass.view.wide import Wide

__all__ = ["Explanation", "Verdict", "Wide", "explained"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The figures of an `Explanation`: what the policy changes in numbers.

    Attributes:
        before, after: the counts of both programs (`precpass.measure.counts.Counts`): matrix
            products, casts, FLOPs and bytes by format.
        narrowed: the matrix products that are float64 in the program and float32 under the policy.
        left_wide: the matrix products that keep their precision and are not in low precision.
        unread_casts: the casts in the rewritten program that only its derivatives read; XLA drops
            them if you take none.
        swapped: the matrix products whose operands are exchanged to replace transposes.
        stored: the results that are rounded where they are defined and stored in 16 bits, in
            whatever precision they are computed.
        crossed: the operands and results of loops, branches and calls with a 16-bit or 8-bit copy.
        crossed_on_8: those of them whose copy has 8 bits, and a scale.
        kept_before, kept_after: the bytes that the forward pass saves for the backward pass
            (`precpass.analysis.residuals`); 0 in a program without one.
    """

    before: Counts
    after: Counts
    narrowed: int
    left_wide: int
    unread_casts: int
    swapped: int
    stored: int
    crossed: int
    crossed_on_8: int
    kept_before: float
    kept_after: float

    def lines(self) -> Iterator[Line]:
        """Yield the figures in words, as styled text."""
        after = self.after
        yield [
            (f"{after.low} of {after.products} products low", "low"),
            (f", {self.narrowed} narrowed to f32" if self.narrowed else "", "low"),
            (f", {self.left_wide} left wide", "wide" if self.left_wide else ""),
            (f"; {after.low_flops:.1%} of the FLOPs in low precision", ""),
        ]
        casts, bytes_added = (
            after.casts - self.before.casts,
            after.cast_bytes - self.before.cast_bytes,
        )
        changed = f"{counted(abs(casts), 'cast')} {'more' if casts >= 0 else 'fewer'}"
        yield [
            (f"{sized(after.low_bytes)} in 16 bits", ""),
            (f"; {changed} than written", "cast"),
            (
                f", which make {sized(abs(bytes_added))} {'more' if bytes_added >= 0 else 'less'}",
                "",
            ),
            (f"; {self.unread_casts} for derivatives of it alone" if self.unread_casts else "", ""),
        ]
        if self.swapped:
            what = f"operands of {counted(self.swapped, 'product')} exchanged"
            yield [(f"{what}, for the transposes behind", "")]
        if self.stored or self.crossed:
            eight = self.crossed_on_8
            borders = f"{counted(self.crossed - eight, 'value')} on 16 bits"
            borders += f" and {eight} on 8 bits" if eight else ""
            borders += " across borders"
            stored = f"{counted(self.stored, 'result')} stored low"
            yield [(f"{stored}, {borders}", "low")]
        if self.kept_before or self.kept_after:
            yield [
                (f"kept for the backward pass: {sized(self.kept_after)}", ""),
                (f" ({sized(self.kept_before)} as written)", "reason"),
            ]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a policy does to a program, in words and figures. `print` shows it.

    Attributes:
        name: the function's name.
        policy: the policy's name.
        device: JAX's name for the device that it is planned for; "" for a CPU.
        verdict: the figures.
        wide: the matrix products that stay in float32, grouped by source line.
        multiplied: (precision, reason, number) of the matrix products for which a way to multiply
            was asked (`Precision.is_multiplication`), whether they have it or not.
        others: (kind, reason, number) of all other equations whose computation and storage do not
            change.
        unmatched: the rules that matched no equation.
        notes: the plan's warnings.
        advice: suggestions from the dataflow graph, each with the number of equations it affects.
        compiled, not_compiled: as in `Inspection`.
    """

    name: str
    policy: str
    device: str
    verdict: Verdict
    wide: tuple[Wide, ...]
    multiplied: tuple[tuple[str, str, int], ...]
    others: tuple[tuple[str, str, int], ...]
    unmatched: tuple[str, ...]
    notes: tuple[str, ...]
    advice: tuple[tuple[Advice, int], ...]
    compiled: Compiled | None = None
    not_compiled: str = ""

    def lines(self) -> list[Line]:
        """Return the explanation as styled text."""
        return list(self._lines())

    def _lines(self) -> Iterator[Line]:
        yield [(titled(self.name, self.policy, self.device), "where")]
        yield from ([("  ", ""), *line] for line in self.verdict.lines())
        if self.wide:
            yield [("products left wide", "frame")]
        for wide, is_first in _by_line(self.wide, lambda wide: wide.source):
            if is_first:
                yield [("  ", ""), *heading(wide.source)]
            times = f" ({wide.times} times)" if wide.times > 1 else ""
            scope = f" in {wide.scope}" if wide.scope else ""
            yield [(f"    {wide.what}{scope}{times}: ", ""), (wide.reason, "wide")]
            yield [(f"      to change it: {wide.remedy}", "reason")]
        if self.multiplied:
            yield [("how products are multiplied", "frame")]
        for precision, reason, n in self.multiplied:
            yield [(f"  {n} in {precision}: ", ""), (reason, "reason")]
        if self.others:
            yield [("all else that stays as written", "frame")]
        for kind, reason, n in self.others:
            yield [(f"  {n} {kind.replace('_', ' ')}: ", ""), (reason, "reason")]
        yield from self._closing()

    def _closing(self) -> Iterator[Line]:
        """What is no table: the compiler's figures, rules that match nothing, notes and advice."""
        yield from compiled_lines(self.compiled, self.not_compiled)
        if self.unmatched:
            yield [("rules that matched no equation", "frame")]
        yield from ([(f"  {rule}", "wide")] for rule in self.unmatched)
        if self.notes:
            yield [("notes", "frame")]
        yield from ([(f"  {note}", "")] for note in self.notes)
        if self.advice:
            yield [("advice", "frame")]
        for (item, n), is_first in _by_line(self.advice, lambda entry: entry[0].source):
            if is_first:
                yield [("  ", ""), *heading(item.source)]
            yield [(f"    {item.text}{f' ({n} times)' if n > 1 else ''}", "")]

    def text(self, *, color: bool | None = None) -> str:
        """Return the explanation as text; `color` is as for `Inspection.diff`."""
        return rendered(self.lines(), color)

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as JSON values."""
        fields = dataclasses.asdict(self)
        fields["verdict"]["low_flops"] = self.verdict.after.low_flops
        fields["advice"] = [
            {"source": dataclasses.asdict(item.source), "text": item.text, "times": n}
            for item, n in self.advice
        ]
        return fields

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        verdict = self.verdict
        title, flops = titled(self.name, self.policy, self.device), verdict.after.flops
        rest = list(self._closing())
        others = (*self.multiplied, *self.others)
        return explanation_page(title, flops, list(verdict.lines()), self.wide, others, rest)


def explained(
    graph: Graph,
    plan: Plan,
    after: Any,
    decided: dict[int, Decision],
    name: str,
    policy: str,
    device: str,
) -> Explanation:
    """The explanation of a program.

    Args:
        graph: that of its jaxpr.
        plan: its plan, made by `inspect`.
        after: the rewritten jaxpr.
        decided: the decision for each equation of the graph, by the equation's identity.
        name: the function's.
        policy: the policy's.
        device: what the program is planned for; "" for a CPU.
    """
    plan_rows, before = list(rows(plan)), graph.root.jaxpr
    wide = tuple(_wide(plan_rows))
    products = (r.decision for r in _lowered(plan_rows) if r.decision.kind is OpKind.COMPUTE)
    stored = [row.decision for row in plan_rows if row.decision.stores_low]
    narrowed = sum(decision.compute is Precision.F32 for decision in products)
    return Explanation(
        name,
        policy,
        device,
        Verdict(
            count(before),
            count(after),
            narrowed,
            sum(w.times for w in wide),
            _unread_casts(after),
            sum(row.decision.product.exchanged for row in plan_rows),
            sum(p is not None for d in stored for p in d.stored),
            sum(len(row.info.crossed) for row in plan_rows),
            sum(value.bits == 8 for row in plan_rows for value in row.info.crossed),
            kept_bytes(before),
            kept_bytes(after),
        ),
        wide,
        tuple(_multiplied(plan_rows)),
        tuple(_others(plan_rows)),
        tuple(map(repr, plan.unmatched)),
        (*plan.notes, *_costs(plan), *_assumptions(plan_rows)),
        tuple(advice(graph, decided)),
    )


def _unread_casts(after: Any) -> int:
    graph = Graph.build(after)
    return sum(
        ir.cast_formats(graph.eqns[row]) is not None for row in unread(graph).rows.nonzero()[0]
    )


def _by_line(items: Sequence[T], source: Callable[[T], Source]) -> Iterator[tuple[T, bool]]:
    """The items in groups of equal source lines, each with whether it is the first of its group."""
    lines: dict[Source, list[T]] = {}
    for item in items:
        lines.setdefault(source(item), []).append(item)
    for there in lines.values():
        yield from ((item, i == 0) for i, item in enumerate(there))


def _costs(plan: Plan) -> Iterator[str]:
    if plan.costs:
        yield f"what products cost in each precision: {plan.costs}"


def _assumptions(found: list[Row]) -> Iterator[str]:
    """The assumptions behind the figures, in words."""
    bodies = [body for row in found for body in row.info.bodies]
    if any(body.trips is None for body in bodies):
        yield f"figures: {NOMINAL_SIZE} trips of each loop whose number only run time knows"
    values = (v for row in found for v in (*row.info.operands, *row.info.results))
    if any(isinstance(d, str) for value in values for d in value.shape):
        yield f"figures: {NOMINAL_SIZE} for each symbolic dimension"
    if any(row.info.primitive == "cond" for row in found):
        yield "figures: all branches of a cond count, though one of them runs"


def _lowered(found: list[Row]) -> Iterator[Row]:
    return (row for row in found if row.decision.action is Action.LOWER)


def _stays_wide(row: Row) -> bool:
    changed = row.decision.action in (Action.LOWER, Action.MULTIPLY)
    is_low = all(operand.dtype in LOW_FORMATS for operand in row.info.operands[:2])
    return row.info.contracts and not changed and not is_low


def _wide(found: list[Row]) -> Iterator[Wide]:
    same: dict[tuple[Source, str, str, Reason], list[Row]] = {}
    for row in filter(_stays_wide, found):
        key = row.info.source, alike(row.scope), row.info.signature, row.decision.reason
        same.setdefault(key, []).append(row)
    for (source, shared, what, reason), items in same.items():
        scope = items[0].scope if len({row.scope for row in items}) == 1 else shared
        remedy = _of_parameters(items[0]) or reason.of_compute.remedy()
        flops = sum(row.calls * row.info.flops for row in items)
        yield Wide(source, scope, what, str(reason), remedy, len(items), flops)


def _of_parameters(row: Row) -> str:
    """How a policy is told that parameters are in 16 bits, for a product of them and float32."""
    formats = {operand.dtype for operand in row.info.operands[:2]}
    low = formats & LOW_FORMATS
    is_mixed = len(low) == 1 and formats - low == {str(Precision.F32)}
    if not (is_mixed and row.decision.reason.includes(reasons.USERS_PRECISION)):
        return ""
    (low,) = low
    return (
        f"if the {low} operand is a parameter, say so by policy.with_parameters('{low}'), which is "
        f"p={low} in a policy's text; or make all its operands float32, or cast them yourself"
    )


def _multiplied(found: list[Row]) -> Iterator[tuple[str, str, int]]:
    decisions = [row.decision for row in found if _is_for_products_alone(row.decision)]
    counts = Counter((str(d.product.scaled or d.compute), str(d.reason)) for d in decisions)
    for (precision, reason), n in counts.most_common():
        yield precision, reason, n


def _is_for_products_alone(decision: Decision) -> bool:
    """Whether a precision of products alone was asked for."""
    is_scaled = decision.product.scaled or decision.reason.includes(reasons.NOT_SCALED)
    is_lowered = decision.action is Action.LOWER and bool(is_scaled)
    return decision.action is Action.MULTIPLY or is_lowered


def _others(found: list[Row]) -> Iterator[tuple[str, str, int]]:
    kept = [
        row.decision
        for row in found
        if row.decision.action is Action.KEEP and not (_stays_wide(row) or row.decision.stores_low)
    ]
    counts = Counter((str(d.kind), str(d.reason)) for d in kept if d.compute is not None)
    for (kind, reason), n in counts.most_common():
        yield kind, reason, n
