"""Where a product's operand comes from, which decides what its cast to a low format costs.

A cast inside the fusion that makes the operand is free. A cast of a loop's constant runs once,
before the loop.
"""

from __future__ import annotations

from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.graph import BodyNode, Graph
from precpass.policy.primitives import OpKind, op

__all__ = ["OperandOrigins"]


class OperandOrigins:
    """The origins of a graph's values. Data movement is looked through: casts commute with it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._rows: dict[int, dict[Any, int]] = {}

    def is_recast(self, body: int, atom: ir.Atom) -> bool:
        """Whether a backward pass casts a product's operand again (`ProductForm`).

        It does if the body is part of a branch inside a loop and the operand is made outside the
        loop.
        """
        node = self.graph.bodies[body]
        while node.around is not None and node.caller.primitive.name not in ("scan", "while"):
            if node.caller.primitive.name == "cond":
                return self._is_loop_constant(body, atom)
            node = node.around
        return False

    def is_made_in(self, body: int, atom: ir.Atom) -> bool:
        """Whether elementwise work in the same body makes an operand."""
        rows = self._producers(self.graph.bodies[body])
        while not ir.is_literal(atom) and (row := rows.get(atom)) is not None:
            eqn = self.graph.eqns[row]
            kind = op(eqn.primitive.name).kind
            if kind is not OpKind.DATA_MOVEMENT:
                return kind is OpKind.ELEMENTWISE
            atom = eqn.invars[0]
        return False

    def _is_loop_constant(self, body: int, atom: ir.Atom) -> bool:
        """Whether an operand is a loop's constant; if calls differ, at the first call."""
        node = self.graph.bodies[body]
        # The equations whose bodies were entered on the way, each with the body it stands in.
        entered: list[tuple[BodyNode, Any]] = []
        while not ir.is_literal(atom):
            row = self._producers(node).get(atom)
            if row is None:
                caller = entered.pop() if entered else (node.around, node.caller)
                outside = _outside(node, atom, *caller)
                if isinstance(outside, bool):
                    return outside
                node, atom = outside
            elif inside := self._inside(row, atom):
                entered.append((node, self.graph.eqns[row]))
                node, atom = inside
            else:
                eqn = self.graph.eqns[row]
                if op(eqn.primitive.name).kind is not OpKind.DATA_MOVEMENT:
                    return False
                atom = eqn.invars[0]
        return False

    def _producers(self, node: BodyNode) -> dict[Any, int]:
        if id(node) not in self._rows:
            rows = range(node.start, node.stop)
            self._rows[id(node)] = {v: row for row in rows for v in self.graph.eqns[row].outvars}
        return self._rows[id(node)]

    def _inside(self, row: int, atom: ir.Atom) -> tuple[BodyNode, Any] | None:
        """The body that makes a result, if it runs once, and the atom for the result there."""
        match self.graph.children.get(row, ()):
            case ((body, child),) if body.trips == 1 and not body.carry:
                position = self.graph.eqns[row].outvars.index(atom)
                if position not in body.results:
                    return None
                inner_atom = ir.open_jaxpr(body.jaxpr).outvars[body.results.index(position)]
                return self.graph.bodies[child], inner_atom
            case _:
                return None


def _outside(
    node: BodyNode, atom: ir.Atom, around: BodyNode | None, caller: Any
) -> tuple[BodyNode, Any] | bool:
    """The atom at the calling equation that stands for a value of a body's border.

    Where none does: whether the value is a loop's constant.
    """
    opened = ir.open_jaxpr(node.jaxpr)
    if caller is None or around is None or atom not in opened.invars:
        return False
    at = opened.invars.index(atom)
    (body, *_) = [b for b in ir.bodies(caller) if ir.open_jaxpr(b.jaxpr) is opened]
    if at < body.constants:
        return True
    if body.trips != 1 or body.carry:
        return False
    return around, caller.invars[body.operands[at]]
