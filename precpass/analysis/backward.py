"""A walk backward over a program, from the readers of values to the equations that make them.

A subclass has the rule: what an equation asks of its operands if something is asked of its
results. It is joined over the readers of a value, enters bodies once for each class of their call
sites (what is asked of their results), and follows what a loop carries from trip to trip until
nothing changes. Bodies that can ask for nothing are skipped.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph

__all__ = ["NOTHING", "Asked", "BackwardWalk", "BodyAsks"]


class Asked(NamedTuple):
    """What is asked of a value, and by which reader.

    Attributes:
        level: how much; a higher level includes the lower ones.
        reader: what the reader does with the value, in words.
        row: of the reader in the graph; -1 if it is not an equation.
    """

    level: int
    reader: str = ""
    row: int = -1


NOTHING = Asked(0)
_LONGEST_CHAIN = 16
"""So many states of a loop that feed each other in turn are followed one by one; of a longer chain
all states are asked for what one is."""


@dataclasses.dataclass(frozen=True, eq=False)
class BodyAsks:
    """What is asked of the values of one body, at one class of its call sites.

    Attributes:
        of: variable -> what its readers ask; a variable of which nothing is asked is absent.
        inner: equation row -> the same for its bodies.
        kept: equation row -> what is asked of its results, as far as the rule keeps it.
    """

    of: dict[Any, Asked] = dataclasses.field(default_factory=dict)
    inner: dict[int, tuple[BodyAsks, ...]] = dataclasses.field(default_factory=dict)
    kept: dict[int, Asked] = dataclasses.field(default_factory=dict)


class BackwardWalk:
    """A walk under the rule `operands`, which a subclass has.

    Args:
        graph: the program.
        asking: the primitives that ask something though nothing is asked of their results.
    """

    decides = NOTHING
    """What the predicate of a loop is asked for."""

    def __init__(self, graph: Graph, asking: frozenset[str]) -> None:
        self.graph = graph
        self.asking = asking
        self._asking_rows: dict[int, list[int]] = {}
        self._bodies: dict[Any, BodyAsks] = {}

    def operands(self, row: int, eqn: ir.Eqn, asked: Asked, here: BodyAsks) -> Sequence[Asked]:
        """What an equation without bodies asks of its operands; () for nothing of any.

        Args:
            row: of the equation in the graph.
            eqn: the equation.
            asked: what is asked of its results, joined.
            here: of the body around it; what is asked of earlier values is not known yet.
        """
        raise NotImplementedError

    def around(self, row: int, eqn: ir.Eqn, here: BodyAsks) -> Mapping[int, Asked]:
        """What an equation with bodies itself asks of its operands, by their positions."""
        return {0: self.decides} if eqn.primitive.name == "cond" else {}

    def body(self, at: int, results: tuple[Asked, ...]) -> BodyAsks:
        """What is asked inside a body if `results` is asked of its results."""
        if not any(a.level for a in results) and not self._rows_that_ask(at):
            return _NOTHING_ASKED
        if (at, results) not in self._bodies:
            here = self._bodies[at, results] = BodyAsks()
            self._equations(at, results, here)
        return self._bodies[at, results]

    def found(self) -> Iterator[tuple[int, BodyAsks]]:
        """Each body, with what is asked of its values at a class of its call sites."""
        return ((at, asks) for (at, _), asks in self._bodies.items())

    def _equations(self, at: int, results: tuple[Asked, ...], here: BodyAsks) -> None:
        """Visit what is asked for something, or asks by itself, the last equation first."""
        graph, of = self.graph, here.of
        waiting = [-row for row in self._rows_that_ask(at)]
        known = set(waiting)

        def ask(atom: ir.Atom, asked: Asked) -> None:
            if not asked.level or ir.is_literal(atom):
                return
            of[atom] = max(of.get(atom, NOTHING), asked)
            row = graph.row_of_maker(at, atom)
            if row is not None and -row not in known:
                known.add(-row)
                heapq.heappush(waiting, -row)

        for v, asked in zip(ir.open_jaxpr(graph.bodies[at].jaxpr).outvars, results, strict=False):
            ask(v, asked)
        while waiting:
            row = -heapq.heappop(waiting)
            eqn = graph.eqns[row]
            if row in graph.children:
                self._enter(row, eqn, here, ask)
                continue
            asked = max((of.get(v, NOTHING) for v in eqn.outvars), default=NOTHING)
            for v, own in zip(eqn.invars, self.operands(row, eqn, asked, here), strict=False):
                ask(v, own)

    def _enter(
        self, row: int, eqn: ir.Eqn, here: BodyAsks, ask: Callable[[ir.Atom, Asked], None]
    ) -> None:
        inner: list[BodyAsks] = []
        of_carry: dict[int, Asked] = {}
        for body, child in self.graph.children[row]:
            opened = ir.open_jaxpr(body.jaxpr)
            results = [here.of.get(eqn.outvars[result], NOTHING) for result in body.results]
            if not body.results:
                results = [self.decides] * len(opened.outvars)
            for out, asked in of_carry.items():  # by the condition of a while
                results[out] = max(results[out], asked)
            inside = self._until_settled(body, child, results)
            if body.decides:
                carried = enumerate(opened.invars[body.constants :])
                of_carry = {out: inside.of.get(v, NOTHING) for out, v in carried}
            for v, operand in zip(opened.invars, body.operands, strict=True):
                ask(eqn.invars[operand], inside.of.get(v, NOTHING))
            inner.append(inside)
        if any(inside is not _NOTHING_ASKED for inside in inner):
            here.inner[row] = tuple(inner)
        for operand, asked in self.around(row, eqn, here).items():
            ask(eqn.invars[operand], asked)

    def _until_settled(self, body: ir.Body, child: int, results: list[Asked]) -> BodyAsks:
        invars = ir.open_jaxpr(body.jaxpr).invars
        trips = 0
        while True:
            inside, before = self.body(child, tuple(results)), list(results)
            for operand, result in body.carry:
                results[result] = max(results[result], inside.of.get(invars[operand], NOTHING))
            if results == before:
                return inside
            trips += 1
            if trips > _LONGEST_CHAIN:
                most = max(results[result] for _, result in body.carry)
                for _, result in body.carry:
                    results[result] = max(results[result], most)

    def _rows_that_ask(self, at: int) -> list[int]:
        """The equations that ask something by themselves, or inside of them; the last first."""
        if at not in self._asking_rows:
            graph, node = self.graph, self.graph.bodies[at]
            self._asking_rows[at] = [
                row
                for row in range(node.stop - 1, node.start - 1, -1)
                if graph.primitives[row] in self.asking
                or any(self._rows_that_ask(child) for _, child in graph.children.get(row, ()))
            ]
        return self._asking_rows[at]


_NOTHING_ASKED = BodyAsks()
