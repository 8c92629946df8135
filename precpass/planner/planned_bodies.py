"""The walk over a planned program: each body, with each of the plans that it has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from precpass.analysis.graph import Graph
from precpass.plan.plan import Plan

__all__ = ["planned_bodies"]


def planned_bodies(graph: Graph, root: Plan) -> Iterator[tuple[int, Plan]]:
    """The index of each body of a program with a plan of it; every such pair comes once.

    A body has several plans if equations that call it are planned differently.

    Args:
        graph: the program.
        root: its plan.
    """
    rows_of = defaultdict[int, list[int]](list)
    for row in graph.children:
        rows_of[int(graph.body[row])].append(row)
    seen, todo = set[tuple[int, int]](), [(0, root)]
    while todo:
        body, plan = todo.pop()
        if (body, id(plan)) in seen:
            continue
        seen.add((body, id(plan)))
        yield body, plan
        for row in rows_of[body]:
            decision = plan.decisions[row - graph.bodies[body].start]
            pairs = zip(graph.children[row], decision.inner, strict=bool(decision.inner))
            todo += [(child, inner) for (_, child), inner in pairs]
