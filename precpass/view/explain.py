"""`explain`: what a policy does to a program, what stays in float32, and how to change that."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.analysis.liveness import unread
from precpass.analysis.residuals import kept_bytes
from precpass.analysis.sizes import NOMINAL_SIZE
from precpass.measure.counts import LOW_FORMATS, Counts, count
from precpass.plan.eqn_info import Site
from precpass.plan.plan import Action, Decision, Plan
from precpass.plan.reasons import DecidedBy, Reason
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind
from precpass.units import are, counted, listed, sized
from precpass.view.advice import CACHE_LINE, Advice, advice
from precpass.view.compiled import Compiled, compiled_lines
from precpass.view.page import Cell, as_html, bar, facts, located, page, sheet, title
from precpass.view.rows import Row, alike, listed_sites, rows
from precpass.view.text import Line, heading, rendered, shown_path, shown_source, titled

__all__ = ["Explanation", "Verdict", "Wide", "explained"]

_NAMES = {"bf16": "bfloat16", "f16": "float16"}
_HALF = 0.55
"""The share of bytes that is called half."""
_REASONS = 3
"""The most reasons for which saved values stay in float32 that are named."""


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
        kept_wide: why values among them stay in float32, each with the bytes of these values.
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
    kept_wide: tuple[tuple[str, float], ...] = ()

    def brief(self) -> str:
        """Return how much runs in low precision, in a sentence."""
        after = self.after
        if not after.products:
            return "It has no matrix products, so there is nothing to run in low precision."
        formats = [name for name in after.flops if name in LOW_FORMATS and after.flops[name]]
        low = " and ".join(_NAMES.get(name, name) for name in formats) or "low precision"
        narrowed = f", {self.narrowed} in f32 instead of f64" if self.narrowed else ""
        do = "does" if self.left_wide == 1 else "do"
        wide = f"; {self.left_wide} {do} not" if self.left_wide else ""
        products = f"{after.low} of {counted(after.products, 'matrix product')}"
        run = "runs" if after.products == 1 else "run"
        return f"{products} {run} in {low}{narrowed}: {after.low_flops:.1%} of the FLOPs{wide}."

    def saving(self) -> str:
        """Return what the policy saves for the backward pass, in a sentence."""
        if not (self.kept_before or self.kept_after):
            return "`compare` measures time and memory."
        before, after = sized(self.kept_before), sized(self.kept_after)
        sizes = f"{after}, as in the program as written"
        if before != after:
            is_less = self.kept_after < self.kept_before
            more = f"{after}, which is more than the {before} of the program as written"
            sizes = f"{after} instead of {before}" if is_less else more
        return f"Saved for the backward pass: {sizes}."

    def why_kept(self) -> Iterator[str]:
        """Yield why what is saved for the backward pass is not half."""
        if self.kept_after > _HALF * self.kept_before and self.kept_wide:
            yield "Saved for the backward pass in float32:"
            yield from (f"  {sized(nbytes)} {why}." for why, nbytes in self.kept_wide[:_REASONS])

    def lines(self) -> Iterator[Line]:
        """Yield the figures in words, as styled text."""
        after, before = self.after, self.before
        casts, nbytes = after.casts - before.casts, after.cast_bytes - before.cast_bytes
        yield [(self.brief(), "wide" if self.left_wide else "low")]
        changed = f"{counted(abs(casts), 'cast')} {'more' if casts >= 0 else 'fewer'} than written"
        written = f", which write {sized(abs(nbytes))} {'more' if nbytes >= 0 else 'less'}"
        unread = f"; {self.unread_casts} of them only for derivatives" if self.unread_casts else ""
        low = f"{sized(after.low_bytes)} of results in 16 bits; "
        yield [(low, ""), (changed, "cast"), (written + unread, "")]
        if self.swapped:
            what = counted(self.swapped, "matrix product")
            yield [(f"{what} with exchanged operands, which replace transposes", "")]
        if self.stored or self.crossed:
            eight = self.crossed_on_8
            kept = f"{counted(self.crossed - eight, 'value')} in 16 bits"
            kept += f" and {eight} in 8 bits" if eight else ""
            stored = f"{counted(self.stored, 'result')} stored in 16 bits"
            yield [(f"{stored}; {kept} kept across function and loop boundaries", "low")]


@dataclasses.dataclass(frozen=True)
class Wide:
    """Equal matrix products that a policy leaves in float32.

    Attributes:
        source: your source line.
        scope: the name scopes around them; "layer_*" for several that differ only in their numbers.
        what: primitive, operands and results.
        reason: why they stay in float32.
        remedy: how to change it; None if nobody would want to.
        times: the number of equations.
        flops: the floating-point operations of all of them in one run.
        site: where you find them: their module, and the line that calls it.
    """

    source: ir.Source
    scope: str
    what: str
    reason: str
    remedy: str | None
    times: int
    flops: float
    site: Site


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
        others: (kind, reason, number, lines) of all other equations whose computation and storage
            do not change; lines are those of your code, "model.py:9, 12".
        unmatched: the rules that matched no equation.
        notes: the plan's warnings.
        advice: suggestions from the dataflow graph, each with the number of equations it affects.
        compiled: as in `Inspection`.
        not_compiled: as in `Inspection`.
    """

    name: str
    policy: str
    device: str
    verdict: Verdict
    wide: tuple[Wide, ...]
    multiplied: tuple[tuple[str, str, int], ...]
    others: tuple[tuple[str, str, int, str], ...]
    unmatched: tuple[str, ...]
    notes: tuple[str, ...]
    advice: tuple[tuple[Advice, int], ...]
    compiled: Compiled | None = None
    not_compiled: str = ""

    def lines(self, *, all: bool = False) -> list[Line]:
        """Return the explanation as styled text; `all` is as for `text`."""
        title: Line = [(titled(self.name, self.policy, self.device), "where")]
        head, *more = self.verdict.lines()
        listing = [*more, *self._listing()] if all else []
        lines = [head, [(self.verdict.saving(), "")], *self._remarks(all=all), *listing]
        if not all:
            last = "`.all` (or --all) lists all that is not in low precision, and why."
            lines.append([(last, "reason")])
        return [title, *([("  ", ""), *line] for line in lines)]

    def _remarks(self, *, all: bool) -> Iterator[Line]:
        """What to change, or if not `all` what weighs most of it, and what else is to be known."""
        remedies, most = self._remedies(all=all), None if all else _REMEDIES
        if not remedies:
            all_low = "every matrix product runs in low precision"
            why = "the others should keep their precision" if self.wide else all_low
            why = f": {why}" if self.verdict.after.products else ""
            yield [(f"There is nothing left to lower{why}.", "")]
            if self.verdict.after.low:
                yield [
                    (
                        "`compare` shows the error, and `audit` what the compiler makes of it.",
                        "reason",
                    )
                ]
        for number, (text, sites) in enumerate(remedies[:most], 1):
            yield [(f"{number}. ", ""), (text, "wide")]
            if where := [_placed(site) for site in sites if site.source.file]:
                yield [("   at ", ""), (listed(where, most or len(where)), "where")]
        if not all and len(remedies) > _REMEDIES:
            yield [(f"{len(remedies) - _REMEDIES} more such remarks are in `.all`.", "")]
        for precision, reason, n in self.multiplied[:most]:
            yield [(f"Matrix products, {n} in {precision}: ", ""), (reason, "reason")]
        yield from ([(line, "")] for line in self.verdict.why_kept())
        yield from compiled_lines(self.compiled, self.not_compiled)
        yield from ([(f"Note: {note}", "reason")] for note in self.notes)

    def _remedies(self, *, all: bool) -> list[tuple[str, list[Site]]]:
        """What to change, and where: first rules that match nothing, then what weighs most."""
        counts = Counter[tuple[str | None, str]]()
        for wide in self.wide:
            counts[wide.remedy, wide.reason] += wide.times
        weights, places = dict[str, float](), dict[str, dict[Site, None]]()

        def add(text: str, weight: float, site: Site) -> None:
            weights[text] = weights.get(text, 0.0) + weight
            places.setdefault(text, {})[site] = None

        for w in self.wide:
            n = counts[w.remedy, w.reason]
            products = f"{counted(n, 'matrix product')} {are(n)} not in low precision"
            text = f"{w.remedy}: {products} ({w.reason})"
            if w.remedy is not None:
                add(text, w.flops, w.site)
        for item, n in self.advice:
            # A scalar, as in an optimizer's step, costs nothing in any format.
            if all or item.weight >= CACHE_LINE:
                add(item.text, item.weight * n, item.site)
        unused = (f"correct or remove {rule}: it matches no equation" for rule in self.unmatched)
        rules: list[tuple[str, list[Site]]] = [(text, []) for text in unused]
        order = sorted(weights, key=lambda text: -weights[text])
        return [*rules, *((text, list(places[text])) for text in order)]

    @property
    def all(self) -> str:
        """All figures, each equation that stays in float32, and all advice, as text."""
        return self.text(all=True)

    def _listing(self) -> Iterator[Line]:
        """All that is not in low precision, and why."""
        last = None
        if self.wide:
            yield [(_WIDE, "frame")]
        for wide in self.wide:  # those of a site stand together
            if wide.site != last:
                yield [("  ", ""), *heading(wide.site.source, wide.site.module)]
            last = wide.site
            times = f" ({wide.times} times)" if wide.times > 1 else ""
            scope = f" in {wide.scope}" if wide.scope and not wide.site.module else ""
            yield [(f"    {wide.what}{scope}{times}: ", ""), (wide.reason, "wide")]
            if wide.remedy is not None:
                yield [(f"      to change it: {wide.remedy}", "reason")]
        if self.others:
            yield [(_OTHERS, "frame")]
        for kind, reason, n, where in self.others:
            yield [(f"  {n} {kind.replace('_', ' ')}: ", ""), (reason, "reason")]
            if where:
                yield [("     at ", ""), (where, "where")]

    def text(self, *, color: bool | None = None, all: bool = False) -> str:
        """Return the explanation as text.

        Args:
            color: as for `Inspection.diff`.
            all: whether to list every equation that stays in float32 and all advice. Otherwise the
                text has the verdict, what is saved, and the three remedies that weigh most.
        """
        return rendered(self.lines(all=all), color)

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as JSON values."""
        fields = dataclasses.asdict(self)
        fields["verdict"]["low_flops"] = self.verdict.after.low_flops
        for wide in fields["wide"]:
            del wide["site"]
        fields["advice"] = [
            {"source": dataclasses.asdict(item.source), "text": item.text, "times": n}
            for item, n in self.advice
        ]
        return fields

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        verdict, flops = self.verdict, self.verdict.after.flops
        styles = dict.fromkeys(LOW_FORMATS, "low") | {"f32": "wide", "f64": "bad"}
        ordered = sorted(flops.items(), key=lambda item: -item[1])
        parts = [(name, n, styles.get(name, "none")) for name, n in ordered]
        body = title(titled(self.name, self.policy, self.device)) + bar(parts, "of all FLOPs")
        body += facts([*verdict.lines(), [(verdict.saving(), "")]])
        others = [*((*each, "") for each in self.multiplied), *self.others]
        body += _wide_table(self.wide, sum(flops.values()) or 1.0) if self.wide else ""
        body += _others_table(others) if others else ""
        rest = list(self._remarks(all=True))
        return page(body + (as_html(rest) if rest else ""))


_REMEDIES = 3
"""The most remedies in brief, and the most places that are named for each."""
_LINES = 12
"""The most lines of a file that are named for equations that stay as written."""
_WIDE = "matrix products that are not in low precision"
_OTHERS = "everything else that stays as written"


def _wide_table(wide: Sequence[Wide], total: float) -> str:
    ordered = sorted(wide, key=lambda w: -w.flops)
    cells = [
        [
            located(w.site),
            Cell(f"{w.what}{f' in {w.scope}' if w.scope else ''}"),
            Cell(str(w.times)),
            Cell(f"{w.flops / total:.1%}", w.flops, w.flops / total),
            Cell([(w.reason, "wide")]),
            Cell(w.remedy or ""),
        ]
        for w in ordered
    ]
    heads = ["line", "product", "times", "FLOPs", "why", "to change it"]
    groups = _each([w.reason for w in ordered])
    return sheet(heads, cells, texts=(0, 1, 4, 5), groups=groups, sorted_by=3, caption=_WIDE)


def _others_table(others: Sequence[tuple[str, str, int, str]]) -> str:
    ordered = sorted(others, key=lambda entry: -entry[2])
    kinds = [kind.replace("_", " ") for kind, *_ in ordered]
    cells = [
        [Cell(str(n)), Cell(kind), Cell([(reason, "reason")]), Cell([(lines, "where")])]
        for kind, (_, reason, n, lines) in zip(kinds, ordered, strict=True)
    ]
    heads = ["equations", "kind", "reason", "lines"]
    return sheet(heads, cells, texts=(1, 2, 3), groups=_each(kinds), sorted_by=0, caption=_OTHERS)


def _each(names: Sequence[str]) -> dict[str, list[bool]]:
    """A filter for each name, of the rows that have it."""
    return {name: [other == name for other in names] for name in dict.fromkeys(names)}


def _placed(site: Site) -> str:
    """A site in few words, as "block.up (model.py:27)"."""
    place = shown_source(site.source)
    return f"{site.module} ({place})" if site.module else place


def explained(
    graph: Graph,
    plan: Plan,
    after: Any,
    decided: dict[int, Decision],
    sites: dict[int, Site],
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
        sites: where you find each equation, by its identity.
        name: the function's.
        policy: the policy's.
        device: what the program is planned for; "" for a CPU.
    """
    plan_rows, before = list(rows(plan)), graph.root.jaxpr
    new = Graph.build(after)
    wide = tuple(_wide(plan_rows))
    products = (r.decision for r in _lowered(plan_rows) if r.decision.kind is OpKind.COMPUTE)
    stored = [row.decision for row in plan_rows if row.decision.stores_low]
    narrowed = sum(decision.compute is Precision.F32 for decision in products)
    return Explanation(
        name,
        policy,
        device,
        Verdict(
            count(graph),
            count(new),
            narrowed,
            sum(w.times for w in wide),
            _unread_casts(new),
            sum(row.decision.product.exchanged for row in plan_rows),
            sum(p is not None for d in stored for p in d.stored),
            sum(len(row.info.crossed) for row in plan_rows),
            sum(value.bits == 8 for row in plan_rows for value in row.info.crossed),
            kept_bytes(before),
            kept_bytes(after),
            plan.kept_wide,
        ),
        wide,
        tuple(_multiplied(plan_rows)),
        tuple(_others(plan_rows)),
        tuple(map(repr, plan.unmatched)),
        (*plan.notes, *_costs(plan), *_sums(plan_rows), *_assumptions(plan_rows)),
        tuple(advice(graph, decided, sites, has_tiles=bool(device))),
    )


def _unread_casts(graph: Graph) -> int:
    return sum(
        ir.cast_formats(graph.eqns[row]) is not None for row in unread(graph).rows.nonzero()[0]
    )


def _costs(plan: Plan) -> Iterator[str]:
    if plan.costs:
        yield f"what the forms of the program cost, relative to the first: {plan.costs}"


def _sums(found: list[Row]) -> Iterator[str]:
    """The formats of the sums over devices that a policy or a rule asks for in 16 bits."""
    mores = [row.decision.reason.more.split("; ") for row in found]
    sums = Counter(more for each in mores for more in each if " over devices is in " in more)
    yield from (f"{more} ({counted(n, 'equation')})" for more, n in sums.items())


def _assumptions(found: list[Row]) -> Iterator[str]:
    """The assumptions behind the figures, in words."""
    bodies = [body for row in found for body in row.info.bodies]
    if any(body.trips is None for body in bodies):
        yield f"the figures count {NOMINAL_SIZE} iterations of each loop whose number is not known"
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
    wide = list(filter(_stays_wide, found))
    sites = listed_sites(row.info.site for row in wide)
    same: dict[tuple[Site, str, str, Reason], list[Row]] = {}
    order = {site: i for i, site in enumerate(dict.fromkeys(sites.values()))}
    for row in sorted(wide, key=lambda row: order[sites[row.info.site]]):
        key = sites[row.info.site], alike(row.scope), row.info.signature, row.decision.reason
        same.setdefault(key, []).append(row)
    for (site, shared, what, reason), items in same.items():
        scope = items[0].scope if len({row.scope for row in items}) == 1 else shared
        remedy = _of_parameters(items[0]) or reason.remedy()
        flops = sum(row.calls * row.info.flops for row in items)
        source = items[0].info.source
        yield Wide(source, scope, what, str(reason), remedy, len(items), flops, site)


def _of_parameters(row: Row) -> str:
    """How a policy is told that parameters are in 16 bits, for a product of them and float32."""
    formats = {operand.dtype for operand in row.info.operands[:2]}
    low = formats & LOW_FORMATS
    is_mixed = len(low) == 1 and formats - low == {str(Precision.F32)}
    if not (is_mixed and row.decision.decided_by is DecidedBy.USER):
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
    is_scaled = decision.product.scaled or decision.product.not_scaled
    is_lowered = decision.action is Action.LOWER and bool(is_scaled)
    return decision.action is Action.MULTIPLY or is_lowered


def _others(found: list[Row]) -> Iterator[tuple[str, str, int, str]]:
    alike: dict[tuple[str, str], list[Site]] = {}
    for row in found:
        decision = row.decision
        is_kept = decision.action is Action.KEEP and decision.compute is not None
        if is_kept and not (_stays_wide(row) or decision.stores_low):
            alike.setdefault((str(decision.kind), str(decision.reason)), []).append(row.info.site)
    for (kind, reason), sites in sorted(alike.items(), key=lambda entry: -len(entry[1])):
        yield kind, reason, len(sites), _lines_of(sites)


def _lines_of(sites: Iterable[Site]) -> str:
    """The lines of sites, most of them first, as "model.py:9, 12; data.py:4"."""
    files: dict[str, dict[int, None]] = {}
    for source, _ in Counter(site.source for site in sites if site.source.file).most_common():
        files.setdefault(shown_path(source.file), {})[source.line] = None
    some = (f"{file}:{listed(list(map(str, lines)), _LINES)}" for file, lines in files.items())
    return "; ".join(some)
