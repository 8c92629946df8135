"""Which sums between devices are sent in bfloat16, where the policy asks for that (`reduce`).

They are sums of what low matrix products made: each device holds a term that has lost its digits to
the rounding of operands already. In a `shard_map`, or on explicit axes, an equation adds them up.
That of a gradient may not exist yet: it is the derivative of an equation that copies a weight to
all devices, or moves a value around a ring. Elsewhere XLA's partitioner adds up the results of
products in their own format (`planner.result_formats`).

A loss, a norm or a mean is a sum of few numbers, and stays in float32. So does a sum in the forward
pass that leaves the program, or of which a reader needs the digits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from precpass import jaxpr as ir
from precpass.analysis.digits import Digits, DigitsRead
from precpass.analysis.equations import is_wide, moved_operand, scales
from precpass.analysis.graph import BORDER, Graph
from precpass.plan import reasons
from precpass.plan.plan import Action, Decision, DeviceSum, Plan
from precpass.plan.reasons import DecidedBy
from precpass.planner.planned_bodies import planned_bodies
from precpass.planner.scaled_products import is_derivative
from precpass.planner.storage.readers import Readers
from precpass.policy.policy import WIRE
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind
from precpass.policy.scopes import is_backward

__all__ = ["DeviceSums", "leaves_backward_pass"]

_SUMS = frozenset(("psum", "psum_invariant", "reduce_scatter"))
_COPIES = frozenset(("pvary", "all_gather", "ppermute", "reshard"))
"""Primitives whose transposes add up terms of devices. A ring of permutations adds one in each."""
_TERMS = _SUMS | frozenset(
    ("add_any", "pad", "concatenate", "broadcast_in_dim", "pvary", "device_put")
)
"""Primitives whose results are sums of their operands, or put together from them."""
_WRITTEN = frozenset((DecidedBy.OWN_POLICY, DecidedBy.TYPES, DecidedBy.USER, DecidedBy.KEEP))
_NEEDED = Digits.SUBTRACTED | Digits.COMPARED | Digits.RANKED | Digits.ANY_LEAVING
_Name = tuple[int, ir.Atom]


class DeviceSums:
    """The sums between devices of one program.

    Args:
        plan: of the program.
        graph: the program.
        digits: which digits of its values are read.
        reduce: what the policy asks for; without 16 bits only rules lower a sum.
    """

    def __init__(self, plan: Plan, graph: Graph, digits: DigitsRead, reduce: str) -> None:
        self.graph = graph
        self._digits = digits
        self._reduce = reduce
        self._products = {
            row
            for body, of_body in planned_bodies(graph, plan)
            for row, decision in enumerate(of_body.decisions, graph.bodies[body].start)
            if _is_lowered(decision, OpKind.COMPUTE)
        }
        self._readers = Readers(graph, self._products, of_stacks=True)

    def decision(self, body: int, row: int, decision: Decision) -> Decision:
        """The decision for an equation, with how it or its derivative adds up terms of devices."""
        eqn, name = self.graph.eqns[row], self.graph.primitives[row]
        adds = name in _SUMS or (name == "reshard" and ir.is_unreduced(eqn.invars[0].aval))
        if not (adds or name in _COPIES) or decision.decided_by in _WRITTEN:
            return decision
        if not all(map(is_wide, (*eqn.invars, *eqn.outvars))):
            return decision
        if decision.decided_by is DecidedBy.RULE:
            is_low = adds and _is_lowered(decision, decision.kind)
        elif self._reduce not in ("bf16", WIRE):
            is_low = False
        else:
            adds = adds or (name == "ppermute" and is_backward(self.graph.scope(row)))
            is_low = self._adds_products(body, row) if adds else self._copies_to_products(body, row)
        if not is_low:
            return decision
        of, how = "it" if adds else "its cotangents", self._reduce
        dim = _part_dim(eqn) if how == WIRE else None
        if how == WIRE and dim is None and name != "ppermute":
            why = decision.reason.plus(reasons.SUMMED_WIDE, of)
            return dataclasses.replace(decision, reason=why)
        form = DeviceSum(of_cotangents=not adds, dim=dim)
        why = decision.reason.plus(reasons.SUMMED, of, how if how == WIRE else "bf16")
        changed = {"action": Action.LOWER, "compute": Precision.BF16} if adds else {}
        return dataclasses.replace(decision, reason=why, device_sum=form, **changed)

    def _adds_products(self, body: int, row: int) -> bool:
        """Whether an equation adds up results of low products, and nothing needs their digits."""
        eqn, digits = self.graph.eqns[row], self._digits
        if not is_derivative(self.graph.scope(row)) and any(
            digits.digits_of(body, v) & _NEEDED for v in eqn.outvars
        ):
            return False
        return all(self._is_made_by_products(body, v) for v in eqn.invars)

    def _copies_to_products(self, body: int, row: int) -> bool:
        """Whether the derivative of a program without one will add up results of low products."""
        eqn = self.graph.eqns[row]
        if self.graph.has_backward_pass:
            return False
        names = [v for v in (*eqn.invars, *eqn.outvars) if not ir.is_literal(v)]
        return any(self._readers.readers_of(body, v).low for v in names)

    def _is_made_by_products(self, body: int, atom: ir.Atom) -> bool:
        """Whether a value is the result of a low product, moved or scaled, or a sum with one."""

        def before(body: int, atom: ir.Atom) -> Iterator[_Name] | None:
            row = self.graph.row_of_maker(body, atom)
            if row in self._products:
                return None
            if row is None:
                return _before_body(self.graph, body, atom)
            eqn = self.graph.eqns[row]
            if row in self.graph.children:
                return _inside(self.graph, row, atom)
            is_term = moved_operand(eqn) is not None or eqn.primitive.name in _TERMS or scales(eqn)
            return ((body, v) for v in eqn.invars if is_term)

        return _is_reached(body, atom, before)


def leaves_backward_pass(graph: Graph, body: int, var: ir.Var) -> bool:
    """Whether a derivative, or a sum of which it is a term, is returned or read elsewhere.

    It is the gradient of a weight then, which an optimizer reads, or one of another argument.
    """

    def after(body: int, atom: ir.Atom) -> Iterator[_Name] | None:
        found: list[_Name] = []
        for row in graph.readers(body).get(atom, ()) if not ir.is_literal(atom) else ():
            if row == BORDER:
                if body == 0:
                    return None
                found += _after_body(graph, body, atom)
            elif row in graph.children:
                found += graph.names_inside(row, atom)
            elif not is_backward(graph.scope(row)):
                return None
            else:
                eqn = graph.eqns[row]
                if moved_operand(eqn) is atom or eqn.primitive.name in _TERMS or scales(eqn):
                    found += [(body, v) for v in eqn.outvars]
        return iter(found)

    return is_derivative_row(graph, body, var) and _is_reached(body, var, after)


def is_derivative_row(graph: Graph, body: int, var: ir.Var) -> bool:
    """Whether the equation that makes a value differentiates."""
    row = graph.row_of_maker(body, var)
    return row is not None and is_derivative(graph.scope(row))


def _is_lowered(decision: Decision, kind: OpKind) -> bool:
    is_low = decision.action is Action.LOWER and decision.compute is Precision.BF16
    return is_low and decision.kind is kind


def _is_reached(
    body: int, atom: ir.Atom, follow: Callable[[int, ir.Atom], Iterator[_Name] | None]
) -> bool:
    """Whether a walk from a value ends: whether `follow` gives None for a value that it reaches."""
    todo, seen = [(body, atom)], set[_Name]()
    while todo:
        name = todo.pop()
        if ir.is_literal(name[1]) or name in seen:
            continue
        seen.add(name)
        reached = follow(*name)
        if reached is None:
            return True
        todo += reached
    return False


def _before_body(graph: Graph, body: int, atom: ir.Atom) -> Iterator[_Name]:
    """The names of a body's operand at its callers, and at the end of a loop's trip."""
    opened = ir.open_jaxpr(graph.bodies[body].jaxpr)
    for row, inner in graph.callers[body]:
        for at, operand in zip(opened.invars, inner.operands, strict=False):
            if at is atom:
                yield int(graph.body[row]), graph.eqns[row].invars[operand]
        for into, out in inner.carry:
            if opened.invars[into] is atom:
                yield body, opened.outvars[out]


def _after_body(graph: Graph, body: int, atom: ir.Atom) -> Iterator[_Name]:
    """The names of a body's result at its callers, and at the start of a loop's trip."""
    opened = ir.open_jaxpr(graph.bodies[body].jaxpr)
    for row, inner in graph.callers[body]:
        for at, result in zip(opened.outvars, inner.results, strict=False):
            if at is atom:
                yield int(graph.body[row]), graph.eqns[row].outvars[result]
        for into, out in inner.carry:
            if opened.outvars[out] is atom:
                yield body, opened.invars[into]


def _inside(graph: Graph, row: int, atom: ir.Atom) -> Iterator[_Name]:
    """The names of an equation's result in the equation's bodies."""
    for inner, child in graph.children[row]:
        outvars = ir.open_jaxpr(inner.jaxpr).outvars
        for v, result in zip(outvars, inner.results, strict=False):
            if graph.eqns[row].outvars[result] is atom:
                yield child, v


def _part_dim(eqn: ir.Eqn) -> int | None:
    """The dimension along which devices may divide a sum's terms; None if they may not."""
    params, (operand, *others) = eqn.params, eqn.invars
    if params.get("axis_index_groups") is not None or others:
        return None
    match eqn.primitive.name:
        case "reduce_scatter":
            return params["scatter_dimension"]
        case "all_gather":
            return params["all_gather_dimension"]
        case "psum" | "psum_invariant":
            devices = ir.axes_size(operand.aval, params["axes"])
            sizes = enumerate(operand.aval.shape)
            return next((d for d, n in sizes if devices and n and n % devices == 0), None)
        case _:
            return None
