"""What a rewritten program holds only for derivatives that somebody may take later.

A lowered product, and a value that is stored low, refer to their wide operands, because
derivatives pass through those (`ir.is_identity_of_first_operand`). If nobody differentiates,
nothing reads them: XLA drops them and everything that only they are made of, also from the stacks
and carries of loops. Counts and estimates leave them out for that reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph

__all__ = ["Unread", "unread"]


class Unread(NamedTuple):
    """What is read by derivatives alone.

    Attributes:
        rows: of the graph's equations, whether all results are.
        values: of its values, behind each variable its body's index.
    """

    rows: npt.NDArray[np.bool_]
    values: frozenset[tuple[Any, int]]


def unread(graph: Graph) -> Unread:
    """What only derivatives of a program read, if they are taken.

    What nothing reads at all is not among it.

    Args:
        graph: of the program.
    """
    rows = np.zeros(len(graph.eqns), np.bool_)
    if not any(map(ir.is_identity_of_first_operand, graph.eqns)):
        return Unread(rows, frozenset())
    roots = list(_roots(graph))
    written, read = (_live(graph, roots, first=first) for first in (False, True))
    dead = written & ~read
    produced = graph.producers >= 0
    makers = graph.producers[produced]
    # some results of an equation may be read, and others not
    rows[makers[dead[produced]]] = True
    rows[makers[read[produced]]] = False
    return Unread(rows, frozenset(graph.values[i] for i in np.flatnonzero(dead).tolist()))


def _live(graph: Graph, roots: list[int], *, first: bool) -> npt.NDArray[np.bool_]:
    """Which values the program's results and effects depend on.

    Args:
        graph: of the program.
        roots: the values that are needed in any case.
        first: whether what hands a value on reads its first operand alone.
    """
    back: dict[int, list[int]] = {}
    for a, b in graph.links.tolist():
        back.setdefault(b, []).append(a)
    reads: dict[int, list[int]] = {}
    for value, row in zip(graph.sources.tolist(), graph.targets.tolist(), strict=True):
        eqn = graph.eqns[row]
        if (
            not (first and ir.is_identity_of_first_operand(eqn))
            or graph.values[value][0] is eqn.invars[0]
        ):
            reads.setdefault(row, []).append(value)
    producers = graph.producers.tolist()
    live, todo = np.zeros(len(graph.values), np.bool_), list(roots)
    while todo:
        value = todo.pop()
        if not live[value]:
            live[value] = True
            todo += back.get(value, ())
            # what an equation with bodies reads is linked to what its results are made of
            if producers[value] not in graph.children:
                todo += reads.get(producers[value], ())
    return live


def _roots(graph: Graph) -> Iterator[int]:
    """The results, what effects read, and what crosses a border without a link."""
    index = {(id(var), body): i for i, (var, body) in enumerate(graph.values)}

    def places(atoms: Any, body: int) -> Iterator[int]:
        return (index[id(v), body] for v in atoms if not ir.is_literal(v))

    yield from places(ir.open_jaxpr(graph.root.jaxpr).outvars, 0)
    for at, node in enumerate(graph.bodies):
        for row in range(node.start, node.stop):
            eqn = graph.eqns[row]
            children = graph.children.get(row, ())
            linked = {i for body, _ in children for i in body.operands}
            if children:
                yield from places([v for i, v in enumerate(eqn.invars) if i not in linked], at)
            elif ir.effects_of(eqn):
                yield from places(eqn.invars, at)
            for body, child in children:
                # a predicate leaves by no result
                yield from places(ir.open_jaxpr(body.jaxpr).outvars[len(body.results) :], child)
