"""A walk backward over a program, from the readers of values to the equations that make them.

A subclass has the rule: what an equation asks of its operands if something is asked of its
results. It is joined over the readers of a value, enters bodies once for each class of their call
sites (what is asked of their results), and follows what a loop carries from trip to trip until
nothing changes. Bodies that can ask for nothing are skipped.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

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


class _HasLevel(Protocol):
    """What is asked of a value; nothing is if its level is 0."""

    @property
    def level(self) -> int: ...


A = TypeVar("A", bound=_HasLevel)


@dataclasses.dataclass(frozen=True, eq=False)
class BodyAsks(Generic[A]):
    """What is asked of the values of one body, at one class of its call sites.

    Attributes:
        of: variable -> what its readers ask; a variable of which nothing is asked is absent.
        inner: equation row -> the same for its bodies.
        kept: equation row -> what is asked of its results, as far as the rule keeps it.
    """

    of: dict[Any, A] = dataclasses.field(default_factory=dict)
    inner: dict[int, tuple[BodyAsks[A], ...]] = dataclasses.field(default_factory=dict)
    kept: dict[int, A] = dataclasses.field(default_factory=dict)


class BackwardWalk(Generic[A]):
    """A walk under the rule `operands`, which a subclass has.

    Args:
        graph: the program.
        asking: the primitives that ask something though nothing is asked of their results.
        nothing: what is asked of a value of which nothing is asked.
        decides: what the predicate of a loop is asked for; None for nothing.
    """

    def __init__(
        self, graph: Graph, asking: frozenset[str], nothing: A, decides: A | None = None
    ) -> None:
        self.graph = graph
        self.asking = asking
        self.nothing = nothing
        self.decides = nothing if decides is None else decides
        self._nothing_asked = BodyAsks[A]()
        self._asking_rows: dict[int, list[int]] = {}
        self._bodies: dict[Any, BodyAsks[A]] = {}

    def joined(self, one: A, other: A) -> A:
        """What two readers ask."""
        return max(one, other)  # pyright: ignore[reportArgumentType] -- tuples, by their levels

    def asks(self, row: int) -> bool:
        """Whether an equation of one of these primitives does."""
        del row
        return True

    def of_result(self, body: ir.Body, result: int, asked: A) -> A:
        """What is asked of a body's result if something is asked of its name outside."""
        del body, result
        return asked

    def operands(self, row: int, eqn: ir.Eqn, asked: A, here: BodyAsks[A]) -> Sequence[A]:
        """What an equation without bodies asks of its operands; () for nothing of any.

        Args:
            row: of the equation in the graph.
            eqn: the equation.
            asked: what is asked of its results, joined.
            here: of the body around it; what is asked of earlier values is not known yet.
        """
        raise NotImplementedError

    def around(self, row: int, eqn: ir.Eqn, here: BodyAsks[A]) -> Mapping[int, A]:
        """What an equation with bodies itself asks of its operands, by their positions."""
        return {0: self.decides} if eqn.primitive.name == "cond" else {}

    def body(self, at: int, results: tuple[A, ...]) -> BodyAsks[A]:
        """What is asked inside a body if `results` is asked of its results."""
        if not any(a.level for a in results) and not self._rows_that_ask(at):
            return self._nothing_asked
        if (at, results) not in self._bodies:
            here = self._bodies[at, results] = BodyAsks[A]()
            self._equations(at, results, here)
        return self._bodies[at, results]

    def found(self) -> Iterator[tuple[int, BodyAsks[A]]]:
        """Each body, with what is asked of its values at a class of its call sites."""
        return ((at, asks) for (at, _), asks in self._bodies.items())

    def _equations(self, at: int, results: tuple[A, ...], here: BodyAsks[A]) -> None:
        """Visit what is asked for something, or asks by itself, the last equation first."""
        graph, of, nothing = self.graph, here.of, self.nothing
        waiting = [-row for row in self._rows_that_ask(at)]
        known = set(waiting)

        def ask(atom: ir.Atom, asked: A) -> None:
            if not asked.level or ir.is_literal(atom):
                return
            of[atom] = self.joined(of[atom], asked) if atom in of else asked
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
            each = [of[v] for v in eqn.outvars if v in of]
            asked = functools.reduce(self.joined, each) if each else nothing
            for v, own in zip(eqn.invars, self.operands(row, eqn, asked, here), strict=False):
                ask(v, own)

    def _enter(
        self, row: int, eqn: ir.Eqn, here: BodyAsks[A], ask: Callable[[ir.Atom, A], None]
    ) -> None:
        inner: list[BodyAsks[A]] = []
        of_carry: dict[int, A] = {}
        nothing = self.nothing
        for body, child in self.graph.children[row]:
            opened = ir.open_jaxpr(body.jaxpr)
            asked_outside = (here.of.get(eqn.outvars[result], nothing) for result in body.results)
            results = [self.of_result(body, at, asked) for at, asked in enumerate(asked_outside)]
            if not body.results:
                results = [self.decides] * len(opened.outvars)
            for out, asked in of_carry.items():  # by the condition of a while
                results[out] = self.joined(results[out], asked)
            inside = self._until_settled(body, child, results)
            if body.decides:
                carried = enumerate(opened.invars[body.constants :])
                of_carry = {out: inside.of.get(v, nothing) for out, v in carried}
            for v, operand in zip(opened.invars, body.operands, strict=True):
                ask(eqn.invars[operand], inside.of.get(v, nothing))
            inner.append(inside)
        if any(inside is not self._nothing_asked for inside in inner):
            here.inner[row] = tuple(inner)
        for operand, asked in self.around(row, eqn, here).items():
            ask(eqn.invars[operand], asked)

    def _until_settled(self, body: ir.Body, child: int, results: list[A]) -> BodyAsks[A]:
        invars = ir.open_jaxpr(body.jaxpr).invars
        trips = 0
        while True:
            inside, before = self.body(child, tuple(results)), list(results)
            for operand, result in body.carry:
                asked = inside.of.get(invars[operand], self.nothing)
                results[result] = self.joined(results[result], asked)
            if results == before:
                return inside
            trips += 1
            if trips > _LONGEST_CHAIN:
                most = functools.reduce(self.joined, (results[result] for _, result in body.carry))
                for _, result in body.carry:
                    results[result] = self.joined(results[result], most)

    def _rows_that_ask(self, at: int) -> list[int]:
        """The equations that ask something by themselves, or inside of them; the last first."""
        if at not in self._asking_rows:
            graph, node = self.graph, self.graph.bodies[at]
            self._asking_rows[at] = [
                row
                for row in range(node.stop - 1, node.start - 1, -1)
                if (graph.primitives[row] in self.asking and self.asks(row))
                or any(self._rows_that_ask(child) for _, child in graph.children.get(row, ()))
            ]
        return self._asking_rows[at]
