"""Which of a program's values are one value, and which of them are weights.

A value that is moved, cast or handed across the border of a body stays the same value: all of these
are one class. A weight is a class whose values the program is given and does not compute; it may
stack them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.equations import moved_operand
from precpass.analysis.graph import Graph

__all__ = ["SameValues"]

_ASSEMBLING = frozenset(("concatenate", "stack", "broadcast_in_dim"))
"""The equations by which a program makes a stack of weights. JAX's own `stack` is new in 0.12;
before, it is a `concatenate` of what `broadcast_in_dim` makes. What a `dynamic_slice` takes from a
stack is left out: it may as well be a batch of the data."""


class SameValues:
    """The classes of a program's values.

    Args:
        graph: the program.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def of_operands(self, body: int, eqn: ir.Eqn) -> tuple[int, int]:
        """The classes of a product's two operands; -1 for a literal."""
        lhs, rhs = (
            -1 if ir.is_literal(v) else self._class(self.index[body, v]) for v in eqn.invars
        )
        return lhs, rhs

    @functools.cached_property
    def index(self) -> dict[tuple[int, Any], int]:
        """The number of each value, by its body and variable."""
        return {(body, var): at for at, (var, body) in enumerate(self.graph.values)}

    @functools.cached_property
    def _parents(self) -> list[int]:
        """The forest of classes: values that are one value, moved, cast or across borders.

        A value that is computed is another one in each call of a body that is called several times.
        """
        given = self._given(self._joined(lambda _a, _b: True))
        return self._joined(lambda a, b: given[a] or not self._is_shared(a, b))

    def _joined(self, joins: Callable[[int, int], bool]) -> list[int]:
        parents = list(range(len(self.graph.values)))
        for a, b in self.graph.links.tolist():
            if joins(a, b):
                parents[_top(parents, a)] = _top(parents, b)
        for at, (_, body) in enumerate(self.graph.values):
            if (source := self.source(at)) is not None and not ir.is_literal(source):
                parents[_top(parents, at)] = _top(parents, self.index[body, source])
        return parents

    def _is_shared(self, a: int, b: int) -> bool:
        """Whether two values are one across the border of a body that is called several times."""
        pair = self.graph.values[a][1], self.graph.values[b][1]
        return any(
            len(self._callers[inner]) > 1 and outer in self._callers[inner]
            for inner, outer in (pair, pair[::-1])
        )

    @functools.cached_property
    def _callers(self) -> list[list[int]]:
        """For each body the bodies of the equations that call it, one for each equation."""
        return [[self._body_of(row) for row, _ in rows] for rows in self.graph.callers]

    def _given(self, parents: list[int]) -> list[bool]:
        """For each value whether its class has none that an equation computes."""
        computed, assembled = set[int](), list[tuple[int, set[int]]]()
        for at, (_, body) in enumerate(self.graph.values):
            row = int(self.graph.producers[at])
            if row < 0 or row in self.graph.children or ir.dequantized_from(self.graph.eqns[row]):
                continue
            if self.source(at) is None and row not in self._constant:
                eqn = self.graph.eqns[row]
                if eqn.primitive.name not in _ASSEMBLING:
                    computed.add(_top(parents, at))
                    continue
                variables = [v for v in eqn.invars if not ir.is_literal(v)]
                operands = {_top(parents, self.index[body, v]) for v in variables}
                assembled.append((_top(parents, at), operands))
        known = -1
        while known < len(computed):  # what is assembled may be assembled once more
            known = len(computed)
            computed.update(made for made, operands in assembled if operands & computed)
        return [_top(parents, at) not in computed for at in range(len(self.graph.values))]

    @functools.cached_property
    def _constant(self) -> set[int]:
        """The rows that read no value of the program.

        A branch returns such a value in the place of what only another branch computes, so it does
        not tell whether the other's is a weight.
        """
        rows, made = set[int](), set[tuple[int, Any]]()
        for row, eqn in enumerate(self.graph.eqns):
            body = self._body_of(row)
            reads = [(body, v) for v in eqn.invars if not ir.is_literal(v)]
            if row not in self.graph.children and made.issuperset(reads):
                rows.add(row)
                made.update((body, v) for v in eqn.outvars)
        return rows

    def _class(self, value: int) -> int:
        return _top(self._parents, value)

    def source(self, value: int) -> Any:
        """The operand that a value is moved or cast from; None if something computes it."""
        row = int(self.graph.producers[value])
        if row < 0 or row in self.graph.children:
            return None
        eqn = self.graph.eqns[row]
        # The last two mark for a `shard_map` that a value may differ between shards.
        is_same = eqn.primitive.name in ("convert_element_type", "pvary", "pcast")
        return eqn.invars[0] if is_same else moved_operand(eqn)

    @functools.cached_property
    def weights(self) -> set[int]:
        """The classes whose values are given and not computed."""
        given = self._given(self._joined(lambda _a, _b: True))
        arguments = {(0, v) for v in ir.open_jaxpr(self.graph.bodies[0].jaxpr).invars}
        for body, node in enumerate(self.graph.bodies):
            arguments.update((body, v) for v in ir.open_jaxpr(node.jaxpr).constvars)
        for row, eqn in enumerate(self.graph.eqns):
            assembles = eqn.primitive.name in _ASSEMBLING and row not in self._constant
            if assembles or ir.dequantized_from(eqn):
                arguments.update((self._body_of(row), v) for v in eqn.outvars)
        return {
            self._class(at)
            for at, (var, body) in enumerate(self.graph.values)
            if given[at] and (body, var) in arguments
        }

    def _body_of(self, row: int) -> int:
        return int(self.graph.body[row])


def _top(parents: list[int], value: int) -> int:
    """The value that stands for a value's class."""
    while parents[value] != value:
        parents[value] = value = parents[parents[value]]
    return value
