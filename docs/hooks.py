"""What MkDocs writes into pages when it builds them.

`<!-- reasons -->` becomes the reasons of a plan and their remedies, `<!-- version -->` the version,
`<!-- readme: TITLE -->` the section of README with that title, and `<!-- file: PATH -->` a Python
file beside the page. The changelog of the repository is a page.
"""

import re
from pathlib import Path
from typing import Any

from precpass.plan import reasons
from precpass.plan.reasons import DecidedBy, Template
from precpass.version import __version__

ROOT = Path(__file__).resolve().parents[1]
PLACE = "<!-- reasons -->"
VERSION = "<!-- version -->"
FILE = re.compile(r"^<!-- file: (\S+) -->$", re.MULTILINE)
SECTION = re.compile(r"^<!-- readme: (.+) -->$", re.MULTILINE)
CHANGELOG = "changelog.md"
SAME_NAME = "::: precpass.numerics.least_squares\n"
FUNCTION = """\
::: precpass.numerics.least_squares.least_squares
    options:
      heading: precpass.numerics.least_squares
      toc_label: least_squares
"""
"""For the function, which mkdocstrings would take for the module with the same name."""
FIGURE = re.compile(r"<td>(?=[-+\d./e%]*\d[-+\d./e%]*</td>)")


def templates() -> dict[DecidedBy, list[Template]]:
    """The kinds of reasons by who decides, in the order in which deciders win."""
    kinds = {value for value in vars(reasons).values() if isinstance(value, Template)}
    ordered = sorted(kinds, key=lambda template: template.text)
    return {by: [t for t in ordered if t.decided_by is by] for by in DecidedBy}


def cell(text: str) -> str:
    """A text in a cell of a Markdown table, with "…" for parts that differ between equations."""
    whole = f"…{text}" if text.startswith(";") else text
    return whole.replace("{}", "…").replace("|", "\\|")


def tables() -> str:
    """A table for each decider: its reasons, and how to change what it decides."""
    lines: list[str] = []
    for by, kinds in templates().items():
        if kinds:
            lines += [f"## {by.value}", "", "| reason | to change it |", "|---|---|"]
            lines += [f"| {cell(t.text)} | {cell(t.remedy or '')} |" for t in kinds]
            lines += [""]
    return "\n".join(lines)


def of_repository(name: str) -> str:
    """A document in the repository's root, with links from the root of the site."""
    return (ROOT / name).read_text(encoding="utf-8").replace("](docs/pages/", "](")


def section(match: re.Match[str]) -> str:
    """The section of README that a page asks for by its title, without the title."""
    _, found, rest = of_repository("README.md").partition(f"\n## {match[1]}\n")
    if not found:
        raise ValueError(f"a page asks for the section {match[1]!r}, which README.md lacks")
    return rest.partition("\n## ")[0].strip()


def on_config(config: Any, **_: Any) -> Any:
    """MkDocs calls it before it builds: the version stands beside the name of the site."""
    config.site_name = f"{config.site_name} {__version__}"
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs calls it with each page's text."""
    if page.file.src_uri == CHANGELOG:
        return of_repository("CHANGELOG.md")
    folder = Path(page.file.abs_src_path).parent

    def block(match: re.Match[str]) -> str:
        text = (folder / match[1]).read_text(encoding="utf-8")
        return f"```python\n{text}```"

    markdown = SECTION.sub(section, FILE.sub(block, markdown)).replace(VERSION, __version__)
    markdown = markdown.replace(SAME_NAME, FUNCTION)
    return markdown.replace(PLACE, tables()) if PLACE in markdown else markdown


def on_page_content(html: str, **_: Any) -> str:
    """MkDocs calls it with each page's HTML: figures such as 9.9e-02 are not broken at a hyphen."""
    return FIGURE.sub('<td class="figure">', html)
