"""Whether a product's operand comes from outside of its loop.

Its cast then runs once, before the loop. Data movement is looked through, because casts commute
with it.
"""

from __future__ import annotations

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.policy.primitives import OpKind, op

__all__ = ["is_recast"]


def is_recast(graph: Graph, body: int, atom: ir.Atom) -> bool:
    """Whether a backward pass casts a product's operand again (`ProductForm`).

    It does if the body is part of a branch inside a loop and the operand is made outside the loop.
    """
    node = graph.bodies[body]
    while node.around is not None and node.caller.primitive.name not in ("scan", "while"):
        if node.caller.primitive.name == "cond":
            return _is_loop_constant(graph, body, atom)
        node = node.around
    return False


def _is_loop_constant(graph: Graph, body: int, atom: ir.Atom) -> bool:
    """Whether an operand is a loop's constant; if calls differ, at the first call."""
    entered: list[int] = []  # calls on the way whose results were followed inside
    while not ir.is_literal(atom):
        row = graph.row_of_maker(body, atom)
        if row is None:
            call = entered.pop() if entered else next((row for row, _ in graph.callers[body]), None)
            outside = graph.outside(body, atom, call)
            if outside is None or not outside.is_call:
                return outside is not None and outside.is_same
            body, atom = outside.body, outside.atom
        elif inside := graph.name_in_call(row, atom):
            entered.append(row)
            body, atom = inside
        elif op(graph.primitives[row]).kind is OpKind.DATA_MOVEMENT:
            atom = graph.eqns[row].invars[0]
        else:
            return False
    return False
