"""What MkDocs writes into pages when it builds them: the reasons of a plan and their remedies."""

from typing import Any

from precpass.plan import reasons
from precpass.plan.reasons import DecidedBy, Template

PLACE = "<!-- reasons -->"


def templates() -> dict[DecidedBy, list[Template]]:
    """The kinds of reasons by who decides, in the order in which deciders win."""
    kinds = {value for value in vars(reasons).values() if isinstance(value, Template)}
    ordered = sorted(kinds, key=lambda template: template.text)
    return {by: [t for t in ordered if t.decided_by is by] for by in DecidedBy}


def cell(text: str) -> str:
    """A text in a cell of a Markdown table, with an ellipsis for what differs between equations."""
    return text.replace("{}", "…").replace("|", "\\|")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls it with each page's text."""
    if PLACE not in markdown:
        return markdown
    lines: list[str] = []
    for by, kinds in templates().items():
        if kinds:
            lines += [f"## {by.value}", "", "| reason | to change it |", "|---|---|"]
            lines += [f"| {cell(t.text)} | {cell(t.remedy)} |" for t in kinds]
            lines += [""]
    return markdown.replace(PLACE, "\n".join(lines))
