"""The positions of a chart's boxes: layers by networkx's topological order, nested by scope."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from precpass.view.picture.clusters import Chart

__all__ = ["Frame", "Layout", "laid_out", "short"]

_LETTER, _MARGIN, _PAD, _HEAD = 7.0, 22.0, 14.0, 22.0
_HEIGHT, _NARROWEST, _PER_LAYER = 40.0, 72.0, 6
_LONGEST = 32


def short(label: str) -> str:
    """A label, shortened to fit on the page."""
    return label if len(label) <= _LONGEST else label[: _LONGEST - 1] + "\u2026"


@dataclasses.dataclass
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

    def move(self, dx: float, dy: float) -> None:
        """Moves the frame."""
        self.x += dx
        self.y += dy


@dataclasses.dataclass(frozen=True)
class Layout:
    """The positions of everything in a chart.

    Attributes:
        boxes: the frames of the chart's boxes, by the boxes' indices.
        scopes: the scopes and loops around them, outer ones first.
        width, height: of the whole.
    """

    boxes: dict[int, Frame]
    scopes: list[Frame]
    width: float
    height: float

    def move(self, dx: float, dy: float) -> None:
        """Moves everything."""
        for frame in (*self.boxes.values(), *self.scopes):
            frame.move(dx, dy)


def laid_out(chart: Chart, labels: Sequence[str]) -> Layout:
    """The layout of a chart.

    Args:
        chart: what is drawn.
        labels: the text in each box.
    """
    return _inside(chart, labels, (), list(range(len(chart.boxes))))


def _inside(
    chart: Chart, labels: Sequence[str], path: tuple[str, ...], members: list[int]
) -> Layout:
    """The layout of the boxes inside one scope."""
    units: dict[object, list[int]] = {}
    for i in members:
        path_here = chart.boxes[i].path
        units.setdefault(
            path_here[: len(path) + 1] if len(path_here) > len(path) else i, []
        ).append(i)
    parts = [_unit(chart, labels, key, inner) for key, inner in units.items()]
    home = {i: at for at, inner in enumerate(units.values()) for i in inner}
    edges = {(home[a], home[b]) for a, b in chart.edges if a in home and b in home}
    return _stacked(parts, _layers(len(parts), {(a, b) for a, b in edges if a != b}))


def _unit(chart: Chart, labels: Sequence[str], key: object, members: list[int]) -> Layout:
    if isinstance(key, int):
        width = max(_NARROWEST, _LETTER * len(labels[key]) + 2 * _PAD)
        return Layout({key: Frame(labels[key], 0, 0, width, _HEIGHT)}, [], width, _HEIGHT)
    assert isinstance(key, tuple)
    inner = _inside(chart, labels, key, members)
    inner.move(_PAD, _HEAD + _PAD)
    label = str(key[-1])
    width = max(inner.width + 2 * _PAD, _LETTER * len(short(label)) + 2 * _PAD)
    height = inner.height + _HEAD + 2 * _PAD
    scope = Frame(label, 0, 0, width, height)
    return Layout(inner.boxes, [scope, *inner.scopes], width, height)


def _layers(n: int, edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Units in layers: each after the units that it reads, and those of a cycle in sequence."""
    import networkx as nx  # its import takes a tenth of jax's time

    graph = nx.DiGraph()
    graph.add_nodes_from(range(n))
    graph.add_edges_from(edges)
    whole = nx.condensation(graph)
    layers: list[list[int]] = []
    for generation in nx.topological_generations(whole):
        groups = sorted(sorted(whole.nodes[c]["members"]) for c in generation)
        alone = [group[0] for group in groups if len(group) == 1]
        layers += [alone[i : i + _PER_LAYER] for i in range(0, len(alone), _PER_LAYER)]
        layers += [[i] for group in groups if len(group) > 1 for i in group]
    return layers


def _stacked(parts: list[Layout], layers: list[list[int]]) -> Layout:
    widths = [sum(parts[i].width for i in layer) + _MARGIN * (len(layer) - 1) for layer in layers]
    width, y = max(widths, default=0.0), 0.0
    boxes: dict[int, Frame] = {}
    scopes: list[Frame] = []
    for layer, own in zip(layers, widths, strict=True):
        x = (width - own) / 2
        for i in layer:
            parts[i].move(x, y)
            x += parts[i].width + _MARGIN
            boxes |= parts[i].boxes
            scopes += parts[i].scopes
        y += max(parts[i].height for i in layer) + _MARGIN
    return Layout(boxes, scopes, width, max(y - _MARGIN, 0.0))
