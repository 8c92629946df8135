"""Compile gradients for a device that need not be there, and compare them.

    scripts/bench --target h100
    scripts/bench --target "tpu v5e" --models cnn,lstm --json v5e.json

Nothing runs on the device: bytes, kernels, memory and a TPU's cycles are those of the compiled text
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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import bench
import bench_cells
import bench_columns
import jax
from bench_columns import COLUMNS
from bench_models import MODELS, Model, foreign
from rich.console import Console

from precpass.devices.cpu_info import cpu_info
from precpass.devices.detect import planned_for
from precpass.devices.targets import TARGETS, abstract_on, target_of
from precpass.measure.traffic import traffic_of

MODE = "gradient"
COMPILED: Mapping[str, Callable[[str], Model]] = {
    **{name: MODELS[name] for name in ("transformer", "unrolled", "cnn", "lstm")},
    "jraph": foreign.graph_network,
    "flax-decoder": foreign.flax_decoder,
}
"""The models that are compiled, two of them with the code of other libraries."""
KEYS = ("float32", "hand", "grad-auto", "auto-grad")
"""The columns that are compiled."""
WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}
ALL_ROUNDINGS = {"xla_allow_excess_precision": False}
BATCHES = 4
"""An error is the median over so many batches."""
ERROR_SIZES = {"jraph": "medium"}
"""The sizes of models whose errors are not of small ones: a few relus decide the error of a graph
of 16 nodes."""


@dataclasses.dataclass(frozen=True)
class TargetCell:
    """The gradient of one model in one column, compiled for a target.

    Attributes:
        failure: the type and the first line of what it raised; nothing else is there then.
        moved: the bytes that its kernels move; on a GPU with every product in cublasLt.
        moved_triton: the same with Triton's kernels; none on a TPU.
        cycles: the TPU compiler's estimate; none on a GPU, and none if the estimate leaves out
            kernels, because these may be most of the work.
        temp: the bytes of XLA's temporary memory.
        kernels, low: the runs of matrix and convolution kernels, and of those on 16 bits.
        casts: the runs of kernels that only cast.
        error: relative, against float64, of a smaller model, as the median over `BATCHES` batches.
    """

    model: str
    column: str
    failure: str | None = None
    moved: float | None = None
    moved_triton: float | None = None
    cycles: int | None = None
    temp: int | None = None
    kernels: int | None = None
    low: int | None = None
    casts: int | None = None
    error: float | None = None


def cell(target: Any, model: Model, key: str) -> TargetCell:
    """A column of one model, compiled for a target."""
    args = model.params, model.state, model.batch(0)
    with planned_for(target):
        lowered = bench_cells.traced(model, MODE, key).lower(*abstract_on(target, args))
        is_gpu = target.platform == "gpu"
        program = lowered.compile(WITHOUT_TRITON if is_gpu else None)
        traffic = traffic_of(program.as_text(), target.platform)
        triton = traffic_of(lowered.compile().as_text(), "gpu").moved if is_gpu else None
    return TargetCell(
        model.name,
        key,
        moved=traffic.moved,
        moved_triton=triton,
        cycles=None if traffic.without_cycles else traffic.cycles,
        temp=program.memory_analysis().temp_size_in_bytes,
        kernels=traffic.runs,
        low=traffic.low_runs,
        casts=traffic.casts,
    )


def errors(target: Any, model: Model, keys: Sequence[str]) -> Mapping[str, float]:
    """The errors of columns as they are planned for a target, on this machine's CPU.

    Each is the median over some batches, because the error of a single one varies by a fifth.
    """
    wanted = [bench_cells.reference(model, MODE, batch) for batch in range(BATCHES)]
    batches = [bench_columns.arguments(model, MODE, batch) for batch in range(BATCHES)]
    found: dict[str, float] = {}
    for key in keys:
        with planned_for(target):
            lowered = bench_cells.traced(model, MODE, key).lower(*batches[0])
        program = lowered.compile(ALL_ROUNDINGS)
        pairs = zip(batches, wanted, strict=True)
        each = [bench_cells.error_of(program(*args), leaves) or 0.0 for args, leaves in pairs]
        found[key] = statistics.median(each)
    return found


def measured(options: argparse.Namespace, target: Any, name: str) -> Iterator[TargetCell]:
    """The cells of one model."""
    model, of_errors = COMPILED[name](options.size), ERROR_SIZES.get(name, "small")
    each: Mapping[str, float] = {}
    if options.errors:
        each = errors(target, COMPILED[name](of_errors), options.columns)
    for key in options.columns:
        try:
            yield dataclasses.replace(cell(target, model, key), error=each.get(key))
        except Exception as error:
            yield TargetCell(name, key, failure=bench_cells.first_line(error))
    jax.clear_caches()


# ---------------------------------------------------------------- tables


COSTS = ("moved", "moved_triton", "cycles", "temp")


def ratio(cells: Sequence[TargetCell], cell: TargetCell, base: str, figure: str) -> float | None:
    """A figure of a cell over that of another column; none where one has none."""
    same = (c for c in cells if (c.model, c.column) == (cell.model, base))
    mine, its = (getattr(c, figure) if c else None for c in (cell, next(same, None)))
    return mine / its if mine is not None and its else None


def means(cells: Sequence[TargetCell]) -> list[list[Any]]:
    """The geometric means and the worst of each column's ratios to "by hand"."""
    rows: list[list[Any]] = []
    for key in dict.fromkeys(c.column for c in cells if c.column != "hand"):
        row: list[Any] = [COLUMNS[key].title]
        for figure in (*COSTS, "error"):
            own = [c for c in cells if c.column == key]
            each = [r for c in own if (r := ratio(cells, c, "hand", figure))]
            if figure == "error" and key == "float32":
                each = []
            row.append(round(statistics.geometric_mean(each), 3) if each else None)
            row.append(round(max(each), 3) if each else None)
        rows.append(row)
    return rows


def rows_of(cells: Sequence[TargetCell]) -> list[list[Any]]:
    """Each cell's figures as a row: bytes, cycles and memory to float32, and the error."""
    rows: list[list[Any]] = []
    for c in cells:
        to = [ratio(cells, c, "float32", figure) for figure in COSTS]
        shown = [None if r is None else round(r, 3) for r in to]
        error = None if c.error is None else float(f"{c.error:.2g}")
        kernels = c.failure or f"{c.low}/{c.kernels}"
        rows.append([c.model, COLUMNS[c.column].title, *shown, kernels, c.casts, error])
    return rows


NAMES = ("bytes", "bytes, Triton", "cycles", "temp")
TITLES = ("model", "program", *NAMES, "low kernels", "cast kernels", "error")
MEANS = ("program", *(title for name in (*NAMES, "error") for title in (name, "worst")))


def tables(cells: Sequence[TargetCell]) -> list[dict[str, Any]]:
    """The means, and every figure."""
    found = {"columns": MEANS, "rows": means(cells)}, {"columns": TITLES, "rows": rows_of(cells)}
    by_hand, to_float32 = map(without_empty_columns, found)
    return [by_hand, {"mode": MODE, **to_float32}]


def without_empty_columns(table: dict[str, Any]) -> dict[str, Any]:
    """A table without the figures that this device's compiler does not give."""
    full = [any(v is not None for v in column) for column in zip(*table["rows"], strict=True)]
    columns, *rows = (
        [v for v, keep in zip(line, full, strict=False) if keep]
        for line in (table["columns"], *table["rows"])
    )
    return {"columns": columns, "rows": rows}


def result(options: argparse.Namespace, cells: Sequence[TargetCell]) -> dict[str, Any]:
    """The run as a file of scripts/results."""
    others = ", ".join(f"{name}: {size}" for name, size in ERROR_SIZES.items())
    versions = f"jax {jax.__version__}, Python {sys.version.split()[0]}, {cpu_info().model}"
    by_hand, to_float32 = tables(cells)
    return {
        "title": f"Compiled for {options.target}",
        "measured": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "text": (
            f"{versions}, models of size {options.size}, compiled and not run. Errors: of models "
            f"of size small ({others}), against float64, evaluated on a CPU as planned for the "
            f"target, medians over {BATCHES} batches."
        ),
        "parts": [
            {"title": "To by hand: geometric means and worst", "tables": [by_hand]},
            {"title": "To float32", "tables": [to_float32]},
        ],
        "cells": [dataclasses.asdict(c) for c in cells],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", required=True, help=", ".join(TARGETS))
    bench.add_choices(parser, models=COMPILED, columns=KEYS)
    parser.add_argument("--size", default="target")
    parser.add_argument("--errors", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a file of results")
    options = parser.parse_args(argv)
    short = options.target if options.target in TARGETS else f"tpu {options.target}"
    target = target_of(short)
    warnings.simplefilter("ignore")
    console, cells = Console(width=150), list[TargetCell]()
    for name in options.models:
        own = list(measured(options, target, name))
        console.print(bench.shown(tables(own)[1]))
        cells += own
        if options.json is not None:  # as far as it is
            options.json.write_text(json.dumps(result(options, cells), indent=1) + "\n")
    console.print(bench.shown(tables(cells)[0]))


if __name__ == "__main__":
    main()
