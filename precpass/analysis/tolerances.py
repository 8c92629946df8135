"""Which while loops may never end if products in them are low.

A loop that goes on until a residual is small needs a residual that becomes small. If a lowered
product makes it in the same trip, its rounding error stays. So such a loop's products stay float32,
all of them, because a step that is a little off keeps the residual up as well.

A predicate ends anyway if it reads a counter, or compares a value that the loop adds to, such as a
time; and it is no test of a residual if it compares with zero, with a number that is not small, or
with a value that the loop carries, as in early stopping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from precpass import jaxpr as ir
from precpass.analysis.backward import NOTHING, Asked, BackwardWalk, BodyAsks
from precpass.analysis.equations import is_matrix_product
from precpass.analysis.graph import Graph
from precpass.analysis.thresholds import Thresholds, moves
from precpass.policy.primitives import COMPUTING, op

__all__ = ["Tolerances"]

_DECIDES, _RESIDUAL = 1, 2
"""What is asked of a truth value that decides whether the loop goes on, and of a number that makes
one, by a comparison (`Asked.row`)."""
_MOVED, _ADDED_TO = Asked(1), Asked(2)


class Tolerances:
    """The loops of a program that end on a tolerance.

    Args:
        graph: the program.
        thresholds: what its comparisons compare with.
    """

    def __init__(self, graph: Graph, thresholds: Thresholds) -> None:
        self.graph = graph
        self._residuals = _ResidualWalk(graph, thresholds)
        self._additions = _AdditionWalk(graph)
        self.starts: dict[int, frozenset[int]] = {}
        """Of such a loop, the positions of the operands that its residual is made of."""
        self.reasons: dict[int, str] = {}
        """Why such a loop, by its equation's row, may never end in low precision, in words."""
        for row, name in enumerate(graph.primitives):
            if name == "while" and self._tests_residual(row):
                at = f", at {place}," if (place := graph.source(row).place) else ""
                self.reasons[row] = f"the loop around it{at} ends on a tolerance"

    def _tests_residual(self, row: int) -> bool:
        (cond, at_cond), (body, at_body) = self.graph.children[row]
        asks = self._residuals.body(at_cond, (Asked(_DECIDES),))
        carried = ir.open_jaxpr(cond.jaxpr).invars[cond.constants :]
        asked = [
            NOTHING if own.level == _RESIDUAL and self._is_progress(row, out, own) else own
            for out, own in enumerate(asks.of.get(v, NOTHING) for v in carried)
        ]
        found = self._residuals.body(at_body, tuple(asked))
        read = [*zip(ir.open_jaxpr(body.jaxpr).invars, body.operands, strict=True)]
        self.starts[row] = frozenset(
            operand
            for v, operand in read[body.constants :]
            if found.of.get(v, NOTHING).level == _RESIDUAL
        )
        return _reaches_product(found) or self._reaches_product_later(row, found)

    def _reaches_product_later(self, row: int, found: BodyAsks[Asked]) -> bool:
        """Whether a trip reads what products made in the trip before, by a norm.

        A number that is compared as it is, such as the length of a step, is no part of a residual.
        """
        _, (body, at) = self.graph.children[row]
        opened, asked = ir.open_jaxpr(body.jaxpr), [NOTHING] * len(body.results)
        for operand, result in body.carry:
            own = found.of.get(opened.invars[operand], NOTHING)
            if own.level == _RESIDUAL and not self._is_compared_itself(opened.invars[operand], own):
                asked[result] = own
        return _reaches_product(self._residuals.body(at, tuple(asked)))

    def _is_compared_itself(self, v: ir.Var, asked: Asked) -> bool:
        return v.aval.ndim == self.graph.eqns[asked.row].outvars[0].aval.ndim

    def _is_progress(self, row: int, out: int, asked: Asked) -> bool:
        """Whether a loop adds to a carry that is compared as it is, and not by a norm."""
        _, (body, at) = self.graph.children[row]
        opened = ir.open_jaxpr(body.jaxpr)
        own = opened.invars[body.constants + out]
        if not self._is_compared_itself(own, asked):
            return False
        results = [NOTHING] * len(opened.outvars)
        results[out] = _MOVED
        return self._additions.body(at, tuple(results)).of.get(own) == _ADDED_TO


def _reaches_product(asks: BodyAsks[Asked]) -> bool:
    inner = (body for bodies in asks.inner.values() for body in bodies)
    return bool(asks.kept) or any(map(_reaches_product, inner))


def _may_be_lowered(eqn: ir.Eqn) -> bool:
    is_product = eqn.primitive.name in COMPUTING and ir.precision_of(eqn.outvars[0].aval)
    return bool(is_product) and is_matrix_product(eqn) and ir.user_order(eqn) is None


class _AdditionWalk(BackwardWalk[Asked]):
    """Which operands of a body are in a result, moved or with something added to them."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph, frozenset(), NOTHING)

    def operands(
        self, row: int, eqn: ir.Eqn, asked: Asked, here: BodyAsks[Asked]
    ) -> Sequence[Asked]:
        name = eqn.primitive.name
        if name in ("add", "sub"):
            return [_ADDED_TO] * 2
        if name == "select_n":
            return [NOTHING, *[asked] * (len(eqn.invars) - 1)]
        return [asked] * len(eqn.invars) if moves(name) or name == "neg" else ()


class _ResidualWalk(BackwardWalk[Asked]):
    """The numbers that decide whether a loop goes on, and what they are made of in one trip."""

    def __init__(self, graph: Graph, thresholds: Thresholds) -> None:
        super().__init__(graph, frozenset(), NOTHING)
        self._thresholds = thresholds

    def operands(
        self, row: int, eqn: ir.Eqn, asked: Asked, here: BodyAsks[Asked]
    ) -> Sequence[Asked]:
        name, invars = eqn.primitive.name, eqn.invars
        if asked.level == _RESIDUAL and _may_be_lowered(eqn):
            here.kept[row] = asked
        floats = [ir.precision_of(v.aval) is not None for v in invars]
        if op(name).compares and any(floats):
            tests = self._thresholds.has_tolerance(row, in_loop=True)
            return [Asked(_RESIDUAL, row=row) if tests else NOTHING] * 2
        # Behind a product that the condition computes there may be one that the trip does.
        # Libraries have primitives of their own among those that hand on a truth value, which may
        # be counted, too.
        if asked.level == _DECIDES or (name == "convert_element_type" and not floats[0]):
            decides = Asked(_DECIDES)
            return [NOTHING if is_float else decides for is_float in floats]
        if name == "select_n" and all(map(ir.is_literal, invars[1:])):
            return [Asked(_DECIDES)]
        return [asked if is_float else NOTHING for is_float in floats]

    def around(self, row: int, eqn: ir.Eqn, here: BodyAsks[Asked]) -> Mapping[int, Asked]:
        """A branch is chosen by what decides, if its result does."""
        asked = max((here.of.get(v, NOTHING) for v in eqn.outvars), default=NOTHING)
        is_choice = eqn.primitive.name == "cond" and asked.level == _DECIDES
        return {0: asked} if is_choice else {}
