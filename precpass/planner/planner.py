"""The walk over a program that makes its plan.

Under the AutoMixed presets products run low with float32 results, and arithmetic stays as it was
written, because inside a fusion that costs nothing. What is stored in memory in 16 bits, what
crosses borders, is decided afterwards (`planner.storage.assignment`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.accumulation import LoopFeedback
from precpass.analysis.analysis import Analysis
from precpass.analysis.equations import has_low, unentered
from precpass.analysis.graph import Graph
from precpass.analysis.need import EXACT_NOWHERE, ExactProducts
from precpass.analysis.operand_origin import is_recast
from precpass.analysis.propagate import ValueRanges
from precpass.backends.backend import Backend, backend_of
from precpass.backends.cpu_transposes import eliminate_transposes
from precpass.eight_bits.products import ScaledProducts
from precpass.plan import reasons
from precpass.plan.borders import Border, across
from precpass.plan.decisions import border_of, crossing_formats, enter
from precpass.plan.plan import Action, Decision, Plan
from precpass.plan.reasons import DecidedBy
from precpass.planner.decide import decide
from precpass.planner.query import Queries, Query
from precpass.planner.requests import PolicyRequests
from precpass.planner.result_formats import with_low_results
from precpass.planner.storage.assignment import assign_storage
from precpass.policy.policy import PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind, op
from precpass.policy.rules import WIRE
from precpass.policy.scopes import innermost_keep, is_fixed, join_scopes

__all__ = ["Planner", "distinguish", "make_plan"]


def make_plan(
    jaxpr: ir.Jaxpr,
    policy: PrecisionPolicy,
    scope: str = "",
    closed_over: Sequence[Any] = (),
    border: Border = (),
    platform: str = "cpu",
    device_kind: str = "",
) -> Plan:
    """The plan for a jaxpr under a policy.

    Args:
        jaxpr: open or closed.
        policy: what to aim for.
        scope: the name scopes around it.
        closed_over: the values of its first operands, as far as it closes over them.
        border: the formats in which values cross its border, for a custom rule.
        platform: JAX's name of the platform whose compiler the plan is for. It decides the form of
            products; the program runs on every platform.
        device_kind: JAX's name of the device, which decides what the plan says of 8 bits.
    """
    graph = Graph.build(jaxpr, lambda inner: distinguish(policy, join_scopes(scope, inner)))
    analysis = Analysis(graph, closed_over)
    backend = backend_of(platform)
    if policy.results == "f32":
        backend = backend._replace(has_low_results=False)
    planner = Planner(analysis, policy, scope, backend, device_kind)
    plan, inner = planner.root(border), backend.has_low_results
    if inner or policy.rules or policy.lock or policy.reduce in ("bf16", WIRE):
        return with_low_results(plan, analysis, planner.requests.reduce, inner=inner)
    return plan


def distinguish(policy: PrecisionPolicy, scope: str) -> Hashable:
    """A key that is equal for two scopes if the policy cannot tell them apart."""
    if policy.lock is not None or any(
        rule.scope or rule.module or rule.where for rule in policy.rules
    ):
        return scope
    return innermost_keep(scope), is_fixed(scope)


class Planner:
    """One run of the planner over a program.

    Args:
        analysis: of the program.
        policy: what to aim for.
        scope: the name scopes around the program.
        backend: the compiler that the plan is for.
        device_kind: as for `make_plan`.
    """

    def __init__(
        self,
        analysis: Analysis,
        policy: PrecisionPolicy,
        scope: str,
        backend: Backend,
        device_kind: str,
    ) -> None:
        self.analysis = analysis
        self.graph = analysis.graph
        self.policy = policy
        self.scope = scope
        self._backend = backend
        self._scaled = ScaledProducts(self.graph, policy, backend, device_kind)
        self.notes: list[str] = []
        self.lowered: dict[Any, ir.Contents] = {}
        self.shared: dict[Any, Plan] = {}
        self.memo: dict[Any, Plan] = {}
        self.requests = PolicyRequests(self.graph, scope, policy)
        # Unless the policy orders more than products, no equation that adds is lowered.
        orders_more = bool(policy.orders - {OpKind.COMPUTE})
        self._may_lower_sums = orders_more or self.requests.tells_equations_apart
        # If the policy orders elementwise work, it orders storage too, and no costs decide it.
        compute = policy.precision_for(OpKind.COMPUTE)
        self._assigns_storage = compute.is_low and OpKind.ELEMENTWISE not in policy.orders
        self._decide = functools.cache(functools.partial(decide, policy=policy))

    def root(self, border: Border) -> Plan:
        """The plan of the outermost jaxpr, with the warnings that planning gave rise to."""
        exact = EXACT_NOWHERE
        if self.policy.follows_readers:
            exact = self.analysis.exact_needs.products
        plan = self.plan(self.analysis.facts, exact, (), decides=False, border=border)
        if self._assigns_storage and plan.lowers:
            low = self.policy.precision_for(OpKind.COMPUTE)
            plan = assign_storage(plan, self.analysis, self.requests, low, self._backend)
        notes = dict.fromkeys((*self.notes, *self.requests.saved_plan_warnings()))
        saved, unmatched = self.policy.lock, self.requests.unmatched()
        costs = f"in the saved plan: {saved.costs}" if saved and saved.costs else ""
        return dataclasses.replace(plan, notes=tuple(notes), unmatched=unmatched, costs=costs)

    def plan(
        self,
        facts: ValueRanges,
        exact: ExactProducts,
        carried: LoopFeedback,
        decides: bool,
        border: Border,
    ) -> Plan:
        """The plan of one body at one class of call sites.

        Args:
            facts: of the body there.
            exact: its products whose results are needed exactly there.
            carried: the results and operands through which a loop around the body accumulates.
            decides: whether it computes a loop's predicate.
            border: the formats in which values cross its border.
        """
        key = (id(facts), id(exact), carried, decides, border)
        if key not in self.memo:
            node, analysis = self.graph.bodies[facts.body], self.analysis
            decisions = self._decisions(facts, exact, carried, decides)
            if not self.policy.widens:
                readers = functools.partial(analysis.graph.readers, facts.body)
                decisions = eliminate_transposes(node, decisions, readers)
            plan = Plan(tuple(decisions), border_of(node.jaxpr, border))
            # equal plans of one jaxpr are one object, so that it is rewritten and lowered once
            self.memo[key] = self.shared.setdefault((facts.body, plan), plan)
        return self.memo[key]

    def _decisions(
        self, facts: ValueRanges, exact: ExactProducts, carried: LoopFeedback, decides: bool
    ) -> list[Decision]:
        node, children = self.graph.bodies[facts.body], self.graph.children
        adds = self.analysis.additive.accumulating(node.jaxpr, carried)
        stored: dict[Any, Precision | None] = {}
        decisions: list[Decision] = []
        queries = Queries(facts, exact, self.requests, self.scope, decides_loop=decides)
        for at, eqn in enumerate(self.graph.eqns[node.start : node.stop]):
            row, is_added = node.start + at, at in adds
            if row in children:
                decision = self._entered(row, facts, exact, decides, adds.get(at))
            else:
                query = queries.query_of(row, eqn, stored, accumulates=is_added)
                decision = self._decide(query)
                if decision.kind is OpKind.COMPUTE:
                    self._note_float64(row, query)
                    decision = self._product(eqn, facts.body, decision)
                elif decision.kind is OpKind.BOUNDARY:
                    self._note_products_inside(row, query)
            decisions.append(decision)
            if decision.converts:
                stored.update(zip(eqn.outvars, decision.stored, strict=True))
        return decisions

    # ------------------------------------------------------------ equations with bodies

    def _entered(
        self,
        row: int,
        facts: ValueRanges,
        exact: ExactProducts,
        decides: bool,
        fed_back: Sequence[LoopFeedback] | None,
    ) -> Decision:
        """The decision for an equation with bodies, of which each is planned.

        Args:
            row: the equation's.
            facts: of the body around it.
            exact: that body's products whose results are needed exactly.
            decides: whether it computes a loop's predicate.
            fed_back: for each of its bodies, which results a loop around it feeds back into which
                operands; None if the equation adds to nothing that a loop carries.
        """
        eqn, scope = self.graph.eqns[row], self.requests.scope(row)
        # With x64 off a float64 body is evaluated as one span, in which effects would be lost.
        survives = ir.in_x64() or not ir.effects_of(eqn)
        wide = self.requests.in_float64(row, scope) and survives
        is_kept = is_fixed(scope) or ir.keeps_border(eqn)
        border = () if is_kept else crossing_formats(self.policy, wide)
        inner: list[Plan] = []
        children = zip(self.graph.children[row], facts.inner[row], strict=True)
        for at, ((body, _), inside) in enumerate(children):
            feedback: LoopFeedback = ()
            if fed_back is not None:
                feedback = fed_back[at]
            elif body.carry and self._may_lower_sums:
                feedback = self.analysis.additive.cyclic(body)
            needed = exact.inside(row, at)
            inner.append(self.plan(inside, needed, feedback, decides or body.decides, border))
        # JAX traces the rules when it differentiates. Who reads their results is unknown then.
        plans_rules = (
            ir.has_rules(eqn) and not exact.why_exact(row) and self._plans_rules(eqn, scope)
        )
        rules = border if plans_rules else None
        natives = [ir.parts_of(v.aval) for v in eqn.outvars]
        stored = tuple(None if (p := across(border, n)) is n else p for n in natives)
        kind = op(eqn.primitive.name).kind
        return enter(kind, stored, tuple(inner), rules, in_float64_span=wide)

    def _plans_rules(self, eqn: ir.Eqn, scope: str) -> bool:
        """Whether an equation's custom rules are planned; that happens when JAX traces them."""
        if is_fixed(scope):
            return False
        asks = self.policy.lowers or self.policy.rules or innermost_keep(scope)
        return bool(asks or (self.policy.widens and has_low(eqn)))

    # ------------------------------------------------------------ products

    def _product(self, eqn: ir.Eqn, body: int, decision: Decision) -> Decision:
        """The decision for a product, with the form that it has."""
        if decision.action is Action.MULTIPLY:
            return self._multiplied(eqn, decision)
        if decision.action is not Action.LOWER or decision.compute is None:
            return decision
        if decision.product.scaled is not None:
            decision = self._scaled.planned(eqn, body, decision)
        lhs, rhs = (is_recast(self.graph, body, v) for v in eqn.invars[:2])
        if not (lhs or rhs):
            return decision
        form = decision.product._replace(recast_in_backward=(lhs, rhs))
        return dataclasses.replace(decision, product=form)

    def _multiplied(self, eqn: ir.Eqn, decision: Decision) -> Decision:
        """The decision with what runs instead, where the platform does not multiply so."""
        assert decision.compute is not None
        is_dot = ir.dot_numbers(eqn) is not None
        instead = decision.compute.runs_as(self._backend.name, is_dot=is_dot)
        if not instead:
            return decision
        device = self._backend.name.upper()
        reason = decision.reason.plus(reasons.RUNS_AS, decision.compute, device, instead)
        return dataclasses.replace(decision, reason=reason)

    def _note_float64(self, row: int, query: Query) -> None:
        """Warns of a float64 product that the user orders low, and the policy leaves alone."""
        request = query.place.request
        formats = query.formats
        if request is None or len(formats) != 1 or formats & self.policy.retypes:
            return
        is_asked = request.decided_by in (DecidedBy.KEEP, DecidedBy.RULE)
        if is_asked and request.precision.is_low and not any(p.is_low for p in formats):
            where = f"{ir.name_of(self.graph.eqns[row])} at {self.graph.source(row)}"
            self.notes.append(
                f"{where} stays in {query.widest}: {request.reason} asks for {request.precision}, "
                f"and {self.policy.title} changes no {query.widest} values. Allow it by "
                "policy.with_retypes('f64', 'f32', 'bf16', 'f16'), or cast the operands to float32"
            )

    def _note_products_inside(self, row: int, query: Query) -> None:
        """Warns of products inside an equation whose body the pass does not enter."""
        traits, eqn = query.traits, self.graph.eqns[row]
        if query.place.is_fixed or traits.is_float64_span or traits.serves_product:
            return
        if products_inside := unentered(eqn, self.lowered):
            where = f"{ir.name_of(eqn)} at {self.graph.source(row)} is not entered"
            why = traits.why_boundary or "it is unknown to precpass"
            self.notes.append(f"{where} ({why}) and {products_inside}")
