"""Rows of figures as aligned text, as values for JSON, and as a pandas frame."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from precpass.measure.execute import Memory, Timing
from precpass.measure.traffic import Traffic
from precpass.view.text import plain, width

__all__ = [
    "TIMES",
    "aligned",
    "cells_of",
    "for_json",
    "framed",
    "memory_figures",
    "milliseconds",
    "of_each_device",
    "printed",
    "refusals",
    "row_data",
    "shares",
    "short",
    "traffic_columns",
    "traffic_figures",
    "traffic_notes",
]

R = TypeVar("R")

TRAFFIC = (
    "kernels low: the runs of matrix and convolution kernels whose factors have 16 bits or less, "
    "of all. kernels' MB: what kernels read and write. cast kernels: those that only cast. "
    "Mcycles: the TPU compiler's own estimate, without copies that run beside kernels. All are of "
    "the compiled program, times loops' trips."
)
WITHOUT_CYCLES = (
    "not estimated: the runs of Mosaic kernels (Pallas, ragged products) and of communication. "
    "That compiler has no estimate of their cycles, so Mcycles is without them."
)
ONE_TRIP = (
    "Figures of compiled programs have one trip of each loop whose number only run time knows."
)
TIMES = (
    "ms: median of {} interleaved rounds (lower-upper quartile); ratio: to the first row, "
    "median over rounds."
)


def cells_of(
    columns: Sequence[tuple[str, Callable[[R], str]]], rows: Sequence[R], always: Collection[str]
) -> list[tuple[str, ...]]:
    """A table's cells, headings first.

    Args:
        columns: each with its heading, and what it shows of a row.
        rows: the rows.
        always: the headings of the columns that stay where no row has anything.
    """
    texts = [[heading, *map(cell, rows)] for heading, cell in columns]
    kept = [column for column in texts if column[0] in always or any(column[1:])]
    return list(zip(*([c[0], *(text or "-" for text in c[1:])] for c in kept), strict=True))


def row_data(row: Any) -> dict[str, Any]:
    """What every report's row has as data: its name, policy, figures and all times, in seconds."""
    return {
        "name": row.name,
        "policy": None if row.policy is None else repr(row.policy),
        **row.figures(),
        "all_seconds": [] if row.timing is None else list(row.timing.seconds),
    }


def aligned(table: Sequence[tuple[str, ...]]) -> list[str]:
    """The lines of a table, headings first: names to the left, figures to the right.

    Columns for which the `width` does not suffice go on below, beside the names again.
    """
    names, *columns = zip(*table, strict=True)
    parts: list[list[tuple[str, ...]]] = [[]]
    taken = first = max(map(len, names))
    for column in columns:
        wide = 2 + max(map(len, column))
        if parts[-1] and taken + wide > width():
            parts.append([])
            taken = first
        parts[-1].append(column)
        taken += wide
    lines: list[str] = []
    for part in parts:
        lines += [""] * bool(lines) + _lines(names, part)
    return lines


def printed(lines: Iterable[str]) -> str:
    """Lines as one text; those that are longer than the `width` are wrapped."""
    return plain([(line, "")] for line in lines)


def _lines(names: Sequence[str], columns: Sequence[Sequence[str]]) -> list[str]:
    first = max(map(len, names))
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "  ".join([name.ljust(first), *(c.rjust(w) for c, w in zip(cells, widths, strict=True))])
        for name, *cells in zip(names, *columns, strict=True)
    ]
    ruler = "-" * (first + sum(2 + width for width in widths))
    head, *rows = (line.rstrip() for line in lines)
    return [head, ruler, *rows]


def short(value: float) -> str:
    """Three digits, without an exponent as long as that stays short."""
    if not value or not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def milliseconds(timing: Timing | None) -> str:
    """The median of runs and their quartiles; "" if nothing was timed."""
    if timing is None:
        return ""
    median, low, high = (short(1e3 * s) for s in (timing.median, *timing.quartiles))
    return f"{median} ({low}-{high})"


def memory_figures(memory: Memory | None) -> dict[str, int | None]:
    """What XLA allocates, in bytes, under its names in frames and dicts."""
    return {
        "argument_bytes": memory and memory.arguments,
        "output_bytes": memory and memory.outputs,
        "aliased_bytes": memory and memory.aliased,
        "temp_bytes": memory and memory.temp,
    }


def traffic_notes(each: Iterable[Traffic | None]) -> list[str]:
    """What the columns of compiled programs mean; nothing on a CPU, where there are none."""
    shown = [traffic for traffic in each if traffic is not None]
    if not shown:
        return []
    notes = [TRAFFIC]
    notes += [WITHOUT_CYCLES] if any(traffic.without_cycles for traffic in shown) else []
    return notes + ([ONE_TRIP] if any(traffic.guesses for traffic in shown) else [])


def of_each_device(each: Iterable[Memory | None], others: str) -> list[str]:
    """What the figures of a program that is divided over several devices mean.

    Args:
        each: the memory of each program.
        others: the figures that are those of the whole program.
    """
    devices = max((memory.devices for memory in each if memory is not None), default=1)
    if devices == 1:
        return []
    return [
        f"each program is divided over {devices} devices: memory, kernels, their bytes and cycles "
        f"are those of one device. {others} are those of the whole program."
    ]


def refusals(each: Iterable[tuple[str, str]]) -> list[str]:
    """The rows that a compiler refused, by name, and why."""
    return [f"{name} is not compiled: {why}" for name, why in each if why]


def traffic_figures(traffic: Traffic | None) -> dict[str, float | None]:
    """What a compiled program does, under its names in frames and dicts; none on a CPU."""
    if traffic is None:
        return {}
    return {
        "compiled_kernels": traffic.runs,
        "compiled_kernels_low": traffic.low_runs,
        "compiled_moved_bytes": traffic.moved,
        "compiled_cast_kernels": traffic.casts,
        "compiled_cast_bytes": traffic.cast_bytes,
        "compiled_transpose_kernels": traffic.transposes,
        "compiled_cycles": traffic.cycles,
        "compiled_without_cycles": traffic.without_cycles,
    }


def traffic_columns(
    traffic_of_row: Callable[[R], Traffic | None],
) -> list[tuple[str, Callable[[R], str]]]:
    """The columns that show what compiled programs do; they are empty on a CPU."""

    def column(cell: Callable[[Traffic], str]) -> Callable[[R], str]:
        def shown(row: R) -> str:
            traffic = traffic_of_row(row)
            return "" if traffic is None else cell(traffic)

        return shown

    return [
        ("kernels low", column(lambda t: f"{t.low_runs}/{t.runs}")),
        ("kernels' MB", column(lambda t: short(t.moved / 1e6))),
        ("cast kernels", column(lambda t: str(t.casts))),
        ("Mcycles", column(lambda t: "" if t.cycles is None else short(t.cycles / 1e6))),
        ("not estimated", column(lambda t: str(t.without_cycles or ""))),
    ]


def shares(flops: Mapping[str, float]) -> str:
    """The formats of FLOPs, each with its share, without those of half a percent."""
    total = sum(flops.values())
    each = sorted(flops.items(), key=lambda item: -item[1])
    return " ".join(f"{name} {100 * n / total:.0f}%" for name, n in each if n >= total / 200)


def framed(figures: Mapping[str, Mapping[str, Any]]) -> Any:
    """Rows of figures, by name, as a `pandas.DataFrame`; None is NaN.

    Raises:
        ImportError: without pandas.
    """
    try:
        import pandas  # pandas is optional
    except ImportError:
        raise ImportError("to_frame needs pandas: pip install pandas; or use to_dict()") from None

    index = pandas.Index(list(figures), name="program")
    frame = pandas.DataFrame(list(figures.values()), index=index)
    flops = [name for name in frame.columns if name.startswith("flops_")]
    frame[flops] = frame[flops].fillna(0.0)  # the row does not use this format
    return frame.apply(pandas.to_numeric)


def for_json(value: Any) -> Any:
    """Values for JSON: numbers that are not finite become the strings "inf", "-inf", "nan"."""
    if isinstance(value, dict):
        return {key: for_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
