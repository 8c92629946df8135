"""Who reads each value of a program: low products, or anything else."""

from __future__ import annotations

from collections.abc import Collection

from precpass import jaxpr as ir
from precpass.analysis.equations import moved_operand
from precpass.analysis.reach import Reach

__all__ = ["Readers"]

Name = tuple[int, ir.Var]
"""A value in one body: the index of the body, and the variable."""
Answer = tuple[bool, int]
"""Whether low products read a value, and how often anything else does, 2 for any more."""
NOT_READ: Answer = (False, 0)


class Readers:
    """Who reads each value: whether low products do, and how often anything else does.

    Who reads a value that is only moved reads the value before it. A call is no reader, because the
    compiler puts the call's body in its place: the activation function of a layer is a jitted call
    in most programs, and so is its derivative. What a loop hands to its next trip is read by that.

    Args:
        reach: the names of the program's values.
        reads_low: the rows that read their first two operands on 16 bits.
    """

    def __init__(self, reach: Reach, reads_low: Collection[int]) -> None:
        self._reach = reach
        self._reads_low = reads_low
        self._known: dict[Name, frozenset[Answer]] = {}

    def of(self, body: int, value: ir.Var) -> frozenset[Answer]:
        """Whether low products read a value, and how often anything else does, 2 for any more.

        There are several answers if the value's body is called in several places.
        """
        todo, begun = [(body, value)], set[Name]()
        while todo:
            name = todo[-1]
            if name in self._known:
                todo.pop()
                continue
            found, same = self._direct(*name)
            names = {other for group in same for other in group}
            # A body that is called twice may hand its own result to itself.
            unknown = [n for n in names if n not in self._known and n not in begun]
            begun.add(name)
            if unknown:
                todo += unknown
                continue
            answers = {found}
            for group in same:
                each = [self._known.get(n, frozenset([NOT_READ])) for n in group]
                answers = {_both(a, b) for a in answers for b in frozenset[Answer]().union(*each)}
            self._known[name] = frozenset(answers)
        return self._known[body, value]

    def _direct(self, body: int, value: ir.Var) -> tuple[Answer, list[list[Name]]]:
        """The readers of a value under one name, and its other names.

        A name comes in a group of its own, unless it is one of the names that a result of a body
        has at several callers: of these only one is read in each run of the body.
        """
        found, same = NOT_READ, list[list[Name]]()
        for eqn in self._reach.direct(body, value):
            if eqn is None:
                outside = self._reach.outside(body, value)
                found = _both(found, (False, outside is None))
                same += [outside] if outside else []
                continue
            row = self._reach.row(body, eqn)
            if inside := self._reach.inside(row, value):
                same += [[name] for name in inside]
            elif moved_operand(eqn) is value:
                same += [[(body, moved)] for moved in eqn.outvars]
            else:
                is_low = row in self._reads_low and any(value is v for v in eqn.invars[:2])
                found = _both(found, (is_low, not is_low))
        return found, same


def _both(a: Answer, b: Answer) -> Answer:
    """The readers of a value that has two names."""
    return a[0] or b[0], min(a[1] + b[1], 2)
