"""What storing a class of values costs, and the cheapest way to store it.

Costs are bytes that one run of the program moves to and from memory: for what loops stack and
carry, for what the forward pass saves for the backward pass, and for casts. A value inside a
fusion costs nothing in any format. The bytes are whole numbers, so sums of them are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

from precpass.analysis.graph import BodyNode, Graph, trips_of
from precpass.analysis.operand_origin import is_made_in
from precpass.analysis.sizes import nbytes
from precpass.planner.storage.value_classes import Place, StorageClass, StorageClasses
from precpass.policy.primitives import OpKind, op

__all__ = ["StorageCosts"]

_CACHED = 0.25
"""The time to read a byte that was just written, relative to one from memory (assumed)."""


class StorageCosts:
    """The costs of storing the values of a program.

    Args:
        graph: the program.
        classes: of its values.
    """

    def __init__(self, graph: Graph, classes: StorageClasses) -> None:
        self.graph = graph
        self.classes = classes
        self._trips_of: dict[int, float] = {}

    def cheapest(self, values: StorageClass, *, may_round: bool) -> tuple[bool, bool]:
        """The cheapest way to store a class; of equally cheap ones, that which changes least.

        Args:
            values: the class.
            may_round: whether it may be rounded where it is defined.

        Returns:
            Whether it is rounded where it is defined and stored in 16 bits, and whether it crosses
            borders in 16 bits: in its place then, and else in copies beside it.
        """
        crosses = bool(values.crossed)
        if not may_round and not (crosses and self._repeats(values)):
            return False, False
        traffic = sum(map(_traffic, values.places))
        costs = {(False, False): traffic + self._copying(values)}
        if crosses:
            costs[False, True] = traffic + self._beside(values)
        if may_round:
            costs[True, crosses] = traffic / 2 + self._rounding(values)
        return min(costs, key=costs.__getitem__)

    def _repeats(self, values: StorageClass) -> bool:
        """Whether a loop would cast a value again that was made before the loop.

        A 16-bit copy that crosses the border saves these casts. Elsewhere such a copy would only
        stay in memory from its first reader to its last.
        """
        begins = [self._trips(int(self.graph.body[row])) for row, _ in values.defined]
        first = 1.0 if values.given_bytes or not begins else min(begins)
        return any(self._trips(body) > first for body in values.low_readers)

    def _trips(self, body: int) -> float:
        """How often the loops around a body run it, counted at its first caller."""
        chain: list[BodyNode] = []
        node: BodyNode | None = self.graph.bodies[body]
        while node is not None and id(node) not in self._trips_of:
            chain.append(node)
            node = node.around
        for inner in reversed(chain):
            outside = self._trips_of[id(inner.around)] if inner.around is not None else 1.0
            trips = trips_of(inner) if inner.caller is not None else 1.0
            self._trips_of[id(inner)] = outside * trips
        return self._trips_of[id(self.graph.bodies[body])]

    def _rounding(self, values: StorageClass) -> float:
        """The bytes of rounding the results of products; in any other fusion it is free."""
        result_bytes = (
            nbytes(self.graph.eqns[row].outvars[k].aval) * self._calls(row)
            for row, k in values.defined
            if not self._rounds_for_free(row)
        )
        return _CACHED * 1.5 * sum(result_bytes)

    def _beside(self, values: StorageClass) -> float:
        """The bytes of 16-bit copies beside a class: of its casts, and the copies' own traffic."""
        defined_bytes = sum(
            nbytes(self.graph.eqns[row].outvars[k].aval) * self._calls(row)
            for row, k in values.defined
        )
        # each slice of a stack is copied, and the copy is read afterwards
        copies = sum(p.nbytes if p.kind == "sliced" else p.nbytes / 2 for p in values.places)
        return 1.5 * (values.given_bytes + defined_bytes) + copies

    def _copying(self, values: StorageClass) -> float:
        """The bytes of casts for products in bodies whose borders no 16-bit copy crosses."""
        return 1.5 * sum(
            values.low_read_bytes[body] * self._calls_of(body)
            for body, rows in values.low_readers.items()
            if not self._casts_for_free(values, body, rows)
        )

    def _casts_for_free(self, values: StorageClass, body: int, rows: Sequence[int]) -> bool:
        """Whether elementwise work in a body makes all that its products read of a class."""
        return all(
            is_made_in(self.graph, body, atom)
            for row in rows
            for atom in self.graph.eqns[row].invars[:2]
            if self.classes.of(body, atom) is values
        )

    def _rounds_for_free(self, row: int) -> bool:
        """Whether rounding a row's result takes no kernel that reads and writes all of it."""
        # Of what is put together, only the new pieces are rounded.
        is_elementwise = op(self.graph.eqns[row].primitive.name).kind is OpKind.ELEMENTWISE
        return is_elementwise or row in self.classes.put_together

    def _calls_of(self, body: int) -> float:
        """How often a body runs; once if only a derivative will run it, so that it has a cost."""
        return self.graph.bodies[body].calls or 1.0

    def _calls(self, row: int) -> float:
        return self._calls_of(int(self.graph.body[row]))


def _traffic(place: Place) -> float:
    """The bytes that are written and read."""
    return place.nbytes * (2.0 if place.kind in ("carry", "kept", "written") else 1.0)
