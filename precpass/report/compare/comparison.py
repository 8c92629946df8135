"""`Comparison`: the result of `compare`, as text, HTML, a pandas frame, a dict and a plot."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from precpass.analysis.sizes import NOMINAL_SIZE
from precpass.measure.counts import Counts
from precpass.measure.execute import Memory, Timing
from precpass.measure.traffic import Traffic
from precpass.policy.policy import PrecisionPolicy
from precpass.report.compare.conclusion import conclusion
from precpass.report.compare.errors import Errors
from precpass.report.compare.plot import Point, draw
from precpass.report.compare.tables import (
    TIMES,
    aligned,
    cells_of,
    for_json,
    framed,
    memory_figures,
    milliseconds,
    of_each_device,
    printed,
    refusals,
    row_data,
    shares,
    short,
    traffic_columns,
    traffic_figures,
    traffic_notes,
)
from precpass.units import counted
from precpass.view.sheet import bar, facts, figures
from precpass.view.text import Line, as_html, page, spans

__all__ = ["REFERENCES", "Comparison", "Row"]

_BEST, _OTHER = "no other is faster and nearer", "another is faster and nearer"
_BAD, _FINITE, _WITHOUT = "not finite", "finite", "without an error"

_AXES = {
    "time": "time (ms)",
    "ratio": "time / time of {} (median over rounds)",
    "memory": "temp memory (MB)",
}


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
        errors: of all its results together against the reference.
        leaves: (path of an array of the results, errors) for each.
        traffic: the compiled program's kernels and the bytes that they move; None on a CPU.
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
    errors: Errors
    leaves: tuple[tuple[str, Errors], ...]
    traffic: Traffic | None = None
    refused: str = ""

    def figures(self) -> dict[str, Any]:
        """Return all figures by their names in the frame and the dict: bytes, seconds, FLOPs."""
        quartiles = (None, None) if self.timing is None else self.timing.quartiles
        return {
            "products": self.counts.products,
            "products_low": self.counts.low,
            "products_marked": self.counts.marked,
            "casts": self.counts.casts,
            "casts_inserted": self.casts_inserted,
            "low_bytes": self.counts.low_bytes,
            "low_flops_share": self.counts.low_flops,
            **{f"flops_{name}": n for name, n in sorted(self.counts.flops.items())},
            **memory_figures(self.memory),
            **traffic_figures(self.traffic),
            **({"refused": self.refused} if self.refused else {}),
            "seconds": None if self.timing is None else self.timing.median,
            "seconds_lower": quartiles[0],
            "seconds_upper": quartiles[1],
            "ratio": self.ratio,
            **_error_figures(self.errors),
        }


def _error_figures(errors: Errors) -> dict[str, Any]:
    return {
        "relative_error": errors.relative,
        "max_ulp": errors.max_ulp,
        "sqnr_db": errors.sqnr,
        "cosine": errors.cosine,
        "nonfinite": errors.nonfinite,
        "integers_differ": errors.differing,
    }


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `compare`: a function under several policies, beside other functions.

    `print` it for a table. A notebook displays it as one.

    Attributes:
        function: the function's name.
        rows: one per policy or function, in the order in which they were given.
        reference: the precision of the reference for the errors, "f64" or "f32".
        rounds: how many times each row was timed.
        device: the device and the JAX release on which it ran.
        without_bfloat16: whether that is a processor without bfloat16 instructions.
    """

    function: str
    rows: tuple[Row, ...]
    reference: str
    rounds: int
    device: str
    without_bfloat16: bool = False

    @property
    def conclusion(self) -> str:
        """Which program to use, and why, in a sentence."""
        return conclusion(self.rows, self.without_bfloat16)

    def pareto(self, by: str = "time") -> tuple[Row, ...]:
        """Return the rows that no other row beats in both cost and error, the cheapest first.

        A row without a finite error or without that cost is left out.

        Args:
            by: "time" (median), "ratio" (of times within a round, as in the table) or "memory"
                (temp).

        Raises:
            ValueError: for another `by`, and if that was not measured.
        """
        points = self._points(by)
        front = [
            (cost, error, row)
            for cost, error, row in points
            if not any(c <= cost and e <= error and (c, e) != (cost, error) for c, e, _ in points)
        ]
        return tuple(row for _, _, row in sorted(front, key=lambda point: point[:2]))

    def _points(self, by: str) -> list[tuple[float, float, Row]]:
        """The cost and the error of each row that has both, and a finite error."""
        if by not in _AXES:
            raise ValueError(f"unknown cost {by!r}: legal are {', '.join(map(repr, _AXES))}")
        costs = {row.name: _cost(row, by) for row in self.rows}
        if all(cost is None for cost in costs.values()):
            why = "this backend does not tell it" if by == "memory" else "rounds=0"
            raise ValueError(f"{by} was not measured ({why})")
        points: list[tuple[float, float, Row]] = []
        for row in self.rows:
            cost, error = costs[row.name], row.errors.relative
            if cost is not None and error is not None and math.isfinite(error):
                points.append((cost, error, row))
        return points

    # ------------------------------------------------------------ as data

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, those of each leaf included, as JSON values.

        Numbers that are not finite are the strings "inf", "-inf" and "nan".
        """
        rows = [
            {
                **row_data(row),
                "leaves": [{"path": p, **_error_figures(e)} for p, e in row.leaves],
            }
            for row in self.rows
        ]
        head = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return for_json({**head, "rows": rows})

    def to_frame(self) -> Any:
        """Return the figures as a `pandas.DataFrame`, one row per program; None is NaN.

        Raises:
            ImportError: without pandas.
        """
        return framed({row.name: row.figures() for row in self.rows})

    # ------------------------------------------------------------ as a table

    def __str__(self) -> str:
        closing = ["", self.conclusion] if self.conclusion else []
        return printed([self._title, "", *aligned(self._table()), "", *self._notes(), *closing])

    def _repr_html_(self) -> str:
        (head, *rows), best = self._table(), self._best()
        groups = {
            _BEST: [row in best for row in self.rows],
            _BAD: [bool(row.errors.nonfinite) for row in self.rows],
        }
        shown = figures(head, rows, bad=groups[_BAD], groups=groups)
        notes = as_html([[(note, "reason")] for note in (*self._notes(), self.conclusion)])
        title = f'<div class="head">{spans([(self._title, "")])}</div>'
        return page(title + self._bar(groups) + facts(self._facts()) + shown + notes)

    def _bar(self, groups: dict[str, list[bool]]) -> str:
        """How many of the programs are worth a look."""
        is_timed = any(groups[_BEST])

        def state(row: Row, bad: bool, best: bool) -> str:
            if bad:
                return _BAD
            if row.errors.relative is None:
                return _WITHOUT
            return _BEST if best else _OTHER if is_timed else _FINITE

        states = list(map(state, self.rows, groups[_BAD], groups[_BEST]))
        styles = {_BAD: "bad", _OTHER: "wide", _BEST: "low", _FINITE: "low", _WITHOUT: "none"}
        parts = [(what, float(states.count(what)), style) for what, style in styles.items()]
        return bar(parts, f"of {counted(len(self.rows), 'program')}")

    def _best(self) -> tuple[Row, ...]:
        return self.pareto() if any(row.timing for row in self.rows) else ()

    def _facts(self) -> list[Line]:
        """The rows that no other beats in both time and error."""
        return [
            [
                (f"{row.name}: ", "where"),
                (f"ratio {_number(row.ratio, '.2f')}, ", ""),
                (f"error {_number(row.errors.relative, '.1e')}", ""),
            ]
            for row in self._best()
        ]

    @property
    def _title(self) -> str:
        return f"{self.function} against {REFERENCES[self.reference]}, {self.device}"

    def _table(self) -> list[tuple[str, ...]]:
        """The cells, headings first."""
        return cells_of(_COLUMNS, self.rows, _ALWAYS)

    def _notes(self) -> list[str]:
        return [
            "products low: how many matrix products read operands of 16 or 8 bits; casts added: to "
            "the function as written. A loop's body counts once in both.",
            "16-bit MB: results in bfloat16 or float16. It and FLOPs count every iteration of a "
            f"loop ({NOMINAL_SIZE} if only run time knows how many). temp: what XLA allocates "
            "beside arguments and results.",
            *([TIMES.format(self.rounds)] if self.rounds else []),
            *traffic_notes(row.traffic for row in self.rows),
            *of_each_device((row.memory for row in self.rows), "FLOPs and 16-bit MB"),
            *refusals((row.name, row.refused) for row in self.rows),
            "rel. error: |d| / |r| over all floating results where the reference is finite; ULP: "
            "of the output's own format, left out where no digit of an element is right; "
            "non-finite: of values that are finite in the reference.",
        ]

    # ------------------------------------------------------------ as a picture

    def plot(self, x: str = "time", ax: Any = None) -> Any:
        """Plot cost against error on log scales, with the Pareto front drawn and named.

        A line through a time or ratio goes from its lower to its upper quartile. A row with
        non-finite results is a cross at the top. An error or cost of zero, which a log scale does
        not have, is drawn at a tenth of the smallest other one.

        Args:
            x: "time" (median, ms), "ratio" (of times within a round, to the first row's) or
                "memory" (temp, MB). On a machine with other work the ratio is more reliable.
            ax: the `matplotlib.axes.Axes` to draw on; those of a new figure by default.

        Returns:
            The axes.

        Raises:
            ImportError: without matplotlib.
            ValueError: for another `x`, if that was not measured, and if no row has a finite error.
        """
        front = self.pareto(by=x)
        if not front:
            raise ValueError("nothing to plot: no row has floating results with a finite error")
        scale = {"time": 1e3, "ratio": 1.0, "memory": 1e-6}[x]
        points: list[Point] = []
        for row in self.rows:
            cost, error = _cost(row, x), row.errors.relative
            if cost is not None and error is not None:
                lower, upper = self._quartiles(row, x) or (cost, cost)
                span = lower * scale, upper * scale
                points.append(Point(row.name, cost * scale, span, error, row in front))
        against = f"relative error against {REFERENCES[self.reference]}"
        axis = _AXES[x].format(self.rows[0].name)
        return draw(points, axis, against, f"{self.function}: cost and error", ax)

    def _quartiles(self, row: Row, by: str) -> tuple[float, float] | None:
        first = self.rows[0].timing
        if by == "memory" or row.timing is None or first is None:
            return None
        return (row.timing if by == "time" else row.timing.ratios(first)).quartiles


REFERENCES = {"f64": "float64", "f32": "float32"}
"""The legal precisions of the reference, with their names in tables."""


def _cost(row: Row, by: str) -> float | None:
    if by == "time":
        return None if row.timing is None else row.timing.median
    if by == "ratio":
        return row.ratio
    return None if row.memory is None else float(row.memory.temp)


# ---------------------------------------------------------------- cells


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _ulp(value: float | None) -> str:
    """An error in units in the last place; "" for the largest that there is, which says nothing."""
    return "" if value is None or value >= 2 / np.finfo(np.float32).eps else short(value)


def _low(row: Row) -> str:
    counts = row.counts
    marked = f" ({counts.marked} marked)" if counts.marked else ""
    return f"{counts.low}/{counts.products}{marked}"


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("program", lambda row: row.name),
    ("products low", _low),
    ("casts added", lambda row: f"{row.casts_inserted:+d}"),
    ("16-bit MB", lambda row: short(row.counts.low_bytes / 1e6)),
    ("FLOPs in", lambda row: shares(row.counts.flops)),
    ("temp MB", lambda row: "" if row.memory is None else short(row.memory.temp / 1e6)),
    *traffic_columns(lambda row: row.traffic),
    ("ms", lambda row: milliseconds(row.timing)),
    ("ratio", lambda row: _number(row.ratio, ".2f")),
    ("rel. error", lambda row: _number(row.errors.relative, ".1e")),
    ("max ULP", lambda row: _ulp(row.errors.max_ulp)),
    ("SQNR dB", lambda row: _number(row.errors.sqnr, ".1f")),
    ("cosine", lambda row: _number(row.errors.cosine, ".6f")),
    ("non-finite", lambda row: str(row.errors.nonfinite or "")),
    ("integers off", lambda row: str(row.errors.differing or "")),
)
_ALWAYS = ("program", "products low", "rel. error")
