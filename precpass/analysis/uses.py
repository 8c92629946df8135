"""Def-use chains: which equations read a value.

A cast before a value with several readers is done once and shared, or once for each reader; and a
value that every reader casts to a low format anyway need not be rounded by its own equation.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph

__all__ = ["Uses"]


class Uses:
    """The readers of the values of a graph's bodies, found when a body is first asked about."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._readers: dict[int, dict[Any, list[Any]]] = {}
        self._widenings: dict[int, dict[Any, Any]] = {}
        self._cast: dict[int, frozenset[Any]] = {}

    def of(self, body: int) -> Mapping[Any, Sequence[Any]]:
        """For each variable of a body the equations that read it; None stands for the border."""
        if body not in self._readers:
            opened = ir.open_jaxpr(self.graph.bodies[body].jaxpr)
            readers = collections.defaultdict[Any, list[Any]](list)
            is_literal = ir.is_literal
            for reader in opened.eqns:
                for v in reader.invars:
                    if not is_literal(v):
                        readers[v].append(reader)
            for v in opened.outvars:
                if not is_literal(v):
                    readers[v].append(None)
            self._readers[body] = dict(readers)
        return self._readers[body]

    def cast(self, body: int) -> frozenset[Any]:
        """The variables of a body that a cast reads."""
        if body not in self._cast:
            atoms = (e.invars[0] for e in ir.casts(self.graph.bodies[body].jaxpr))
            self._cast[body] = frozenset(v for v in atoms if not ir.is_literal(v))
        return self._cast[body]

    def widened_from(self, body: int, atom: ir.Atom) -> Any:
        """The 16-bit variable that a value was widened from by a cast, or None."""
        if body not in self._widenings:
            casts = ir.casts(self.graph.bodies[body].jaxpr)
            self._widenings[body] = dict(filter(None, map(ir.widening, casts)))
        return None if ir.is_literal(atom) else self._widenings[body].get(atom)
