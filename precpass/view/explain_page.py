"""An explanation as HTML: the verdict as a bar, and what stays wide as a table, the most first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from precpass.measure.counts import LOW_FORMATS
from precpass.view.sheet import Cell, Entry, bar, facts, sheet
from precpass.view.text import Line, as_html, heading, page, spans
from precpass.view.verdict import Wide

__all__ = ["explanation_page"]


def explanation_page(
    title: str,
    flops: Mapping[str, float],
    verdict: Sequence[Line],
    wide: Sequence[Wide],
    others: Sequence[tuple[str, str, int, str]],
    rest: Sequence[Line],
) -> str:
    """An explanation as HTML.

    Args:
        title: the names of the function and the policy.
        flops: the floating-point operations of the rewritten program by format.
        verdict: the figures in words.
        wide: the products that stay wide.
        others: (kind, reason, number, lines) of the other equations that stay as they are.
        rest: rules that match nothing, notes and advice.
    """
    head = f'<div class="head">{spans([(title, "")])}</div>'
    parts = [(name, n, _style(name)) for name, n in sorted(flops.items(), key=lambda i: -i[1])]
    body = head + bar(parts, "of all FLOPs") + facts(verdict)
    if wide:
        body += _wide(wide, sum(flops.values()) or 1.0)
    if others:
        body += _others(others)
    return page(body + (as_html(rest) if rest else ""))


def _style(name: str) -> str:
    return "low" if name in LOW_FORMATS else {"f32": "wide", "f64": "bad"}.get(name, "none")


def _wide(wide: Sequence[Wide], total: float) -> str:
    entries = [
        Entry(
            [
                Cell(heading(w.site.source, w.site.module), f"{w.source.file}:{w.source.line:06d}"),
                Cell([(f"{w.what}{f' in {w.scope}' if w.scope else ''}", "")], w.what),
                Cell([(str(w.times), "")], float(w.times)),
                Cell([(f"{w.flops / total:.1%}", "")], w.flops, w.flops / total),
                Cell([(w.reason, "wide")], w.reason),
                Cell([(w.remedy or "", "")], w.remedy or ""),
            ],
            frozenset([w.reason]),
        )
        for w in sorted(wide, key=lambda w: -w.flops)
    ]
    heads = ["line", "product", "times", "FLOPs", "why", "to change it"]
    reasons = list(dict.fromkeys(w.reason for w in wide))
    return sheet(
        heads,
        entries,
        groups=reasons,
        sorted_by=3,
        wide=5,
        caption="matrix products that are not in low precision",
    )


def _others(others: Sequence[tuple[str, str, int, str]]) -> str:
    entries = [
        Entry(
            [
                Cell([(str(n), "")], float(n)),
                Cell([(kind.replace("_", " "), "")], kind),
                Cell([(reason, "reason")], reason),
                Cell([(lines, "where")], lines),
            ],
            frozenset([kind.replace("_", " ")]),
        )
        for kind, reason, n, lines in sorted(others, key=lambda entry: -entry[2])
    ]
    kinds = list(dict.fromkeys(kind.replace("_", " ") for kind, *_ in others))
    return sheet(
        ["equations", "kind", "reason", "lines"],
        entries,
        groups=kinds,
        sorted_by=0,
        wide=2,
        caption="everything else that stays as written",
    )
