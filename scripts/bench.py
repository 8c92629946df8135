"""Measure models in float32, by hand in bfloat16, and under the pass.

Every model is written plainly in float32 and by hand in bfloat16 (scripts/bench_models). For its
forward pass, its gradient and its whole train step each column gives time (median, and the ratio to
float32 within rounds, with quartiles), XLA's temp memory and what the forward pass keeps for the
backward pass in MiB, products on 16 bits, casts, the relative error against float64, and the loss
after a fixed number of steps.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from bench_cells import Cell, Effort, measured
from bench_columns import COLUMNS, MODES
from bench_models import MODELS, SIZES
from rich.console import Console
from rich.progress import track
from rich.table import Table

from precpass.devices.cpu_info import cpu_info
from precpass.measure.execute import Timing

STEPS = {"small": 3, "medium": 8, "target": 8, "large": 32}
BASES = ("float32", "hand")
"""The columns to which times are compared: the first also in every cell of the tables."""
HEADINGS = ("ms", "to float32", "temp", "kept", "low", "casts", "error", "loss")


# ---------------------------------------------------------------- tables


def ratio(cells: Iterable[Cell], cell: Cell, base: str) -> Timing | None:
    """The times of a cell over those of another column, by rounds; none where one has none."""
    same = (c for c in cells if (c.model, c.mode, c.column) == (cell.model, cell.mode, base))
    other = next(same, None)
    if other is None or cell.timing is None or other.timing is None:
        return None
    return cell.timing.ratios(other.timing)


def mean(cells: Sequence[Cell], mode: str, column: str, base: str) -> float | None:
    """The geometric mean over the models of a column's median ratio.

    Models that failed in either column do not count. A mode of "all" has every ratio of the column.
    """
    own = [c for c in cells if c.column == column != base and mode in (c.mode, "all")]
    each = [timing.median for c in own if (timing := ratio(cells, c, base))]
    return statistics.geometric_mean(each) if each else None


def means_table(cells: Sequence[Cell]) -> dict[str, Any]:
    """The geometric means: a row for each column, to both of `BASES` in each mode."""
    modes = [*dict.fromkeys(cell.mode for cell in cells), "all"]
    rows: list[list[str]] = []
    for key in [key for key in COLUMNS if any(cell.column == key for cell in cells)]:
        pairs = [[mean(cells, mode, key, base) for base in BASES] for mode in modes]
        texts = [" / ".join("-" if x is None else f"{x:.2f}" for x in pair) for pair in pairs]
        rows.append([COLUMNS[key].title, *texts])
    return {"columns": ["geometric means: time to float32 / by hand", *modes], "rows": rows}


def short(value: float | None) -> str:
    """Three digits, without an exponent."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.01 else f"{value:.2f}"


def row(cells: Sequence[Cell], cell: Cell) -> list[str]:
    """The figures of one cell, in the order of `HEADINGS`."""
    if cell.failure:
        return [cell.failure, *["-"] * (len(HEADINGS) - 1)]
    relative = "-"
    if times := ratio(cells, cell, BASES[0]):
        lower, upper = times.quartiles
        relative = f"{times.median:.2f} ({lower:.2f}-{upper:.2f})"
    return [
        short(1e3 * cell.timing.median) if cell.timing else "-",
        relative,
        *(short(None if x is None else x / 2**20) for x in (cell.temp_bytes, cell.kept_bytes)),
        f"{cell.counts.low}/{cell.counts.products}" if cell.counts else "-",
        str(cell.counts.casts) if cell.counts else "-",
        "-" if cell.error is None else f"{cell.error:.1e}",
        "-" if cell.loss is None else f"{cell.loss:.4f}",
    ]


def table_of(cells: Sequence[Cell], mode: str) -> dict[str, Any]:
    """One mode: a row for each model and column."""
    own = [cell for cell in cells if cell.mode == mode]
    rows = [[c.model, COLUMNS[c.column].title, *row(own, c)] for c in own]
    return {"mode": mode, "columns": ["model", "column", *HEADINGS], "rows": rows}


def result(options: argparse.Namespace, cells: Sequence[Cell]) -> dict[str, Any]:
    """The run as a file of scripts/results."""
    info, device = cpu_info(), jax.devices()[0]
    formats = ", ".join(info.bf16) or "no bfloat16 instructions"
    text = f"{device.device_kind} ({device.platform}), {info.model} ({info.cores} cores, {formats})"
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    tables = [table_of(cells, mode) for mode in dict.fromkeys(c.mode for c in cells)]
    release = f"jax {jax.__version__}, Python {platform.python_version()}"
    return {
        "title": f"The benchmark, {info.model}",
        "measured": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "text": f"{text}{load}, size {options.size}, at least {options.rounds} rounds. Times: "
        "median; ratios: median (quartiles) of ratios within a round, below 1 is faster. temp and "
        "kept in MiB. low: products on 16 bits of all.",
        "parts": [{"title": release, "tables": [*tables, means_table(cells)]}],
    }


def shown(table: dict[str, Any]) -> Table:
    """A table for the terminal."""
    made = Table(title=table.get("mode"), title_justify="left")
    for heading in table["columns"]:
        made.add_column(heading, justify="right")
    for cells in table["rows"]:
        made.add_row(*("-" if cell is None else str(cell) for cell in cells))
    return made


# ---------------------------------------------------------------- the command


def some_of(names: Sequence[str], text: str) -> list[str]:
    """Names between commas, in the order in which all of them stand."""
    given = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in given if name not in names]
    if unknown or not given:
        quoted = ", ".join(map(repr, unknown or [text]))
        raise argparse.ArgumentTypeError(f"unknown {quoted}; legal: {', '.join(names)}")
    return [name for name in names if name in given]


def add_choices(parser: argparse.ArgumentParser, **choices: Iterable[str]) -> None:
    """Adds options that take some of the legal names, all by default."""
    for option, legal in choices.items():
        names = list(legal)
        parser.add_argument(
            f"--{option}",
            type=partial(some_of, names),
            default=names,
            metavar="A,B",
            help=f"some of {', '.join(names)}; all by default",
        )


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_choices(parser, models=MODELS, modes=MODES, columns=COLUMNS)
    parser.add_argument(
        "--rounds",
        type=int,
        default=7,
        help="measured rounds (7), more where they take less than two seconds",
    )
    parser.add_argument("--size", choices=SIZES, default="medium", help="large is for a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a file of results")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error("--rounds takes a number of at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    if any(word.partition("=")[0] == "--target" for word in sys.argv[1:] if argv is None):
        import bench_targets  # whose options are others

        return bench_targets.main()
    options = arguments(argv)
    out = Console() if Console().is_terminal else Console(width=130)
    effort = Effort(options.rounds, STEPS[options.size], 0 if options.size == "small" else 2)
    cells: list[Cell] = []
    programs = [(name, mode) for name in options.models for mode in options.modes]
    for name, mode in track(programs, "measuring", console=Console(stderr=True)):
        found = measured(MODELS[name](options.size), mode, options.columns, effort)
        out.print(shown(table_of(found, mode)))
        cells += found
        if options.json:  # as far as it is, so that a run that is stopped leaves what it measured
            options.json.write_text(json.dumps(result(options, cells), indent=1) + "\n")
        jax.clear_caches()  # a whole run holds hundreds of programs
    out.print(shown(means_table(cells)))
    out.print(result(options, cells)["text"], highlight=False, markup=False)


if __name__ == "__main__":
    main()
