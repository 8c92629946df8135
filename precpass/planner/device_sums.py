"""Which sums between devices are sent in bfloat16, where the policy asks for that (`reduce`).

They are sums of what low matrix products made, whose operands have been rounded already. In a
`shard_map`, or on explicit axes, an equation adds them up. That of a gradient may not exist yet: it
is the derivative of an equation that copies a weight to all devices, or moves a value around a
ring. Elsewhere XLA's partitioner adds up the results of products in the format that they have
(`planner.result_formats`).

Losses, norms and means stay in float32. A sum in the forward pass does, too, if the program returns
it or if a reader needs its digits.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.digits import Digits, DigitsRead
from precpass.analysis.equations import is_wide, moved_operand, scales
from precpass.analysis.graph import BORDER, Graph
from precpass.backends.fused_readers import FusedReaders
from precpass.eight_bits.products import is_derivative
from precpass.plan import reasons
from precpass.plan.plan import Action, Decision, DeviceSum, Plan
from precpass.plan.reasons import DecidedBy
from precpass.planner.planned_bodies import planned_bodies
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind
from precpass.policy.rules import WIRE
from precpass.policy.scopes import is_backward

__all__ = ["DeviceSums"]

_SUMS = frozenset(("psum", "psum_invariant", "reduce_scatter"))
_COPIES = frozenset(("pvary", "all_gather", "ppermute", "reshard"))
"""Primitives whose transposes add up terms of devices. A ring of permutations adds one in each."""
_TERMS = frozenset(("add_any", "pad", "concatenate", "broadcast_in_dim", "pvary", "device_put"))
_WRITTEN = frozenset((DecidedBy.OWN_POLICY, DecidedBy.TYPES, DecidedBy.USER, DecidedBy.KEEP))
_NEEDED = Digits.SUBTRACTED | Digits.COMPARED | Digits.RANKED | Digits.ANY_LEAVING
_Names = list[tuple[Any, int]]
"""Variables, each with the index of its body."""


class DeviceSums:
    """The sums between devices of one program.

    Args:
        plan: of the program.
        graph: the program.
        digits: which digits of its values are read.
        reduce: what the policy asks for at a row. If that is not 16 bits, only a rule that names
            the sum lowers it.
    """

    def __init__(
        self, plan: Plan, graph: Graph, digits: DigitsRead, reduce: Callable[[int], str]
    ) -> None:
        self.graph = graph
        self._plan = plan
        self._digits = digits
        self._reduce = reduce

    def decision(self, body: int, row: int, decision: Decision) -> Decision:
        """The decision for an equation, with how it or its derivative adds up terms of devices."""
        eqn, name = self.graph.eqns[row], self.graph.primitives[row]
        if name not in _SUMS and name not in _COPIES:
            return decision
        adds = name in _SUMS or ir.is_unreduced(eqn.invars[0].aval)
        adds = adds or (name == "ppermute" and is_backward(self.graph.scope(row)))
        if not self._may_be_low(body, row, decision, adds):
            return decision
        of, is_divided = (
            "the sum" if adds else "the sum of its cotangents",
            self._reduce(row) == WIRE,
        )
        dim = ir.part_dim(eqn) if is_divided else None
        if is_divided and dim is None and name != "ppermute":
            why = decision.reason.plus(reasons.SUMMED_WIDE, of)
            return dataclasses.replace(decision, reason=why)
        why = decision.reason.plus(reasons.SUMMED, of, WIRE if is_divided else "bf16")
        decision = dataclasses.replace(decision, reason=why, device_sum=DeviceSum(not adds, dim))
        if not adds:
            return decision
        return dataclasses.replace(decision, action=Action.LOWER, compute=Precision.BF16)

    def _may_be_low(self, body: int, row: int, decision: Decision, adds: bool) -> bool:
        """Whether a sum that an equation or its derivative makes is to be sent in 16 bits."""
        eqn = self.graph.eqns[row]
        if decision.decided_by in _WRITTEN or not all(map(is_wide, (*eqn.invars, *eqn.outvars))):
            return False
        is_asked = decision.decided_by in (DecidedBy.RULE, DecidedBy.SAVED_PLAN)
        if is_asked and self.graph.primitives[row] in _SUMS:
            return _is_lowered(decision)
        if self._reduce(row) not in ("bf16", WIRE):
            return False
        if adds:
            return self._adds_products(body, row)
        return self._copies_to_products(body, row)

    def _adds_products(self, body: int, row: int) -> bool:
        """Whether an equation adds up results of low products, and nothing needs their digits.

        Gradients may be returned or subtracted, also where you add them up yourself.
        """
        eqn, digits = self.graph.eqns[row], self._digits
        needed = any(digits.digits_of(body, v) & _NEEDED for v in eqn.outvars)
        of_derivatives = needed and not is_derivative(self.graph.scope(row))
        return all(self._is_made_by_products(body, v, of_derivatives) for v in eqn.invars)

    def _copies_to_products(self, body: int, row: int) -> bool:
        """Whether the derivative of a program without one will add up results of low products."""
        eqn = self.graph.eqns[row]
        if self.graph.has_backward_pass:
            return False
        names = [v for v in (*eqn.invars, *eqn.outvars) if not ir.is_literal(v)]
        return any(self._readers.readers_of(body, v).low for v in names)

    def _is_made_by_products(self, body: int, atom: ir.Atom, of_derivatives: bool) -> bool:
        """Whether a value is the result of a low product, moved or scaled, or a sum with one.

        Args:
            body: of the value.
            atom: the value.
            of_derivatives: whether only a product of a derivative counts; a loop may add it up.
        """

        def before(body: int, atom: ir.Atom) -> _Names | None:
            row = self.graph.row_of_maker(body, atom)
            if row is None:
                return []
            is_derived = not of_derivatives or is_derivative(self.graph.scope(row))
            if row in self._products and is_derived:
                return None
            is_sum = of_derivatives and self.graph.primitives[row] == "add"
            invars = self.graph.eqns[row].invars
            return [(v, body) for v in invars if is_sum or self._hands_on(row, v)]

        return self._reaches(body, atom, before, forward=False)

    def leaves_backward_pass(self, body: int, var: ir.Var) -> bool:
        """Whether a derivative, or a sum of which it is a term, is returned or read elsewhere.

        It is the gradient of a weight then, which an optimizer reads, or of another argument.
        """

        def after(body: int, atom: ir.Atom) -> _Names | None:
            found: _Names = []
            for row in self.graph.readers(body).get(atom, ()):
                is_inside = row in self.graph.children or (row == BORDER and body)
                if not is_inside and (row == BORDER or not is_backward(self.graph.scope(row))):
                    return None
                if not is_inside and self._hands_on(row, atom):
                    found += [(v, body) for v in self.graph.eqns[row].outvars]
            return found

        row = self.graph.row_of_maker(body, var)
        is_made_there = row is not None and is_derivative(self.graph.scope(row))
        return is_made_there and self._reaches(body, var, after, forward=True)

    def _hands_on(self, row: int | None, atom: ir.Atom) -> bool:
        """Whether a result is an operand, moved or scaled, or a sum of which it is a term."""
        assert row is not None
        eqn, name = self.graph.eqns[row], self.graph.primitives[row]
        return moved_operand(eqn) is atom or name in _TERMS or name in _SUMS or scales(eqn)

    def _reaches(
        self,
        body: int,
        atom: ir.Atom,
        follow: Callable[[int, ir.Atom], _Names | None],
        *,
        forward: bool,
    ) -> bool:
        """Whether a walk from a value, through all bodies, comes to one that `follow` ends at."""
        todo, seen = [(atom, body)], set[tuple[ir.Var, int]]()
        while todo:
            var, body = name = todo.pop()
            if not ir.is_literal(var) and name not in seen:
                seen.add(name)
                if (found := follow(body, var)) is None:
                    return True
                todo += [*found, *self._links[forward].get(name, ())]
        return False

    @functools.cached_property
    def _links(self) -> tuple[dict[Any, _Names], dict[Any, _Names]]:
        """For each value its names on the other sides of borders, before it and after it."""
        values = self.graph.values
        before, after = (collections.defaultdict[Any, _Names](list) for _ in range(2))
        for a, b in self.graph.links.tolist():
            before[values[b]].append(values[a])
            after[values[a]].append(values[b])
        return before, after

    @functools.cached_property
    def _products(self) -> set[int]:
        """The rows of low products."""
        return {
            row
            for body, plan in planned_bodies(self.graph, self._plan)
            for row, decision in enumerate(plan.decisions, self.graph.bodies[body].start)
            if decision.kind is OpKind.COMPUTE and _is_lowered(decision)
        }

    @functools.cached_property
    def _readers(self) -> FusedReaders:
        return FusedReaders(self.graph, self._products, of_stacks=True)


def _is_lowered(decision: Decision) -> bool:
    return decision.action is Action.LOWER and decision.compute is Precision.BF16
