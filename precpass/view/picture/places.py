"""Where the equations of a program stand: in which layers, scopes and loops."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.graph import BodyNode, Graph
from precpass.policy.primitives import OpKind, op
from precpass.view.layers import Around, Path, inside
from precpass.view.rows import CALLS, alike, frame_name

__all__ = ["Path", "Place", "folded", "places"]

_UNSEEN = CALLS | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
"""Equations with bodies that are no part of a path: what they call says where it is."""

_REPEATED = 3
"""The fewest layers of one structure that are drawn as one. A block's two norms are not."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an equation without bodies stands.

    Attributes:
        row: its row in the graph.
        path: the layers, name scopes and loops around it, outermost first.
        source: its line.
        primitive: its primitive's name.
        made: the Python calls that made it.
        shapes: those of its operands.
        in_layers: how many parts of the path, at its end, are layers' calls and no name scopes.
        entered: the equations with bodies that lead from the place before to this one.
    """

    row: int
    path: Path
    source: ir.Source
    primitive: str
    made: ir.Made
    shapes: tuple[Any, ...]
    in_layers: int
    entered: tuple[int, ...]


def places(graph: Graph) -> list[Place]:
    """The place of each equation without bodies, in the order of execution."""
    around: dict[int, Around] = {}
    numbers: dict[Any, dict[Any, int]] = collections.defaultdict(dict)
    for node in graph.bodies:
        around[id(node)] = _around(node, around, numbers)
    found: list[Place] = []
    entered: tuple[int, ...] = ()
    for row in _executed(graph, 0, {0}):
        if row in graph.children:
            entered = (*entered, row)
            continue
        eqn, node = graph.eqns[row], graph.bodies[int(graph.body[row])]
        path, made, in_layers = inside(around[id(node)], eqn)
        shapes = tuple(getattr(v.aval, "shape", ()) for v in eqn.invars)
        source, name = graph.source(row), eqn.primitive.name
        found.append(Place(row, path, source, name, made, shapes, in_layers, entered))
        entered = ()
    if found and entered:  # bodies without equations, at the end
        found[-1] = dataclasses.replace(found[-1], entered=found[-1].entered + entered)
    return found


def _executed(graph: Graph, body: int, seen: set[int]) -> Iterator[int]:
    """The rows of equations in the order of execution, each once; bodies follow theirs."""
    for row in range(graph.bodies[body].start, graph.bodies[body].stop):
        yield row
        for _, child in graph.children.get(row, ()):
            if child not in seen:
                seen.add(child)
                yield from _executed(graph, child, seen)


def _around(
    node: BodyNode, around: dict[int, Around], numbers: dict[Any, dict[Any, int]]
) -> Around:
    """What is around a body, that is, around the equation that enters it first.

    Args:
        node: the body.
        around: those of the bodies before it.
        numbers: which of the loops and branches of one name in one place each is; it is added.
    """
    if node.caller is None or node.around is None:
        return Around()
    eqn = node.caller
    found = path, made, _ = inside(around[id(node.around)], eqn)
    bodies = ir.bodies(eqn)
    body = next(b for b in bodies if ir.open_jaxpr(b.jaxpr) is ir.open_jaxpr(node.jaxpr))
    which = "" if len(bodies) == 1 else body.name
    name = ir.name_of(eqn)
    if name not in _UNSEEN:
        # Two loops are two frames, but one that a Python loop over layers calls again is the same.
        one_name = numbers[path, name]
        number = one_name.setdefault((made.calls, ir.source_of(eqn)), len(one_name) + 1)
        frame = frame_name(f"{name} {number}" if number > 1 else name, which, body.trips)
        return Around((*path, frame), made)
    return found


# ---------------------------------------------------------------- folding


def folded(found: Sequence[Place]) -> dict[int, Path]:
    """For each row its path, in which repeated layers are one that says how many they are."""
    names = _names(dict.fromkeys(place.path for place in found), _structures(found))
    return _counted(found, {place.row: names[place.path] for place in found})


def _structures(found: Sequence[Place]) -> dict[Path, Any]:
    """What is in each layer: its products, and if it has none all equations."""
    inside: dict[Path, list[Counter[Any]]] = {}
    for place in found:
        for i in range(1, len(place.path) + 1):
            products, all_ = inside.setdefault(place.path[:i], [Counter(), Counter()])
            entry = place.path[i:], place.primitive, place.shapes
            all_[entry] += 1
            if op(place.primitive).kind is OpKind.COMPUTE:
                products[entry] += 1
    return {
        path: frozenset((products or all_).items()) for path, (products, all_) in inside.items()
    }


def _names(paths: Iterable[Path], structure: dict[Path, Any]) -> dict[Path, Path]:
    """For each path and all around it the path with repeated layers as one."""
    children: dict[Path, dict[Path, None]] = collections.defaultdict(dict)
    for path in paths:
        for i in range(len(path)):
            children[path[:i]][path[: i + 1]] = None
    names: dict[Path, Path] = {(): ()}
    for parent in sorted(children, key=len):
        groups: dict[tuple[str, Any], list[Path]] = collections.defaultdict(list)
        for path in children[parent]:
            is_loop = " trips" in path[-1]
            groups[path[-1] if is_loop else _stem(path[-1]), structure[path]].append(path)
        stems = Counter(stem for stem, _ in groups)
        for (stem, _), group in groups.items():
            first, last = group[0][-1], group[-1][-1]
            whole = stem if stems[stem] == 1 else f"{first} \u2026 {last}"
            for path in group:
                label = f"{whole} \u00d7{len(group)}" if len(group) >= _REPEATED else path[-1]
                names[path] = (*names[parent], label)
    return names


def _stem(label: str) -> str:
    """A label without its number. haiku numbers "block", "block_1", "block_2"."""
    return re.sub(r"[_ ]?[*]$", "", alike(label)) or "*"


def _counted(found: Sequence[Place], paths: dict[int, Path]) -> dict[int, Path]:
    """Paths in which a layer that the same line calls several times says how many times."""
    own: dict[Path, Counter[Any]] = collections.defaultdict(Counter)
    called: dict[Path, bool] = {}
    for place in found:
        path = paths[place.row]
        own[path][place.made.calls, place.primitive, place.shapes] += 1
        for i in range(len(path) + 1):
            is_call = i > len(path) - place.in_layers
            called[path[:i]] = called.get(path[:i], True) and is_call
    # A layer is called as often as most of what is in it: its equations, and the layers inside.
    inside: dict[Path, list[int]] = {
        p: [_mode(own[p].values())] if p in own else [] for p in called
    }
    often: dict[Path, int] = {}
    for path in sorted(called, key=len, reverse=True):
        often[path] = _mode(inside[path])
        inside.get(path[:-1], []).append(often[path])
    labels: dict[Path, Path] = {(): ()}
    for path in sorted(called, key=len):
        *_, last = path or ("",)
        if path:
            around = path[:-1]
            above = often[around] if called[around] and around else 1
            n = often[path] // max(above, 1) if called[path] else 1
            labels[path] = (*labels[around], last if n < 2 else f"{last} \u00d7{n}")
    return {row: labels[path] for row, path in paths.items()}


def _mode(counts: Iterable[int]) -> int:
    """The most frequent count, and of several the smallest."""
    found = Counter(counts)
    return min(found, key=lambda n: (-found[n], n), default=1)
