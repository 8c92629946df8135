"""What is known of values before the program runs, propagated forward per call site.

The planner guards values by these facts: what would overflow, vanish or lose
integers in a narrower format, and what follows random bits.
"""

from __future__ import annotations

import dataclasses
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
        values: variable -> fact.
        inner: equation row -> the facts of its bodies.
        unchecked: the constants that an outer trace has not computed yet.
    """

    body: int
    values: dict[Any, Fact]
    inner: dict[int, tuple[Facts, ...]]
    unchecked: frozenset[Any] = frozenset()

    def of(self, atom: Any) -> Fact:
        """The fact of a variable or literal."""
        return of_array(atom.val) if ir.is_literal(atom) else self.values.get(atom, ANY)


_Memo = dict[Any, Facts]


def propagate(graph: Graph, hoisted: int = 0) -> Facts:
    """The facts of the root and, under it, of every body at its call sites.

    Args:
        graph: the program.
        hoisted: how many of its first operands are constants of an outer trace,
            which nobody can check.
    """
    memo: dict[Any, Facts] = {}
    opened = ir.open_jaxpr(graph.root.jaxpr)
    root = _body(graph, 0, tuple(of_aval(v.aval) for v in opened.invars), memo, False)
    unchecked = root.unchecked | frozenset(opened.invars[:hoisted])
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
    facts = memo[key] = Facts(at, values, {}, unchecked)
    for row in range(node.start, node.stop):
        eqn = graph.eqns[row]
        operands = [facts.of(v) for v in eqn.invars]
        if row in graph.children:
            made = _enter(graph, row, operands, facts, memo, sampler)
        else:
            made = results(eqn, operands)
        values.update(zip(eqn.outvars, made, strict=True))
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
    private = str(eqn.params.get("name", "")).startswith("_")
    for body, child in graph.children[row]:
        opened = ir.open_jaxpr(body.jaxpr)
        given = [operands[i] for i in body.operands]
        for invar, _ in body.carry:
            given[invar] = of_aval(opened.invars[invar].aval)
        inside = _body(graph, child, tuple(given), memo, private)
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
    # JAX's samplers are private jits inside of each other: at the outermost one's end a sample
    # is a number like any other
    return [fact._replace(random=fact.random and sampler) for fact in left]
