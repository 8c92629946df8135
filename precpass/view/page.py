"""The parts of HTML pages: text, what folds, bars, and tables that are sorted and filtered.

A page is self-contained. Its only script is that of its tables: a click on a heading sorts the
rows, and one on a group's name shows those of the group. Where scripts are left out, as in a
notebook that is not trusted, the tables are still there.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from precpass.plan.eqn_info import Site
from precpass.view.text import Line, heading, shown_path

__all__ = [
    "CSS",
    "MOST_ROWS",
    "SCRIPT",
    "Cell",
    "as_html",
    "bar",
    "facts",
    "figures",
    "folded",
    "located",
    "page",
    "sheet",
    "spans",
    "title",
]

MOST_ROWS = 200
"""The most rows of a table, because a notebook stores them."""

_FORMAT = re.compile(r"\b(f64|f32|bf16|f16)\b")


def spans(line: Line | str) -> str:
    """A line as HTML, each format in its own colour."""

    def piece(text: str, style: str) -> str:
        formatted = _FORMAT.sub(r'<b class="\1">\1</b>', html.escape(text))
        return f'<span class="{style}">{formatted}</span>' if style else formatted

    return "".join(piece(*part) for part in ([(line, "")] if isinstance(line, str) else line))


def as_html(lines: Iterable[Line]) -> str:
    """The lines as a `pre` element, to stand in a `page`, which has the styles."""
    return f"<pre>{chr(10).join(map(spans, lines))}</pre>"


def page(body: str) -> str:
    """A self-contained piece of HTML, with the script of its tables if it has any."""
    script = f"<script>{SCRIPT}</script>" if 'class="sheet"' in body else ""
    return f'<div class="precpass"><style>{CSS}</style>{body}{script}</div>'


def title(text: str) -> str:
    """The heading of a page."""
    return f'<div class="head">{spans(text)}</div>'


def folded(head: str | Line, body: str, *, is_open: bool = False) -> str:
    """A part of a page that a click on its heading shows and hides."""
    opened = ' open="open"' if is_open else ""
    return f"<details{opened}><summary>{spans(head)}</summary>{body}</details>"


def facts(lines: Sequence[Line]) -> str:
    """Short statements side by side."""
    return f'<div class="facts">{"".join(f"<span>{spans(line)}</span>" for line in lines)}</div>'


def bar(parts: Sequence[tuple[str, float, str]], caption: str) -> str:
    """A bar whose parts are as wide as their shares.

    Args:
        parts: each with its name, its size, and the style of its colour.
        caption: what the sizes are.
    """
    total = sum(size for _, size, _ in parts)
    shown = [(name, size / total, style) for name, size, style in parts if size]
    stripes = "".join(
        f'<i class="fill {style}" style="width:{100 * share:.2f}%"></i>'
        for _, share, style in shown
    )
    keys = "".join(
        f'<span class="key"><i class="dot {style}"></i>'
        f"{f'{share:.1%}' if share < 0.9995 else '100%'} {spans(name)}</span> "
        for name, share, style in shown
    )
    below = f'<div class="keys">{keys}<span class="reason">{spans(caption)}</span></div>'
    return f'<div class="bar">{stripes}</div>{below}' if total else ""


class Cell(NamedTuple):
    """A cell of a table.

    Attributes:
        line: its styled text.
        key: what it is sorted by; None for its text. Figures come first, from the largest to the
            smallest ("3/4" is one), then texts as in a dictionary, then "" and "-".
        part: the share of a cell's width that is tinted; None for none.
    """

    line: Line | str
    key: float | str | None = None
    part: float | None = None


def located(site: Site) -> Cell:
    """The cell of a line of your code, with its module."""
    source = site.source
    key = f"{shown_path(source.file)}:{source.line:06d}"
    return Cell(heading(source, site.module), key)


def sheet(
    heads: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    texts: Sequence[int] = (0,),
    groups: Mapping[str, Sequence[bool]] | None = None,
    sorted_by: int | None = None,
    caption: str = "",
) -> str:
    """A table that is sorted by a click on a heading, and filtered by one on a group's name.

    Args:
        heads: the columns' headings.
        rows: the cells, in the order in which they are shown at first.
        texts: the columns of texts; figures are to the right.
        groups: the filters: for each row, whether it is shown.
        sorted_by: the column that the order is that of, if it is one.
        caption: the text above it.
    """
    kept, left = rows[:MOST_ROWS], len(rows) - MOST_ROWS
    shown = [(name, flags[: len(kept)]) for name, flags in (groups or {}).items() if any(flags)]
    styles = ["" if i in texts else "figure" for i in range(len(heads))]
    tops = "".join(
        f'<th scope="col" class="{style}">{_button("sort", str(i), head, i == sorted_by)}</th>'
        for i, (head, style) in enumerate(zip(heads, styles, strict=True))
    )
    body = "".join(
        f'<tr class="{" ".join(f"g{n}" for n, (_, flags) in enumerate(shown) if flags[i])}">'
        f"{''.join(map(_cell, row, styles))}</tr>"
        for i, row in enumerate(kept)
    )
    above = f"<caption>{spans(caption)}</caption>" if caption else ""
    more = f'<div class="reason">and {left} more</div>' if left > 0 else ""
    return (
        f'<div class="sheet">{_filters(len(kept), shown)}<table>{above}<thead><tr>{tops}</tr>'
        f"</thead><tbody>{body}</tbody></table>{more}</div>"
    )


def _filters(n: int, groups: Sequence[tuple[str, Sequence[bool]]]) -> str:
    counts = [sum(flags) for _, flags in groups]
    if not groups or counts == [n]:
        return ""
    buttons = [_button("show", "tr", f"all {n}", True)]
    buttons += [
        _button("show", f".g{i}", f"{name} {count}", False)
        for i, ((name, _), count) in enumerate(zip(groups, counts, strict=True))
    ]
    return f'<div class="filters">{"".join(buttons)}</div>'


def _button(name: str, value: str, text: str, is_pressed: bool) -> str:
    pressed = f'aria-pressed="{str(is_pressed).lower()}"'
    return f'<button type="button" name="{name}" value="{value}" {pressed}>{spans(text)}</button>'


def _cell(cell: Cell, style: str) -> str:
    key = "" if cell.key is None else f' data-key="{html.escape(str(cell.key))}"'
    if cell.part is None:
        return f'<td class="{style}"{key}>{spans(cell.line)}</td>'
    part = f'style="--part:{100 * cell.part:.1f}%"'
    return f'<td class="{style} part"{key} {part}>{spans(cell.line)}</td>'


def figures(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    bad: Sequence[bool] = (),
    groups: Mapping[str, Sequence[bool]] | None = None,
) -> str:
    """A table of figures, each row with a name in its first column.

    Args:
        heads: the columns' headings.
        rows: the cells' texts.
        bad: for each row, whether something is wrong with it.
        groups: as for `sheet`.
    """

    def cell(text: str, style: str) -> Cell:
        # Shares and what is behind a figure in parentheses are not broken.
        figure, opening, more = re.sub(r" (\d+%)", "\u00a0\\1", text).partition(" (")
        return Cell([(figure, style), *([(" ", ""), (f"({more}", "reason")] if opening else [])])

    styles = ["bad" if is_bad else "" for is_bad in bad] or [""] * len(rows)
    cells = [
        [Cell([(name, style or "where")], name), *(cell(text, style) for text in texts)]
        for (name, *texts), style in zip(rows, styles, strict=True)
    ]
    return sheet(heads, cells, groups=groups)


# What a page has in XML too: no "<" and no "&".
SCRIPT = r"""
(() => {
  if (window.precpassSheets) return;
  window.precpassSheets = true;
  const figure = /^([-+]?[\d.]+(?:e[-+]?\d+)?|inf)(?:\/(\d+))?/;
  const rank = (cell) => {
    const text = cell.dataset.key ?? cell.textContent;
    const [, value, whole] = figure.exec(text) ?? [];
    if (value) return [0, -(value === "inf" ? 1e999 : value) / (whole ?? 1), ""];
    return [["", "-"].includes(text) ? 2 : 1, 0, text.toLowerCase()];
  };
  const compare = (a, b) => a[0] - b[0] || a[1] - b[1] || a[2].localeCompare(b[2]);
  document.addEventListener("click", (event) => {
    const button = event.target.closest(".precpass .sheet button");
    if (!button) return;
    const sheet = button.closest(".sheet");
    const body = sheet.querySelector("tbody");
    for (const other of sheet.querySelectorAll(`[name=${button.name}]`))
      other.setAttribute("aria-pressed", other === button);
    if (button.name === "show") {
      for (const row of body.rows) row.hidden = !row.matches(button.value);
    } else {
      const key = (row) => rank(row.cells[button.value]);
      body.append(...[...body.rows].sort((a, b) => compare(key(a), key(b))));
    }
  });
})();
"""
"""The script of all tables of a document, which listens once, however many pages have it."""

CSS = """
.precpass { font-family: ui-monospace, monospace; font-size: 13px; line-height: 1.45;
max-width: 1200px; --low: #2f9e6e; --wide: #e08c00; --bad: #ca244d; --mid: #4c8fe0;
--none: #a8aab4; --rule: #d5d7de; --tint: #4c8fe02e; --green: #18794e; --amber: #945700;
--blue: #0b68cb; --red: #ca244d; --purple: #8e4ec6; }
.precpass pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.precpass svg { max-width: 100%; height: auto; }
.precpass .where { font-weight: bold; } .precpass .code { font-style: italic; }
.precpass :is(.low, .added, .bf16, .f16) { color: var(--green); }
.precpass :is(.wide, .f32) { color: var(--amber); }
.precpass :is(.cast, .hunk) { color: var(--blue); }
.precpass :is(.removed, .bad, .f64) { color: var(--red); }
.precpass .frame { color: var(--purple); font-weight: bold; }
.precpass .reason { opacity: 0.7; } .precpass b { font-weight: 600; }
.precpass summary { cursor: pointer; } .precpass details > details, .precpass details > pre,
.precpass details > table { margin-left: 1.4em; }
.precpass table { font-size: inherit; }
.precpass td, .precpass th { text-align: left; padding: 1px 10px 1px 0; }
.precpass .head { font-weight: bold; margin-bottom: 6px; }
.precpass .bar { display: flex; height: 14px; border-radius: 4px; overflow: hidden; }
.precpass .fill { display: block; min-width: 2px; }
.precpass .dot { display: inline-block; width: 9px; height: 9px; border-radius: 2px;
margin-right: 5px; }
.precpass i.low { background: var(--low); } .precpass i.wide { background: var(--wide); }
.precpass i.bad { background: var(--bad); } .precpass i.cast { background: var(--mid); }
.precpass i.none { background: var(--none); }
.precpass .keys, .precpass .facts { display: flex; flex-wrap: wrap; gap: 2px 16px;
margin: 4px 0; }
.precpass .facts > span { border: 1px solid var(--rule); border-radius: 4px; padding: 0 7px; }
.precpass .facts { gap: 5px 6px; }
.precpass .sheet { margin: 8px 0; overflow-x: auto; }
.precpass .sheet table { width: 100%; font-size: 12px; border-collapse: collapse; }
.precpass .sheet tr { border-bottom: 1px solid var(--rule); background: none; }
.precpass .sheet caption { padding: 6px 0 4px; text-align: left; }
.precpass .sheet th, .precpass .sheet td { padding: 2px 6px 3px 4px; overflow-wrap: break-word;
text-align: left; vertical-align: top; white-space: normal; }
.precpass .sheet .figure { text-align: right; overflow-wrap: normal; }
.precpass .sheet td.figure span, .precpass .sheet td.part { white-space: nowrap; }
.precpass .sheet td.part { background: linear-gradient(to left, var(--mid) var(--part),
transparent var(--part)) bottom / 100% 3px no-repeat; }
.precpass .sheet button { all: unset; cursor: pointer; }
.precpass .sheet button:focus-visible { outline: 2px solid var(--mid); }
.precpass .sheet th button[aria-pressed=true] { text-decoration: underline; }
.precpass .filters { display: flex; flex-wrap: wrap; gap: 6px; margin-bottom: 6px; }
.precpass .filters button { border: 1px solid var(--rule); border-radius: 9px; padding: 0 9px; }
.precpass .filters button[aria-pressed=true] { background: var(--tint); border-color: var(--mid); }
@media (prefers-color-scheme: dark) {
.precpass { --low: #33b074; --wide: #d9900f; --bad: #e5484d; --mid: #4c8fe0; --none: #62646e;
--rule: #3b3d45; --tint: #4c8fe04d; --green: #3dd68c; --amber: #ffca16; --blue: #70b8ff;
--red: #ff9592; --purple: #d19dff; } }
"""
"""The style sheet of all that is shown as HTML, in light and in dark mode."""
