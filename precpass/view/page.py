"""Plans, inspections and policies as self-contained HTML without scripts."""

from __future__ import annotations

from collections.abc import Sequence

from precpass.plan.plan import Plan
from precpass.policy.policy import PrecisionPolicy
from precpass.policy.primitives import OpKind
from precpass.view.diff import Section, diff_tree, totals
from precpass.view.line_table import line_table, summary
from precpass.view.text import Line, as_html, page, spans

__all__ = ["folded", "inspection_page", "plan_page", "policy_page", "table"]


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
    parts = [folded(title, as_html(lines)) for title, lines in more]
    parts.append(folded("picture", picture))
    return page(_changes(plan, name) + "".join(parts))


def _changes(plan: Plan, name: str) -> str:
    head = f'<div class="head">{spans([(name, "")])}</div>'
    costs = as_html([[(f"costs {plan.costs}", "reason")]]) if plan.costs else ""
    changes = folded(totals(plan, name), costs + _tree(diff_tree(plan, "equations")))
    return head + summary(plan) + line_table(plan) + changes


def _tree(section: Section) -> str:
    def inner(inside: Section | list[Line]) -> str:
        return _tree(inside) if isinstance(inside, Section) else as_html(inside)

    return "".join(
        folded(head, inner(inside), is_open=isinstance(inside, Section))
        for head, inside in section.entries()
    )


_OPEN = ' open="open"'


def folded(head: str | Line, body: str, *, is_open: bool = False) -> str:
    """A part of a page that a click on its heading shows and hides."""
    line = [(head, "")] if isinstance(head, str) else head
    return f"<details{_OPEN if is_open else ''}><summary>{spans(line)}</summary>{body}</details>"


def table(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A table of plain text.

    Args:
        heads: the columns' headings.
        cells: the rows.
    """

    def row(tag: str, texts: Sequence[str]) -> str:
        start = '<th scope="col">' if tag == "th" else f"<{tag}>"
        cells = (f"{start}{spans([(text, '')])}</{tag}>" for text in texts)
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(row("td", texts) for texts in cells)
    return f"<table><thead>{row('th', heads)}</thead><tbody>{body}</tbody></table>"


def policy_page(policy: PrecisionPolicy) -> str:
    """A policy as HTML: the precision of each kind, its rules and its options."""
    kinds = [(kind, str(policy.precision_for(kind))) for kind in OpKind]
    cells = [
        [str(kind).replace("_", " "), precision, "order" if kind in policy.orders else "permission"]
        for kind, precision in kinds
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
    return page(
        folded(policy.title, table(["kind", "precision", "as"], cells) + lines, is_open=True)
    )


def plan_page(plan: Plan) -> str:
    """A plan as HTML: its changes by source line, or its totals if `inspect` did not make it."""
    return page(_changes(plan, "plan") if plan.eqn_infos else spans([(repr(plan), "")]))
