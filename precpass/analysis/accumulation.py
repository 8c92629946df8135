"""Which equations of a loop body add to what the loop carries.

If such an equation were rounded in every trip, the sum would be lost: 16384 ones that a scan
carries in bfloat16 add up to 256. The planner therefore keeps these equations in the format of
the carry.

A set of a jaxpr's operands or results is a Python integer with one bit for each. One walk over a
body then answers for all of its carries at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from precpass import jaxpr as ir
from precpass.policy.primitives import OpKind, op

__all__ = ["Additive", "LoopFeedback"]

LoopFeedback = tuple[int, ...]
"""For each operand of a jaxpr, the set of the results that are fed back into it."""


class Additive:
    """The additive paths through the jaxprs of one program, each jaxpr walked once."""

    def __init__(self) -> None:
        # holds the jaxpr too: an id is only unique while its object lives
        self._passes: dict[int, tuple[Any, list[int]]] = {}
        self._reached: dict[int, tuple[Any, dict[Any, int]]] = {}

    def accumulating(
        self, jaxpr: ir.Jaxpr, feedback: LoopFeedback
    ) -> Mapping[int, Sequence[LoopFeedback]]:
        """The equations on an additive path from an operand to a result that is fed back into it.

        Args:
            jaxpr: a loop's body, or a body inside it.
            feedback: which results are fed back into each operand.

        Returns:
            The position of each of these equations, with the feedback into each of its bodies.
        """
        if not any(feedback):
            return {}
        opened = ir.open_jaxpr(jaxpr)
        reached = self._forward(opened)
        needed = {v: 0 for eqn in opened.eqns for v in eqn.outvars}
        for o, v in enumerate(opened.outvars):
            if not ir.is_literal(v):
                needed[v] = needed.get(v, 0) | 1 << o
        additive_eqns: dict[int, Sequence[LoopFeedback]] = {}
        for row in range(len(opened.eqns) - 1, -1, -1):
            eqn = opened.eqns[row]
            if not any(needed[v] for v in eqn.outvars):
                continue
            before = after = 0
            for result, operands in enumerate(self._passed(eqn)):
                leads_to = needed[eqn.outvars[result]]
                if leads_to and operands:
                    after |= leads_to
                    for i in _bits(operands):
                        v = eqn.invars[i]
                        if not ir.is_literal(v):
                            before |= reached.get(v, 0)
                            needed[v] = needed.get(v, 0) | leads_to
            if any(feedback[i] & after for i in _bits(before)):
                additive_eqns[row] = [
                    _inside(body, eqn, feedback, reached, needed) for body in ir.bodies(eqn)
                ]
        return additive_eqns

    def cyclic(self, body: ir.Body) -> LoopFeedback:
        """For each operand, the results that an additive cycle through the loop's carry feeds back.

        A carry may accumulate through another one: two carries that swap places and add one in
        each trip are both sums.
        """
        invar_of = {outvar: invar for invar, outvar in body.carry}
        leads = dict.fromkeys(invar_of.values(), 0)
        ends: list[tuple[int, int]] = []
        for outvar, operands in enumerate(self._through(body.jaxpr)):
            for i in _bits(operands):
                if outvar in invar_of and i in leads:
                    leads[i] |= 1 << invar_of[outvar]
                    ends.append((i, outvar))
        closed = dict(leads)
        for k, through in closed.items():
            if through & ~(1 << k):
                for i in closed:
                    if closed[i] >> k & 1:
                        closed[i] |= closed[k]
        feedback = [0] * len(body.operands)
        for i, outvar in ends:
            to = invar_of[outvar]
            if to == i or closed[to] >> i & 1:
                feedback[i] |= 1 << outvar
        return tuple(feedback) if any(feedback) else ()

    def _through(self, jaxpr: ir.Jaxpr) -> list[int]:
        """For each result of a jaxpr, the operands that it is a sum of."""
        opened = ir.open_jaxpr(jaxpr)
        cached = self._passes.get(id(opened))
        if cached is None:
            reached = self._forward(opened)
            ends = [0 if ir.is_literal(v) else reached.get(v, 0) for v in opened.outvars]
            cached = self._passes[id(opened)] = opened, ends
        return cached[1]

    def _forward(self, opened: ir.Jaxpr) -> dict[Any, int]:
        """For each value of a jaxpr, the operands that reach it through additive equations."""
        if (cached := self._reached.get(id(opened))) is not None:
            return cached[1]
        reached = {v: 1 << i for i, v in enumerate(opened.invars)}
        for eqn in opened.eqns:
            reads = [0 if ir.is_literal(v) else reached.get(v, 0) for v in eqn.invars]
            if any(reads):
                for v, operands in zip(eqn.outvars, self._passed(eqn), strict=True):
                    total = 0
                    for i in _bits(operands):
                        total |= reads[i]
                    if total:
                        reached[v] = total
        self._reached[id(opened)] = opened, reached
        return reached

    def _passed(self, eqn: ir.Eqn) -> list[int]:
        """For each result of an equation, the operands that it is a sum of."""
        bodies = ir.bodies(eqn)
        if not bodies:
            row = op(eqn.primitive.name)
            adds = row.kind in (OpKind.DATA_MOVEMENT, OpKind.REDUCTION)
            adds = adds or row.carries_sums
            return [(1 << len(eqn.invars)) - 1 if adds else 0] * len(eqn.outvars)
        passed = [0] * len(eqn.outvars)
        for body in bodies:
            for inside, result in zip(self._through(body.jaxpr), body.results, strict=False):
                for i in _bits(inside):
                    passed[result] |= 1 << body.operands[i]
        return passed


def _inside(
    body: ir.Body,
    eqn: ir.Eqn,
    feedback: LoopFeedback,
    reached: Mapping[Any, int],
    needed: Mapping[Any, int],
) -> LoopFeedback:
    """For each operand of a body inside of another one, its results that are fed back into it.

    Args:
        body: the inner body.
        eqn: its equation in the outer body.
        feedback: which results of the outer body are fed back into each of its operands.
        reached: for each value of the outer body, the operands that it is a sum of.
        needed: for each value of the outer body, the results that are a sum of it.
    """
    if body.carry or body.trips != 1:
        # Any trip of an inner loop may lead to any result of it.
        return ((1 << len(body.results)) - 1,) * len(body.operands)
    inside: list[int] = []
    for operand in body.operands:
        v, fed_back = eqn.invars[operand], 0
        for i in () if ir.is_literal(v) else _bits(reached.get(v, 0)):
            fed_back |= feedback[i]
        each = (bool(needed[eqn.outvars[at]] & fed_back) << r for r, at in enumerate(body.results))
        inside.append(sum(each))
    return tuple(inside)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
