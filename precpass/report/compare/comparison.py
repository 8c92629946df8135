"""`Comparison`: the result of `compare`, as text, HTML, a pandas frame, a dict and a plot."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from precpass.report.compare.conclusion import conclusion
from precpass.report.compare.plot import Point, draw
from precpass.report.compare.rows import Row, cells_of, error_figures, notes_of
from precpass.report.compare.tables import aligned, for_json, framed, printed
from precpass.view.page import as_html, facts, figures, page, title

__all__ = ["REFERENCES", "Comparison", "Row"]

_BEST, _BAD = "no other is faster and nearer", "not finite"

REFERENCES = {"f64": "float64", "f32": "float32"}
"""The legal precisions of the reference, with their names in tables."""

_AXES = {
    "time": ("time (ms)", 1e3),
    "ratio": ("time / time of {} (median over rounds)", 1.0),
    "memory": ("temp memory (MB)", 1e-6),
}
"""The costs, each with its label in a plot and the unit there."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `compare`: a function under several policies, beside other functions.

    `print` it for a table. A notebook displays it as one.

    Attributes:
        function: the function's name.
        rows: one per policy or function, in the order in which they were given.
        columns: the names of the columns that the table shows.
        reference: the precision of the reference for the errors, "f64" or "f32"; "" if no column
            shows errors.
        rounds: how many times each row was timed.
        device: the device and the JAX release on which it ran.
        without_bfloat16: whether that is a processor without bfloat16 instructions.
    """

    function: str
    rows: tuple[Row, ...]
    columns: tuple[str, ...]
    reference: str
    rounds: int
    device: str
    without_bfloat16: bool = False

    @property
    def conclusion(self) -> str:
        """Which program to use, and why, in a sentence; "" without times, estimates and errors."""
        if not (self.reference or self.rounds or any(row.roofline for row in self.rows)):
            return ""
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
        points = [
            (cost, row.error, row)
            for row, cost, _ in self._costs(by)
            if row.error is not None and math.isfinite(row.error)
        ]
        front = [
            (cost, error, row)
            for cost, error, row in points
            if not any(c <= cost and e <= error and (c, e) != (cost, error) for c, e, _ in points)
        ]
        return tuple(row for _, _, row in sorted(front, key=lambda point: point[:2]))

    def _costs(self, by: str) -> list[tuple[Row, float, tuple[float, float]]]:
        """The rows that have a cost, each with it and its quartiles."""
        if by not in _AXES:
            raise ValueError(f"unknown cost {by!r}: legal are {', '.join(map(repr, _AXES))}")
        costs: list[tuple[Row, float, tuple[float, float]]] = []
        first = self.rows[0].timing
        for row in self.rows:
            if by == "memory" and row.memory is not None:
                costs.append((row, row.memory.temp, (row.memory.temp, row.memory.temp)))
            elif by != "memory" and row.timing is not None and first is not None:
                timing = row.timing if by == "time" else row.timing.ratios(first)
                costs.append((row, timing.median, timing.quartiles))
        if not costs:
            why = "this backend does not tell it" if by == "memory" else "rounds=0"
            raise ValueError(f"{by} was not measured ({why})")
        return costs

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, those of each leaf included, as JSON values.

        Numbers that are not finite are the strings "inf", "-inf" and "nan".
        """
        rows = [
            {
                "name": row.name,
                "policy": None if row.policy is None else repr(row.policy),
                **row.figures(),
                "all_seconds": [] if row.timing is None else list(row.timing.seconds),
                "leaves": [{"path": p, **error_figures(e)} for p, e in row.leaves],
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
        table = aligned(cells_of(self.columns, self.rows))
        notes = notes_of(self.columns, self.rows, self.rounds)
        return printed([self._title, "", *table, "", *notes, *closing])

    def _repr_html_(self) -> str:
        head, *rows = cells_of(self.columns, self.rows)
        best = self.pareto() if any(row.timing for row in self.rows) else ()
        groups = {
            _BEST: [row in best for row in self.rows],
            _BAD: [bool(row.errors and row.errors.nonfinite) for row in self.rows],
        }
        shown = figures(head, rows, bad=groups[_BAD], groups=groups)
        notes = notes_of(self.columns, self.rows, self.rounds)
        below = as_html([[(note, "reason")] for note in notes])
        above = title(self._title) + facts([[(self.conclusion, "")]] if self.conclusion else [])
        return page(above + shown + below)

    @property
    def _title(self) -> str:
        against = f" against {REFERENCES[self.reference]}" if self.reference else ""
        return f"{self.function}{against}, {self.device}"

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
        label, unit = _AXES[x]
        points = [
            Point(row.name, cost * unit, (lower * unit, upper * unit), row.error, row in front)
            for row, cost, (lower, upper) in self._costs(x)
            if row.error is not None
        ]
        against = f"relative error against {REFERENCES[self.reference]}"
        title = f"{self.function}: cost and error"
        return draw(points, label.format(self.rows[0].name), against, title, ax)
