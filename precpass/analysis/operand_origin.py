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
    entered: list[tuple[int, ir.Body]] = []  # calls on the way whose results were followed inside
    while not ir.is_literal(atom):
        row = graph.row_of_maker(body, atom)
        if row is None:
            calls = entered or graph.callers[body][:1]
            invars = ir.open_jaxpr(graph.bodies[body].jaxpr).invars
            if not calls or atom not in invars:
                return False
            row, called = calls[-1]
            del entered[-1:]
            at = invars.index(atom)
            if at < called.constants or called.trips != 1 or called.carry:
                return at < called.constants
            body, atom = int(graph.body[row]), graph.eqns[row].invars[called.operands[at]]
        elif inside := graph.name_in_call(row, atom):
            entered.append((row, graph.children[row][0][0]))
            body, atom = inside
        elif op(graph.primitives[row]).kind is OpKind.DATA_MOVEMENT:
            atom = graph.eqns[row].invars[0]
        else:
            return False
    return False
