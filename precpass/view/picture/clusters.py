"""A program's dataflow as few enough boxes to be drawn: equations are merged into boxes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Hashable

from precpass import jaxpr as ir
from precpass.analysis.graph import BodyNode, Graph
from precpass.plan.plan import Action, Decision
from precpass.policy.primitives import OpKind
from precpass.policy.scopes import clean_scope, is_backward
from precpass.view.rows import CALLS, alike, frame_name

__all__ = ["Box", "Chart", "chart"]

Path = tuple[str, ...]


@dataclasses.dataclass
class Box:
    """Equations that are drawn as one.

    Attributes:
        label: an equation's primitive, a source line, or a name scope.
        path: the name scopes and loops around it, outermost first.
        first: the first equation's row, for the order on the page.
        formats: the number of equations that run in each format.
        low, products: the number of its low products, and of all its products.
        casts: the number of casts that the rewrite adds. An equation with bodies is drawn as
            its bodies, so its casts count for the first equation inside.
        stored: the number of equations that run as written and whose results are stored low.
        lines: the number of equations on each source line.
    """

    label: str
    path: Path
    first: int
    formats: Counter[str] = dataclasses.field(default_factory=Counter)
    low: int = 0
    products: int = 0
    casts: int = 0
    stored: int = 0
    lines: Counter[ir.Source] = dataclasses.field(default_factory=Counter)


@dataclasses.dataclass(frozen=True)
class Chart:
    """What is drawn.

    Attributes:
        boxes: in the order of their first equations.
        edges: pairs of positions in `boxes`: the second box reads a result of the first.
    """

    boxes: tuple[Box, ...]
    edges: frozenset[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class _Place:
    row: int
    path: Path
    source: ir.Source
    primitive: str


def chart(graph: Graph, decided: dict[int, tuple[Decision, int]], limit: int) -> Chart:
    """The dataflow of a program in at most `limit` boxes, if that is possible.

    These levels are tried in order: one box per equation; one per scope and line; the same with
    scopes merged that differ only in their numbers (layer_0, layer_1); whole scopes, from the
    innermost outwards.

    Args:
        graph: that of the original program.
        decided: for each equation, by its id, the decision and the number of casts there.
        limit: the largest number of boxes.
    """
    places = _places(graph)
    depth = max((len(place.path) for place in places), default=0)
    levels: list[Callable[[_Place], tuple[Path, Hashable, str]]] = [
        lambda p: (p.path, p.row, p.primitive),
        lambda p: (p.path, p.source, _line(p)),
        lambda p: (_alike(p.path), p.source, _line(p)),
        *(_whole(d) for d in range(depth, -1, -1)),
    ]
    keys: dict[int, tuple[Path, Hashable, str]] = {}
    for level in levels:
        keys = {place.row: level(place) for place in places}
        boxes = {key[:2] for key in keys.values()}
        # A scope takes up the room of two boxes.
        scopes = {path[:i] for path, _ in boxes for i in range(1, len(path) + 1)}
        if len(boxes) + 2 * len(scopes) <= limit:
            break
    return _merged(graph, decided, places, keys)


def _first_inside(graph: Graph, row: int, drawn: Collection[int]) -> int:
    """The first drawn equation inside another one, or the one before it if nothing is inside."""
    todo = [row]
    while todo:
        at = todo.pop()
        if at in drawn:
            return at
        bodies = [graph.bodies[child] for _, child in graph.children.get(at, ())]
        todo += [
            inner for node in reversed(bodies) for inner in reversed(range(node.start, node.stop))
        ]
    return max((other for other in drawn if other < row), default=next(iter(drawn)))


def _whole(depth: int) -> Callable[[_Place], tuple[Path, Hashable, str]]:
    def key(place: _Place) -> tuple[Path, Hashable, str]:
        path = _alike(place.path)
        if len(path) < depth or not path:
            return path, None, "..." if path else "all else"
        cut = path[:depth]
        return (cut[:-1], cut[-1], cut[-1]) if cut else ((), None, "program")

    return key


def _merged(
    graph: Graph,
    decided: dict[int, tuple[Decision, int]],
    places: list[_Place],
    keys: dict[int, tuple[Path, Hashable, str]],
) -> Chart:
    boxes: dict[tuple[Path, Hashable], Box] = {}
    position: dict[int, tuple[Path, Hashable]] = {}
    for place in places:
        path, key, label = keys[place.row]
        position[place.row] = (path, key)
        box = boxes.setdefault((path, key), Box(label, path, place.row))
        decision, casts = decided[id(graph.eqns[place.row])]
        if decision.compute is not None:
            box.formats[str(decision.compute)] += 1
            if decision.kind is OpKind.COMPUTE:
                box.products += 1
                box.low += decision.action is Action.LOWER
        box.casts += casts
        box.stored += decision.stores_low
        if place.source.file:
            box.lines[place.source] += 1
    for row in graph.children if position else ():
        if (casts := decided[id(graph.eqns[row])][1]) > 0:
            boxes[position[_first_inside(graph, row, position)]].casts += casts
    index = {key: i for i, key in enumerate(boxes)}
    edges = {
        (index[position[a]], index[position[b]])
        for a, b in _flow(graph, set(position))
        if position[a] != position[b]
    }
    return Chart(tuple(boxes.values()), frozenset(edges))


def _places(graph: Graph) -> list[_Place]:
    """The place of each equation without bodies."""
    around = {id(node): _path_of(node) for node in graph.bodies}
    places: list[_Place] = []
    for node in graph.bodies:
        for row in range(node.start, node.stop):
            if row not in graph.children:
                eqn = graph.eqns[row]
                path = (*around[id(node)], *_parts(ir.scope_of(eqn)))
                places.append(_Place(row, path, graph.source(row), eqn.primitive.name))
    return places


def _path_of(node: BodyNode) -> Path:
    """The scopes and loops around a body."""
    parts: list[Path] = []
    at: BodyNode | None = node
    while at is not None and at.caller is not None:
        eqn = at.caller
        body = next(b for b in ir.bodies(eqn) if ir.open_jaxpr(b.jaxpr) is ir.open_jaxpr(at.jaxpr))
        which = "" if len(ir.bodies(eqn)) == 1 else body.name
        name = frame_name(ir.name_of(eqn), which, body.trips)
        names = () if ir.name_of(eqn) in CALLS else (name,)
        parts.append((*_parts(ir.scope_of(eqn)), *names))
        at = at.around
    return tuple(part for path in reversed(parts) for part in path)


def _parts(scope: str) -> Path:
    backward = ("backward",) if is_backward(scope) else ()
    return (*backward, *filter(None, clean_scope(scope).split("/")))


def _alike(path: Path) -> Path:
    """A path with "*" for the numbers in scopes; loops keep their trip counts."""
    return tuple(part if " trips" in part else alike(part) for part in path)


def _line(place: _Place) -> str:
    source = place.source
    return f"{source.function}:{source.line}" if source.file else place.primitive


def _flow(graph: Graph, drawn: set[int]) -> set[tuple[int, int]]:
    """Pairs of drawn equations, the second of which reads a result of the first, across borders."""
    back: dict[int, list[int]] = {}
    for a, b in graph.links.tolist():
        back.setdefault(b, []).append(a)
    producers = graph.producers.tolist()
    memo: dict[int, frozenset[int]] = {}

    def makers(value: int) -> frozenset[int]:
        """The drawn equations that a value may come from."""
        if value not in memo:
            reached, todo, seen = set[int](), [value], {value}
            while todo:
                at = todo.pop()
                if producers[at] in drawn:
                    reached.add(producers[at])
                    continue
                for other in back.get(at, ()):
                    if other not in seen:
                        seen.add(other)
                        todo.append(other)
            memo[value] = frozenset(reached)
        return memo[value]

    return {
        (maker, eqn)
        for value, eqn in zip(graph.sources.tolist(), graph.targets.tolist(), strict=True)
        if eqn in drawn
        for maker in makers(value)
    }
