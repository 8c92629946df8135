"""The values through which a loop's state becomes its next state."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph

__all__ = ["Cycles"]


class Cycles:
    """The values through which the states of a program's loops become their next states.

    A value is one of them if it is computed from a loop's state, and if that state, in this trip
    or a later one, is computed from the value. An equation in `ends` does not count as computing.

    Args:
        graph: the program.
        ends: the rows of the equations that do not count, such as products that round.
    """

    def __init__(self, graph: Graph, ends: Collection[int]) -> None:
        self._graph = graph
        self._ends = ends
        self._of: dict[int, frozenset[ir.Var]] = {}

    def on_cycles(self, body: int) -> frozenset[ir.Var]:
        """The values of one body for which this holds, with its own loop or one around it."""
        if body not in self._of:
            self._of[body] = frozenset(self._found(body))
        return self._of[body]

    def _found(self, body: int) -> Iterator[ir.Var]:
        """Finds the values of one body, by a pass over its equations in each direction.

        The states of the body's loop have numbers, and what a loop around it passes in and out is
        one more state. A set of states is an integer with a bit for each number.
        """
        graph = self._graph
        opened = ir.open_jaxpr(graph.bodies[body].jaxpr)
        before, behind = _Bits(), _Bits()  # states that reach a value, states that it reaches
        returns: list[int] = []  # for each state, those that become it, in any number of trips
        for row, inner in graph.callers[body]:
            for into, out in inner.carry:
                before.add(opened.invars[into], 1 << len(returns))
                behind.add(opened.outvars[out], 1 << len(returns))
                returns.append(1 << len(returns))
            outside, caller = self.on_cycles(int(graph.body[row])), graph.eqns[row]
            if not outside:
                continue
            for v, at in zip(opened.invars, inner.operands, strict=True):
                before.add(v, _is_in(caller.invars[at], outside) << len(returns))
            for v, at in zip(opened.outvars, inner.results, strict=False):
                behind.add(v, (caller.outvars[at] in outside) << len(returns))
            returns.append(1 << len(returns))
        if not returns:
            return
        start = graph.bodies[body].start
        eqns = [eqn for row, eqn in enumerate(opened.eqns, start) if row not in self._ends]
        for eqn in eqns:
            before.all(eqn.outvars, before.of(eqn.invars))
        for eqn in reversed(eqns):
            behind.all(eqn.invars, behind.of(eqn.outvars))
        becomes = [0] * len(returns)
        for v in opened.invars:
            for state in _states(before.of([v])):
                becomes[state] |= behind.of([v])
        for state, found in enumerate(_closure(becomes)):
            for later in _states(found):
                returns[later] |= 1 << state
        for v in before.each:
            if any(behind.of([v]) & returns[state] for state in _states(before.of([v]))):
                yield v


def _closure(becomes: list[int]) -> list[int]:
    """For each state those that it becomes in any number of trips, from those in one trip."""
    becomes = list(becomes)
    for middle in range(len(becomes)):
        for state, found in enumerate(becomes):
            if found >> middle & 1:
                becomes[state] |= becomes[middle]
    return becomes


class _Bits:
    """A set of states for each value, as the bits of an integer."""

    def __init__(self) -> None:
        self.each: dict[ir.Var, int] = {}

    def add(self, atom: ir.Atom, states: int) -> None:
        if states and not ir.is_literal(atom):
            self.each[atom] = self.each.get(atom, 0) | states

    def all(self, atoms: Iterable[ir.Atom], states: int) -> None:
        for atom in atoms:
            self.add(atom, states)

    def of(self, atoms: Iterable[ir.Atom]) -> int:
        return functools.reduce(int.__or__, (self.each.get(v, 0) for v in _variables(atoms)), 0)


def _states(bits: int) -> Iterator[int]:
    while bits:
        yield (bits & -bits).bit_length() - 1
        bits &= bits - 1


def _variables(atoms: Iterable[ir.Atom]) -> Iterator[Any]:
    return (v for v in atoms if not ir.is_literal(v))


def _is_in(atom: ir.Atom, values: Collection[ir.Var]) -> bool:
    return not ir.is_literal(atom) and atom in values
