"""The source lines of a program as a table: what runs in low precision, and its size."""

from __future__ import annotations

import dataclasses
from collections import Counter

from precpass.measure.counts import LOW_FORMATS
from precpass.plan.eqn_info import Site
from precpass.plan.plan import Action, Plan
from precpass.policy.primitives import OpKind
from precpass.units import counted, in_unit, sized
from precpass.view.rows import Row, listed_sites, rows
from precpass.view.sheet import Cell, Entry, bar, facts, sheet
from precpass.view.text import heading

__all__ = ["line_table", "summary"]

_WIDE, _LOW, _CAST, _SAME = "products in float32", "in low precision", "with casts", "as written"


@dataclasses.dataclass
class _OfLine:
    """What the equations of a source line do."""

    flops: float = 0.0
    moved: float = 0.0
    low: int = 0
    products: int = 0
    casts: int = 0
    stored: int = 0
    wide_flops: float = 0.0
    changes: int = 0
    reasons: Counter[str] = dataclasses.field(default_factory=Counter[str])

    def add(self, row: Row) -> None:
        """Counts an equation, as often as it runs."""
        info, decision = row.info, row.decision
        is_low = _is_low(row)
        if not info.bodies:
            self.moved += row.calls * sum(v.nbytes for v in (*info.operands, *info.results))
        self.casts += sum(cast.what == "inserted" for cast in info.casts)
        self.stored += decision.stores_low
        self.changes += row.changes
        if decision.kind is OpKind.COMPUTE:
            self.products += 1
            self.low += is_low
            self.flops += row.calls * info.flops
            if not is_low:
                self.wide_flops += row.calls * info.flops
                self.reasons[decision.reason.of_compute] += 1


def _is_low(row: Row) -> bool:
    lowered = row.decision.action is Action.LOWER
    return lowered or all(operand.dtype in LOW_FORMATS for operand in row.info.operands[:2])


def summary(plan: Plan) -> str:
    """A bar of products' FLOPs by precision, and the numbers of changes."""
    whole = _OfLine()
    for row in rows(plan):
        whole.add(row)
    parts = [
        ("low precision", whole.flops - whole.wide_flops, "low"),
        ("float32", whole.wide_flops, "wide"),
    ]
    shown = [
        [(f"{whole.low} of {counted(whole.products, 'matrix product')} in low precision", "low")],
        [(f"{counted(whole.casts, 'cast')} inserted", "cast")],
    ]
    if whole.stored:
        shown.append([(f"{counted(whole.stored, 'equation')} stored in 16 bits", "low")])
    return bar(parts, f"of {_flops(whole.flops)} of products") + facts(shown)


def _flops(n: float) -> str:
    prefixes = ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0)
    return in_unit(n, [(f"{prefix}FLOP", size) for prefix, size in prefixes])


def line_table(plan: Plan) -> str:
    """The lines of a plan's program, those with the most FLOPs in float32 first."""
    lines: dict[Site, _OfLine] = {}
    found = list(rows(plan))
    sites = listed_sites(row.info.site for row in found)
    for row in found:
        lines.setdefault(sites[row.info.site], _OfLine()).add(row)
    flops = sum(of.flops for of in lines.values()) or 1.0
    moved = sum(of.moved for of in lines.values()) or 1.0
    order = sorted(lines.items(), key=lambda entry: (-entry[1].wide_flops, -entry[1].moved))
    heads = ["line", "FLOPs", "bytes", "low", "casts", "why products are in float32"]
    entries = [_entry(site, of, flops, moved) for site, of in order]
    return sheet(heads, entries, groups=[_WIDE, _LOW, _CAST, _SAME])


def _entry(site: Site, of: _OfLine, flops: float, moved: float) -> Entry:
    ((reason, _),) = of.reasons.most_common(1) or [("", 0)]
    more = f" (+{len(of.reasons) - 1})" if len(of.reasons) > 1 else ""
    groups = {
        _WIDE: of.low < of.products,
        _LOW: bool(of.low),
        _CAST: bool(of.casts),
        _SAME: not of.changes,
    }
    low = f"{of.low}/{of.products}" if of.products else ""
    cells = [
        Cell(heading(site.source, site.module), f"{site.source.file}:{site.source.line:06d}"),
        Cell([(_share(of.flops / flops), "")], of.flops, of.flops / flops),
        Cell([(sized(of.moved), "")], of.moved, of.moved / moved),
        Cell(
            [(low, "low" if of.low == of.products else "wide")],
            of.low / of.products if of.products else None,
        ),
        Cell([(str(of.casts or ""), "cast")], float(of.casts)),
        Cell([(reason + more, "wide")], reason or None),
    ]
    return Entry(cells, frozenset(name for name, holds in groups.items() if holds))


def _share(share: float) -> str:
    return "" if not share else "<1%" if share < 0.005 else f"{100 * share:.0f}%"
