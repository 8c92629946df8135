"""What a saved plan says of the equations of a graph."""

from __future__ import annotations

from collections.abc import Iterator

from precpass import jaxpr as ir
from precpass.graph import Graph, join_scopes
from precpass.lock import Lock, Names
from precpass.precision import Precision

__all__ = ["Locked"]


class Locked:
    """The precisions that a lock has for the equations of a graph.

    Args:
        graph: one that tells all scopes apart.
        scope: the name scopes around it.
        lock: of the policy.
    """

    def __init__(self, graph: Graph, scope: str, lock: Lock) -> None:
        self._lock = lock
        self._names = Names()
        self._known: dict[int, Precision] = {}
        for node in graph.bodies:
            for row in range(node.start, node.stop):
                eqn = graph.eqns[row]
                atoms = (*eqn.invars, *eqn.outvars)
                if row in graph.children or not any(ir.precision_of(v.aval) for v in atoms):
                    continue
                whole = join_scopes(join_scopes(scope, node.scope), ir.scope_of(eqn))
                name = self._names.add(whole, graph.source(row).function, ir.name_of(eqn))
                if (precision := lock.of(*name)) is not None:
                    self._known[row] = precision

    def of(self, row: int) -> Precision | None:
        """The precision of an equation; None where the lock does not have it."""
        return self._known.get(row)

    def complaints(self, policy: str) -> Iterator[str]:
        """What the graph and the lock do not share (`Lock.complaints`)."""
        return self._lock.complaints(self._names.counts, "this program", policy)
