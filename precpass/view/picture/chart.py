"""A program's dataflow as few enough boxes to be drawn: equations are merged into boxes."""

from __future__ import annotations

import collections
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.analysis.sizes import nbytes
from precpass.plan.plan import Action, Decision
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind
from precpass.view.picture.places import Path, Place, folded, places

__all__ = ["Box", "Chart", "chart"]


Decided = dict[int, tuple[Decision, int]]
"""For each equation, by its id, the decision and the number of casts that are listed with it."""

Level = Callable[[Place], tuple[Path, Any, str]]
"""For a place the path of its box, the box's key there, and its label."""


@dataclasses.dataclass
class Box:
    """Equations that are drawn as one.

    Attributes:
        label: an equation's primitive, a source line, or the name of a layer or scope.
        path: the layers, name scopes and loops around it, outermost first.
        formats: the number of equations that run in each format.
        low, products: the number of its low products, and of all its products.
        casts: the number of casts that the rewrite adds. An equation with bodies is drawn as
            its bodies, so its casts count for the first equation inside.
        stored: the number of equations that run as written and whose results are stored low.
        lines: the number of equations on each source line.
        moved: the bytes of its equations' operands and results, times loops' trips, in the
            formats in which the rewritten program has them.
        moved_low: those of the equations that run in 16 bits.
    """

    label: str
    path: Path
    formats: Counter[str] = dataclasses.field(default_factory=Counter)
    low: int = 0
    products: int = 0
    casts: int = 0
    stored: int = 0
    lines: Counter[ir.Source] = dataclasses.field(default_factory=Counter)
    moved: float = 0.0
    moved_low: float = 0.0


@dataclasses.dataclass(frozen=True)
class Chart:
    """What is drawn.

    Attributes:
        boxes: in the order of execution of their first equations.
        edges: for each pair of positions in `boxes`, of which the second box reads a result of
            the first, the types of what it reads and their bytes.
    """

    boxes: tuple[Box, ...] = ()
    edges: Mapping[tuple[int, int], dict[str, float]] = dataclasses.field(default_factory=dict)


def chart(graph: Graph, decided: Decided, limit: int) -> Chart:
    """The dataflow of a program in at most `limit` boxes, if that is possible.

    These levels are tried in order: one box per equation; in programs without layers one per scope
    and line; then one box per layer, from the innermost outwards. Both have repeated scopes and
    layers as one.

    Args:
        graph: that of the original program.
        decided: what the plan says of its equations.
        limit: the largest number of boxes.
    """
    found = places(graph)
    keys: dict[int, tuple[Path, Any, str]] = {}
    for level in _levels(found):
        keys = {place.row: level(place) for place in found}
        boxes = {key[:2] for key in keys.values()}
        # A scope takes up the room of two boxes.
        scopes = {path[:i] for path, _ in boxes for i in range(1, len(path) + 1)}
        if len(boxes) + 2 * len(scopes) <= limit:
            break
    return _merged(graph, decided, found, keys)


def _levels(found: list[Place]) -> Iterator[Level]:
    yield lambda p: (p.path, p.row, p.primitive)
    paths = folded(found)
    if not any(p.made.has_scopes or p.in_layers for p in found):
        yield lambda p: (paths[p.row], p.source, _line(p))
    depth = max((len(path) for path in paths.values()), default=0)
    yield from (_layers(found, paths, d) for d in range(depth, -1, -1))


def _layers(found: list[Place], paths: dict[int, Path], depth: int) -> Level:
    """Layers as boxes, down to a depth; what a layer does between others is a box for each step."""
    around = {path[:i] for path in paths.values() for i in range(min(len(path), depth))}

    def key(place: Place) -> tuple[Path, Any, str]:
        path = paths[place.row]
        if not depth:
            return (), None, "program"
        if len(path) > depth or path not in around:
            cut = path[:depth]
            return cut[:-1], cut, cut[-1]
        label = place.made.step or (
            place.primitive if place.made.layers or together[step(place)] == 1 else _line(place)
        )
        return path, step(place), label

    def step(place: Place) -> Any:
        return paths[place.row], place.made.key or place.source, place.made.step

    together = Counter(map(step, found))
    return key


def _line(place: Place) -> str:
    source = place.source
    return f"{source.function}:{source.line}" if source.file else place.primitive


def _merged(
    graph: Graph,
    decided: Decided,
    found: list[Place],
    keys: dict[int, tuple[Path, Any, str]],
) -> Chart:
    boxes: dict[tuple[Path, Any], Box] = {}
    position: dict[int, tuple[Path, Any]] = {}
    for place in found:
        path, key, label = keys[place.row]
        position[place.row] = (path, key)
        box = boxes.setdefault((path, key), Box(label, path))
        eqn = graph.eqns[place.row]
        decision, casts = decided[id(eqn)]
        if decision.compute is not None:
            box.formats[str(decision.compute)] += 1
            if decision.kind is OpKind.COMPUTE:
                box.products += 1
                box.low += decision.action is Action.LOWER
        moved = _moved(eqn, decision) * float(graph.calls[place.row])
        box.moved += moved
        box.moved_low += moved * (str(decision.compute) in ("bf16", "f16"))
        box.casts += casts + sum(decided[id(graph.eqns[row])][1] for row in place.entered)
        box.stored += decision.stores_low
        if place.source.file:
            box.lines[place.source] += 1
    index = {key: i for i, key in enumerate(boxes)}
    read: dict[tuple[int, int], set[int]] = collections.defaultdict(set)
    for value, reader in _flow(graph, set(position)):
        a, b = position[int(graph.producers[value])], position[reader]
        if a != b:
            read[index[a], index[b]].add(value)
    edges = {pair: _types(graph, decided, values) for pair, values in read.items()}
    return Chart(tuple(boxes.values()), edges)


def _moved(eqn: Any, decision: Decision) -> float:
    """The bytes of an equation's operands and results, in the formats in which it has them."""
    operands = decision.compute if decision.action is Action.LOWER else None
    read = sum(_bytes(v.aval, operands) for v in eqn.invars)
    stored = dict(enumerate(decision.stored))
    return read + sum(_bytes(v.aval, stored.get(i)) for i, v in enumerate(eqn.outvars))


def _bytes(aval: Any, precision: Precision | None) -> float:
    """The bytes of a value, in another format if it is a number and there is one."""
    if precision is None or ir.precision_of(aval) is None:
        return nbytes(aval)
    return nbytes(aval) * precision.dtype.itemsize / aval.dtype.itemsize


def _types(graph: Graph, decided: Decided, values: set[int]) -> dict[str, float]:
    sizes: dict[str, float] = {}
    for value in values:
        var, _ = graph.values[value]
        eqn = graph.eqns[int(graph.producers[value])]
        stored = dict(zip(eqn.outvars, decided[id(eqn)][0].stored, strict=False)).get(var)
        dtype = stored or ir.precision_of(var.aval) or getattr(var.aval, "dtype", "")
        shape = ",".join(map(str, getattr(var.aval, "shape", ())))
        sizes[f"{dtype}[{shape}]"] = _bytes(var.aval, stored)
    return sizes


def _flow(graph: Graph, drawn: set[int]) -> set[tuple[int, int]]:
    """Pairs of a drawn equation's result and a drawn equation that reads it, across borders."""
    back: dict[int, list[int]] = {}
    for a, b in graph.links.tolist():
        back.setdefault(b, []).append(a)
    producers = graph.producers.tolist()
    memo: dict[int, frozenset[int]] = {}

    def made(value: int) -> frozenset[int]:
        """The results of drawn equations that a value may be."""
        if value not in memo:
            reached, todo, seen = set[int](), [value], {value}
            while todo:
                at = todo.pop()
                if producers[at] in drawn:
                    reached.add(at)
                    continue
                for other in back.get(at, ()):
                    if other not in seen:
                        seen.add(other)
                        todo.append(other)
            memo[value] = frozenset(reached)
        return memo[value]

    return {
        (result, eqn)
        for value, eqn in zip(graph.sources.tolist(), graph.targets.tolist(), strict=True)
        if eqn in drawn
        for result in made(value)
    }
