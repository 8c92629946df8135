"""Which values are behind a product and then an activation: the features of a network.

They are rounded already, so a product of them is not asked for exact digits (`analysis.need`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from precpass import jaxpr as ir
from precpass.analysis.backward import LONGEST_CHAIN
from precpass.analysis.graph import Graph
from precpass.policy.primitives import OpKind, op

__all__ = ["Features", "features"]

_PRODUCT, _FEATURE = 1, 2


@dataclasses.dataclass(frozen=True, eq=False)
class Features:
    """What is behind products in one body, at one class of its call sites.

    Attributes:
        behind: variable -> whether it is behind a product (1), or an activation after one (2).
        inner: equation row -> the same for its bodies.
    """

    behind: dict[Any, int]
    inner: dict[int, tuple[Features, ...]]

    def has(self, atom: ir.Atom) -> bool:
        """Whether a value is a feature."""
        return not ir.is_literal(atom) and self.behind.get(atom, 0) == _FEATURE


def features(graph: Graph) -> Features:
    """The features of a program, in its root and, inside, in its bodies."""
    operands = ir.open_jaxpr(graph.root.jaxpr).invars
    return _Walk(graph).body(0, (0,) * len(operands))


class _Walk:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._bodies: dict[Any, Features] = {}

    def body(self, at: int, operands: tuple[int, ...]) -> Features:
        if (at, operands) not in self._bodies:
            node = self.graph.bodies[at]
            here = self._bodies[at, operands] = Features({}, {})
            pairs = zip(ir.open_jaxpr(node.jaxpr).invars, operands, strict=True)
            here.behind.update((v, mark) for v, mark in pairs if mark)
            for row in range(node.start, node.stop):
                eqn, results = self.graph.eqns[row], []
                read = [_mark(here, v) for v in eqn.invars]
                if row in self.graph.children:
                    results = self._enter(row, eqn, read, here)
                elif mark := _made(eqn, read):
                    results = [mark if _is_number(v.aval) else 0 for v in eqn.outvars]
                here.behind.update((v, m) for v, m in zip(eqn.outvars, results, strict=False) if m)
        return self._bodies[at, operands]

    def _enter(self, row: int, eqn: ir.Eqn, read: list[int], here: Features) -> list[int]:
        results, inner = [0] * len(eqn.outvars), list[Features]()
        for body, child in self.graph.children[row]:
            inside = self._until_settled(body, child, [read[at] for at in body.operands])
            inner.append(inside)
            outvars = ir.open_jaxpr(body.jaxpr).outvars
            for v, result in zip(outvars, body.results, strict=False):
                results[result] = max(results[result], _mark(inside, v))
        here.inner[row] = tuple(inner)
        return results

    def _until_settled(self, body: ir.Body, child: int, operands: list[int]) -> Features:
        outvars = ir.open_jaxpr(body.jaxpr).outvars
        trips = 0
        while True:
            inside, before = self.body(child, tuple(operands)), list(operands)
            for operand, result in body.carry:
                operands[operand] = max(operands[operand], _mark(inside, outvars[result]))
            if operands == before:
                return inside
            trips += 1
            if trips > LONGEST_CHAIN:
                most = max(operands[operand] for operand, _ in body.carry)
                for operand, _ in body.carry:
                    operands[operand] = most


def _mark(here: Features, atom: ir.Atom) -> int:
    return 0 if ir.is_literal(atom) else here.behind.get(atom, 0)


def _made(eqn: ir.Eqn, read: list[int]) -> int:
    """What an equation makes of operands that are behind products."""
    row, mark = op(eqn.primitive.name), max(read, default=0)
    if row.kind is OpKind.COMPUTE:
        return max(mark, _PRODUCT)
    if not mark or row.kind is not OpKind.ELEMENTWISE or row.selects:
        return mark
    if row.is_arithmetic:
        # A choice by a mask that no product made, such as a triangle, is movement.
        return _FEATURE if eqn.primitive.name == "select_n" and read[0] else mark
    return _FEATURE


def _is_number(aval: Any) -> bool:
    """Whether a value is a floating-point number, or a truth value that such numbers gave."""
    return ir.precision_of(aval) is not None or getattr(aval, "dtype", None) == np.bool_
