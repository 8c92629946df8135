"""Compile the models of the benchmark for a device that need not be there, and compare them.

    scripts/bench --target h100
    scripts/bench --target "tpu v5e" --models cnn,lstm --json v5e.json

Nothing runs on the device: bytes, kernels, memory and a TPU's cycles are what its compiler made
(`precpass.measure.traffic`). Errors are those of the same rewritten programs on this machine's CPU,
with every rounding that they have, of a smaller model. A GPU's programs are compiled twice, with
every product as a call of cublasLt, and with Triton's kernels: a real device chooses for each
product by its time.
"""

import argparse
import dataclasses
import datetime
import json
import statistics
import sys
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import bench_cells
import bench_columns
import jax
from bench_columns import COLUMNS, MODES
from bench_models import FOREIGN, MODELS, Model
from rich.console import Console
from rich.table import Table

from precpass.devices.cpu_info import cpu_info
from precpass.devices.detect import planned_for
from precpass.devices.targets import TARGETS, abstract_on, target_of
from precpass.measure.traffic import Traffic, traffic_of

KEYS = ("float32", "hand", "jmp", "grad-auto", "auto-grad", "auto-best")
"""The columns that are compiled."""
WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}
ALL_ROUNDINGS = {"xla_allow_excess_precision": False}
BATCHES = 4
"""An error is the median over so many batches."""
ERROR_SIZES = {"jraph": "medium", "resnet50": "medium"}
"""Models whose errors are of another size.

A few relus decide the error of a graph of 16 nodes. The last batch normalisations of a small
ResNet-50 see two values for each channel, and the error of its gradient is above 1 by hand as well.
"""


@dataclasses.dataclass(frozen=True)
class TargetCell:
    """One model in one mode and one column, compiled for a target.

    Attributes:
        failure: the type and the first line of what it raised; nothing else is there then.
        moved: the bytes that its kernels move; on a GPU with every product in cublasLt.
        moved_triton: the same with Triton's kernels; none on a TPU.
        cycles: the TPU compiler's estimate; none on a GPU, and none if the estimate leaves out
            kernels, because these may be most of the work.
        temp: the bytes of XLA's temporary memory.
        kernels, low: the runs of matrix and convolution kernels, and of those on 16 bits.
        casts, cast_bytes: the runs of kernels that only cast, and the bytes that these move.
        error: relative, against float64, of a smaller model, as the median over
            `BATCHES` batches; none of a step.
        seconds: that compiling took here.
    """

    model: str
    mode: str
    column: str
    failure: str | None = None
    moved: float | None = None
    moved_triton: float | None = None
    cycles: int | None = None
    temp: int | None = None
    kernels: int | None = None
    low: int | None = None
    casts: int | None = None
    cast_bytes: float | None = None
    error: float | None = None
    seconds: float | None = None


def cell(target: Any, model: Model, mode: str, key: str) -> TargetCell:
    """A column of one model in one mode, compiled for a target."""
    start = time.perf_counter()
    state = jax.eval_shape(model.optimizer.init, model.params) if mode == "step" else None
    args = (model.params, model.state, *([state] if mode == "step" else []), model.batch(0))
    with planned_for(target), COLUMNS[key].context():
        lowered = bench_cells.traced(model, mode, key).lower(*abstract_on(target, args))
        is_gpu = target.platform == "gpu"
        program = lowered.compile(WITHOUT_TRITON if is_gpu else None)
        traffic = traffic_of(program.as_text(), target.platform)
        triton = traffic_of(lowered.compile().as_text(), "gpu").moved if is_gpu else None
    return TargetCell(
        model.name,
        mode,
        key,
        moved=traffic.moved,
        moved_triton=triton,
        temp=program.memory_analysis().temp_size_in_bytes,
        seconds=time.perf_counter() - start,
        **figures(traffic),
    )


def figures(traffic: Traffic) -> dict[str, Any]:
    return {
        "cycles": None if traffic.without_cycles else traffic.cycles,
        "kernels": traffic.runs,
        "low": traffic.low_runs,
        "casts": traffic.casts,
        "cast_bytes": traffic.cast_bytes,
    }


def errors(target: Any, model: Model, mode: str, keys: Sequence[str]) -> Mapping[str, float]:
    """The errors of columns as they are planned for a target, on this machine's CPU.

    Each is the median over some batches: the error of a single one varies by a fifth, and is many
    times as large where rounding sends one token to another expert.
    """
    wanted = [bench_cells.reference(model, mode, batch) for batch in range(BATCHES)]
    found: dict[str, float] = {}
    for key in keys:
        with planned_for(target), COLUMNS[key].context():
            lowered = bench_cells.traced(model, mode, key).lower(
                *bench_columns.arguments(model, mode)
            )
        program = lowered.compile(ALL_ROUNDINGS)
        each: list[float] = []
        for batch, leaves in enumerate(wanted):
            args = bench_columns.copied(bench_columns.arguments(model, mode, batch))
            each.append(bench_cells.error_of(program(*args), leaves) or 0.0)
        found[key] = statistics.median(each)
    return found


def measured(
    options: argparse.Namespace, target: Any, name: str, known: Collection[tuple[str, str, str]]
) -> Iterator[TargetCell]:
    """The cells of one model, but for those that are known."""
    makes = {**MODELS, **FOREIGN}
    model = makes[name](options.size)
    for mode in options.modes:
        keys = [k for k in options.columns if mode in COLUMNS[k].modes]
        keys = [k for k in keys if (name, mode, k) not in known]
        if not keys:
            continue
        cells: list[TargetCell] = []
        for key in keys:
            try:
                cells.append(cell(target, model, mode, key))
            except Exception as error:
                cells.append(TargetCell(name, mode, key, failure=bench_cells.first_line(error)))
        each: Mapping[str, float] = {}
        if mode != "step" and options.errors:
            try:
                size = ERROR_SIZES.get(name, options.error_size)
                each = errors(target, makes[name](size), mode, keys)
            except RuntimeError as error:
                print(f"{name}, {mode}: no errors: {error}", file=sys.stderr)
        yield from (dataclasses.replace(c, model=name, error=each.get(c.column)) for c in cells)
        jax.clear_caches()


# ---------------------------------------------------------------- tables


RATIOS = ("moved", "moved_triton", "cycles", "temp", "error")


def ratio(cells: Sequence[TargetCell], cell: TargetCell, base: str, figure: str) -> float | None:
    """A figure of a cell over that of another column; none where one has none."""
    same = (c for c in cells if (c.model, c.mode, c.column) == (cell.model, cell.mode, base))
    mine, its = (getattr(c, figure) if c else None for c in (cell, next(same, None)))
    return mine / its if mine is not None and its else None


def means(cells: Sequence[TargetCell]) -> list[list[Any]]:
    """The geometric means over gradients and steps of each column's ratios to "by hand".

    A figure that fewer than half of the programs have gets no mean, because a reader would take
    the mean of a few programs for that of all.
    """
    rows: list[list[Any]] = []
    for key in KEYS:
        own = [c for c in cells if c.column == key and c.mode != "forward"]
        if key == "hand" or not own:
            continue
        row: list[Any] = [key]
        for figure in RATIOS:
            each = [r for c in own if (r := ratio(cells, c, "hand", figure))]
            each = each if 2 * len(each) >= len(own) else []
            row.append(round(statistics.geometric_mean(each), 3) if each else None)
            row.append(round(max(each), 3) if each else None)
        rows.append([*row, len(own)])
    return rows


def rows_of(cells: Sequence[TargetCell]) -> list[list[Any]]:
    """Each cell's figures as a row: bytes, cycles and memory to float32, and the error."""
    rows: list[list[Any]] = []
    for c in cells:
        to = [ratio(cells, c, "float32", figure) for figure in RATIOS[:-1]]
        shown = [None if r is None else round(r, 3) for r in to]
        error = None if c.error is None else float(f"{c.error:.2g}")
        kernels = c.failure or f"{c.low}/{c.kernels}"
        rows.append([c.model, c.mode, c.column, *shown, kernels, c.casts, error])
    return rows


COLUMN_TITLES = ("model", "mode", "program", "bytes", "bytes, Triton", "cycles", "temp")
TITLES = (*COLUMN_TITLES, "low kernels", "cast kernels", "error")
MEANS = ("program", *(f"{f}{m}" for f in RATIOS for m in ("", ", worst")), "programs")


def result(options: argparse.Namespace, cells: Sequence[TargetCell]) -> dict[str, Any]:
    """The run as a file of scripts/results."""
    others = ", ".join(f"{name}: {size}" for name, size in ERROR_SIZES.items())
    versions = f"jax {jax.__version__}, Python {sys.version.split()[0]}, {cpu_info().model}"
    return {
        "title": f"Compiled for {options.target}",
        "measured": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "text": (
            f"{versions}, models of size {options.size}, compiled and not run: bytes that kernels "
            "move, the compiler's estimated cycles and temp memory, to float32. On a GPU every "
            "product is a cublasLt call, or one of Triton's kernels. Errors: of models of size "
            f"{options.error_size} ({others}), against float64, evaluated on a CPU as planned "
            f"for the target, medians over {BATCHES} batches."
        ),
        "parts": [
            {
                "title": "To the program by hand: geometric mean and worst of gradients and steps",
                "tables": [{"columns": list(MEANS), "rows": means(cells)}],
            },
            {"title": "To float32", "tables": [{"columns": list(TITLES), "rows": rows_of(cells)}]},
        ],
        "cells": [dataclasses.asdict(c) for c in cells],
    }


def table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    shown = Table(*titles)
    for row in rows:
        shown.add_row(*("-" if x is None else str(x) for x in row))
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    from bench import some_of

    names = [*MODELS, *FOREIGN]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", required=True, help=", ".join(TARGETS))
    for option, of in (("models", names), ("modes", MODES), ("columns", KEYS)):
        parser.add_argument(f"--{option}", type=partial(some_of, of), default=list(of))
    parser.add_argument("--size", default="target")
    parser.add_argument("--error-size", default="small")
    parser.add_argument("--errors", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--json",
        type=Path,
        help="write it there, as a file of scripts/results; what is there already is kept, and not "
        "compiled again",
    )
    options = parser.parse_args(argv)
    short = options.target if options.target in TARGETS else f"tpu {options.target}"
    target = target_of(short)
    warnings.simplefilter("ignore")
    file: Path | None = options.json
    kept = json.loads(file.read_text())["cells"] if file is not None and file.exists() else []
    console, cells = Console(width=150), [TargetCell(**cell) for cell in kept]
    known = {(c.model, c.mode, c.column) for c in cells}
    for name in options.models:
        cells += measured(options, target, name, known)
        cells.sort(key=lambda c: (names.index(c.model), MODES.index(c.mode), KEYS.index(c.column)))
        own = [c for c in cells if c.model == name]
        console.print(table(TITLES, rows_of(own)))
        if file is not None:  # as far as it is
            file.write_text(json.dumps(result(options, cells), indent=1))
    console.print(table(MEANS, means(cells)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
