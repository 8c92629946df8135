"""What a policy asks of single equations of a graph: by its rules, and by a saved plan."""

from __future__ import annotations

from collections.abc import Iterator

from precpass import jaxpr as ir
from precpass.equations import view_of
from precpass.graph import Graph, join_scopes
from precpass.lock import Names
from precpass.policy import PrecisionPolicy
from precpass.precision import Precision
from precpass.rules import Rule, clean_scope

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
