"""Which values are behind a product and then an activation: the features of a network.

They are rounded already, so a product of them is not asked for exact digits (`analysis.need`).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.policy.primitives import COMPUTING, OpKind, op

__all__ = ["features"]

_PRODUCT, _FEATURE = 1, 2
"""What a value may be behind: a product; and an activation after one."""
_Rule = tuple[Callable[[list[int]], int], Sequence[ir.Atom]]
"""What a variable is behind, as a function of what some atoms are behind; and these atoms."""


def features(graph: Graph) -> frozenset[Any]:
    """The variables that are features. In a body with several callers they are so for each."""
    rules = _rules(graph)
    readers, marks = defaultdict[Any, list[Any]](list), defaultdict[Any, int](int)
    for v, (_, atoms) in rules.items():
        for atom in atoms:
            if not ir.is_literal(atom):
                readers[atom].append(v)
    products = (eqn for eqn in graph.eqns if eqn.primitive.name in COMPUTING)
    todo = [v for eqn in products for v in eqn.outvars if v in rules]
    while todo:  # a mark only rises, and rises twice at most
        v = todo.pop()
        rule, atoms = rules[v]
        mark = rule([0 if ir.is_literal(atom) else marks[atom] for atom in atoms])
        if mark > marks[v]:
            marks[v] = mark
            todo += readers[v]
    return frozenset(v for v, mark in marks.items() if mark == _FEATURE)


def _rules(graph: Graph) -> dict[Any, _Rule]:
    """The rule of each variable that may be behind a product."""
    given, made = defaultdict[Any, list[ir.Atom]](list), defaultdict[Any, list[ir.Atom]](list)
    rules: dict[Any, _Rule] = {}
    for row, eqn in enumerate(graph.eqns):
        for body, _ in graph.children.get(row, ()):
            opened = ir.open_jaxpr(body.jaxpr)
            for v, at in zip(opened.invars, body.operands, strict=True):
                given[v].append(eqn.invars[at])
            for operand, result in body.carry:
                made[opened.invars[operand]].append(opened.outvars[result])
            for atom, at in zip(opened.outvars, body.results, strict=False):
                made[eqn.outvars[at]].append(atom)
        if row not in graph.children:
            for v in eqn.outvars:
                if ir.precision_of(v.aval) or getattr(v.aval, "dtype", None) == np.bool_:
                    rules[v] = functools.partial(_made, eqn), eqn.invars
    for v in (*given, *made):
        rules[v] = functools.partial(_joined, len(given[v])), (*given[v], *made[v])
    return rules


def _joined(calls: int, marks: list[int]) -> int:
    """What a body's operand is behind at each of its calls, or else in a loop's next trip."""
    return max(min(marks[:calls], default=0), *marks[calls:], 0)


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
