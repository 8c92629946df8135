"""Who reads each value of a program: low products, or anything else."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from precpass import jaxpr as ir
from precpass.analysis.equations import moved_operand
from precpass.analysis.graph import BORDER, Graph

__all__ = ["ReadBy", "Readers"]

Name = tuple[int, ir.Var]
"""A value in one body: the index of the body, and the variable."""


class ReadBy(NamedTuple):
    """What reads a value in one run of the program.

    Attributes:
        low: whether a low product does.
        others: how often anything else does; 2 stands for any larger number too, because XLA writes
            a value for two such readers as it does for more.
    """

    low: bool = False
    others: int = 0

    def together_with(self, other: ReadBy) -> ReadBy:
        """The readers of a value that has two names, which read it under one or the other."""
        return ReadBy(self.low or other.low, min(self.others + other.others, 2))


class Readers:
    """Who reads each value: whether low products do, and how often anything else does.

    An equation that reads a moved value, such as a transposed one, counts as a reader of the value
    before the movement. A call is no reader, because the compiler puts its body in its place: the
    activation function of a layer is a jitted call in most programs, and so is its derivative.
    A loop's state counts as read once by the next trip.

    Args:
        graph: the program.
        reads_low: the rows that read their first two operands on 16 bits.
        of_stacks: whether what reads a loop's stack reads the values that it stacks.
    """

    def __init__(self, graph: Graph, reads_low: Collection[int], *, of_stacks: bool) -> None:
        self._graph = graph
        self._of_stacks = of_stacks
        self._reads_low = reads_low
        self._known: dict[Name, frozenset[ReadBy]] = {}

    def of(self, body: int, value: ir.Var) -> frozenset[ReadBy]:
        """The readers of a value, for each place from which its body may be called.

        A body that several places call is planned once, but in each place other equations may read
        what it returns.
        """
        todo, begun = [(body, value)], set[Name]()
        while todo:
            name = todo[-1]
            if name in self._known:
                todo.pop()
                continue
            direct, groups = self._direct(*name)
            names = {other for group in groups for other in group}
            # A body that is called twice may hand its own result to itself.
            unknown = [n for n in names if n not in self._known and n not in begun]
            begun.add(name)
            if unknown:
                todo += unknown
                continue
            answers = {direct}
            for group in groups:
                each = [self._known.get(n, frozenset([ReadBy()])) for n in group]
                answers = {
                    a.together_with(b) for a in answers for b in frozenset[ReadBy]().union(*each)
                }
            self._known[name] = frozenset(answers)
        return self._known[body, value]

    def _direct(self, body: int, value: ir.Var) -> tuple[ReadBy, list[list[Name]]]:
        """The readers of a value under one name, and its other names.

        A name comes in a group of its own, unless it is one of the names that a result of a body
        has at several callers: of these only one is read in each run of the body.
        """
        direct, groups = ReadBy(), list[list[Name]]()
        for row in self._graph.readers(body).get(value, ()):
            if row == BORDER:
                outside = self._graph.names_outside(body, value, of_stacks=self._of_stacks)
                direct = direct.together_with(ReadBy(others=int(outside is None)))
                groups += [outside] if outside else []
                continue
            eqn = self._graph.eqns[row]
            if inside := self._graph.names_inside(row, value):
                groups += [[name] for name in inside]
            elif moved_operand(eqn) is value:
                groups += [[(body, moved)] for moved in eqn.outvars]
            else:
                is_low = row in self._reads_low and any(value is v for v in eqn.invars[:2])
                direct = direct.together_with(ReadBy(is_low, int(not is_low)))
        return direct, groups
