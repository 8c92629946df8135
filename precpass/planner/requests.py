"""What a policy asks of each equation: by keep regions, rules, a saved plan, or its preset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.analysis.sizes import flops
from precpass.plan import reasons
from precpass.plan.file import Names, differences, rules_left_out
from precpass.policy.policy import PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.policy.primitives import Op, OpKind, op
from precpass.policy.rules import EqnView, Rule
from precpass.policy.scopes import clean_scope, innermost_keep, is_fixed, join_scopes

__all__ = ["PolicyRequests", "Request"]


class Request(NamedTuple):
    """What a policy asks for an equation.

    Attributes:
        precision: the precision in which it is to be evaluated.
        reason: where the request comes from, in words.
        is_order: whether it is an order; otherwise it is a permission, which is used if it pays.
        scaled: the format of 8 bits in which a product that is lowered is to multiply.
        largest: the largest magnitudes of such a product's operands, as the rule has them.
    """

    precision: Precision
    reason: reasons.Reason
    is_order: bool
    scaled: Precision | None = None
    largest: tuple[float | None, float | None] = (None, None)

    @property
    def decided_by(self) -> reasons.DecidedBy:
        """Where the request comes from, for code."""
        return self.reason.template.decided_by

    @classmethod
    def asking(cls, precision: Precision, reason: reasons.Reason, is_order: bool) -> Request:
        """A request for any precision. What surrounds a scaled product is as for bfloat16."""
        if precision.is_scaled:
            return cls(Precision.BF16, reason, is_order, precision)
        return cls(precision, reason, is_order)


class PolicyRequests:
    """A policy over one graph: what it asks for each equation.

    Attributes:
        graph: the graph.
        tells_equations_apart: whether the policy has rules, or a saved plan, and so may ask for
            more than the kind of an equation and the keep regions around it.

    Args:
        graph: the program, with all scopes apart that the policy tells apart (`distinguish`).
        scope: the name scopes around it.
        policy: the policy.
    """

    def __init__(self, graph: Graph, scope: str, policy: PrecisionPolicy) -> None:
        self.graph = graph
        self.tells_equations_apart = bool(policy.rules or policy.lock)
        self.follows_readers = policy.follows_readers
        self._policy = policy
        self._scope = scope
        precisions = {kind: policy.precision_for(kind) for kind in OpKind}
        self._presets = {
            kind: Request.asking(
                precision, reasons.PRESET(policy.title, kind, precision), kind in policy.orders
            )
            for kind, precision in precisions.items()
        }
        self._matched: set[Rule] = set()
        self._rules_of: dict[tuple[str, ir.Source], list[Rule]] = {}
        regions = [rule for rule in policy.rules if rule.is_region]
        self._wide_regions = regions if any(r.precision is Precision.F64 for r in regions) else []
        self._names = Names()
        self._locked: dict[int, Precision] = {}
        if policy.lock is not None:
            self._lock_rows(scope)

    def scope(self, row: int) -> str:
        """The whole name stack of an equation."""
        return join_scopes(self._scope, self.graph.scope(row))

    def is_fixed(self, row: int) -> bool:
        """Whether an equation belongs to a function with a policy of its own."""
        return is_fixed(self.scope(row))

    def request(self, row: int, table: Op, scope: str) -> Request:
        """The request for an equation: from a keep region, a rule, a saved plan, or the preset."""
        kept = innermost_keep(scope)
        if kept is not None:
            is_order = table.kind is OpKind.COMPUTE and (kept.is_low or not kept.is_format)
            return Request.asking(kept, reasons.KEEP_REGION(kept), is_order)
        rule = self.rule(row, scope)
        if rule is not None:
            is_order = not rule.is_region or table.kind is OpKind.COMPUTE
            template = reasons.RULE if rule.min_flops is None else reasons.RULE_BY_SIZE
            request = Request.asking(rule.parsed, template(repr(rule)), is_order)
            return request._replace(largest=rule.largest or (None, None))
        if (locked := self.locked(row)) is not None:
            request = Request.asking(locked, reasons.SAVED_PLAN(), True)
            by_size = self._first_rule(row, scope)
            # A saved plan names formats, and the policy has the scales.
            if by_size is not None and by_size.parsed is locked:
                request = request._replace(largest=by_size.largest or (None, None))
            return request
        return self._presets[table.kind]

    def may_store(self, row: int, low: Precision) -> bool:
        """Whether the policy allows that an equation's results are stored in a low format.

        A saved plan only says in which precision an equation is computed. It says nothing of
        storage, so the preset's answer counts.
        """
        eqn, scope = self.graph.eqns[row], self.scope(row)
        table = op(eqn.primitive.name)
        if is_fixed(scope):
            return False
        if ir.user_order(eqn) is not None or table.kind is OpKind.BOUNDARY:
            return ir.keeps_bits(eqn)
        if self.locked(row) is not None and not (innermost_keep(scope) or self.rule(row, scope)):
            return self._presets[table.kind].precision is low
        return self.request(row, table, scope).precision is low

    def _lock_rows(self, scope: str) -> None:
        graph, lock = self.graph, self._policy.lock
        assert lock is not None
        for node in graph.bodies:
            for row in range(node.start, node.stop):
                eqn = graph.eqns[row]
                atoms = (*eqn.invars, *eqn.outvars)
                if row in graph.children or not any(ir.precision_of(v.aval) for v in atoms):
                    continue
                whole = join_scopes(join_scopes(scope, node.scope), ir.scope_of(eqn))
                source = graph.source(row)
                name = self._names.add(whole, source.function, ir.name_of(eqn), source.place)
                if (precision := lock.precision_of(*name)) is not None:
                    self._locked[row] = precision

    def locked(self, row: int) -> Precision | None:
        """The precision of an equation in the saved plan; None if the plan lacks the equation."""
        return self._locked.get(row)

    def rule(self, row: int, scope: str) -> Rule | None:
        """The first rule that matches an equation.

        None if that is a rule by size, which says what gains as a preset does, and a saved plan has
        the equation.
        """
        rule = self._first_rule(row, scope)
        is_by_size = rule is not None and rule.min_flops is not None
        return None if is_by_size and self.locked(row) else rule

    def _first_rule(self, row: int, scope: str) -> Rule | None:
        if not self._policy.rules:
            return None
        eqn, source = self.graph.eqns[row], self.graph.source(row)
        place = scope, source
        if place not in self._rules_of:
            where = clean_scope(scope), source.file, source.function, source.line
            self._rules_of[place] = [r for r in self._policy.rules if r.covers(*where)]
        view = None
        for rule in self._rules_of[place]:
            if not rule.is_region or rule.min_flops is not None:
                view = view or view_of(eqn, scope, source)
                if not rule.matches(view):
                    continue
            self._matched.add(rule)
            return rule
        return None

    def reduce(self, row: int) -> str:
        """The format of sums between devices that a rule, or else the policy, asks for."""
        rule = self.rule(row, self.scope(row)) if self._policy.rules else None
        return (rule and rule.reduce) or self._policy.reduce

    def in_float64(self, row: int, scope: str) -> bool:
        """Whether an equation stands in a region that is to run in float64.

        The innermost keep region decides, or else the first matching rule that names a precision.
        """
        if is_fixed(scope):
            return False
        if (kept := innermost_keep(scope)) is not None:
            return kept is Precision.F64
        if not self._wide_regions:
            return False
        view = view_of(self.graph.eqns[row], scope, self.graph.source(row))
        rule = next((r for r in self._wide_regions if r.matches(view)), None)
        if rule is None or rule.precision is not Precision.F64:
            return False
        self._matched.add(rule)
        return True

    def unmatched(self) -> tuple[Rule, ...]:
        """The rules that matched no equation; large equations of a primitive need not be there."""
        others = (rule for rule in self._policy.rules if rule not in self._matched)
        # A rule that `calibrate` wrote stands in the place of one that asked for 8 bits.
        scaled = {rule.parsed for rule in self._matched if rule.largest}
        return tuple(
            r
            for r in others
            if set(r.patterns) != {"primitive", "min_flops"} and r.parsed not in scaled
        )

    def saved_plan_warnings(self) -> Iterator[str]:
        """Warnings of equations that the graph or the saved plan lacks, and of gaps in its file."""
        if (lock := self._policy.lock) is not None:
            yield from differences(lock, self._names, "this program", self._policy.title)
            yield from rules_left_out(lock)


def view_of(eqn: ir.Eqn, scope: str, source: ir.Source) -> EqnView:
    """The `EqnInfo` that rules see of an equation, under its whole name stack."""

    def shapes(atoms: list[Any]) -> tuple[tuple[Any, ...], ...]:
        return tuple(tuple(getattr(v.aval, "shape", ())) for v in atoms)

    def dtypes(atoms: list[Any]) -> tuple[str, ...]:
        return tuple(str(getattr(v.aval, "dtype", "")) for v in atoms)

    return EqnView(
        eqn.primitive.name,
        op(eqn.primitive.name).kind,
        clean_scope(scope),
        source.file,
        source.function,
        source.line,
        shapes(eqn.invars),
        dtypes(eqn.invars),
        shapes(eqn.outvars),
        dtypes(eqn.outvars),
        dict(ir.sorted_params(eqn)),
        flops(eqn),
    )
