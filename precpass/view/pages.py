"""Inspections, plans and policies as HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from precpass.measure.counts import LOW_FORMATS
from precpass.plan.eqn_info import Site
from precpass.plan.plan import Action, Plan
from precpass.policy.policy import PrecisionPolicy
from precpass.policy.primitives import OpKind
from precpass.units import counted, in_unit, sized
from precpass.view.diff import Section, diff_tree, totals
from precpass.view.page import Cell, as_html, bar, facts, folded, located, page, sheet, spans, title
from precpass.view.rows import Row, listed_sites, rows
from precpass.view.text import Line

__all__ = ["inspection_page", "plan_page", "policy_page"]


def policy_page(policy: PrecisionPolicy) -> str:
    """A policy as HTML: the precision of each kind, its rules and its options."""
    cells = [
        [
            Cell(str(kind).replace("_", " ")),
            Cell(str(policy.precision_for(kind))),
            Cell("order" if kind in policy.orders else "permission"),
        ]
        for kind in OpKind
        if kind is not OpKind.BOUNDARY
    ]
    others = [repr(rule) for rule in policy.rules]
    others.append(f"may change: {', '.join(sorted(map(str, policy.retypes)))}")
    if policy.widens:
        others.append("widens what the program has low")
    if policy.output is not None:
        others.append(f"outputs in {policy.output}")
    if policy.profitability != "always":
        others.append("the form of the program that costs least")
    lines = as_html([[(text, "")] for text in others])
    table = sheet(["kind", "precision", "as"], cells, texts=range(3))
    return page(folded(policy.title, table + lines, is_open=True))


def plan_page(plan: Plan) -> str:
    """A plan as HTML: its changes by source line, or its totals if `inspect` did not make it."""
    return page(_changes(plan, "plan") if plan.eqn_infos else spans(repr(plan)))


def inspection_page(
    plan: Plan, name: str, more: Sequence[tuple[str, Sequence[Line]]], picture: str
) -> str:
    """An inspection as HTML.

    Args:
        plan: its plan.
        name: the names of the function and the policy.
        more: further parts, each with its title.
        picture: the SVG of its graph.
    """
    parts = [folded(head, as_html(lines)) for head, lines in more]
    return page(_changes(plan, name) + "".join(parts) + folded("picture", picture))


def _changes(plan: Plan, name: str) -> str:
    costs = as_html([[(f"costs {plan.costs}", "reason")]]) if plan.costs else ""
    found = list(rows(plan))
    changes = folded(totals(plan, name), costs + _tree(diff_tree(plan)))
    return title(name) + _summary(found) + _lines(found) + changes


def _tree(section: Section) -> str:
    def inner(inside: Section | list[Line]) -> str:
        return _tree(inside) if isinstance(inside, Section) else as_html(inside)

    return "".join(
        folded(head, inner(inside), is_open=isinstance(inside, Section))
        for head, inside in section.entries()
    )


# ---------------------------------------------------------------- lines of a program


def _products(found: Iterable[Row], *, low: bool) -> list[Row]:
    """The products in low precision, or the others."""
    products = (row for row in found if row.decision.kind is OpKind.COMPUTE)
    return [row for row in products if _is_low(row) is low]


def _is_low(row: Row) -> bool:
    lowered = row.decision.action is Action.LOWER
    return lowered or all(operand.dtype in LOW_FORMATS for operand in row.info.operands[:2])


def _flops(found: Iterable[Row]) -> float:
    return sum(row.calls * row.info.flops for row in found)


def _moved(found: Iterable[Row]) -> float:
    return sum(
        row.calls * sum(value.nbytes for value in (*row.info.operands, *row.info.results))
        for row in found
        if not row.info.bodies
    )


def _casts(found: Iterable[Row]) -> int:
    return sum(cast.what == "inserted" for row in found for cast in row.info.casts)


def _summary(found: Sequence[Row]) -> str:
    """A bar of products' FLOPs by precision, and the numbers of changes."""
    low, wide = _products(found, low=True), _products(found, low=False)
    parts = [("low precision", _flops(low), "low"), ("float32", _flops(wide), "wide")]
    products = counted(len(low) + len(wide), "matrix product")
    shown: list[Line] = [
        [(f"{len(low)} of {products} in low precision", "low")],
        [(f"{counted(_casts(found), 'cast')} inserted", "cast")],
    ]
    if stored := sum(row.decision.stores_low for row in found):
        shown.append([(f"{counted(stored, 'equation')} stored in 16 bits", "low")])
    prefixes = ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0)
    units = [(f"{prefix}FLOP", size) for prefix, size in prefixes]
    return bar(parts, f"of {in_unit(_flops([*low, *wide]), units)} of products") + facts(shown)


def _lines(found: Sequence[Row]) -> str:
    """The lines of a program, those with the most FLOPs in float32 first."""
    sites = listed_sites(row.info.site for row in found)
    by_line: dict[Site, list[Row]] = {}
    for row in found:
        by_line.setdefault(sites[row.info.site], []).append(row)
    wide = {site: _products(of, low=False) for site, of in by_line.items()}
    order = sorted(by_line, key=lambda site: (-_flops(wide[site]), -_moved(by_line[site])))
    lines = [by_line[site] for site in order]
    groups = {
        "products in float32": [bool(wide[site]) for site in order],
        "in low precision": [bool(_products(of, low=True)) for of in lines],
        "with casts": [bool(_casts(of)) for of in lines],
        "as written": [not any(row.changes for row in of) for of in lines],
    }
    products = (row for row in found if row.decision.kind is OpKind.COMPUTE)
    total, moved = _flops(products) or 1.0, _moved(found) or 1.0
    heads = ["line", "FLOPs", "bytes", "low", "casts", "why products are in float32"]
    cells = [_cells(site, by_line[site], total, moved) for site in order]
    return sheet(heads, cells, texts=(0, 5), groups=groups)


def _cells(site: Site, of: Sequence[Row], total: float, moved: float) -> list[Cell]:
    low, wide = _products(of, low=True), _products(of, low=False)
    flops, bytes_, casts = _flops([*low, *wide]), _moved(of), _casts(of)
    reasons = Counter(row.decision.reason.of_compute for row in wide)
    ((reason, _),) = reasons.most_common(1) or [("", 0)]
    more = f" (+{len(reasons) - 1})" if len(reasons) > 1 else ""
    share = f"{100 * flops / total:.0f}%" if flops >= 0.005 * total else "<1%"
    products = f"{len(low)}/{len(low) + len(wide)}" if low or wide else ""
    return [
        located(site),
        Cell(share if flops else "", flops, flops / total),
        Cell(sized(bytes_), bytes_, bytes_ / moved),
        Cell([(products, "wide" if wide else "low")]),
        Cell([(str(casts or ""), "cast")]),
        Cell([(reason + more, "wide")]),
    ]
