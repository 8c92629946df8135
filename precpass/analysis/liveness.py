"""The values in a rewritten program that only its derivatives read, if they are ever taken.

A lowered product, and a value that is stored in 16 bits, refer to their float32 operands, because
derivatives pass through those (`ir.is_identity_of_first_operand`). If nobody differentiates,
nothing reads these operands. XLA drops them, and everything that only serves to compute them, also
from the stacks and carries of loops. So counts and estimates leave them out.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph

__all__ = ["Unread", "dead", "unread"]


class Unread(NamedTuple):
    """The equations and values that only derivatives read.

    Attributes:
        rows: for each of the graph's equations, whether that holds for all of its results.
        values: the values for which it holds, as pairs (variable, index of its body).
    """

    rows: npt.NDArray[np.bool_]
    values: frozenset[tuple[Any, int]]


def unread(graph: Graph) -> Unread:
    """The equations and values that only derivatives of a program read.

    Values that nothing reads at all are not among them.

    Args:
        graph: the program.
    """
    if graph not in _KNOWN:
        _KNOWN[graph] = _unread(graph)
    return _KNOWN[graph]


_KNOWN: weakref.WeakKeyDictionary[Graph, Unread] = weakref.WeakKeyDictionary()
"""What several figures of one graph ask for."""


def _unread(graph: Graph) -> Unread:
    rows = np.zeros(len(graph.eqns), np.bool_)
    if not any(map(ir.is_identity_of_first_operand, graph.eqns)):
        return Unread(rows, frozenset())
    roots = list(_roots(graph))
    written, read = (_live(graph, roots, first=first) for first in (False, True))
    dead = written & ~read
    produced = graph.producers >= 0
    makers = graph.producers[produced]
    # Of an equation with several results some may be read and others not.
    rows[makers[dead[produced]]] = True
    rows[makers[read[produced]]] = False
    return Unread(rows, frozenset(graph.values[i] for i in np.flatnonzero(dead).tolist()))


def dead(graph: Graph) -> npt.NDArray[np.bool_]:
    """For each equation, whether no result and no effect of the program depends on it.

    Args:
        graph: the program.
    """
    live = _live(graph, list(_roots(graph)), first=False)
    rows = np.ones(len(graph.eqns), np.bool_)
    rows[graph.producers[live & (graph.producers >= 0)]] = False
    rows[[row for row, eqn in enumerate(graph.eqns) if ir.effects_of(eqn)]] = False
    return rows


def _live(graph: Graph, roots: list[int], *, first: bool) -> npt.NDArray[np.bool_]:
    """For each value, whether the program's results and effects depend on it.

    Args:
        graph: the program.
        roots: the values that are needed in any case.
        first: whether equations that return their first operand count as reading only that one.
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
            # The operands of an equation with bodies are linked to values inside the bodies.
            if producers[value] not in graph.children:
                todo += reads.get(producers[value], ())
    return live


def _roots(graph: Graph) -> Iterator[int]:
    """The results, the operands of effects, and values that cross a border without a link."""
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
                # A loop's predicate is no result of the loop's equation.
                yield from places(ir.open_jaxpr(body.jaxpr).outvars[len(body.results) :], child)
