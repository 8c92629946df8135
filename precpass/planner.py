"""Graph, facts and policy in; `Plan` out.

The simple planner: products run low with wide results, the rest stays as it
was written unless the policy orders otherwise. On CPU it is the fastest rule
measured; elsewhere XLA fuses the widening.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from precpass import jaxpr as ir
from precpass.accumulate import Pairs, accumulating, cyclic_pairs
from precpass.equations import (
    border_is_low,
    contracts,
    float_vars,
    guarded,
    has_low,
    keep,
    product_names,
    stored_precision,
    view_of,
    widen,
)
from precpass.facts import Facts, propagate
from precpass.graph import Graph, join_scopes
from precpass.opkinds import Op, OpKind, op
from precpass.plan import Action, Decision, Plan
from precpass.policy import PrecisionPolicy
from precpass.precision import Precision
from precpass.rules import Rule, innermost_keep

__all__ = ["Planner", "distinguish", "make_plan", "unchanged_plan"]


def make_plan(jaxpr: Any, policy: PrecisionPolicy, scope: str = "", hoisted: int = 0) -> Plan:
    """The plan for a jaxpr under a policy.

    Args:
        jaxpr: open or closed.
        policy: what to aim for.
        scope: the name scopes around it.
        hoisted: how many of its first operands are constants of an outer trace.
    """
    graph = Graph.build(jaxpr, lambda inner: distinguish(policy, join_scopes(scope, inner)))
    return Planner(graph, propagate(graph, hoisted), policy, scope).root()


def unchanged_plan(jaxpr: Any) -> Plan:
    """The plan of a pass that is switched off."""
    eqns = ir.open_jaxpr(jaxpr).eqns
    off = "precpass is switched off"
    return Plan(tuple(keep(eqn, op(eqn.primitive.name).kind, off) for eqn in eqns))


def distinguish(policy: PrecisionPolicy, scope: str) -> Hashable:
    """What of a scope the policy's rules can tell apart."""
    if any(rule.scope or rule.where for rule in policy.rules):
        return scope
    return innermost_keep(scope)


_WITH_RULES = frozenset(
    ("custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "linear_call", "remat_opt")
)


class Planner:
    """One run of the planner over a graph."""

    def __init__(self, graph: Graph, facts: Facts, policy: PrecisionPolicy, scope: str) -> None:
        self.graph = graph
        self.facts = facts
        self.policy = policy
        self.scope = scope
        self.matched: set[Rule] = set()
        self.notes: list[str] = []
        self.shared: dict[Any, Plan] = {}
        self.memo: dict[Any, Plan] = {}
        # without an order beyond products, no equation that adds is lowered
        self._orders = bool(policy.rules or policy.orders - {OpKind.COMPUTE})
        self.readers: dict[int, dict[Any, list[Any]]] = {}
        self.widenings: dict[int, dict[Any, Any]] = {}

    def root(self) -> Plan:
        """The plan of the outermost jaxpr, with what was noticed on the way."""
        plan = self.plan(self.facts, frozenset(), decides=False)
        unmatched = tuple(rule for rule in self.policy.rules if rule not in self.matched)
        return Plan(plan.decisions, False, tuple(dict.fromkeys(self.notes)), unmatched)

    def plan(self, facts: Facts, carried: Pairs, decides: bool) -> Plan:
        """The plan of one body at one class of call sites.

        Args:
            facts: of the body there.
            carried: pairs (invar, outvar) through which a loop around it accumulates.
            decides: whether it computes a loop's predicate.
        """
        key = (id(facts), carried, decides)
        if key not in self.memo:
            node = self.graph.bodies[facts.body]
            adds = accumulating(node.jaxpr, carried) if carried else frozenset[int]()
            stored: dict[Any, Precision] = {}
            decisions: list[Decision] = []
            for row in range(node.start, node.stop):
                eqn = self.graph.eqns[row]
                if row in self.graph.children:
                    decision = self._enter(row, facts, decides, row - node.start in adds, carried)
                else:
                    decision = self._leaf(row, facts, decides, row - node.start in adds, stored)
                decisions.append(decision)
                pairs = zip(eqn.outvars, decision.stored, strict=True)
                stored.update((v, p) for v, p in pairs if p is not None)
            widens = self.policy.widens and border_is_low(node.jaxpr)
            plan = Plan(tuple(decisions), widens)
            # equal plans of one jaxpr are one object, so that it is rewritten and lowered once
            self.memo[key] = self.shared.setdefault((facts.body, plan), plan)
        return self.memo[key]

    def _enter(self, row: int, facts: Facts, decides: bool, adds: bool, carried: Pairs) -> Decision:
        eqn = self.graph.eqns[row]
        inner: list[Plan] = []
        for (body, _), inside in zip(self.graph.children[row], facts.inner[row], strict=True):
            pairs = (
                cyclic_pairs(body) if body.carry and self._orders else frozenset[tuple[int, int]]()
            )
            if adds:
                pairs |= {
                    (i, o) for i in range(len(body.operands)) for o in range(len(body.results))
                }
            plan = self.plan(inside, pairs, decides or body.decides)
            if body.fixed and plan.widens:
                plan = Plan(plan.decisions)
            inner.append(plan)
        rules = eqn.primitive.name in _WITH_RULES and self._plans_rules(row)
        stored = tuple(
            Precision.F32
            if any(p.widens for p in inner) and (ir.precision_of(v.aval) or Precision.F32).is_low
            else None
            for v in eqn.outvars
        )
        kind = op(eqn.primitive.name).kind
        return Decision(Action.ENTER, kind, None, stored, "entered", tuple(inner), rules)

    def _plans_rules(self, row: int) -> bool:
        eqn = self.graph.eqns[row]
        asks = self.policy.lowers or self.policy.rules or innermost_keep(self._scope(row))
        return bool(asks or (self.policy.widens and has_low(eqn)))

    def _scope(self, row: int) -> str:
        return join_scopes(self.scope, self.graph.scope(row))

    # ------------------------------------------------------------ leaves

    def _leaf(
        self, row: int, facts: Facts, decides: bool, adds: bool, stored: dict[Any, Precision]
    ) -> Decision:
        eqn = self.graph.eqns[row]
        table = op(eqn.primitive.name)
        if self.policy.widens and (ir.is_carrier(eqn) or ir.is_detach(eqn)):
            why = "the product it serves is wide again"
            return Decision(Action.DROP, table.kind, Precision.F32, (Precision.F32,), why)
        floats = {p for v in (*eqn.invars, *eqn.outvars) if (p := ir.precision_of(v.aval))}
        if table.kind is OpKind.BOUNDARY:
            return self._boundary(row, floats)
        if not floats:
            return keep(eqn, table.kind, "no floating-point values")
        target, why, ordered = self._target(row, table)
        if target is Precision.F32 and self.policy.widens and any(p.is_low for p in floats):
            return widen(eqn, table, Precision.F32, "AlwaysF32 removes low precision")
        if eqn.primitive.name == "convert_element_type":
            return self._cast(eqn, facts.body)
        if decides:
            return keep(eqn, table.kind, "decides whether a loop goes on: computed wide")
        native = floats.pop() if len(floats) == 1 else None
        if native is None or native.is_low:
            return keep(eqn, table.kind, "the user's own precision")
        if native not in self.policy.retypes:
            return keep(eqn, table.kind, f"{native} is not in the policy's retypes")
        if target.dtype.itemsize > native.dtype.itemsize:
            return widen(eqn, table, target, why)
        if not target.is_low:
            return keep(eqn, table.kind, why)
        return self._lower(eqn, facts, table, target, why, ordered, adds, stored)

    def _cast(self, eqn: Any, body: int) -> Decision:
        kind, target = op(eqn.primitive.name).kind, ir.precision_of(eqn.outvars[0].aval)
        source = self._widened_from(body, eqn.invars[0])
        # one reader: several would add up their cotangents in the low format
        alone = len(self._readers(body).get(eqn.invars[0], ())) == 1 if source else False
        if source is not None and alone and ir.precision_of(source.aval) is target:
            why = "narrows what was just widened: exact without both casts"
            return Decision(Action.DROP, kind, target, (None,), why)
        return keep(eqn, kind, "a cast that the user wrote")

    def _lower(
        self,
        eqn: Any,
        facts: Facts,
        table: Op,
        target: Precision,
        why: str,
        ordered: bool,
        adds: bool,
        stored: dict[Any, Precision],
    ) -> Decision:
        kind, name = table.kind, eqn.primitive.name
        blocked = (
            self._blocked(eqn, table, ordered, adds)
            or guarded(eqn, facts, target, table)
            or self._rounded_by_readers(eqn, facts, table, target)
        )
        if blocked:
            return keep(eqn, kind, blocked)
        elementwise_low = OpKind.ELEMENTWISE in self.policy.orders
        if kind is OpKind.COMPUTE and not (contracts(eqn) or elementwise_low):
            return keep(eqn, kind, "an elementwise product: nothing is contracted")
        moves_low = (
            kind is OpKind.DATA_MOVEMENT
            and not table.spreads
            and all(not ir.is_literal(v) and stored.get(v) is target for v in float_vars(eqn))
        )
        if not (ordered or moves_low):
            return keep(eqn, kind, f"may run in {target}; wide costs nothing inside a fusion")
        held = stored_precision(name, target, table)
        results = tuple(held if ir.precision_of(v.aval) else None for v in eqn.outvars)
        reason = "moves a low value" if not ordered else why
        if any(not ir.is_literal(v) and v in facts.unchecked for v in eqn.invars):
            reason += "; a constant of an outer trace is unchecked"
        return Decision(Action.LOWER, kind, target, results, reason)

    def _blocked(self, eqn: Any, table: Op, ordered: bool, adds: bool) -> str | None:
        if table.selects:
            return "selects or compares: runs in its widest operand's precision"
        if adds:
            return "accumulates in a loop's carry"
        if table.wide and not ordered:
            return "of the full-precision set"
        order = ir.user_order(eqn)
        return f"the user's order: {order}" if order else None

    def _rounded_by_readers(
        self, eqn: Any, facts: Facts, table: Op, target: Precision
    ) -> str | None:
        """Whether there is nothing to do because every reader rounds.

        Rounding commutes with movement, and a sum is rounded once anyway. A
        program that was rewritten before has this form.
        """
        moves = table.kind is OpKind.DATA_MOVEMENT or eqn.primitive.name == "stop_gradient"
        moves = moves or not float_vars(eqn)
        if not (moves or (table.accumulates and table.kind is OpKind.REDUCTION)):
            return None
        readers = self._readers(facts.body)
        rounds = all(
            r is not None
            and r.primitive.name == "convert_element_type"
            and Precision.of(r.params["new_dtype"]) is target
            for v in eqn.outvars
            for r in readers.get(v, ())
        )
        read = any(readers.get(v) for v in eqn.outvars)
        return f"every reader rounds to {target}" if rounds and read else None

    def _widened_from(self, body: int, atom: Any) -> Any:
        """The low variable of which a value is a widening cast, or None."""
        if body not in self.widenings:
            opened = ir.open_jaxpr(self.graph.bodies[body].jaxpr)
            self.widenings[body] = dict(filter(None, map(ir.widening, opened.eqns)))
        return None if ir.is_literal(atom) else self.widenings[body].get(atom)

    def _readers(self, body: int) -> dict[Any, list[Any]]:
        """Of each variable of a body: the equations that read it, None for its border."""
        if body not in self.readers:
            opened = ir.open_jaxpr(self.graph.bodies[body].jaxpr)
            found: dict[Any, list[Any]] = {}
            for reader in (*opened.eqns, None):
                for v in opened.outvars if reader is None else reader.invars:
                    if not ir.is_literal(v):
                        found.setdefault(v, []).append(reader)
            self.readers[body] = found
        return self.readers[body]

    def _boundary(self, row: int, floats: set[Precision]) -> Decision:
        eqn = self.graph.eqns[row]
        products = [name for j in ir.hidden_jaxprs(eqn) for name in product_names(j)]
        if products:
            self.notes.append(
                f"{ir.name_of(eqn)} at {self.graph.source(row)} is not entered and contains "
                f"{len(products)} product(s): they keep their precision"
            )
        reason = "keeps its exact dtypes" if floats else "no floating-point values"
        return keep(eqn, OpKind.BOUNDARY, reason)

    def _target(self, row: int, table: Op) -> tuple[Precision, str, bool]:
        """The precision that is asked for, by whom, and whether as an order."""
        scope = self._scope(row)
        kept = innermost_keep(scope)
        if kept is not None:
            return kept, f"keep({str(kept)!r})", table.kind is OpKind.COMPUTE or not kept.is_low
        rule = self._rule(row, scope)
        if rule is not None:
            precision = Precision.parse(rule.precision)
            whole = not rule.is_region or table.kind is OpKind.COMPUTE or not precision.is_low
            return precision, repr(rule), whole
        precision = self.policy.precision_for(table.kind)
        return (
            precision,
            f"{self.policy.name}: {table.kind} in {precision}",
            table.kind in self.policy.orders,
        )

    def _rule(self, row: int, scope: str) -> Rule | None:
        if not self.policy.rules:
            return None
        view = view_of(self.graph.eqns[row], scope, self.graph.source(row))
        for rule in self.policy.rules:
            if rule.matches(view):
                self.matched.add(rule)
                return rule
        return None
