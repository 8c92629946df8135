"""Parts of a page without scripts: a bar of shares, and a table that can be sorted and filtered.

A click on a heading checks a hidden radio button, and a style sheet orders the rows by it. So it
works wherever HTML is shown, also in a notebook that is not trusted to run scripts; where styles
are left out too, it is a plain table.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from precpass.view.text import Line, spans

__all__ = ["MOST_ROWS", "Cell", "Entry", "bar", "facts", "figures", "sheet"]

MOST_ROWS = 200
"""The most rows of a table, because a notebook stores them."""

_HELD = '<form method="dialog" class="sheet">'
"""A form of its own keeps the buttons of two tables of a page apart, and is never sent."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        line: its styled text.
        key: what it is sorted by: numbers from the largest to the smallest, None behind them, and
            texts as in a dictionary.
        part: the share of a cell's width that is tinted; None for none.
    """

    line: Line
    key: float | str | None = None
    part: float | None = None


@dataclasses.dataclass(frozen=True)
class Entry:
    """A row of a table.

    Attributes:
        cells: one for each column.
        groups: the names of the filters that show it.
    """

    cells: Sequence[Cell]
    groups: frozenset[str] = frozenset()


def bar(parts: Sequence[tuple[str, float, str]], caption: str) -> str:
    """A bar whose parts are as wide as their shares.

    Args:
        parts: each with its name, its size, and the style of its colour.
        caption: what the sizes are.
    """
    total = sum(size for _, size, _ in parts)
    if not total:
        return ""
    shown = [(name, size / total, style) for name, size, style in parts if size]
    stripes = "".join(
        f'<i class="fill {style}" style="width:{100 * share:.2f}%"></i>'
        for _, share, style in shown
    )
    keys = " ".join(
        f'<span class="key"><i class="dot {style}"></i>{_percent(share)} '
        f"{spans([(name, '')])}</span>"
        for name, share, style in shown
    )
    return (
        f'<div class="bar">{stripes}</div>'
        f'<div class="keys">{keys} <span class="reason">{spans([(caption, "")])}</span></div>'
    )


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.9995 else "100%"


def facts(lines: Sequence[Line]) -> str:
    """Short statements side by side."""
    return f'<div class="facts">{"".join(f"<span>{spans(line)}</span>" for line in lines)}</div>'


def sheet(
    heads: Sequence[str],
    entries: Sequence[Entry],
    *,
    groups: Sequence[str] = (),
    sorted_by: int | None = None,
    wide: int = 0,
    caption: str = "",
) -> str:
    """A table that is sorted by a click on a heading, and filtered by one on a group's name.

    Args:
        heads: the columns' headings.
        entries: the rows, in the order in which they are shown at first.
        groups: the names of the filters.
        sorted_by: the column that the order is that of, if it is one.
        wide: the column that takes the room that is left.
        caption: the text above it.
    """
    kept = entries[:MOST_ROWS]
    keys = [[entry.cells[i].key for entry in kept] for i in range(len(heads))]
    is_figure = [not any(isinstance(key, str) for key in column) for column in keys]
    ranks = list(map(_ranks, keys))
    rows = "".join(
        _row(entry, [of[i] for of in ranks], groups, is_figure) for i, entry in enumerate(kept)
    )
    tops = "".join(
        f'<th scope="col" class="{"figure" if is_figure[i] else ""}"><label title="sort by this">'
        f'<input type="radio" name="sort" class="s{i}"{_checked(i == sorted_by)}/>'
        f"{spans([(head, '')])}</label></th>"
        for i, head in enumerate(heads)
    )
    columns = " ".join("minmax(10em, 1fr)" if i == wide else "auto" for i in range(len(heads)))
    above = f'<div class="title">{spans([(caption, "")])}</div>' if caption else ""
    left = len(entries) - len(kept)
    more = f'<div class="reason">and {left} more</div>' if left else ""
    return (
        f"{_HELD}{above}{_filters(kept, groups)}"
        f'<table style="grid-template-columns:{columns}"><thead><tr>{tops}</tr></thead>'
        f"<tbody>{rows}</tbody></table>{more}</form>"
    )


def figures(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str = "",
    bad: Sequence[bool] = (),
    groups: Mapping[str, Sequence[bool]] | None = None,
) -> str:
    """A table of figures, each row with a name in its first column.

    Args:
        heads: the columns' headings.
        rows: the cells' texts.
        caption: the text above it.
        bad: for each row, whether something is wrong with it.
        groups: the filters: for each row, whether it is shown.
    """
    groups = {} if groups is None else groups

    def entry(i: int, row: Sequence[str]) -> Entry:
        style = "bad" if i < len(bad) and bad[i] else ""
        cells = [Cell([(row[0], style or "where")], row[0])]
        cells += [Cell(_parted(text, style), _figure(text)) for text in row[1:]]
        return Entry(cells, frozenset(name for name, holds in groups.items() if holds[i]))

    entries = [entry(i, row) for i, row in enumerate(rows)]
    return sheet(heads, entries, groups=list(groups), caption=caption)


def _parted(text: str, style: str) -> Line:
    """A figure, in which shares and what is behind it in parentheses are not broken."""
    figure, opening, more = re.sub(r" (\d+%)", "\u00a0\\1", text).partition(" (")
    return [(figure, style), *([(" ", ""), (f"({more}", "reason")] if opening else [])]


_NUMBER = re.compile(r"[+-]?(?:inf|nan|\d+(?:\.\d+)?(?:e[+-]?\d+)?)")


def _figure(text: str) -> float | None:
    """The number at the beginning of a text, or what "3/4" is; None if there is none.

    Examples:
        >>> _figure("1.25 (1.1-1.3)"), _figure("3/4"), _figure("-")
        (1.25, 0.75, None)
    """
    found = _NUMBER.match(text)
    if found is None:
        return None
    over = re.match(r"(\d+)/(\d+)", text)
    if over is not None and int(over[2]):
        return int(over[1]) / int(over[2])
    return float(found[0])


def _filters(entries: Sequence[Entry], groups: Sequence[str]) -> str:
    counts = [(name, sum(name in entry.groups for entry in entries)) for name in groups]
    found = [(i, name, n) for i, (name, n) in enumerate(counts) if n]
    if not found or (len(found) == 1 and found[0][2] == len(entries)):
        return ""
    buttons = [
        f'<label><input type="radio" name="show" checked="checked"/>all {len(entries)}</label>'
    ]
    buttons += [
        f'<label><input type="radio" name="show" class="g{i}"/>{spans([(name, "")])} {n}</label>'
        for i, name, n in found
    ]
    return f'<div class="filters">{"".join(buttons)}</div>'


def _checked(is_so: bool) -> str:
    return ' checked="checked"' if is_so else ""


def _row(entry: Entry, ranks: Sequence[int], groups: Sequence[str], figures: Sequence[bool]) -> str:
    style = ";".join(f"--s{i}:{rank}" for i, rank in enumerate(ranks))
    names = " ".join(f"g{i}" for i, name in enumerate(groups) if name in entry.groups)
    cells = "".join(
        _cell(cell, is_figure) for cell, is_figure in zip(entry.cells, figures, strict=True)
    )
    return f'<tr class="{names}" style="{style}">{cells}</tr>'


def _cell(cell: Cell, is_figure: bool) -> str:
    tint = "" if cell.part is None else f' style="--part:{100 * cell.part:.1f}%"'
    styles = " ".join(("figure" * is_figure, "part" * (cell.part is not None))).strip()
    return f'<td class="{styles}"{tint}>{spans(cell.line)}</td>'


def _ranks(keys: Sequence[float | str | None]) -> list[int]:
    """The position of each key: numbers from the largest, texts as in a dictionary."""

    def order(i: int) -> tuple[int, float, str]:
        key = keys[i]
        if key is None:
            return 2, 0.0, ""
        if isinstance(key, str):
            return 1, 0.0, key.casefold()
        return 0, -math.inf if math.isnan(key) else -key, ""

    ranks = [0] * len(keys)
    for rank, i in enumerate(sorted(range(len(keys)), key=order)):
        ranks[i] = rank
    return ranks
