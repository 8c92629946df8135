"""The walk over a planned program: each body, with each of the plans that it has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from precpass.analysis.graph import Graph
from precpass.plan.plan import Action, Decision, Plan
from precpass.policy.primitives import OpKind

__all__ = ["Decisions", "decisions_of", "planned_bodies"]

Decisions = Mapping[int, Sequence[Decision]]
"""Of the products that are lowered and the equations with bodies in a program, by row."""


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


def decisions_of(graph: Graph, plan: Plan, rows: Sequence[Iterable[int]]) -> Decisions:
    """The decisions for rows of a program: one for each plan that their body has.

    Args:
        graph: the program.
        plan: of the program.
        rows: for each body the rows that are wanted.
    """
    found: dict[int, list[Decision]] = {}
    for body, its_plan in planned_bodies(graph, plan):
        start = graph.bodies[body].start
        for row in rows[body]:
            decision = its_plan.decisions[row - start]
            is_lowered = decision.kind is OpKind.COMPUTE and decision.action is Action.LOWER
            if decision.inner or is_lowered:
                found.setdefault(row, []).append(decision)
    return found
