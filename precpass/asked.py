"""What a policy asks of single equations of a graph: by its rules, and by a saved plan."""

from __future__ import annotations

from collections.abc import Iterator

from precpass import jaxpr as ir
from precpass import reasons
from precpass.equations import view_of
from precpass.graph import Graph, join_scopes
from precpass.lock import Names
from precpass.opkinds import Op, OpKind
from precpass.policy import PrecisionPolicy
from precpass.precision import Precision
from precpass.rules import Rule, clean_scope, innermost_keep

__all__ = ["Asked"]


class Asked:
    """The rules and the lock of a policy over one graph; false where it has neither.

    Args:
        graph: one that tells all scopes apart which these can.
        scope: the name scopes around it.
        policy: the policy.
    """

    def __init__(self, graph: Graph, scope: str, policy: PrecisionPolicy) -> None:
        self._graph = graph
        self._policy = policy
        given = {kind: policy.precision_for(kind) for kind in OpKind}
        self._presets = {
            kind: (precision, reasons.PRESET(policy.name, kind, precision), kind in policy.orders)
            for kind, precision in given.items()
        }
        self._matched: set[Rule] = set()
        self._rules_of: dict[tuple[str, ir.Source], list[Rule]] = {}
        regions = [rule for rule in policy.rules if rule.is_region]
        self._wide_regions = regions if any(r.precision is Precision.F64 for r in regions) else []
        self._names = Names()
        self._locked: dict[int, Precision] = {}
        if policy.lock is not None:
            self._lock_rows(scope)

    def __bool__(self) -> bool:
        return bool(self._policy.rules or self._policy.lock)

    def target(self, row: int, table: Op, scope: str) -> tuple[Precision, reasons.Reason, bool]:
        """The precision that is asked for, by whom, and whether as an order."""
        kept = innermost_keep(scope)
        if kept is not None:
            return kept, reasons.KEEP_REGION(kept), table.kind is OpKind.COMPUTE and kept.is_low
        rule = self.rule(row, scope)
        if rule is not None:
            precision = Precision.parse(rule.precision)
            whole = not rule.is_region or table.kind is OpKind.COMPUTE
            return precision, reasons.RULE(repr(rule)), whole
        if (locked := self.locked(row)) is not None:
            return locked, reasons.SAVED_PLAN(), True
        return self._presets[table.kind]

    def permits(self, row: int, table: Op, scope: str, low: Precision) -> bool:
        """Whether what an equation makes may be stored low, whatever it is computed in.

        A saved plan has what equations are computed in alone.
        """
        if self.locked(row) is not None and not (innermost_keep(scope) or self.rule(row, scope)):
            return self._presets[table.kind][0] is low
        return self.target(row, table, scope)[0] is low

    def _lock_rows(self, scope: str) -> None:
        graph, lock = self._graph, self._policy.lock
        assert lock is not None
        for node in graph.bodies:
            for row in range(node.start, node.stop):
                eqn = graph.eqns[row]
                atoms = (*eqn.invars, *eqn.outvars)
                if row in graph.children or not any(ir.precision_of(v.aval) for v in atoms):
                    continue
                whole = join_scopes(join_scopes(scope, node.scope), ir.scope_of(eqn))
                name = self._names.add(whole, graph.source(row).function, ir.name_of(eqn))
                if (precision := lock.of(*name)) is not None:
                    self._locked[row] = precision

    def locked(self, row: int) -> Precision | None:
        """The precision of an equation in the saved plan; None where that does not have it."""
        return self._locked.get(row)

    def rule(self, row: int, scope: str) -> Rule | None:
        """The first rule that matches an equation."""
        if not self._policy.rules:
            return None
        eqn, source = self._graph.eqns[row], self._graph.source(row)
        place = scope, source
        if place not in self._rules_of:
            where = clean_scope(scope), source.file, source.function, source.line
            self._rules_of[place] = [r for r in self._policy.rules if r.covers(*where)]
        view = None
        for rule in self._rules_of[place]:
            if not rule.is_region:
                view = view or view_of(eqn, scope, source)
                if not rule.matches(view):
                    continue
            self._matched.add(rule)
            return rule
        return None

    def in_float64(self, row: int, scope: str) -> bool:
        """Whether the first region of the rules that an equation stands in is one in float64."""
        if not self._wide_regions:
            return False
        view = view_of(self._graph.eqns[row], scope, self._graph.source(row))
        rule = next((r for r in self._wide_regions if r.matches(view)), None)
        if rule is None or rule.precision is not Precision.F64:
            return False
        self._matched.add(rule)
        return True

    def unmatched(self) -> tuple[Rule, ...]:
        """The rules that matched nothing of what was asked."""
        return tuple(rule for rule in self._policy.rules if rule not in self._matched)

    def complaints(self) -> Iterator[str]:
        """What the graph and the saved plan do not share, and what the plan's file is without."""
        if (lock := self._policy.lock) is not None:
            yield from lock.complaints(self._names.counts, "this program", self._policy.name)
            yield from lock.rules_left_out()
