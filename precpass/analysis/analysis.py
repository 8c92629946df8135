"""All analyses of one program, each made once. None of them depends on a policy."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from precpass.analysis.accumulation import Additive
from precpass.analysis.digits import DigitsRead
from precpass.analysis.graph import Graph
from precpass.analysis.idioms import Idioms
from precpass.analysis.need import ExactNeeds, exact_needs
from precpass.analysis.numbers import Numbers
from precpass.analysis.propagate import ValueRanges, propagate

__all__ = ["Analysis"]


class Analysis:
    """The analyses of one program.

    Attributes:
        graph: the program.
        facts: the ranges of the root's values; those of bodies, by class of call sites, are inside.
        additive: the additive paths through its loops.

    Args:
        graph: the program.
        closed_over: the values of its first operands, as far as it closes over them.
    """

    def __init__(self, graph: Graph, closed_over: Sequence[object] = ()) -> None:
        self.graph = graph
        self.facts = propagate(graph, closed_over)
        self.additive = Additive()

    @functools.cached_property
    def facts_of(self) -> dict[int, list[ValueRanges]]:
        """The ranges of each body's values, at each class of its call sites."""
        ranges_by_body: dict[int, list[ValueRanges]] = {}
        todo, seen = [self.facts], {id(self.facts)}
        while todo:
            facts = todo.pop()
            ranges_by_body.setdefault(facts.body, []).append(facts)
            for inner in facts.inner.values():
                new = [inside for inside in inner if id(inside) not in seen]
                seen.update(map(id, new))
                todo += new
        return ranges_by_body

    @functools.cached_property
    def numbers(self) -> Numbers:
        """The values that are one number."""
        return Numbers(self.graph, self.facts_of)

    @functools.cached_property
    def idioms(self) -> Idioms:
        """What differences and comparisons belong to."""
        return Idioms(self.graph, self.numbers)

    @functools.cached_property
    def digits(self) -> DigitsRead:
        """How values are read where it would show that they were rounded once more."""
        return DigitsRead(self.graph, self.numbers, self.idioms)

    @functools.cached_property
    def exact_needs(self) -> ExactNeeds:
        """What its readers need with all the digits of float32."""
        return exact_needs(self.graph, self.numbers)

    @functools.cached_property
    def deciding(self) -> frozenset[int]:
        """The bodies that compute the predicates of loops, and those that they enter."""
        entered = self.graph.children.values()
        deciding = {child for bodies in entered for body, child in bodies if body.decides}
        return frozenset[int]().union(*map(self.graph.inside, deciding))
