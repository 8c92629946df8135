"""What is known of values before the program runs, propagated forward per call site.

The planner guards values by these facts: what would overflow, vanish or lose
integers in a narrower format, and what follows random bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.core

from precpass import jaxpr as ir
from precpass.fact import ANY, Fact, guard, of_array, of_aval
from precpass.graph import Graph
from precpass.transfer import hull, results

__all__ = ["ANY", "Fact", "Facts", "guard", "of_array", "propagate"]


@dataclasses.dataclass(frozen=True, eq=False)
class Facts:
    """The facts of one body at one class of call sites.

    Attributes:
        body: its index in the graph.
        values: variable -> fact, where anything is known.
        inner: equation row -> the facts of its bodies.
        unchecked: the constants that an outer trace has not computed yet.
        sampler: whether it is inside of one of JAX's samplers.
        literals: the facts of literals that were asked for, by id; the graph holds them.
    """

    body: int
    values: dict[Any, Fact]
    inner: dict[int, tuple[Facts, ...]]
    unchecked: frozenset[Any] = frozenset()
    sampler: bool = False
    literals: dict[int, Fact] = dataclasses.field(default_factory=dict)

    def of(self, atom: Any) -> Fact:
        """The fact of a variable or literal."""
        if not ir.is_literal(atom):
            return self.values.get(atom, ANY)
        fact = self.literals.get(id(atom))
        if fact is None:
            fact = self.literals[id(atom)] = of_array(atom.val)
        return fact


def propagate(graph: Graph, closed_over: Sequence[Any] = ()) -> Facts:
    """The facts of the root and, under it, of every body at its call sites.

    Args:
        graph: the program.
        closed_over: the values of its first operands, as far as it closes over
            them; those that an outer trace has not computed yet nobody can check.
    """
    memo: dict[Any, Facts] = {}
    opened = ir.open_jaxpr(graph.root.jaxpr)
    known = [None if isinstance(x, jax.core.Tracer) else of_array(x) for x in closed_over]
    given = known + [None] * (len(opened.invars) - len(known))
    facts = tuple(
        of_aval(v.aval) if fact is None else fact
        for v, fact in zip(opened.invars, given, strict=True)
    )
    root = _body(graph, 0, facts, memo, False)
    pairs = zip(opened.invars, known, strict=False)
    unchecked = root.unchecked | frozenset(v for v, fact in pairs if fact is None)
    return dataclasses.replace(root, unchecked=unchecked)


def _body(
    graph: Graph, at: int, given: tuple[Fact, ...], memo: dict[Any, Facts], sampler: bool
) -> Facts:
    key = (at, given, sampler)
    if key in memo:
        return memo[key]
    node = graph.bodies[at]
    opened = ir.open_jaxpr(node.jaxpr)
    values: dict[Any, Fact] = dict(zip(opened.invars, given, strict=True))
    consts = ir.consts_of(node.jaxpr)
    values.update(zip(opened.constvars, map(of_array, consts), strict=False))
    pairs = zip(opened.constvars, consts, strict=False)
    unchecked = frozenset(var for var, const in pairs if isinstance(const, jax.core.Tracer))
    facts = memo[key] = Facts(at, values, {}, unchecked, sampler)
    for row in range(node.start, node.stop):
        eqn = graph.eqns[row]
        operands = [facts.of(v) if ir.is_literal(v) else values.get(v, ANY) for v in eqn.invars]
        if row in graph.children:
            made = _enter(graph, row, operands, facts, memo, sampler)
        else:
            made = results(eqn, operands)
        for v, fact in zip(eqn.outvars, made, strict=True):
            if fact is not ANY:
                values[v] = fact
    return facts


def _enter(
    graph: Graph,
    row: int,
    operands: list[Fact],
    facts: Facts,
    memo: dict[Any, Facts],
    sampler: bool,
) -> list[Fact]:
    eqn = graph.eqns[row]
    joined: list[Fact | None] = [None] * len(eqn.outvars)
    inner: list[Facts] = []
    inside_sampler = sampler or ir.is_sampler(eqn)
    for body, child in graph.children[row]:
        opened = ir.open_jaxpr(body.jaxpr)
        given = [operands[i] for i in body.operands]
        for invar, _ in body.carry:
            given[invar] = of_aval(opened.invars[invar].aval)
        inside = _body(graph, child, tuple(given), memo, inside_sampler)
        inner.append(inside)
        for atom, result in zip(opened.outvars, body.results, strict=False):
            fact = inside.of(atom)
            before = joined[result]
            joined[result] = fact if before is None else hull([before, fact])
        for _, outvar in body.carry:
            # zero trips hand the initial value through
            joined[body.results[outvar]] = of_aval(eqn.outvars[body.results[outvar]].aval)
    facts.inner[row] = tuple(inner)
    left = [fact or of_aval(v.aval) for fact, v in zip(joined, eqn.outvars, strict=True)]
    # JAX's samplers are jits inside of each other: at the outermost one's end a sample is a number
    # like any other
    return [fact._replace(random=fact.random and sampler) for fact in left]
