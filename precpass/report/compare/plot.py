"""Cost against error as a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = ["Point", "draw"]


class Point(NamedTuple):
    """A program in the picture.

    Attributes:
        name: the label.
        cost: its time or memory.
        span: the lower and the upper quartile of the cost.
        error: its error; inf for results that are not finite.
        in_front: whether it is on the Pareto front.
    """

    name: str
    cost: float
    span: tuple[float, float]
    error: float
    in_front: bool


def draw(points: Sequence[Point], cost: str, error: str, title: str, ax: Any = None) -> Any:
    """The points and their front on log scales, on new axes unless some are given.

    Args:
        points: at least one on the front.
        cost: the label of the horizontal axis.
        error: the label of the vertical axis.
        title: the title.
        ax: the axes.

    Raises:
        ImportError: without matplotlib.
    """
    if ax is None:
        try:
            import matplotlib.pyplot as plt  # optional
        except ImportError:
            raise ImportError("plot needs matplotlib: pip install matplotlib") from None
        ax = plt.subplots(layout="constrained")[1]
    place_x = _on_log_scale([p.cost for p in points])
    place_y = _on_log_scale([p.error for p in points])
    places = [(place_x(p.cost), place_y(p.error)) for p in points]
    said = "quartiles" if any(len(set(point.span)) > 1 for point in points) else None
    for point, at in zip(points, places, strict=True):
        broken, color = not math.isfinite(point.error), "C0" if point.in_front else "0.5"
        ax.scatter(*at, marker="x" if broken else "o", color=color)
        ends = [place_x(end) for end in point.span]
        ax.plot(ends, [at[1]] * 2, color=color, linewidth=1.5, label=said)
        said = None
    front = sorted(at for point, at in zip(points, places, strict=True) if point.in_front)
    ax.plot(*zip(*front, strict=True), drawstyle="steps-post", color="C0", **_FRONT)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.margins(0.15)
    ax.set_xlabel(cost)
    ax.set_ylabel(error)
    ax.set_title(title)
    legend = ax.legend()
    _tick(ax.xaxis)
    _tick(ax.yaxis)
    names = [p.name if math.isfinite(p.error) else f"{p.name} (not finite)" for p in points]
    _label(ax, names, places, legend)
    return ax


_FRONT = {"linestyle": "--", "linewidth": 1, "label": "Pareto front"}


def _on_log_scale(values: Sequence[float]) -> Callable[[float], float]:
    """Values for a log scale: zero and infinity are put a factor of ten beyond the others."""
    real = [v for v in values if v > 0 and math.isfinite(v)] or [1.0]
    return lambda v: (v if math.isfinite(v) else 10 * max(real)) if v > 0 else min(real) / 10


def _tick(axis: Any) -> None:
    """Ticks as plain numbers, where an axis is too short for powers of ten to be ticks enough."""
    from matplotlib import ticker

    low, high = axis.get_view_interval()
    if high < 30 * low:
        subs = (1, 1.5, 2, 3, 5, 7) if high < 12 * low else (1, 2, 5)
        even = ticker.MaxNLocator(6) if high < 4 * low else ticker.LogLocator(subs=subs)
        axis.set_major_locator(even)
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(ticker.NullLocator())


_CORNERS = [(side, lift) for lift in (5, -13, 18, -26, 31, -39) for side in ("left", "right")]
"""Where a label may stand: the side of it that is at its point, and how far up, in points."""


def _label(ax: Any, names: Sequence[str], places: Sequence[Any], legend: Any) -> None:
    """Writes a name at each point, where it covers no other name, no point and not the legend."""
    figure = ax.figure
    figure.draw_without_rendering()  # only then is it known where things are
    taken = [legend.get_window_extent()]
    dots = ax.transData.transform(places)
    for name, at in zip(names, places, strict=True):
        options = [_written(ax, name, at, side, lift) for side, lift in _CORNERS]
        boxes = [text.get_window_extent().padded(4) for text in options]
        faults = [
            sum(box.overlaps(other) for other in taken)
            + sum(bool(box.contains(*dot)) for dot in dots)
            + 2 * (not (ax.bbox.x0 <= box.x0 and box.x1 <= ax.bbox.x1))
            + 2 * (not (ax.bbox.y0 <= box.y0 and box.y1 <= ax.bbox.y1))
            for box in boxes
        ]
        best = faults.index(min(faults))
        taken.append(boxes[best])
        for text in (*options[:best], *options[best + 1 :]):
            text.remove()


def _written(ax: Any, name: str, at: Any, side: str, lift: int) -> Any:
    offset = {"xytext": (5 if side == "left" else -5, lift), "textcoords": "offset points"}
    return ax.annotate(name, at, fontsize="small", horizontalalignment=side, **offset)
