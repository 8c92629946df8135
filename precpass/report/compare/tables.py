"""Rows of figures as aligned text, as values for JSON, and as a pandas frame."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from precpass.measure.execute import Timing
from precpass.view.text import plain, width

__all__ = ["aligned", "for_json", "framed", "milliseconds", "printed", "shares", "short"]


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
