"""How the scaled products of a planned program read its values.

A reading is a format and the dimensions that share a scale. If scaled products alone read a value,
all with the same reading, it can cross the borders of loops in 8 bits and need not be float32
there. So a reading is followed from the product back through transposes, reshapes and borders, to
the equation that makes the value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.plan.plan import Action, Decision, Plan
from precpass.planner.planned_bodies import planned_bodies
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind

__all__ = ["Decisions", "Reading", "Readings", "back_through", "decisions_of"]


class Reading(NamedTuple):
    """How a scaled product reads a value.

    Attributes:
        precision: the format that it is rounded to.
        shared: the dimensions along which it has one scale.
        summed: the dimensions that the product sums over; () if products sum over different ones.
    """

    precision: Precision
    shared: tuple[int, ...]
    summed: tuple[int, ...]


Decisions = Mapping[int, Sequence[Decision]]
"""Of the products and the equations with bodies in a program, by row."""

_Readings = set[Reading | None]
"""The readings of a value. None stands for every reader that is no scaled product."""


class _Border(NamedTuple):
    """How an equation's operands and results cross the borders of its bodies.

    Attributes:
        inside: position of an operand -> its names in bodies, each with the body's index.
        carried_in, carried_out: the positions of what a loop carries. It is read once more in the
            next trip, or behind the loop.
    """

    inside: dict[int, list[tuple[int, Any]]]
    carried_in: set[int]
    carried_out: set[int]


class Readings:
    """How every value of a program is read.

    Args:
        graph: the program.
        decisions: as `decisions_of` finds them.
        crossed: the rows of which values may cross the borders of bodies in other formats.
    """

    def __init__(
        self,
        graph: Graph,
        decisions: Decisions,
        crossed: Collection[int],
    ) -> None:
        self.graph = graph
        self._decisions = decisions
        self._crossed = crossed
        self._of: list[dict[Any, _Readings]] = [{} for _ in graph.bodies]
        self._borders: dict[int, _Border] = {}
        self._grows = True
        self._add((0, v, {None}) for v in ir.open_jaxpr(graph.root.jaxpr).outvars)
        # The results of a body are read around it, so one pass over the program may not be enough.
        while self._grows:
            self._grows = False
            for body in reversed(range(len(graph.bodies))):
                node = graph.bodies[body]
                for row in reversed(range(node.start, node.stop)):
                    self._add(self._by_equation(row, body))

    def of(self, body: int, atom: ir.Atom) -> Reading | None:
        """How all readers read a value of a body; None if they do not read it in one way."""
        return _common(self._all_of(body, atom))

    def by(self, row: int, position: int) -> Reading | None:
        """How one row reads one of its operands; None as for `of`, and if it only moves it."""
        if row in self.graph.children:
            return _common(self._all_outside(row, position))
        product = self._by_product(row)
        return product[position] if position < len(product) else None

    def of_operand(self, row: int, position: int) -> Reading | None:
        """How a row's bodies read one of its operands, as they see it; None as for `of`."""
        return _common(self._all_of_operand(row, position))

    def of_result(self, row: int, position: int) -> Reading | None:
        """How one of a row's results is read, as its bodies see it; None as for `of`."""
        return _common(self._all_of_result(row, position))

    def _all_of(self, body: int, atom: ir.Atom) -> _Readings:
        return set() if ir.is_literal(atom) else self._of[body].get(atom, set())

    def _add(self, found: Iterable[tuple[int, ir.Atom, _Readings]]) -> None:
        for body, atom, readings in found:
            if ir.is_literal(atom):
                continue
            known = self._of[body].setdefault(atom, set())
            if not readings <= known:
                known |= readings
                self._grows = True

    def _by_equation(self, row: int, body: int) -> Iterator[tuple[int, ir.Atom, _Readings]]:
        """How an equation reads its operands, and its bodies' results are read."""
        eqn = self.graph.eqns[row]
        if row in self.graph.children:
            yield from self._by_bodies(row, body)
            return
        product = self._by_product(row)
        for at, atom in enumerate(eqn.invars):
            if at < len(product):
                yield body, atom, {product[at]}
            elif at == 0 and (back := back_through(eqn)) is not None:
                yield body, atom, {r and back(r) for r in self._all_of(body, eqn.outvars[0])}
            else:
                yield body, atom, {None}

    def _by_bodies(self, row: int, around: int) -> Iterator[tuple[int, ir.Atom, _Readings]]:
        for position, atom in enumerate(self.graph.eqns[row].invars):
            yield around, atom, self._all_outside(row, position)
        for body, child in self.graph.children[row]:
            outvars = ir.open_jaxpr(body.jaxpr).outvars
            # A predicate is no result of the equation.
            found = [self._all_of_result(row, at) for at in body.results] or [{None}] * len(outvars)
            yield from ((child, v, readings) for v, readings in zip(outvars, found, strict=True))

    def _all_outside(self, row: int, position: int) -> _Readings:
        """How a row's bodies read one of its operands, as the row's body sees it."""
        readings, loop = self._all_of_operand(row, position), ir.loop_rows(self.graph.eqns[row])
        is_sliced = loop is not None and position >= loop[0]
        return {r and _of_stack(r) for r in readings} if is_sliced else readings

    def _all_of_operand(self, row: int, position: int) -> _Readings:
        border = self._border(row)
        is_shut = row not in self._crossed or position not in border.inside
        if is_shut or position in border.carried_in:
            return {None}
        found: _Readings = set()
        for body, var in border.inside[position]:
            found |= self._all_of(body, var)
        return found

    def _all_of_result(self, row: int, position: int) -> _Readings:
        if position in self._border(row).carried_out or row not in self._crossed:
            return {None}
        eqn = self.graph.eqns[row]
        found = self._all_of(int(self.graph.body[row]), eqn.outvars[position])
        is_stacked = ir.loop_rows(eqn) is not None
        return {r and _of_slice(r) for r in found} if is_stacked else found

    def _border(self, row: int) -> _Border:
        if row not in self._borders:
            self._borders[row] = _border(self.graph.children[row])
        return self._borders[row]

    def _by_product(self, row: int) -> Sequence[Reading | None]:
        """How a scaled product reads its operands; () for any other equation."""
        eqn = self.graph.eqns[row]
        found = {_by_product(eqn, decision) for decision in self._decisions.get(row, ())}
        return found.pop() if len(found) == 1 else ()


def _border(children: Sequence[tuple[ir.Body, int]]) -> _Border:
    border = _Border({}, set(), set())
    for body, child in children:
        border.carried_in.update(body.operands[invar] for invar, _ in body.carry)
        border.carried_out.update(body.results[outvar] for _, outvar in body.carry)
        for position, var in zip(body.operands, ir.open_jaxpr(body.jaxpr).invars, strict=True):
            border.inside.setdefault(position, []).append((child, var))
    return border


def _common(found: _Readings) -> Reading | None:
    """The one rounding with which scaled products alone read a value; None if there is none."""
    readings = [reading for reading in found if reading is not None]
    if len(readings) < len(found) or len({reading[:2] for reading in readings}) != 1:
        return None
    return readings[0] if len(readings) == 1 else readings[0]._replace(summed=())


def decisions_of(graph: Graph, plan: Plan, rows: Sequence[Iterable[int]]) -> Decisions:
    """The decisions for rows of a program: one for each plan that their body has.

    Args:
        graph: the program.
        plan: of the program.
        rows: for each body the rows that are wanted.
    """
    found: dict[int, list[Decision]] = {}
    for body, its_plan in planned_bodies(graph, plan):
        start = graph.bodies[body].start
        for row in rows[body]:
            decision = its_plan.decisions[row - start]
            if decision.inner or (
                decision.kind is OpKind.COMPUTE and decision.action is Action.LOWER
            ):
                found.setdefault(row, []).append(decision)
    return found


def _by_product(eqn: ir.Eqn, decision: Decision) -> tuple[Reading | None, ...]:
    scaled = decision.product.scaled
    if decision.action is not Action.LOWER or scaled is None:
        return ()
    avals = [v.aval for v in eqn.invars]
    if any(map(ir.is_reduced, avals)):
        return ()
    pairs = zip(ir.dot_numbers(eqn)[0], avals, strict=True)
    return tuple(
        Reading(scaled, tuple(sorted(summed if scaled.by_row else range(aval.ndim))), tuple(summed))
        for summed, aval in pairs
    )


def back_through(eqn: ir.Eqn) -> Callable[[Reading], Reading | None] | None:
    """A function that takes the reading of an equation's result and returns its operand's.

    It is None if the equation does more than move all elements of one operand.
    """
    if ir.dequantized_from(eqn):
        return lambda reading: reading
    if (order := ir.permutation(eqn)) is not None:

        def transposed(reading: Reading) -> Reading:
            shared, summed = (tuple(sorted(order[d] for d in dims)) for dims in reading[1:])
            return reading._replace(shared=shared, summed=summed)

        return transposed
    if not ir.moves_whole(eqn):
        return None
    rank, after = (v.aval.ndim for v in (eqn.invars[0], eqn.outvars[0]))

    def reshaped(reading: Reading) -> Reading | None:
        is_whole = len(reading.shared) == after
        return reading._replace(shared=tuple(range(rank)), summed=()) if is_whole else None

    return reshaped


def _of_stack(reading: Reading) -> Reading:
    """The reading of a stack whose slices have this reading."""
    shared, summed = (tuple(d + 1 for d in dims) for dims in reading[1:])
    return reading._replace(shared=shared, summed=summed)


def _of_slice(reading: Reading) -> Reading | None:
    """The reading of the slices of a stack with this reading; None if slices share a scale."""
    shared, summed = (tuple(d - 1 for d in dims if d) for dims in reading[1:])
    return None if 0 in reading.shared else reading._replace(shared=shared, summed=summed)
