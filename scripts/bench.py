"""Measure models in float32, by hand in bfloat16, and in the ways of lowering float32 programs.

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
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bench_table
import jax
from bench_cells import Cell, Effort, measured
from bench_columns import COLUMNS, MODES
from bench_models import MODELS, SIZES
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from precpass.devices.cpu_info import cpu_info
from precpass.report.compare.comparison import for_json

SCHEMA = 1
STEPS = {"small": 3, "medium": 8, "target": 8, "large": 32}
SECONDS = {"small": 0.0, "medium": 2.0, "target": 2.0, "large": 2.0}
LIBRARIES = ("jax", "jaxlib", "numpy", "optax", "jmp", "scikit-learn")


def machine() -> dict[str, Any]:
    """The processor, as the system names it, and how many cores this process may use."""
    found = cpu_info()
    return {
        "processor": found.model,
        "bfloat16": list(found.bf16),
        "cores": found.cores,
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "system": platform.system(),
    }


def header(size: str, rounds: int) -> dict[str, Any]:
    """What a report says of itself."""
    devices = jax.devices()
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "device": {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "count": len(devices),
        },
        "versions": {"python": platform.python_version()} | {n: version(n) for n in LIBRARIES},
        "size": size,
        "rounds": rounds,
        "steps": STEPS[size],
    }


def report(head: dict[str, Any], cells: Sequence[Cell]) -> dict[str, Any]:
    """The JSON object of a run."""
    return head | {
        "columns": {key: column.meaning for key, column in COLUMNS.items()},
        "missing": {key: column.missing for key, column in COLUMNS.items() if column.missing},
        "cells": [cell.to_dict(bench_table.ratios(cells, cell)) for cell in cells],
        "geometric_means": bench_table.geometric_means(cells),
    }


def title(head: dict[str, Any]) -> str:
    """The first line of the tables."""
    machine, versions, device = head["machine"], head["versions"], head["device"]
    formats = ", ".join(machine["bfloat16"]) or "no bfloat16 instructions"
    return (
        f"{head['date']}, {device['kind']} ({device['platform']}), {machine['processor']} "
        f"({machine['cores']} cores, {formats}), jax {versions['jax']}, Python "
        f"{versions['python']}, size {head['size']}, at least {head['rounds']} rounds"
    )


def run(options: argparse.Namespace, console: Console, shown: Callable[[list[Cell]], None]) -> None:
    """Measures what the options name; `shown` is given the cells of each model and mode."""
    columns = (TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn())
    total = 0
    for mode in options.modes:
        own = [k for k in options.columns if mode in COLUMNS[k].modes and not COLUMNS[k].missing]
        total += len(options.models) * (len(own) + options.rounds)
    effort = Effort(options.rounds, STEPS[options.size], SECONDS[options.size])
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("", total=total)
        for name in options.models:
            model = MODELS[name](options.size)
            for mode in options.modes:

                def tell(text: str, advance: int, what: str = f"{name}, {mode}: ") -> None:
                    progress.update(bar, description=what + text, advance=advance)

                shown(measured(model, mode, options.columns, effort, tell))
                jax.clear_caches()  # a whole run holds hundreds of programs


# ---------------------------------------------------------------- the command


def some_of(names: Sequence[str], text: str) -> list[str]:
    """Names between commas, in the order in which all of them stand."""
    given = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in given if name not in names]
    if unknown or not given:
        legal = ", ".join(names)
        shown = ", ".join(map(repr, unknown or [text]))
        raise argparse.ArgumentTypeError(f"unknown {shown}; legal: {legal}")
    return [name for name in names if name in given]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option, names in (("models", MODELS), ("modes", MODES), ("columns", COLUMNS)):
        parser.add_argument(
            f"--{option}",
            type=partial(some_of, list(names)),
            default=list(names),
            metavar="A,B",
            help=f"some of {', '.join(names)}; all by default",
        )
    parser.add_argument(
        "--rounds",
        type=int,
        default=7,
        help="measured rounds (7), more where they take less than two seconds",
    )
    parser.add_argument("--size", choices=SIZES, default="medium", help="large is for a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there")
    reading = "show runs that were written with --json, measuring nothing"
    parser.add_argument("--read", type=Path, nargs="+", metavar="FILE", help=reading)
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error("--rounds takes a number of at least 1")
    return options


def read(files: Sequence[Path]) -> tuple[dict[str, Any], list[Cell]]:
    """The header of the first of some runs, and the cells of all, such as were run in parts."""
    found = [json.loads(file.read_text()) for file in files]
    return found[0], [Cell.from_dict(cell) for part in found for cell in part["cells"]]


def main(argv: Sequence[str] | None = None) -> None:
    if any(word.partition("=")[0] == "--target" for word in sys.argv[1:] if argv is None):
        import bench_targets  # whose options are others

        raise SystemExit(bench_targets.main())
    options = arguments(argv)
    out = Console() if Console().is_terminal else Console(width=130)
    say = partial(out.print, highlight=False, markup=False, soft_wrap=True)
    head, cells = read(options.read) if options.read else (header(options.size, options.rounds), [])
    say(title(head))

    def shown(found: Sequence[Cell]) -> None:
        out.print(bench_table.table_of(found, found[0].model, found[0].mode))

    def measured(found: list[Cell]) -> None:
        shown(found)
        cells.extend(found)
        if options.json:  # as far as it is, so that a run that is stopped leaves what it measured
            options.json.write_text(json.dumps(for_json(report(head, cells)), indent=1))

    for model, mode in dict.fromkeys((cell.model, cell.mode) for cell in cells):
        shown([cell for cell in cells if (cell.model, cell.mode) == (model, mode)])
    if not options.read:
        run(options, Console(stderr=True), measured)
    out.print(bench_table.means_table(cells))
    if options.markdown:
        options.markdown.write_text(bench_table.markdown(cells))
    for line in bench_table.failures(cells):
        say(line)
    for key, column in COLUMNS.items():
        if column.missing and key in options.columns:
            say(f"{column.title}: {column.missing}")
    say(
        "Times: median; ratios: median (quartiles) of ratios within a round, below 1 is faster. "
        "temp and kept in MiB. low: products on 16 bits of all."
    )


if __name__ == "__main__":
    main()
