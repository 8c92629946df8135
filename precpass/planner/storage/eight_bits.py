"""Which values cross the borders of loops and calls in 8 bits, with their scales.

A value may cross so if scaled products alone read it behind the border, and all of them round it in
the same way (`planner.readings`). What a loop stacks then always does, because 8 bits are a quarter
of float32's bytes. Any other value does if it has 8 bits before the border already, or if it would
otherwise be rounded more than once: in every trip of a loop, or by several equations. `_stacks_pay`
says when a stack of weights does.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.equations import is_wide
from precpass.analysis.graph import Graph
from precpass.plan.borders import NO_BORDER_COPIES, BorderCopies, BorderCopy
from precpass.planner.readings import Decisions, Reading, Readings, back_through
from precpass.policy.precision import Precision

__all__ = ["EightBitBorders"]


class EightBitBorders:
    """The values of a program that cross borders in 8 bits.

    Args:
        graph: the program.
        decisions, crossed: as for `Readings`.
        platform: "cpu", "gpu" or "tpu", whose compiler the plan is for.
    """

    def __init__(
        self,
        graph: Graph,
        decisions: Decisions,
        crossed: Collection[int],
        platform: str,
    ) -> None:
        self.graph = graph
        each = (d for of_row in decisions.values() for d in of_row)
        self.is_asked = any(d.product.scaled is not None for d in each)
        self._decisions = decisions
        self._crossed = crossed
        self._platform = platform
        self._operands: dict[tuple[int, int], Reading | None] = {}
        self._results: dict[tuple[int, int], Reading | None] = {}
        self._counts_in: dict[int, dict[Any, Counter[Reading]]] = {}

    @functools.cached_property
    def _readings(self) -> Readings:
        return Readings(self.graph, self._decisions, self._crossed)

    def copies(self, row: int, body: ir.Body) -> BorderCopies:
        """The border copies of 8 bits that one of a row's bodies has."""
        if not self.is_asked:
            return NO_BORDER_COPIES
        operands = [self._of_operand(row, position) for position in body.operands]
        results = [self._of_result(row, position) for position in body.results]
        return BorderCopies(tuple(_copies(operands)), tuple(_copies(results)))

    def _of_operand(self, row: int, position: int) -> Reading | None:
        if (row, position) not in self._operands:
            may = is_wide(self.graph.eqns[row].invars[position])
            reading = self._readings.of_operand(row, position) if may else None
            pays = reading is not None and self._operand_pays(row, position, reading)
            self._operands[row, position] = reading if pays else None
        return self._operands[row, position]

    def _of_result(self, row: int, position: int) -> Reading | None:
        if (row, position) not in self._results:
            may = is_wide(self.graph.eqns[row].outvars[position])
            reading = self._readings.of_result(row, position) if may else None
            pays = reading is not None and self._result_pays(row, position)
            self._results[row, position] = reading if pays else None
        return self._results[row, position]

    def _operand_pays(self, row: int, position: int, reading: Reading) -> bool:
        """Whether it is better to round a row's operand before the row than in it."""
        for body, _ in self.graph.children[row]:
            is_constant = position in body.operands[: body.constants]
            if is_constant and body.trips != 1:
                return True
        loop = ir.loop_rows(self.graph.eqns[row])
        if loop is not None and position >= loop[0] and self._stacks_pay(reading.precision):
            return True
        around, atom = int(self.graph.body[row]), self.graph.eqns[row].invars[position]
        while (maker := self.graph.maker(around, atom)) is not None and ir.moves_whole(maker):
            atom = maker.invars[0]
        is_shared = max(self._counts(around)[atom].values(), default=0) > 1
        return is_shared or self._is_given_in_eight_bits(around, atom)

    def _stacks_pay(self, precision: Precision) -> bool:
        """Whether a stack is rounded before a loop even if that loop alone reads it.

        XLA:GPU writes a float32 stack to memory once more, in another order, if a loop rounds its
        slices to 8 bits. With other compilers it pays only if a backward pass reads the stack of 8
        bits too, and int8 has no backward pass in 8 bits. Six layers of 1024 x 2048 x 2048 in
        float8, compiled for a TPU 7x (jax 0.12.0.1), take 1.06 of the cycles forward, 1.01 with a
        gradient, and 0.86 with a gradient and checkpoints.
        """
        return self._platform == "gpu" or not precision.is_forward_only

    def _is_given_in_eight_bits(self, body: int, atom: Any) -> bool:
        """Whether a variable of a body is an operand or a result that crosses in 8 bits."""
        if (maker := self.graph.row_of_maker(body, atom)) is not None:
            at = list(self.graph.eqns[maker].outvars).index(atom)
            return maker in self.graph.children and self._of_result(maker, at) is not None
        operands = list(ir.open_jaxpr(self.graph.bodies[body].jaxpr).invars)
        if atom not in operands:
            return False
        callers, at = self.graph.callers[body], operands.index(atom)
        return any(self._of_operand(row, of.operands[at]) is not None for row, of in callers)

    def _result_pays(self, row: int, position: int) -> bool:
        """Whether a row's result is stacked, or has 8 bits in the row's bodies in any case."""
        if ir.loop_rows(self.graph.eqns[row]) is not None:
            return True
        for body, child in self.graph.children[row]:
            atom = ir.open_jaxpr(body.jaxpr).outvars[body.results.index(position)]
            if not ir.is_literal(atom) and (
                self._counts(child)[atom] or self._is_given_in_eight_bits(child, atom)
            ):
                return True
        return False

    def _counts(self, body: int) -> dict[Any, Counter[Reading]]:
        """For each variable of a body, how many equations there read it in each way."""
        if body not in self._counts_in:
            self._counts_in[body] = self._counted(body)
        return self._counts_in[body]

    def _counted(self, body: int) -> dict[Any, Counter[Reading]]:
        node, counts = self.graph.bodies[body], defaultdict[Any, Counter[Reading]](Counter)
        for row in reversed(range(node.start, node.stop)):
            eqn = self.graph.eqns[row]
            back = back_through(eqn)
            for at, atom in enumerate(eqn.invars):
                if ir.is_literal(atom):
                    continue
                if back is not None and at == 0:
                    for reading, count in counts[eqn.outvars[0]].items():
                        if (moved := back(reading)) is not None:
                            counts[atom][moved._replace(summed=())] += count
                elif (reading := self._readings.by(row, at)) is not None:
                    counts[atom][reading._replace(summed=())] += 1
        return counts


def _copies(readings: Sequence[Reading | None]) -> Iterator[BorderCopy]:
    for at, reading in enumerate(readings):
        if reading is not None:
            yield BorderCopy(at, reading.precision, rounds=True, shared=reading.shared)
