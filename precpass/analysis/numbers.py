"""Values of which every element is one number that is known before the program runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.analysis.propagate import ValueRanges
from precpass.analysis.ranges import is_real

__all__ = ["Numbers", "number_from_outside"]


class Numbers:
    """The numbers of a program.

    Args:
        graph: the program.
        facts_of: what is known of the values of each body, at each class of its call sites.
    """

    def __init__(self, graph: Graph, facts_of: Mapping[int, Sequence[ValueRanges]]) -> None:
        self._graph = graph
        self._facts_of = facts_of

    def number_of(self, body: int, atom: ir.Atom) -> float | None:
        """The number that every finite element of a value is; None if it is unknown or complex.

        A body's operand is such a number if it is the same one at all of the body's callers.

        Args:
            body: the index of the value's body.
            atom: the value.
        """
        if ir.is_literal(atom):
            is_scalar = np.ndim(atom.val) == 0 and is_real(atom.aval.dtype)
            return float(atom.val) if is_scalar else None
        if self._is_of_first_trip(body, atom):
            return None
        facts = [f.range_of(atom) for f in self._facts_of.get(body, ())]
        is_known = facts and all(f.lo == f.hi == facts[0].lo for f in facts)
        return facts[0].lo if is_known else None

    def _is_of_first_trip(self, body: int, var: ir.Var) -> bool:
        """Whether a value is a loop's state, of which a condition knows the first trip's alone."""
        loops = [loop for _, loop in self._graph.callers[body] if loop.decides or loop.carry]
        invars = ir.open_jaxpr(self._graph.bodies[body].jaxpr).invars
        return bool(loops) and var in invars[loops[0].constants :]


def number_from_outside(graph: Graph, row: int, atom: ir.Atom) -> float | None:
    """The number that every element of an operand is, if a body's caller made the operand.

    JAX makes what a loop's body repeats in every trip once, before the loop. Such an array is read
    from memory in every trip, while one that is made inside of the body costs nothing.

    Args:
        graph: the program.
        row: an equation.
        atom: one of its operands.

    Returns:
        The number; None if it is unknown, or if the operand is a literal or made in the same body.
    """
    body, at = int(graph.body[row]), row
    # The calls whose bodies were entered on the way, innermost last.
    entered: list[int] = []
    crosses = False
    while not ir.is_literal(atom):
        made_at = graph.row_of_maker(body, atom)
        if made_at is not None:
            at = made_at
            inside = graph.name_in_call(at, atom)
            if inside is not None:
                entered.append(at)
                body, atom = inside
            elif _repeats(graph.eqns[at]):
                (atom,) = graph.eqns[at].invars
            else:
                return None
        else:
            outside = graph.outside(body, atom, entered.pop() if entered else None)
            if outside is None or not outside.is_same:
                return None
            crosses = True
            body, atom = outside.body, outside.atom
    is_number = crosses and not getattr(atom.val, "shape", ())
    return float(atom.val) if is_number else None


_REPEATING = frozenset(
    ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "pvary")
)
"""Primitives whose result has no other numbers than their only operand."""


def _repeats(eqn: ir.Eqn) -> bool:
    if eqn.primitive.name == "convert_element_type":
        formats = [ir.precision_of(v.aval) for v in (*eqn.invars, *eqn.outvars)]
        return formats[0] is formats[1] is not None
    return eqn.primitive.name in _REPEATING and len(eqn.invars) == 1
