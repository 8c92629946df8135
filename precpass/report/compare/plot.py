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
    for point, at, (side, lift) in zip(points, places, _labels(places), strict=True):
        broken, color = not math.isfinite(point.error), "C0" if point.in_front else "0.5"
        ax.scatter(*at, marker="x" if broken else "o", color=color)
        ax.plot([place_x(end) for end in point.span], [at[1]] * 2, color=color, linewidth=1)
        ax.annotate(
            f"{point.name} (not finite)" if broken else point.name,
            at,
            xytext=(5 if side == "left" else -5, 5 + lift),
            textcoords="offset points",
            fontsize="small",
            horizontalalignment=side,
        )
    front = sorted(at for point, at in zip(points, places, strict=True) if point.in_front)
    ax.plot(*zip(*front, strict=True), drawstyle="steps-post", color="C0", label="Pareto front")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.margins(0.15)
    ax.set_xlabel(cost)
    ax.set_ylabel(error)
    ax.set_title(title)
    ax.legend()
    return ax


def _on_log_scale(values: Sequence[float]) -> Callable[[float], float]:
    """Values for a log scale: zero and infinity are put a factor of ten beyond the others."""
    real = [v for v in values if v > 0 and math.isfinite(v)] or [1.0]
    return lambda v: (v if math.isfinite(v) else 10 * max(real)) if v > 0 else min(real) / 10


def _labels(places: Sequence[tuple[float, float]]) -> list[tuple[str, int]]:
    """For each point the side of its label, and by how many typographic points that is lifted.

    Labels of points that are near to each other are stacked.
    """
    xs, ys = ([math.log(v) for v in values] for values in zip(*places, strict=True))
    width, height = (max(v) - min(v) or 1.0 for v in (xs, ys))
    labels: list[tuple[str, int]] = []
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        near = zip(xs[:i], ys[:i], strict=True)
        below = sum(abs(x - a) < width / 3 and abs(y - b) < height / 20 for a, b in near)
        labels.append(("right" if x - min(xs) > 0.6 * width else "left", 12 * below))
    return labels
