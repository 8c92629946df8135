"""The benchmark's tables: a row per model and mode, and geometric means over the models."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import rich
from bench_cells import Cell
from bench_columns import COLUMNS, MODES
from rich.table import Table

from precpass.measure.execute import Timing

BASES = ("float32", "hand")
"""The columns to which times are held: the first also in every cell of the table."""


def ratio(cell: Cell, base: Cell | None) -> Timing | None:
    """The times of one cell over those of another, by rounds; none where one has none."""
    if base is None or cell.timing is None or base.timing is None:
        return None
    return cell.timing.ratios(base.timing)


def found(cells: Iterable[Cell], model: str, mode: str, column: str) -> Cell | None:
    """The cell of a model, a mode and a column."""
    wanted = (model, mode, column)
    return next((c for c in cells if (c.model, c.mode, c.column) == wanted), None)


def ratios(cells: Sequence[Cell], cell: Cell) -> dict[str, Timing]:
    """The ratios of a cell's time to that of each of `BASES` that was measured."""
    pairs = {base: ratio(cell, found(cells, cell.model, cell.mode, base)) for base in BASES}
    return {base: timing for base, timing in pairs.items() if timing}


def geometric_means(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The geometric mean over the models of each column's median ratio, mode by mode and in all.

    Models that failed in the column or in the base have no ratio: `models` names those that
    count. A mode of "all" has every ratio of the column, whatever its mode.
    """
    means: list[dict[str, Any]] = []
    for mode in (*MODES, "all"):
        for column in COLUMNS:
            own = [c for c in cells if c.column == column and mode in (c.mode, "all")]
            for base in BASES:
                each = [(c.model, ratios(cells, c).get(base)) for c in own]
                each = [(model, timing.median) for model, timing in each if timing]
                if each and column != base:
                    mean = statistics.geometric_mean(value for _, value in each)
                    models = sorted({model for model, _ in each})
                    means.append(
                        {"mode": mode, "column": column, "to": base, "mean": mean, "models": models}
                    )
    return means


# ---------------------------------------------------------------- as text


def mebibytes(size: float | None) -> str:
    return "-" if size is None else short(size / 2**20)


def short(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.01 else f"{value:.2f}"


def products(cell: Cell) -> str:
    if cell.counts is None:
        return "-"
    marked = f" ({cell.counts.marked} marked)" if cell.counts.marked else ""
    return f"{cell.counts.low}/{cell.counts.products}{marked}"


def row(cell: Cell, base: Cell | None) -> list[str]:
    """The figures of one cell, in the order of `HEADINGS`."""
    if cell.failure:
        return [COLUMNS[cell.column].title, "error", cell.failure]
    times = relative = "-"
    if cell.timing:
        times = short(1e3 * cell.timing.median)
    if ratios := ratio(cell, base):
        lower, upper = ratios.quartiles
        relative = f"{ratios.median:.2f} ({lower:.2f}-{upper:.2f})"
    return [
        COLUMNS[cell.column].title,
        times,
        relative,
        mebibytes(cell.temp_bytes),
        mebibytes(cell.kept_bytes),
        products(cell),
        str(cell.counts.casts) if cell.counts else "-",
        "-" if cell.error is None else f"{cell.error:.1e}",
        "-" if cell.loss is None else f"{cell.loss:.4f}",
    ]


HEADINGS = ("", "ms", "to float32", "temp", "kept", "low", "casts", "error", "loss")


def table_of(cells: Sequence[Cell], model: str, mode: str) -> Table:
    """One model in one mode: a row for each column of the benchmark."""
    table = Table(title=f"{model}, {mode}", box=rich.box.SIMPLE_HEAD, title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    base = found(cells, model, mode, BASES[0])
    for cell in cells:
        if (cell.model, cell.mode) == (model, mode):
            name, *figures = row(cell, base)
            if cell.failure:
                figures = ["error"]
            table.add_row(name, *figures)
    return table


def failures(cells: Sequence[Cell]) -> list[str]:
    """A line for each cell that failed."""
    return [f"{c.model}, {c.mode}, {c.column}: {c.failure}" for c in cells if c.failure]


def means_rows(cells: Sequence[Cell]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The modes that were measured, and each column's name and its means in them."""
    means = {(m["mode"], m["column"], m["to"]): m["mean"] for m in geometric_means(cells)}
    modes = [mode for mode in (*MODES, "all") if any(mode == key[0] for key in means)]
    rows: list[tuple[str, list[str]]] = []
    for key, column in COLUMNS.items():
        pairs = [[means.get((mode, key, base)) for base in BASES] for mode in modes]
        if any(value for pair in pairs for value in pair):
            rows.append((column.title, [" / ".join(map(_mean, pair)) for pair in pairs]))
    return modes, rows


def means_table(cells: Sequence[Cell]) -> Table:
    """The geometric means: a row for each column, a pair of columns for each mode."""
    title = "geometric means over the models, time to float32 / to by hand"
    table = Table(title=title, box=rich.box.SIMPLE_HEAD, title_justify="left")
    modes, rows = means_rows(cells)
    for heading in ("", *modes):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, texts in rows:
        table.add_row(name, *texts)
    return table


def _mean(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def markdown(cells: Sequence[Cell]) -> str:
    """All tables as Markdown, as scripts/README.md has them: one for each mode, and the means."""
    lines: list[str] = []
    for mode in dict.fromkeys(cell.mode for cell in cells):
        lines += ["", _line((mode, "", *HEADINGS[1:])), _rule(1 + len(HEADINGS))]
        for model in dict.fromkeys(cell.model for cell in cells):
            own = [cell for cell in cells if (cell.model, cell.mode) == (model, mode)]
            base = found(own, model, mode, BASES[0])
            for cell in own:
                name = f"**{model}**" if cell is own[0] else ""
                lines.append(_line((name, *row(cell, base))))
    modes, rows = means_rows(cells)
    lines += ["", _line(("geometric means: time to float32 / by hand", *modes))]
    lines += [_rule(1 + len(modes)), *(_line((name, *texts)) for name, texts in rows)]
    return "\n".join(lines).strip() + "\n"


def _rule(columns: int) -> str:
    return "|---" * columns + "|"


def _line(texts: Iterable[str]) -> str:
    return "| " + " | ".join(texts) + " |"
