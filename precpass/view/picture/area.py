"""One area of a picture: what it holds in layers, and the lines inside, in its own coordinates."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from precpass.view.picture.ordering import Joint, placed

__all__ = ["Inner", "Port", "Step", "Wire", "area"]

_PER_LAYER, _WIDEST = 6, 860.0
_GAP, _NOTE, _NAME, _TRACK, _ARROW = 26.0, 15.0, 20.0, 8.0, 12.0

Step = tuple[str, float, float]
"""A step of a line: "L" for a straight one, "C" for a curve that starts and ends downwards."""


@dataclasses.dataclass(frozen=True)
class Port:
    """Where a line crosses the border of an area.

    Attributes:
        is_entry: whether it leads into the area.
        source: the position, in the chart, of the box that the line comes from.
    """

    is_entry: bool
    source: int


@dataclasses.dataclass(frozen=True)
class Wire:
    """A line inside an area, between two things that stand in it, or to or from a port.

    Attributes:
        start, end: what it joins.
        source: the box, or the area, that it comes from: wires of one source share their way.
    """

    start: Any
    end: Any
    source: Any


@dataclasses.dataclass(frozen=True)
class Inner:
    """A thing that stands in an area: a box, or an area inside.

    Attributes:
        width, height: its size.
        room: the width that it takes up, with the text beside the line below it.
        rank: its position in the order of execution.
        entries, exits: where a source's line enters its top and leaves its bottom, from its left
            side; in the middle for one that is not there.
        noted: whether a text stands below it.
    """

    width: float
    height: float
    room: float
    rank: int
    entries: Mapping[Any, float] = dataclasses.field(default_factory=dict[Any, float])
    exits: Mapping[Any, float] = dataclasses.field(default_factory=dict[Any, float])
    noted: bool = False


@dataclasses.dataclass(frozen=True)
class Laid:
    """The layout of an area.

    Attributes:
        corners: the upper left corners of what stands in it.
        ports: how far from its left side each port is.
        steps: the ways of its wires.
        back: the wires that lead back.
        width, height: its size.
    """

    corners: dict[Any, tuple[float, float]]
    ports: dict[Port, float]
    steps: dict[Wire, tuple[Step, ...]]
    back: frozenset[Wire]
    width: float
    height: float


def area(
    things: Mapping[Any, Inner], wires: Iterable[Wire], *, pad: float, head: float, least: float
) -> Laid:
    """The layout of an area.

    Args:
        things: what stands in it.
        wires: the lines in it.
        pad: the room at its left, right and lower sides.
        head: that at its upper side.
        least: its least width.
    """
    return _Layers(things, list(wires)).laid(pad, head, least)


@dataclasses.dataclass(frozen=True)
class _Bend:
    """The place of a line in a layer that it passes."""

    start: Any
    source: Any
    layer: int


class _Layers:
    """The layers of an area, from the ports of entry to those of exit."""

    def __init__(self, things: Mapping[Any, Inner], wires: list[Wire]) -> None:
        self.things = things
        self.back = frozenset(
            wire
            for wire in wires
            if wire.start in things
            and wire.end in things
            and things[wire.start].rank >= things[wire.end].rank
        )
        self.forward = [wire for wire in wires if wire not in self.back]
        self.layer = self._layers()
        self.count = max(self.layer.values(), default=-1) + 1
        self.chains = self._chains()
        layers: list[list[Any]] = [[] for _ in range(self.count)]
        for node, at in self.layer.items():
            layers[at].append(node)
        for chain in self.chains.values():
            for at, bend in chain.items():
                layers[at].append(bend)
        self.nodes = layers
        self.entered = (
            any(isinstance(n, Port) and n.is_entry for n in layers[0]) if layers else False
        )

    def _layers(self) -> dict[Any, int]:
        before: dict[Any, list[Any]] = collections.defaultdict(list)
        after: dict[Any, list[Any]] = collections.defaultdict(list)
        ports = {end for w in self.forward for end in (w.start, w.end) if isinstance(end, Port)}
        for wire in self.forward:
            before[wire.end].append(wire.start)
            after[wire.start].append(wire.end)
        order = sorted(self.things, key=lambda node: self.things[node].rank)
        layer: dict[Any, int] = dict.fromkeys((p for p in ports if p.is_entry), -1)
        taken: dict[int, list[float]] = collections.defaultdict(list)
        for node in order:
            at = max((layer[other] + 1 for other in before[node]), default=0)
            while not self._has_room(taken[at], node):
                at += 1
            layer[node] = at
            taken[at].append(self.things[node].room)
        for node in reversed(order):  # what reads nothing stands just above its first reader
            at = min((layer[other] - 1 for other in after[node] if other in layer), default=0)
            if not before[node] and at > layer[node] and self._has_room(taken[at], node):
                layer[node] = at
                taken[at].append(self.things[node].room)
        last = max(layer.values(), default=-1) + 1
        layer.update(dict.fromkeys((p for p in ports if not p.is_entry), last))
        rank = {at: i for i, at in enumerate(sorted(set(layer.values())))}
        return {node: rank[at] for node, at in layer.items()}

    def _has_room(self, taken: list[float], node: Any) -> bool:
        rooms = [*taken, self.things[node].room]
        return len(rooms) == 1 or (len(rooms) <= _PER_LAYER and sum(rooms) <= _WIDEST)

    def _chains(self) -> dict[tuple[Any, Any], dict[int, _Bend]]:
        """For each start and source the places of its line in the layers that it passes."""
        last: dict[tuple[Any, Any], int] = {}
        for wire in self.forward:
            key = wire.start, wire.source
            last[key] = max(last.get(key, 0), self.layer[wire.end])
        return {
            (start, source): {
                at: _Bend(start, source, at) for at in range(self.layer[start] + 1, end)
            }
            for (start, source), end in last.items()
        }

    # ------------------------------------------------------------ positions

    def _out(self, node: Any, source: Any) -> float:
        if node not in self.things:
            return 0.0
        thing = self.things[node]
        return thing.exits.get(source, thing.width / 2)

    def _into(self, node: Any, source: Any) -> float:
        if node not in self.things:
            return 0.0
        thing = self.things[node]
        return thing.entries.get(source, thing.width / 2)

    def _joints(self) -> list[Joint]:
        joints: list[Joint] = []
        for (start, source), chain in self.chains.items():
            stops = [start, *chain.values()]
            pairs = itertools.pairwise(stops)
            joints += [Joint(a, self._out(a, source), b, 0.0) for a, b in pairs]
        for wire in self.forward:
            key, at = (wire.start, wire.source), self.layer[wire.end]
            above = self.chains[key].get(at - 1, wire.start)
            into = self._into(wire.end, wire.source)
            joints.append(Joint(above, self._out(above, wire.source), wire.end, into))
        return joints

    def laid(self, pad: float, head: float, least: float) -> Laid:
        """The layout."""
        widths = {
            node: self.things[node].room if node in self.things else 1.0
            for layer in self.nodes
            for node in layer
        }
        light = frozenset(node for node in widths if node not in self.things)
        x = placed(self.nodes, widths, self._joints(), light)
        content = max((x[node] + widths[node] for node in x), default=0.0)
        lanes = list(dict.fromkeys((w.start, w.source) for w in self.back))
        width = max(content + (_TRACK * (len(lanes) + 1) if lanes else 0.0) + 2 * pad, least)
        shift = (width - content - (_TRACK * (len(lanes) + 1) if lanes else 0.0)) / 2
        self.x = {node: at + shift for node, at in x.items()}
        self.lanes = {key: shift + content + _TRACK * (i + 1) for i, key in enumerate(lanes)}
        height = self._stack(pad, head)
        corners = {node: (self.x[node], self._top(node)) for node in self.things}
        ports = {node: at for node, at in self.x.items() if isinstance(node, Port)}
        steps = {wire: tuple(self._way(wire)) for wire in self.forward}
        steps |= {wire: tuple(self._way_back(wire)) for wire in self.back}
        return Laid(corners, ports, steps, self.back, width, height)

    def _stack(self, pad: float, head: float) -> float:
        """Sets the upper and lower ends of the layers; the height of all."""
        self.upper: list[float] = []
        self.lower: list[float] = []
        self.below: dict[int, list[Any]] = collections.defaultdict(list)
        self.above: dict[int, list[Any]] = collections.defaultdict(list)
        for wire in self.back:
            key, at = (wire.start, wire.source), self.layer[wire.start]
            if key not in self.below[at]:
                self.below[at].append(key)
            self.above[self.layer[wire.end]].append(wire)
        y = 0.0
        for at, layer in enumerate(self.nodes):
            if at:
                y += self._gap(at - 1)
            elif not self.entered:
                y = head + self._tracks_above(0)
            self.upper.append(y)
            y += max((self.things[n].height for n in layer if n in self.things), default=0.0)
            self.lower.append(y)
        is_left = self.count and any(isinstance(n, Port) and not n.is_entry for n in self.nodes[-1])
        return y if is_left or not self.count else y + max(pad, self._tail(self.count - 1))

    def _tracks_above(self, at: int) -> float:
        return _TRACK * len(self.above[at]) + _ARROW if self.above[at] else 0.0

    def _tail(self, at: int) -> float:
        """The room for texts and lines that lead back, below a layer."""
        tracks = _TRACK * len(self.below[at]) + 6 if self.below[at] else 0.0
        return (_NOTE if self._is_noted(at) else 0.0) + tracks

    def _gap(self, at: int) -> float:
        """The room between a layer and the next."""
        name = _NAME if self.entered and not at else 0.0
        return name + _GAP + self._tail(at) + self._tracks_above(at + 1)

    def _top(self, node: Any) -> float:
        at = self.layer[node]
        height = self.things[node].height if node in self.things else 0.0
        return self.upper[at] + (self.lower[at] - self.upper[at] - height) / 2

    def _bottom(self, node: Any) -> float:
        return self._top(node) + (self.things[node].height if node in self.things else 0.0)

    def _clear(self, at: int) -> float:
        """Where lines may bend below a layer: below its texts, or the name of the area."""
        is_entry = self.entered and not at
        return self.lower[at] + (_NAME if is_entry else _NOTE if self._is_noted(at) else 0.0)

    def _is_noted(self, at: int) -> bool:
        return any(n in self.things and self.things[n].noted for n in self.nodes[at])

    def _way(self, wire: Wire) -> Iterable[Step]:
        first, last = self.layer[wire.start], self.layer[wire.end]
        x = self.x[wire.start] + self._out(wire.start, wire.source)
        yield "L", x, self._bottom(wire.start)
        yield "L", x, self._clear(first)
        chain = self.chains[wire.start, wire.source]
        for at in range(first + 1, last):
            yield "C", self.x[chain[at]], self.upper[at]
            yield "L", self.x[chain[at]], self._clear(at)
        x = self.x[wire.end] + self._into(wire.end, wire.source)
        yield "C", x, self.upper[last]
        yield "L", x, self._top(wire.end)

    def _way_back(self, wire: Wire) -> Iterable[Step]:
        first, last = self.layer[wire.start], self.layer[wire.end]
        key = wire.start, wire.source
        x = self.x[wire.start] + self._out(wire.start, wire.source)
        low = self._clear(first) + _TRACK * self.below[first].index(key) + 6
        high = self.upper[last] - _ARROW - _TRACK * self.above[last].index(wire)
        end = self.x[wire.end] + self._into(wire.end, wire.source)
        yield "L", x, self._bottom(wire.start)
        yield "L", x, low
        yield "L", self.lanes[key], low
        yield "L", self.lanes[key], high
        yield "L", end, high
        yield "L", end, self._top(wire.end)
