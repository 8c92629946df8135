"""Graph, facts and policy in; `Plan` out.

Products run low with wide results, arithmetic stays as it was written unless the policy
orders otherwise: inside of a fusion it costs nothing. What is really in memory, what crosses
borders and which products pay is then decided by a minimum cut (`placing`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

from precpass import jaxpr as ir
from precpass import reasons
from precpass.accumulate import Additive, Feeds, all_feeds
from precpass.asked import Asked
from precpass.boundary import BOUNDARY
from precpass.costs import NOMINAL, Candidate
from precpass.equations import (
    EQUALITIES,
    WIDENED,
    blocked_by_kind,
    border_of,
    contracts,
    crossing_formats,
    float_vars,
    guarded,
    has_low,
    in_region,
    keep,
    lower,
    moves_low,
    unentered,
    widen,
)
from precpass.facts import Facts, propagate
from precpass.graph import Graph, join_scopes
from precpass.likeness import Likeness, distinguished
from precpass.opkinds import Op, OpKind, op
from precpass.placing import Question, placed
from precpass.plan import Action, Border, Decision, Plan, ProductForm, across
from precpass.policy import PrecisionPolicy
from precpass.precision import Precision
from precpass.profit import Weighed, Worth
from precpass.readers import Readers, rounded_by_readers
from precpass.reasons import DecidedBy
from precpass.rules import innermost_keep, is_fixed
from precpass.swaps import with_swaps

__all__ = ["Planner", "distinguish", "make_plan"]


def make_plan(
    jaxpr: Any,
    policy: PrecisionPolicy,
    scope: str = "",
    closed_over: Sequence[Any] = (),
    border: Border = (),
    worth: Worth | None = None,
) -> Plan:
    """The plan for a jaxpr under a policy.

    Args:
        jaxpr: open or closed.
        policy: what to aim for.
        scope: the name scopes around it.
        closed_over: the values of its first operands, as far as it closes over them.
        border: the formats in which values cross its border, for a custom rule.
        worth: tells which products pay; without it all of them do.
    """
    graph = Graph.build(jaxpr, lambda inner: distinguish(policy, join_scopes(scope, inner)))
    return Planner(graph, propagate(graph, closed_over), policy, scope, worth).root(border)


def distinguish(policy: PrecisionPolicy, scope: str) -> Hashable:
    """What of a scope the policy's rules can tell apart."""
    if policy.lock is not None or any(rule.scope or rule.where for rule in policy.rules):
        return scope
    return distinguished(scope)


class Planner:
    """One run of the planner over a graph."""

    def __init__(
        self,
        graph: Graph,
        facts: Facts,
        policy: PrecisionPolicy,
        scope: str,
        worth: Worth | None = None,
    ) -> None:
        self.graph = graph
        self.facts = facts
        self.policy = policy
        self.scope = scope
        self.notes: list[str] = []
        self.lowered: dict[Any, ir.Contents] = {}
        self.shared: dict[Any, Plan] = {}
        self.memo: dict[Any, Plan] = {}
        # without an order beyond products, no equation that adds is lowered
        self.asked = Asked(graph, scope, policy)
        self._orders = bool(self.asked or policy.orders - {OpKind.COMPUTE})
        self.readers = Readers(graph)
        self._weighed = Weighed(graph, self.readers, worth)
        self._additive = Additive()
        # where elementwise work follows an order, storage does too
        compute = policy.precision_for(OpKind.COMPUTE)
        self._cuts = compute.is_low and OpKind.ELEMENTWISE not in policy.orders
        self._facts_of: dict[int, list[Facts]] = {}
        self._deciding: set[int] = set()
        self._alike: dict[Hashable, Decision] = {}
        self._presets_alone = not (self.asked or policy.widens)
        self._may_run = {p: reasons.MAY_RUN(p) for p in Precision}

    def root(self, border: Border) -> Plan:
        """The plan of the outermost jaxpr, with what was noticed on the way."""
        plan = self._placed(self.plan(self.facts, (), decides=False, border=border))
        notes = dict.fromkeys((*self.notes, *self.asked.complaints()))
        unmatched, costs = self.asked.unmatched(), self._weighed.costs(self.policy.lock)
        return dataclasses.replace(plan, notes=tuple(notes), unmatched=unmatched, costs=costs)

    def _placed(self, plan: Plan) -> Plan:
        """The plan with the storage of its values, where that is the planner's to choose."""
        if not (self._cuts and plan.lowers):
            return plan
        low = self.policy.precision_for(OpKind.COMPUTE)
        asked = Question(
            self.graph,
            plan,
            low,
            self._facts_of,
            self._deciding,
            lambda row: self._permits(row, low),
            lambda row: is_fixed(self._scope(row)),
            self._additive,
            self._candidate,
            self.readers,
            self._weighed.device or NOMINAL,
        )
        return placed(asked)

    def _candidate(self, row: int) -> Candidate | None:
        """A product that the preset alone has in a low format; None for others."""
        eqn, low = self.graph.eqns[row], self.policy.precision_for(OpKind.COMPUTE)
        _, why, _ = self.asked.target(row, op(eqn.primitive.name), self._scope(row))
        # what a rule, a region or a saved plan orders is lowered whether or not it pays
        if why.decided_by is not DecidedBy.PRESET:
            return None
        return self._weighed.candidate(eqn, int(self.graph.body[row]), low)

    def _permits(self, row: int, low: Precision) -> bool:
        """Whether what an equation makes may be stored low."""
        eqn, scope = self.graph.eqns[row], self._scope(row)
        table = op(eqn.primitive.name)
        if is_fixed(scope) or ir.user_order(eqn) is not None or table.kind is OpKind.BOUNDARY:
            return ir.keeps_bits(eqn) and not is_fixed(scope)
        return self.asked.permits(row, table, scope, low)

    def plan(self, facts: Facts, carried: Feeds, decides: bool, border: Border) -> Plan:
        """The plan of one body at one class of call sites.

        Args:
            facts: of the body there.
            carried: through which results and operands a loop around it accumulates.
            decides: whether it computes a loop's predicate.
            border: the formats in which values cross its border.
        """
        key = (id(facts), carried, decides, border)
        if key not in self.memo:
            self._facts_of.setdefault(facts.body, []).append(facts)
            if decides:
                self._deciding.add(facts.body)
            node = self.graph.bodies[facts.body]
            adds = self._additive.accumulating(node.jaxpr, carried)
            stored: dict[Any, Precision | None] = {}
            decisions: list[Decision] = []
            alike = self._likeness(facts, decides)
            for at, eqn in enumerate(self.graph.eqns[node.start : node.stop]):
                row, is_added = node.start + at, at in adds
                if row in self.graph.children:
                    decision = self._enter(row, facts, decides, is_added)
                elif (told := alike and alike.of(eqn, stored, adds=is_added)) in self._alike:
                    decision = self._alike[told]
                else:
                    decision = self._decided(row, facts, decides, is_added, stored)
                    if told is not None:
                        self._alike[told] = decision
                decisions.append(decision)
                if decision.converts:
                    stored.update(zip(eqn.outvars, decision.stored, strict=True))
            if not self.policy.widens:
                readers = functools.partial(self.readers.of, facts.body)
                decisions = with_swaps(node.jaxpr, decisions, readers)
            plan = Plan(tuple(decisions), border_of(node.jaxpr, border))
            # equal plans of one jaxpr are one object, so that it is rewritten and lowered once
            self.memo[key] = self.shared.setdefault((facts.body, plan), plan)
        return self.memo[key]

    def _enter(self, row: int, facts: Facts, decides: bool, adds: bool) -> Decision:
        eqn = self.graph.eqns[row]
        # with x64 off a body in float64 is evaluated as a whole, which no effect survives
        wide = self._is_wide(row) and (ir.in_x64() or not ir.effects_of(eqn))
        fixed = is_fixed(self._scope(row)) or ir.keeps_border(eqn)
        border = () if fixed else crossing_formats(self.policy, wide)
        inner: list[Plan] = []
        for (body, _), inside in zip(self.graph.children[row], facts.inner[row], strict=True):
            feeds: Feeds = ()
            if adds:
                feeds = all_feeds(len(body.operands), len(body.results))
            elif body.carry and self._orders:
                feeds = self._additive.cyclic(body)
            inner.append(self.plan(inside, feeds, decides or body.decides, border))
        has_rules = ir.has_rules(eqn) and self._plans_rules(row)
        rules = border if has_rules else None
        natives = [ir.precision_of(v.aval) for v in eqn.outvars]
        stored = tuple(None if (p := across(border, n)) is n else p for n in natives)
        kind, why = op(eqn.primitive.name).kind, reasons.ENTERED()
        return Decision(Action.ENTER, kind, None, stored, why, tuple(inner), rules, wide)

    def _plans_rules(self, row: int) -> bool:
        eqn = self.graph.eqns[row]
        if is_fixed(self._scope(row)):
            return False
        asks = self.policy.lowers or self.policy.rules or innermost_keep(self._scope(row))
        return bool(asks or (self.policy.widens and has_low(eqn)))

    def _scope(self, row: int) -> str:
        return join_scopes(self.scope, self.graph.scope(row))

    # ------------------------------------------------------------ leaves

    def _likeness(self, facts: Facts, decides: bool) -> Likeness | None:
        """Tells the equations of a body that are decided alike; None where rules can tell more."""
        if not self._presets_alone:
            return None

        def scope_of(eqn: Any) -> str:
            return join_scopes(self.scope, self.graph.scope_in(facts.body, eqn))

        return Likeness(facts, self.readers, scope_of, decides=decides)

    def _decided(
        self, row: int, facts: Facts, decides: bool, adds: bool, stored: dict[Any, Precision | None]
    ) -> Decision:
        eqn = self.graph.eqns[row]
        table = op(eqn.primitive.name)
        scope = self._scope(row)
        if is_fixed(scope):
            return keep(eqn, table.kind, reasons.FIXED())
        if self.policy.widens and (ir.hands_on(eqn) or ir.is_detach(eqn)):
            why, wide = reasons.WIDE_AGAIN(), Precision.F32
            return Decision(Action.DROP, table.kind, wide, (wide,), why)
        floats = {p for v in (*eqn.invars, *eqn.outvars) if (p := ir.precision_of(v.aval))}
        if table.kind is OpKind.BOUNDARY:
            return self._boundary(row, floats)
        if ir.applies_function(eqn):
            return keep(eqn, table.kind, reasons.OWN_FUNCTION())
        if not floats:
            is_complex = ir.has_complex(eqn)
            return keep(eqn, table.kind, (reasons.COMPLEX if is_complex else reasons.NO_FLOATS)())
        target, why, ordered = self.asked.target(row, table, scope)
        if target is Precision.F64:
            return in_region(self._float64(eqn, facts, table, floats, why), eqn)
        if target is Precision.F32 and self.policy.widens and any(p.is_low for p in floats):
            return widen(eqn, table, target, reasons.REMOVES_LOW())
        if eqn.primitive.name == "convert_element_type":
            return self._cast(eqn, facts.body)
        if decides:
            return keep(eqn, table.kind, reasons.PREDICATE())
        native = floats.pop() if len(floats) == 1 else None
        if native is None or native.is_low:
            return keep(eqn, table.kind, reasons.USERS_PRECISION())
        if native not in self.policy.retypes:
            return keep(eqn, table.kind, reasons.NOT_RETYPED(native))
        if not (target.is_low or (ordered and target.is_narrower_than(native))):
            return keep(eqn, table.kind, why)
        return self._lower(eqn, facts, table, target, why, ordered, adds, stored)

    def _float64(
        self, eqn: Any, facts: Facts, table: Op, floats: set[Precision], why: reasons.Reason
    ) -> Decision:
        """The decision for an equation that is to run in float64."""
        if facts.sampler or any(facts.of(v).random for v in eqn.outvars):
            return keep(eqn, table.kind, reasons.RANDOM_BITS())
        (native, *others) = floats
        if not self.policy.widens:
            if others or native is not Precision.F32:
                return keep(eqn, table.kind, reasons.USERS_PRECISION())
            if native not in self.policy.retypes:
                return keep(eqn, table.kind, reasons.NOT_RETYPED(native))
        elif floats == {Precision.F64} or (
            Precision.F64 in floats and why.decided_by is DecidedBy.SAVED_PLAN
        ):
            # float64 in a file may be that of the result of a product of mixed types
            return keep(eqn, table.kind, why)
        return widen(eqn, table, Precision.F64, why)

    def _cast(self, eqn: Any, body: int) -> Decision:
        kind, target = op(eqn.primitive.name).kind, ir.precision_of(eqn.outvars[0].aval)
        source = self.readers.widened_from(body, eqn.invars[0])
        # one reader: several would add up their cotangents in the low format
        alone = len(self.readers.of(body).get(eqn.invars[0], ())) == 1 if source else False
        if source is not None and alone and ir.precision_of(source.aval) is target:
            return Decision(Action.DROP, kind, target, (None,), reasons.EXACT_CASTS())
        return keep(eqn, kind, reasons.USERS_CAST())

    def _lower(
        self,
        eqn: Any,
        facts: Facts,
        table: Op,
        target: Precision,
        why: reasons.Reason,
        ordered: bool,
        adds: bool,
        stored: dict[Any, Precision | None],
    ) -> Decision:
        kind, name = table.kind, eqn.primitive.name
        selects = table.selects
        if selects and ordered and name in EQUALITIES:
            read = {stored.get(v) for v in float_vars(eqn) if not ir.is_literal(v)}
            selects = target not in read
        # what a rule, a region or a saved plan orders is lowered whether or not it pays
        is_asked = why.decided_by is DecidedBy.PRESET and not self._cuts
        blocked = (
            blocked_by_kind(eqn, table, ordered, adds, selects)
            or guarded(eqn, facts, target, table)
            or rounded_by_readers(eqn, self.readers.of(facts.body), table, target)
            or (is_asked and self._weighed.against(eqn, facts.body, target))
        )
        if blocked:
            return keep(eqn, kind, blocked)
        elementwise_low = OpKind.ELEMENTWISE in self.policy.orders
        if kind is OpKind.COMPUTE and not (contracts(eqn) or elementwise_low):
            return keep(eqn, kind, reasons.ELEMENTWISE_PRODUCT())
        if not (ordered or moves_low(eqn, stored, target)):
            return keep(eqn, kind, self._may_run[target])
        # (low, low) -> f32 is the fast and the accurate form of a product: its sums stay wide
        held = None if kind is OpKind.COMPUTE else target
        results = tuple(held if ir.precision_of(v.aval) else None for v in eqn.outvars)
        reason = why if ordered else reasons.MOVES_LOW()
        if any(not ir.is_literal(v) and v in facts.unchecked for v in eqn.invars):
            reason = reasons.UNCHECKED(reason)
        decision = lower(kind, target, results, reason)
        if kind is OpKind.COMPUTE:
            lhs, rhs = (self._weighed.is_recast(facts.body, v) for v in eqn.invars[:2])
            form = ProductForm(recast_in_backward=(lhs, rhs))
            decision = dataclasses.replace(decision, product=form) if lhs or rhs else decision
        return decision

    def _boundary(self, row: int, floats: set[Precision]) -> Decision:
        eqn = self.graph.eqns[row]
        if ir.is_float64(eqn):
            return keep(eqn, OpKind.BOUNDARY, reasons.FLOAT64_REGION())
        why = ir.why_opaque(eqn) or BOUNDARY.get(eqn.primitive.name)
        found = unentered(eqn, self.lowered)
        if found:
            where = f"{ir.name_of(eqn)} at {self.graph.source(row)} is not entered"
            self.notes.append(f"{where} ({why or 'it is unknown to precpass'}) and {found}")
        why = why or "a primitive unknown to precpass"
        if not floats:
            return keep(eqn, OpKind.BOUNDARY, reasons.NO_FLOATS())
        kept = keep(eqn, OpKind.BOUNDARY, reasons.EXACT_DTYPES(why))
        if self._is_wide(row):
            if eqn.primitive.name in WIDENED and floats == {Precision.F32}:
                why = reasons.NO_LOW_KERNELS()
                kept = widen(eqn, op(eqn.primitive.name), Precision.F64, why)
            return in_region(kept, eqn)
        return kept

    def _is_wide(self, row: int) -> bool:
        """Whether an equation stands in a region that is to run in float64."""
        scope = self._scope(row)
        kept = innermost_keep(scope)
        if is_fixed(scope):
            return False
        return kept is Precision.F64 if kept is not None else self.asked.in_float64(row, scope)
