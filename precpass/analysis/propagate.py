"""Range analysis: what is known of every value before the program runs.

Ranges are propagated forward, per call site, because one shared body may get -1e9 at one call and
0 at another. The planner's guards use them to find what would overflow, vanish or lose integers
in a low format, and what is made of random bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.analysis.ranges import ANY, ValueRange, is_readable, of_array, of_aval
from precpass.analysis.transfer import Memo, hull, results

__all__ = ["ANY", "ValueRange", "ValueRanges", "of_array", "propagate"]


@dataclasses.dataclass(frozen=True, eq=False)
class ValueRanges:
    """The ranges of the values of one body at one class of call sites.

    Attributes:
        body: the body's index in the graph.
        values: variable -> its range; a variable of which nothing is known is absent.
        inner: equation row -> the ranges of its bodies.
        unchecked: the constants whose elements cannot be read (`ranges.is_readable`).
        sampler: whether the body is inside one of JAX's samplers.
        literals: the ranges of literals by id, cached; the graph keeps the literals alive.
    """

    body: int
    values: dict[Any, ValueRange]
    inner: dict[int, tuple[ValueRanges, ...]]
    unchecked: frozenset[Any] = frozenset()
    sampler: bool = False
    literals: dict[int, ValueRange] = dataclasses.field(default_factory=dict)

    def range_of(self, atom: ir.Atom) -> ValueRange:
        """The range of a variable or literal."""
        if not ir.is_literal(atom):
            return self.values.get(atom, ANY)
        fact = self.literals.get(id(atom))
        if fact is None:
            fact = self.literals[id(atom)] = of_array(atom.val)
        return fact


def propagate(graph: Graph, closed_over: Sequence[Any] = ()) -> ValueRanges:
    """The ranges of the root's values and, inside, of every body's at its call sites.

    Args:
        graph: the program.
        closed_over: the values of its first operands, as far as it closes over
            them.
    """
    opened = ir.open_jaxpr(graph.root.jaxpr)
    known = [of_array(x) if is_readable(x) else None for x in closed_over]
    operand_ranges = known + [None] * (len(opened.invars) - len(known))
    facts = tuple(
        of_aval(v.aval) if fact is None else fact
        for v, fact in zip(opened.invars, operand_ranges, strict=True)
    )
    root = _Propagation(graph).body(0, facts, sampler=False)
    pairs = zip(opened.invars, known, strict=False)
    unchecked = root.unchecked | frozenset(v for v, fact in pairs if fact is None)
    return dataclasses.replace(root, unchecked=unchecked)


class _Propagation:
    """One run over a graph, in which calls of a body with equal ranges share one propagation."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.bodies: dict[Any, ValueRanges] = {}
        self.results: Memo = {}

    def body(self, at: int, given: tuple[ValueRange, ...], *, sampler: bool) -> ValueRanges:
        """The ranges of a body whose operands have the ranges `given`, inside a sampler or not."""
        key = (at, given, sampler)
        if key in self.bodies:
            return self.bodies[key]
        node = self.graph.bodies[at]
        opened = ir.open_jaxpr(node.jaxpr)
        consts = ir.consts_of(node.jaxpr)
        pairs = [*zip(opened.constvars, consts, strict=False)]
        begin = [*zip(opened.invars, given, strict=True), *((v, of_array(c)) for v, c in pairs)]
        values = {v: fact for v, fact in begin if fact is not ANY}
        unchecked = frozenset(var for var, const in pairs if not is_readable(const))
        facts = self.bodies[key] = ValueRanges(at, values, {}, unchecked, sampler)
        # Every equation comes here, so this makes no Python call for each value.
        get, fact_of, is_literal = values.get, facts.range_of, ir.is_literal
        children, memo, unknown = self.graph.children, self.results, ANY
        for row, eqn in enumerate(self.graph.eqns[node.start : node.stop], node.start):
            operands = [fact_of(v) if is_literal(v) else get(v, unknown) for v in eqn.invars]
            if row in children:
                result_ranges = self._enter(row, operands, facts)
            else:
                result_ranges = results(eqn, operands, memo)
            for place, fact in enumerate(result_ranges):
                if fact is not unknown:
                    values[eqn.outvars[place]] = fact
        return facts

    def _enter(
        self, row: int, operands: Sequence[ValueRange], facts: ValueRanges
    ) -> list[ValueRange]:
        eqn = self.graph.eqns[row]
        joined: list[ValueRange | None] = [None] * len(eqn.outvars)
        inner: list[ValueRanges] = []
        sampler = facts.sampler or ir.is_sampler(eqn)
        for body, child in self.graph.children[row]:
            opened = ir.open_jaxpr(body.jaxpr)
            body_operands = [operands[i] for i in body.operands]
            for invar, _ in body.carry:
                body_operands[invar] = of_aval(opened.invars[invar].aval)
            inside = self.body(child, tuple(body_operands), sampler=sampler)
            inner.append(inside)
            for atom, result in zip(opened.outvars, body.results, strict=False):
                fact = inside.range_of(atom)
                before = joined[result]
                joined[result] = fact if before is None else hull([before, fact])
            for _, outvar in body.carry:
                # With zero trips the result is the initial value.
                joined[body.results[outvar]] = of_aval(eqn.outvars[body.results[outvar]].aval)
        facts.inner[row] = tuple(inner)
        left = [fact or of_aval(v.aval) for fact, v in zip(joined, eqn.outvars, strict=True)]
        # JAX's samplers are nested jits. Behind the outermost one a sample is a number like any
        # other.
        return [fact._replace(random=fact.random and facts.sampler) for fact in left]
