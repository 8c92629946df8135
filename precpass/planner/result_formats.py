"""Which lowered products have results in 16 bits, on devices where float32 results cost bandwidth.

On a GPU no kernel folds a cast into a product, so a float32 result is written, and read again by a
kernel that casts it. XLA even widens a convolution whose result is wider than its operands, and
computes it in float32 (`operand_upcaster` in XLA's `gpu_compiler.cc`). A TPU's kernels fold the
cast, but what XLA saves of them for later is float32: with 16-bit results the gradient of a decoder
takes 0.56 of the temporary memory on a v5e, and 0.95 of the compiler's cycles. The units add up in
float32 in any case, so a result in 16 bits is one rounding of a float32 sum.

A dot keeps its float32 result if a reader needs its digits (`analysis.digits`): the rounding errors
of operands average out over the sum, that of the result does not. A convolution always has a 16-bit
result, because it would not be low otherwise. So does the cotangent of a dot's operand, which JAX
makes when it differentiates the rewritten program, if the operand, moved or scaled at the most, is
an argument or a difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from precpass import jaxpr as ir
from precpass.analysis.analysis import Analysis
from precpass.analysis.digits import Digits, left_with
from precpass.analysis.equations import gathered_operand, moved_operand, negates, scales
from precpass.analysis.graph import BORDER
from precpass.plan import reasons
from precpass.plan.decisions import lower
from precpass.plan.plan import Action, Decision, Plan
from precpass.plan.reasons import DecidedBy
from precpass.planner.device_sums import DeviceSums
from precpass.planner.planned_bodies import planned_bodies
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind

__all__ = ["with_low_results"]

_READ = Digits.SUBTRACTED | Digits.COMPARED | Digits.RANKED
_HANDED_ON = frozenset(("pvary", "all_gather", "all_gather_invariant", "device_put"))
"""Primitives whose operands are their results on more devices, or elsewhere."""


def with_low_results(
    plan: Plan, analysis: Analysis, reduce: Callable[[int], str], *, inner: bool
) -> Plan:
    """The plan in which products have 16-bit results wherever that loses no digits of a sum.

    Args:
        plan: of the program, with its storage assigned.
        analysis: of the program.
        reduce: the format of sums between devices that the policy asks for at a row.
        inner: whether products have such results whose results stay inside the program.
    """
    return _ResultFormats(plan, analysis, reduce, inner).plan_of(0, plan)


class _ResultFormats:
    """The results of the products of one program."""

    def __init__(
        self, plan: Plan, analysis: Analysis, reduce: Callable[[int], str], inner: bool
    ) -> None:
        self.graph = analysis.graph
        self._digits = analysis.digits
        self._inner = inner
        self._reduce = reduce
        self._sums = DeviceSums(plan, self.graph, self._digits, reduce)
        self._rounded = self._rounded_values(plan)
        self._plans: dict[tuple[int, int], Plan] = {}

    def _rounded_values(self, root: Plan) -> set[tuple[int, ir.Var]]:
        """The values, with their bodies, that every plan of their body rounds to 16 bits."""
        rounded, wide = set[tuple[int, ir.Var]](), set[tuple[int, ir.Var]]()
        for body, plan in planned_bodies(self.graph, root):
            for row, decision in enumerate(plan.decisions, self.graph.bodies[body].start):
                results = zip(self.graph.eqns[row].outvars, decision.stored, strict=True)
                for var, stored in results:
                    is_low = decision.stores_low and stored is not None and stored.is_low
                    (rounded if is_low else wide).add((body, var))
        return rounded - wide

    def plan_of(self, body: int, plan: Plan) -> Plan:
        """The plan of one body."""
        key = body, id(plan)
        if key not in self._plans:
            start, decisions = self.graph.bodies[body].start, list[Decision]()
            rounded = set[ir.Var]()
            for row, planned in enumerate(plan.decisions, start):
                eqn = self.graph.eqns[row]
                decision = _moved_low(eqn, self._decision(body, row, planned), rounded)
                decisions.append(decision)
                dropped = decision.action is Action.DROP and moved_operand(eqn) in rounded
                counts = self._inner or decision.kind is OpKind.COMPUTE
                if dropped or (counts and _has_low_results(decision)):
                    rounded.update(eqn.outvars)
            same = all(a is b for a, b in zip(decisions, plan.decisions, strict=True))
            self._plans[key] = (
                plan if same else dataclasses.replace(plan, decisions=tuple(decisions))
            )
        return self._plans[key]

    def _decision(self, body: int, row: int, decision: Decision) -> Decision:
        if decision.inner:
            children = self.graph.children[row]
            inner = tuple(
                self.plan_of(child, plan)
                for (_, child), plan in zip(children, decision.inner, strict=True)
            )
            same = all(a is b for a, b in zip(inner, decision.inner, strict=True))
            return decision if same else dataclasses.replace(decision, inner=inner)
        is_product = decision.action is Action.LOWER and decision.kind is OpKind.COMPUTE
        if not is_product or decision.compute is not Precision.BF16:
            # The result may be out of float16's range though the operands are in it.
            return self._sums.decision(body, row, decision)
        eqn = self.graph.eqns[row]
        (result,) = eqn.outvars
        is_low = eqn.primitive.name == "conv_general_dilated" or any(decision.stored)
        # XLA's partitioner adds up the results of products in the format that they have.
        reduce = self._reduce(row)
        inner, of_weights = self._inner and reduce != "f32", reduce == "bf16"
        is_low = inner and (is_low or not self._needs_digits(body, result))
        is_low = is_low or (of_weights and self._sums.leaves_backward_pass(body, result))
        kept = (self._is_inner(body, eqn, side) for side in (0, 1))
        lhs, rhs = (of_weights if is_kept is None else inner and is_kept for is_kept in kept)
        form = decision.product._replace(low_result=is_low, low_cotangents=(lhs, rhs))
        return dataclasses.replace(decision, product=form)

    def _needs_digits(self, body: int, var: ir.Var) -> bool:
        """Whether readers of a product's result need digits that 16 bits do not hold."""
        read = self._digits.digits_of(body, var)
        return bool(read & _READ) or (
            bool(read & Digits.ANY_LEAVING) and not self._is_rounded(body, var)
        )

    def _is_rounded(self, body: int, var: ir.Var) -> bool:
        """Whether a value leaves only in forms that are stored in 16 bits anyway."""
        for row in self.graph.readers(body).get(var, ()):
            if row == BORDER or row in self.graph.children:
                return False
            eqn = self.graph.eqns[row]
            leaves = any(
                left_with(eqn, var, self._digits.digits_of(body, out))
                and (body, out) not in self._rounded
                for out in eqn.outvars
            )
            if leaves:
                return False
        return True

    def _is_inner(self, body: int, eqn: ir.Eqn, side: int) -> bool | None:
        """Whether an operand's cotangent stays inside the program, and nothing is subtracted.

        None if the operand is an argument of the program. JAX makes the cotangent's product when it
        differentiates the rewritten program, which no plan sees.
        """
        var = eqn.invars[side]
        while not ir.is_literal(var):
            # through calls as well, in both directions
            row = self.graph.row_of_maker(body, var)
            if row is None:
                if self._is_loop_constant(body, var):
                    return True  # every trip adds a term to its cotangent
                # A loop takes slices of a stack, too.
                outside = self.graph.outside(body, var)
                if outside is None:
                    return None if body == 0 else False
                if outside.is_state:
                    return False
                body, var = outside.body, outside.atom
                continue
            maker = self.graph.eqns[row]
            if (returned := self.graph.name_in_call(row, var)) is not None:
                body, var = returned
            elif (moved := moved_operand(maker)) is not None:
                var = moved
            elif maker.primitive.name in _HANDED_ON:
                var = maker.invars[maker.outvars.index(var)]
            elif scales(maker) and not negates(maker):
                var = next(v for v in maker.invars if not ir.is_literal(v))
            else:
                return maker.primitive.name != "sub" and not negates(maker)
        return False

    def _is_loop_constant(self, body: int, var: ir.Var) -> bool:
        """Whether a body's operand is the same in every trip of its loop."""
        callers = self.graph.callers[body]
        loops = [inner for _, inner in callers if inner.carry or inner.trips != 1]
        invars = ir.open_jaxpr(self.graph.bodies[body].jaxpr).invars
        return bool(loops) and all(var in invars[: inner.constants] for inner in loops)


def _has_low_results(decision: Decision) -> bool:
    """Whether an equation's results are made in 16 bits, and not rounded to them afterwards."""
    if decision.action is not Action.LOWER or decision.compute is not Precision.BF16:
        return False
    return decision.product.low_result if decision.kind is OpKind.COMPUTE else decision.converts


def _moved_low(eqn: ir.Eqn, decision: Decision, rounded: Collection[ir.Var]) -> Decision:
    """The decision for an equation that moves or gathers a value with 16-bit digits: to do it low.

    Otherwise XLA fuses the cast to float32 into the kernel that makes the value, and stores it and
    all that is moved of it at twice the bytes.
    """
    free = decision.action is Action.KEEP and decision.decided_by is DecidedBy.COST
    if not free or decision.converts:
        return decision
    if moved_operand(eqn) not in rounded and gathered_operand(eqn) not in rounded:
        return decision
    formats = [ir.precision_of(v.aval) for v in eqn.outvars]
    return lower(decision.kind, Precision.BF16, tuple(formats), reasons.MOVES_LOW())
