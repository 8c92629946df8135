"""The layout of one area of a picture: what it holds in rows, each thing below what it reads.

What comes from outside enters an area at its top, and what is read outside leaves it at its bottom,
so that an area is laid out without those around it. A line that passes rows has a place in each.
What a loop computes for its next trip leaves like any other value, and a dashed line at the right
leads back to the top.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["ENTRY", "EXIT", "NOTE", "Line", "Point", "Thing", "laid_out"]

ENTRY, EXIT = "entry", "exit"
"""The ends of lines that come from outside an area, and lead out of it."""

NOTE = 15.0
"""The height of a text below a thing."""

_WIDEST, _MARGIN, _GAP, _PAD, _HEAD, _LANE = 860.0, 20.0, 26.0, 14.0, 22.0, 8.0
_SORTED, _TURNS = 4, 20

Point = tuple[float, float]

Line = tuple[Any, Any]
"""What a line leads from and to."""


@dataclasses.dataclass(frozen=True)
class Thing:
    """A box, or an area with all that is in it.

    Attributes:
        width, height: its size.
        entry, exit: where lines enter its top and leave its bottom, from its left side.
        room: the width that it takes up, with the text below it.
        depth: the height that it takes up, with the text below it.
        first: the position of its first box in the order of execution.
        corners: the upper left corners of what stands in an area, from its own.
        lines: for each line in an area the points that it joins, from top to bottom.
        back: the line that leads back to an area's top; empty if nothing in it is run again.
    """

    width: float
    height: float
    entry: float
    exit: float
    room: float
    depth: float
    first: float
    corners: dict[Any, Point] = dataclasses.field(default_factory=dict[Any, Point])
    lines: dict[Line, list[Point]] = dataclasses.field(default_factory=dict[Line, list[Point]])
    back: tuple[Point, ...] = ()

    @property
    def weight(self) -> float:
        """How much it moves others aside: a line's place in a row makes room for boxes."""
        return 4.0 if self.width else 1.0


class _Bend(NamedTuple):
    """The place of a source's line in a row that it passes."""

    source: Any
    row: int


def _point(depth: float, first: float = 0.0) -> Thing:
    return Thing(0.0, 0.0, 0.0, 0.0, 0.0, depth, first)


def laid_out(things: Mapping[Any, Thing], edges: Iterable[Line], name: float | None) -> Thing:
    """An area.

    Args:
        things: what stands in it.
        edges: its lines.
        name: the width of its name; None for the whole picture, which has no frame.
    """
    is_framed = name is not None
    lines, is_loop = _forward(things, edges)
    used = {end for line in lines for end in line}
    nodes = dict(things)
    if ENTRY in used:
        nodes[ENTRY] = _point(_HEAD, -1)
    if EXIT in used:
        nodes[EXIT] = _point(0.0, math.inf)
    row = _ranks(nodes, lines)
    rows, ways = _with_bends(row, lines)
    row |= {bend: at for at, of_row in enumerate(rows) for bend in of_row}
    nodes = {node: nodes.get(node) or _point(0.0) for node in row}
    x = _placed(rows, nodes, ways.values())
    x, width = _framed(x, nodes, name, 2 * _LANE if is_loop else 0.0)
    upper = _tops(rows, nodes, _HEAD + _LANE if is_framed and ENTRY not in used else 0.0)
    height = max(upper[-1] - _GAP, 0.0) + (_PAD if is_framed and EXIT not in used else 0.0)

    def points(way: Sequence[Any]) -> Iterable[Point]:
        """Those of a line, which runs straight through the rows and bends between them."""
        for node in way[:-1]:
            at, thing = x[node] + nodes[node].exit, nodes[node]
            yield at, upper[row[node]] + thing.height
            yield at, upper[row[node] + 1] - _GAP
        yield x[way[-1]] + nodes[way[-1]].entry, upper[row[way[-1]]]

    low, high, right = height - _LANE / 2, upper[0] + _HEAD - _LANE, width - _LANE
    back = (x[EXIT], low), (right, low), (right, high), (x[ENTRY], high), (x[ENTRY], high + _LANE)
    return Thing(
        width,
        height,
        x[ENTRY],
        x[EXIT],
        width,
        height,
        min((thing.first for thing in things.values()), default=0),
        {node: (x[node], upper[row[node]]) for node in things},
        {line: list(points(way)) for line, way in ways.items()},
        back if is_loop else (),
    )


def _forward(things: Mapping[Any, Thing], edges: Iterable[Line]) -> tuple[list[Line], bool]:
    """Lines that lead on in the order of execution, and whether any leads back around the area."""
    first = {ENTRY: -1, **{node: thing.first for node, thing in things.items()}, EXIT: math.inf}
    lines, returns = list[Line](), list[Line]()
    for a, b in edges:
        (lines if first[a] < first[b] else returns).append((a, b))
    lines += [line for a, b in returns for line in ((a, EXIT), (ENTRY, b))]
    return list(dict.fromkeys(lines)), bool(returns)


def _ranks(nodes: Mapping[Any, Thing], lines: Iterable[Line]) -> dict[Any, int]:
    """The row of each thing: by its longest way from the top, in the order of execution."""
    before: dict[Any, list[Any]] = {node: [] for node in nodes}
    after: dict[Any, list[Any]] = {node: [] for node in nodes}
    for a, b in lines:
        before[b].append(a)
        after[a].append(b)
    row: dict[Any, int] = {}
    taken: dict[int, float] = collections.defaultdict(float)

    def put(node: Any, at: int) -> None:
        row[node] = at
        taken[at] += nodes[node].room

    order = sorted(nodes, key=lambda node: nodes[node].first)
    for node in order:
        at = max((row[other] + 1 for other in before[node]), default=int(node != ENTRY))
        while taken[at] and taken[at] + nodes[node].room > _WIDEST:
            at += 1
        put(node, at if node != EXIT else max(row.values()) + 1)
    constants = [node for node in order if node != ENTRY and after[node] and not before[node]]
    for node in reversed(constants):  # each stands just above its first reader
        at = min(row[other] for other in after[node]) - 1
        if at > row[node] and taken[at] + nodes[node].room <= _WIDEST:
            put(node, at)
    numbers = {at: i for i, at in enumerate(sorted(set(row.values())))}
    return {node: numbers[at] for node, at in row.items()}


def _with_bends(
    row: Mapping[Any, int], lines: Iterable[Line]
) -> tuple[list[list[Any]], dict[Line, list[Any]]]:
    """All that stands in each row, and all that each line joins."""
    ways = {(a, b): [a, *(_Bend(a, at) for at in range(row[a] + 1, row[b])), b] for a, b in lines}
    rows: list[list[Any]] = [[] for _ in set(row.values())]
    for node, at in row.items():
        rows[at].append(node)
    for bend in dict.fromkeys(bend for way in ways.values() for bend in way[1:-1]):
        rows[bend.row].append(bend)
    return rows, ways


def _tops(rows: Sequence[Sequence[Any]], nodes: Mapping[Any, Thing], top: float) -> list[float]:
    """The upper end of each row, and of one below them."""
    depths = [max(nodes[node].depth for node in row) + _GAP for row in rows]
    return list(itertools.accumulate(depths, initial=top))


def _framed(
    x: Mapping[Any, float], nodes: Mapping[Any, Thing], name: float | None, lane: float
) -> tuple[dict[Any, float], float]:
    """The left sides inside an area's frame, and its width."""
    pad, least = (0.0, 0.0) if name is None else (_PAD, name + 2 * _PAD + 2 * _LANE)
    content = max((x[node] + nodes[node].room for node in x), default=0.0)
    width = max(content + lane + 2 * pad, least)
    inside = {node: at + (width - content - lane) / 2 for node, at in x.items()}
    inside = {ENTRY: width / 2, EXIT: width / 2} | inside
    if name is not None:  # no line runs through the name
        inside[ENTRY] = min(max(inside[ENTRY], name + _PAD + _LANE), width - _PAD - lane)
    return inside, width


def _placed(
    rows: Sequence[list[Any]], nodes: Mapping[Any, Thing], ways: Iterable[Sequence[Any]]
) -> dict[Any, float]:
    """The left sides of all that stands in rows, which it sorts; the leftmost is 0.

    Things are sorted by the mean position of what they are joined to (Sugiyama's barycentres), and
    then moved there as far as their neighbours let them, by least squares.
    """
    above: dict[Any, dict[Any, float]] = {node: {} for node in nodes}
    below: dict[Any, dict[Any, float]] = {node: {} for node in nodes}
    for upper, lower in (pair for way in ways for pair in itertools.pairwise(way)):
        offset = nodes[upper].exit - nodes[lower].entry
        above[lower][upper], below[upper][lower] = offset, -offset
    x: dict[Any, float] = {}
    for row in rows:
        x |= _spread(row, dict.fromkeys(row, 0.0), nodes)
    # The last turn is downwards, so that things stand below what they read.
    for turn in range(_TURNS + 1):
        joined = below if turn % 2 else above
        for row in reversed(rows) if turn % 2 else rows:
            goals: dict[Any, float] = {}
            for node in row:
                spots = [x[other] + offset for other, offset in joined[node].items()]
                goals[node] = sum(spots) / len(spots) if spots else x[node]
            if turn < _SORTED:
                row.sort(key=lambda node: goals[node] + nodes[node].room / 2)
            for left, node in itertools.pairwise(row):
                if not above[node] and not below[node]:  # nothing draws it anywhere
                    goals[node] = goals[left] + nodes[left].room
            x |= _spread(row, goals, nodes)
    left = min(x.values(), default=0.0)
    return {node: at - left for node, at in x.items()}


def _spread(
    row: Sequence[Any], goals: Mapping[Any, float], nodes: Mapping[Any, Thing]
) -> dict[Any, float]:
    """The left sides nearest to goals, by weighted least squares, at which nothing overlaps.

    With the widths before each one subtracted, the left sides must not descend: neighbours that
    would are pooled at their mean.
    """
    start = 0.0
    starts: list[float] = []
    pools: list[tuple[float, float, int]] = []  # mean, weight, size
    for node in row:
        mean, weight, size = goals[node] - start, nodes[node].weight, 1
        while pools and pools[-1][0] > mean:
            other, more, n = pools.pop()
            mean, weight = (mean * weight + other * more) / (weight + more), weight + more
            size += n
        pools.append((mean, weight, size))
        starts.append(start)
        start += nodes[node].room + _MARGIN
    means = [mean for mean, _, size in pools for _ in range(size)]
    return {node: mean + at for node, mean, at in zip(row, means, starts, strict=True)}
