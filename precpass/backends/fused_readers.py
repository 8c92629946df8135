"""Who reads each value in the fusions of a compiler: low products, or anything else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from precpass import jaxpr as ir
from precpass.analysis.equations import moved_operand
from precpass.analysis.graph import BORDER, Graph

__all__ = ["FusedReaders", "ReadBy"]

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

    def and_by(self, other: ReadBy) -> ReadBy:
        """The readers of a value that has two names, which read it under one or the other."""
        return ReadBy(self.low or other.low, min(self.others + other.others, 2))


class FusedReaders:
    """Who reads each value: whether low products do, and how often anything else does.

    An equation that reads a moved value, such as a transposed one, counts as a reader of the value
    before the movement. A call is no reader, because the compiler puts its body in its place: the
    activation function of a layer is a jitted call in most programs, and so is its derivative.
    A loop's state counts as read once by the next trip. A value that several callers of its body
    read differently counts as read as by the caller that reads it most.

    Args:
        graph: the program.
        reads_low: the rows that read their first two operands on 16 bits.
        of_stacks: whether what reads a loop's stack reads the values that it stacks.
    """

    def __init__(self, graph: Graph, reads_low: Collection[int], *, of_stacks: bool) -> None:
        self._graph = graph
        self._of_stacks = of_stacks
        self._reads_low = reads_low
        self._known: dict[Name, ReadBy] = {}

    def readers_of(self, body: int, value: ir.Var) -> ReadBy:
        """The readers of a value."""
        todo, begun = [(body, value)], set[Name]()
        while todo:  # no recursion: a body may be called on its own result hundreds of times
            name = todo[-1]
            if name not in self._known:
                direct, groups = self._direct(*name)
                unknown = {n for group in groups for n in group} - self._known.keys() - begun
                begun.add(name)
                if unknown:
                    todo += unknown
                    continue
                for group in groups:
                    each = [self._known.get(n, ReadBy()) for n in group]
                    low, others = any(r.low for r in each), max(r.others for r in each)
                    direct = direct.and_by(ReadBy(low, others))
                self._known[name] = direct
            todo.pop()
        return self._known[body, value]

    def _direct(self, body: int, value: ir.Var) -> tuple[ReadBy, list[Sequence[Name]]]:
        """The readers of a value under one name, and its other names.

        The names of a body's result at its callers are a group: each run has one of them.
        """
        direct, groups = ReadBy(), list[Sequence[Name]]()
        for row in self._graph.readers(body).get(value, ()):
            if row == BORDER:
                outside = self._graph.names_outside(body, value, of_stacks=self._of_stacks)
                direct = direct.and_by(ReadBy(others=int(outside is None)))
                groups += [outside] if outside else []
            elif inside := self._graph.names_inside(row, value):
                groups += [[name] for name in inside]
            elif moved_operand(self._graph.eqns[row]) is value:
                groups += [[(body, moved)] for moved in self._graph.eqns[row].outvars]
            else:
                operands = self._graph.eqns[row].invars[:2]
                is_low = row in self._reads_low and any(value is v for v in operands)
                direct = direct.and_by(ReadBy(is_low, int(not is_low)))
        return direct, groups
