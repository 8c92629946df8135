"""The rows of a comparison, and the columns in which a table shows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from precpass.analysis.sizes import NOMINAL_SIZE
from precpass.measure.counts import Counts
from precpass.measure.execute import Memory, Timing
from precpass.measure.traffic import Traffic
from precpass.policy.policy import PrecisionPolicy
from precpass.report.compare.errors import Errors
from precpass.report.compare.tables import milliseconds, shares, short

__all__ = [
    "COLUMNS",
    "COSTS",
    "DEFAULT",
    "ERRORS",
    "TIMES",
    "TRAFFIC",
    "Row",
    "cells_of",
    "columns_of",
    "error_figures",
    "notes_of",
]


@dataclasses.dataclass(frozen=True)
class Row:
    """One program of a comparison.

    Attributes:
        name: its name in the tables.
        policy: its policy; None for a function given instead of one.
        counts: what its traced step computes.
        casts_inserted: how many more casts it has than the function as you wrote it; negative if
            the policy removes some.
        memory: the memory that XLA planned; None if the backend does not report it.
        timing: the times of its runs; None if it was not timed.
        ratio: run time relative to the first row's in the same round, the median over the rounds;
            None if nothing was timed.
        errors: of all its results together against the reference; None if no column shows errors.
        leaves: (path of an array of the results, errors) for each.
        traffic: the compiled program's kernels and the bytes that they move; on a CPU None, unless
            you name a column that shows it.
        roofline: the seconds that the compiled program's bytes and its products' arithmetic take
            at the published peaks of its device; None on a CPU, on several devices, and if no peak
            is published for a format.
        refused: why the compiler of a device that is not present refuses the program; "" if it
            does not. Then it has no memory and no traffic.
    """

    name: str
    policy: PrecisionPolicy | None
    counts: Counts
    casts_inserted: int
    memory: Memory | None
    timing: Timing | None
    ratio: float | None
    errors: Errors | None
    leaves: tuple[tuple[str, Errors], ...]
    traffic: Traffic | None = None
    roofline: float | None = None
    refused: str = ""

    @property
    def error(self) -> float | None:
        """The relative error of all results together; None if there is none."""
        return None if self.errors is None else self.errors.relative

    def figures(self) -> dict[str, Any]:
        """Return all figures by their names in the frame and the dict: bytes, seconds, FLOPs."""
        memory, traffic = self.memory, self.traffic
        lower, upper = (None, None) if self.timing is None else self.timing.quartiles
        compiled = {} if traffic is None else _traffic_figures(traffic)
        return {
            "products": self.counts.products,
            "products_low": self.counts.low,
            "products_marked": self.counts.marked,
            "casts": self.counts.casts,
            "casts_inserted": self.casts_inserted,
            "low_bytes": self.counts.low_bytes,
            "low_flops_share": self.counts.low_flops,
            **{f"flops_{name}": n for name, n in sorted(self.counts.flops.items())},
            "argument_bytes": memory and memory.arguments,
            "output_bytes": memory and memory.outputs,
            "aliased_bytes": memory and memory.aliased,
            "temp_bytes": memory and memory.temp,
            **compiled,
            **({"roofline_seconds": self.roofline} if compiled else {}),
            **({"refused": self.refused} if self.refused else {}),
            "seconds": None if self.timing is None else self.timing.median,
            "seconds_lower": lower,
            "seconds_upper": upper,
            "ratio": self.ratio,
            **({} if self.errors is None else error_figures(self.errors)),
        }


def _traffic_figures(traffic: Traffic) -> dict[str, Any]:
    return {
        "compiled_kernels": traffic.runs,
        "compiled_kernels_low": traffic.low_runs,
        "compiled_moved_bytes": traffic.moved,
        "compiled_cast_kernels": traffic.casts,
        "compiled_cast_bytes": traffic.cast_bytes,
        "compiled_transpose_kernels": traffic.transposes,
        **{f"compiled_sent_{kind.replace(' ', '_')}": n for kind, n in traffic.sent},
        "compiled_cycles": traffic.cycles,
        "compiled_without_cycles": traffic.without_cycles,
    }


def error_figures(errors: Errors) -> dict[str, Any]:
    """Errors by their names in the frame and the dict."""
    return {
        "relative_error": errors.relative,
        "max_ulp": errors.max_ulp,
        "sqnr_db": errors.sqnr,
        "cosine": errors.cosine,
        "nonfinite": errors.nonfinite,
        "integers_differ": errors.differing,
    }


# ---------------------------------------------------------------- columns


class Column(NamedTuple):
    """A column: its heading, and what it shows of a row; "" for nothing."""

    heading: str
    cell: Callable[[Row], str]


def _products(row: Row) -> str:
    counts = row.counts
    marked = f" ({counts.marked} marked)" if counts.marked else ""
    return f"{counts.low}/{counts.products}{marked}"


def _memory(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row.memory is None else short(getattr(row.memory, name) / 1e6)


def _traffic(show: Callable[[Traffic], str]) -> Callable[[Row], str]:
    return lambda row: "" if row.traffic is None else show(row.traffic)


def _error(show: Callable[[Errors], str]) -> Callable[[Row], str]:
    return lambda row: "" if row.errors is None else show(row.errors)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _ulp(value: float | None) -> str:
    """An error in units in the last place; "" for the largest that there is, which says nothing."""
    return "" if value is None or value >= 2 / np.finfo(np.float32).eps else short(value)


COLUMNS = {
    "products": Column("products low", _products),
    "casts": Column("casts added", lambda row: f"{row.casts_inserted:+d}"),
    "low_bytes": Column("16-bit MB", lambda row: short(row.counts.low_bytes / 1e6)),
    "flops": Column("GFLOP", lambda row: short(sum(row.counts.flops.values()) / 1e9)),
    "formats": Column("FLOPs in", lambda row: shares(row.counts.flops)),
    "arguments": Column("args MB", _memory("arguments")),
    "outputs": Column("out MB", _memory("outputs")),
    "temp": Column("temp MB", _memory("temp")),
    "kernels": Column("kernels low", _traffic(lambda t: f"{t.low_runs}/{t.runs}")),
    "moved": Column("kernels' MB", _traffic(lambda t: short(t.moved / 1e6))),
    "cast_kernels": Column("cast kernels", _traffic(lambda t: str(t.casts))),
    "sent": Column(
        "sent MB",
        _traffic(lambda t: " ".join(f"{k} {short(n / 1e6)}" for k, n in t.sent_by_format)),
    ),
    "cycles": Column(
        "Mcycles", _traffic(lambda t: "" if t.cycles is None else short(t.cycles / 1e6))
    ),
    "without_cycles": Column("not estimated", _traffic(lambda t: str(t.without_cycles or ""))),
    "roofline": Column(
        "roofline ms", lambda row: "" if row.roofline is None else short(1e3 * row.roofline)
    ),
    "time": Column("ms", lambda row: milliseconds(row.timing)),
    "ratio": Column("ratio", lambda row: _number(row.ratio, ".2f")),
    "error": Column("rel. error", lambda row: _number(row.error, ".1e")),
    "ulp": Column("max ULP", _error(lambda e: _ulp(e.max_ulp))),
    "sqnr": Column("SQNR dB", _error(lambda e: _number(e.sqnr, ".1f"))),
    "cosine": Column("cosine", _error(lambda e: _number(e.cosine, ".6f"))),
    "nonfinite": Column("non-finite", _error(lambda e: str(e.nonfinite or ""))),
    "integers": Column("integers off", _error(lambda e: str(e.differing or ""))),
}
"""The columns by their names, in the order of a table."""

TRAFFIC = frozenset(
    ("kernels", "moved", "cast_kernels", "sent", "cycles", "without_cycles", "roofline")
)
TIMES = frozenset(("time", "ratio"))
ERRORS = frozenset(("error", "ulp", "sqnr", "cosine", "nonfinite", "integers"))
DEFAULT = tuple(name for name in COLUMNS if name not in ("flops", "arguments", "outputs"))
COSTS = tuple(name for name in COLUMNS if name not in {*ERRORS, "products", "casts", "low_bytes"})
"""The columns of costs, of which those that need no times can be had for shapes."""
_ALWAYS = frozenset(("products", "error"))
"""The default columns that stay if no row has anything to show in them."""

_OF_THE_TRACE = {
    "products": "products low: how many matrix products read operands of 16 or 8 bits.",
    "casts": "casts added: to the function as written.",
}
_ONCE = "A loop's body counts once."
_TRIPS = f"FLOPs count every iteration of a loop ({NOMINAL_SIZE} if the number is not known)."
_ALLOCATED = "temp: what XLA allocates beside arguments and results."
_OF_TIMES = {
    "time": "ms: median of {} interleaved rounds (lower-upper quartile).",
    "ratio": "ratio: to the first row in the same round, median over {} rounds.",
}
_OF_KERNELS = {
    "kernels": "kernels low: the runs of matrix and convolution kernels whose factors have 16 bits "
    "or less, of all.",
    "moved": "kernels' MB: what kernels read and write.",
    "cast_kernels": "cast kernels: those that only cast.",
    "sent": "sent: the arrays of collectives, by format.",
    "cycles": "Mcycles: the TPU compiler's own estimate, without copies that run beside kernels.",
    "roofline": "roofline: the kernels' bytes at the bandwidth of the device's memory, and the "
    "FLOPs of products at its published peaks, added: an estimate, and no measurement.",
}
_COMPILED = "All are of the compiled program, times loops' trips."
_WITHOUT_CYCLES = (
    "not estimated: the runs of Mosaic kernels (Pallas, ragged products) and of communication. "
    "That compiler has no estimate of their cycles, so Mcycles is without them."
)
_ONE_TRIP = (
    "Figures of compiled programs count one iteration of each loop whose number is not known."
)
_OF_EACH_DEVICE = (
    "each program is divided over {} devices: memory, kernels, their bytes and cycles are those of "
    "one device. FLOPs and 16-bit MB are those of the whole program."
)
_OF_ERRORS = {
    "error": "rel. error: |d| / |r| over all floating results where the reference is finite.",
    "ulp": "max ULP: of the output's own format, left out where no digit of an element is right.",
    "nonfinite": "non-finite: of values that are finite in the reference.",
}


def columns_of(columns: str | Iterable[str] | None) -> tuple[str, ...]:
    """The names of the columns that a table shows.

    Raises:
        ValueError: for an unknown name; the text lists the legal ones.
    """
    if columns is None:
        return DEFAULT
    names = tuple(dict.fromkeys((columns,) if isinstance(columns, str) else columns))
    for name in names:
        if name not in COLUMNS:
            raise ValueError(f"unknown column {name!r}: legal are {', '.join(COLUMNS)}")
    return names


def cells_of(columns: Collection[str], rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A table's cells, headings first. Of the default columns, empty ones are left out."""
    shown = [("program", *(row.name for row in rows))]
    for name in _shown(columns, rows):
        heading, cell = COLUMNS[name]
        shown.append((heading, *(cell(row) or "-" for row in rows)))
    return list(zip(*shown, strict=True))


def _shown(columns: Collection[str], rows: Sequence[Row]) -> list[str]:
    """The columns of a table: of the default ones those that are not empty."""

    def is_full(name: str) -> bool:
        return name in _ALWAYS or any(COLUMNS[name].cell(row) for row in rows)

    return [name for name in columns if columns != DEFAULT or is_full(name)]


def notes_of(columns: Collection[str], rows: Sequence[Row], rounds: int) -> list[str]:
    """What the columns of a table mean."""
    shown = set(_shown(columns, rows))

    def of(meanings: Mapping[str, str]) -> list[str]:
        return [meaning for name, meaning in meanings.items() if name in shown]

    traffic = [row.traffic for row in rows if row.traffic is not None and shown & TRAFFIC]
    devices = max((row.memory.devices for row in rows if row.memory is not None), default=1)
    sizes = [_TRIPS] if shown & {"flops", "formats"} else []
    if "low_bytes" in shown:
        sizes = [f"16-bit MB: results in bfloat16 or float16. It and {_TRIPS}"]
    sizes += [_ALLOCATED] if "temp" in shown else []
    notes = (
        (of(_OF_THE_TRACE), " ".join([*of(_OF_THE_TRACE), _ONCE])),
        (sizes, " ".join(sizes)),
        (rounds, " ".join(of(_OF_TIMES)).format(rounds, rounds)),
        (traffic, " ".join([*of(_OF_KERNELS), _COMPILED])),
        (any(of_row.without_cycles for of_row in traffic), _WITHOUT_CYCLES),
        (any(of_row.guesses for of_row in traffic), _ONE_TRIP),
        (devices > 1, _OF_EACH_DEVICE.format(devices)),
        *((row.refused, f"{row.name} is not compiled: {row.refused}") for row in rows),
        (of(_OF_ERRORS), " ".join(of(_OF_ERRORS))),
    )
    return [note for is_said, note in notes if is_said]
