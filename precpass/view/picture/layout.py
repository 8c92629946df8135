"""The positions of a chart's boxes and lines: layers in the order of execution, nested by scope.

Each area is laid out by itself, the innermost first (`area.py`). What it holds stands in layers,
each below what it reads. A line that passes a layer has a place of its own in it, so that it runs
through no box, and one that crosses an area's border does so at a port.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from precpass.view.picture.area import Inner, Laid, Port, Step, Wire, area
from precpass.view.picture.clusters import Chart
from precpass.view.picture.links import End, Link, labels, linked, unit_of
from precpass.view.picture.places import Path

__all__ = ["Frame", "Layout", "Line", "Note", "laid_out", "short"]

_LETTER, _SMALL_LETTER = 7.3, 6.1
_PAD, _HEAD, _HEIGHT, _NARROWEST = 14.0, 34.0, 40.0, 72.0
_LONGEST = 32
_BESIDE = 5.0


def short(label: str) -> str:
    """A label, shortened to fit on the page."""
    return label if len(label) <= _LONGEST else label[: _LONGEST - 1] + "\u2026"


@dataclasses.dataclass(frozen=True)
class Frame:
    """A rectangle, in pixels.

    Attributes:
        label: the text in it.
        x, y: its upper left corner.
        width, height: its size.
    """

    label: str
    x: float
    y: float
    width: float
    height: float


@dataclasses.dataclass(frozen=True)
class Line:
    """A line from one box to another.

    Attributes:
        steps: its steps; the first one is its beginning.
        back: whether it leads back to what ran before.
        thick: whether it stands for several values.
    """

    steps: tuple[Step, ...]
    back: bool
    thick: bool


@dataclasses.dataclass(frozen=True)
class Note:
    """A text beside the beginning of a line; `x` and `y` are those of its first letter."""

    text: str
    x: float
    y: float


@dataclasses.dataclass(frozen=True)
class Layout:
    """The positions of everything in a chart.

    Attributes:
        boxes: the frames of the chart's boxes, by the boxes' indices.
        scopes: the scopes and loops around them, outer ones first.
        lines: the lines.
        notes: the types of the values that lines stand for.
        width, height: of the whole.
    """

    boxes: dict[int, Frame]
    scopes: list[Frame]
    lines: list[Line]
    notes: list[Note]
    width: float
    height: float


def laid_out(chart: Chart, texts: Sequence[tuple[str, str]], x: float, y: float) -> Layout:
    """The layout of a chart.

    Args:
        chart: what is drawn.
        texts: the two lines of text in each box.
        x: the left side of the whole.
        y: its upper side.
    """
    return _Builder(chart, texts).layout(x, y)


class _Builder:
    def __init__(self, chart: Chart, texts: Sequence[tuple[str, str]]) -> None:
        self.chart, self.texts = chart, texts
        self.links = linked(chart)
        self.notes = labels(chart, self.links)
        self.wires: dict[Path, list[Wire]] = collections.defaultdict(list)
        self.ways: list[list[tuple[Path, Wire]]] = []
        for link in self.links:
            way = list(self._wires(link))
            self.ways.append(way)
            for path, wire in way:
                if wire not in self.wires[path]:
                    self.wires[path].append(wire)
        self.areas: dict[Path, Laid] = {}
        self.inside: dict[Path, dict[End, Inner]] = {}

    def _wires(self, link: Link) -> Iterator[tuple[Path, Wire]]:
        """The parts of a line in each area that it passes, with the area's path."""
        source, target, around = link.source, link.target, link.around
        start = unit_of(self.chart, source, around)
        end = unit_of(self.chart, target, around)
        if isinstance(source, int):
            path = self.chart.boxes[source].path
            for i in range(len(path), len(around), -1):
                yield (
                    path[:i],
                    Wire(unit_of(self.chart, source, path[:i]), Port(False, source), source),
                )
        yield around, Wire(start, end, source)
        if isinstance(target, int) and isinstance(source, int):
            path = self.chart.boxes[target].path
            for i in range(len(around) + 1, len(path) + 1):
                yield (
                    path[:i],
                    Wire(Port(True, source), unit_of(self.chart, target, path[:i]), source),
                )

    def layout(self, x: float, y: float) -> Layout:
        root = self._area((), list(range(len(self.chart.boxes))))
        found = Layout({}, [], [], [], root.width, root.height)
        corners: dict[Path, tuple[float, float]] = {}
        self._fill((), x, y, found, corners)
        for link, way in zip(self.links, self.ways, strict=True):
            steps: list[Step] = []
            for path, wire in way:
                left, top = corners[path]
                steps += [(c, a + left, b + top) for c, a, b in self.areas[path].steps[wire]]
            back = any(wire in self.areas[path].back for path, wire in way)
            found.lines.append(Line(tuple(_simpler(steps)), back, link.thick))
        return found

    def _area(self, path: Path, members: list[int]) -> Laid:
        units: dict[End, list[int]] = collections.defaultdict(list)
        for i in members:
            units[unit_of(self.chart, i, path)].append(i)
        things = {unit: self._thing(unit, inner) for unit, inner in units.items()}
        self.inside[path] = things
        label = short(path[-1]) if path else ""
        self.areas[path] = area(
            things,
            self.wires[path],
            pad=_PAD if path else 0.0,
            head=_HEAD if path else 0.0,
            least=_LETTER * len(label) + 2 * _PAD if path else 0.0,
        )
        return self.areas[path]

    def _thing(self, unit: End, members: list[int]) -> Inner:
        rank = min(self.chart.boxes[i].first for i in members)
        note = self.notes.get(unit, "")
        beside = _SMALL_LETTER * len(note) + _BESIDE + 2 if note else 0.0
        if isinstance(unit, int):
            first, second = self.texts[unit]
            text = max(_LETTER * len(first), _SMALL_LETTER * len(second))
            width = max(_NARROWEST, text + 2 * _PAD)
            return Inner(width, _HEIGHT, max(width, width / 2 + beside), rank, noted=bool(note))
        laid = self._area(unit, members)
        entries = {p.source: at for p, at in laid.ports.items() if p.is_entry}
        exits = {p.source: at for p, at in laid.ports.items() if not p.is_entry}
        room = max(laid.width, laid.width / 2 + beside)
        return Inner(laid.width, laid.height, room, rank, entries, exits, bool(note))

    def _fill(
        self, path: Path, x: float, y: float, found: Layout, corners: dict[Path, Any]
    ) -> None:
        corners[path] = x, y
        laid = self.areas[path]
        for unit, thing in self.inside[path].items():
            left, top = (a + b for a, b in zip(laid.corners[unit], (x, y), strict=True))
            label = self.texts[unit][0] if isinstance(unit, int) else unit[-1]
            frame = Frame(label, left, top, thing.width, thing.height)
            if isinstance(unit, int):
                found.boxes[unit] = frame
            else:
                found.scopes.append(frame)
                self._fill(unit, left, top, found, corners)
            if note := self.notes.get(unit):
                beside = frame.x + frame.width / 2 + _BESIDE, frame.y + frame.height + 12
                found.notes.append(Note(note, *beside))


def _simpler(steps: list[Step]) -> Iterator[Step]:
    """Steps without those that lead nowhere, and straight where a curve would be."""
    yield steps[0]
    for (_, x, y), (kind, x2, y2) in itertools.pairwise(steps):
        if (x, y) != (x2, y2):
            yield "L" if x == x2 else kind, x2, y2
