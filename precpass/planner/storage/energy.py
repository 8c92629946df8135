"""What storage and products cost, as an energy whose minimum is the cheapest plan.

The energy has these nodes, each of which is WIDE or LOW:

- for a class of values that are stored alike, `rounded`: whether it is rounded where it is defined
  and stored low; and `crossing`: whether low copies cross borders beside it;
- for a value that products read in a body, `copied`: whether there is a low copy of it;
- for a product that only the preset lowers, `product`: the precision in which it runs.

Costs are seconds of a device for one run of the program: of memory for what loops stack and carry
and for what the forward pass saves for the backward pass, of casts, and of products. A value
inside a fusion costs nothing in any format.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from precpass.analysis.graph import BodyNode, Graph, trips_of
from precpass.analysis.operand_origin import OperandOrigins
from precpass.analysis.sizes import nbytes
from precpass.devices.devices import DEVICES, Device
from precpass.plan.reasons import Reason
from precpass.planner.storage.min_cut import LOW, WIDE, Cut, Energy
from precpass.planner.storage.value_classes import Place, StorageClass, StorageClasses
from precpass.policy.primitives import OpKind, op

__all__ = ["NOMINAL", "Candidate", "Nodes", "StorageEnergy"]

NOMINAL = DEVICES[0]
"""Its figures are used where a plan must be the same on every device; only ratios matter then."""

_CACHED = 0.25
"""The time to read a byte that was just written, relative to one from memory (assumed)."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A product that is low if that pays.

    Attributes:
        wide: the seconds of one execution in float32.
        low: the seconds of one execution in the low format, without its casts.
        casts: the seconds of casting each of its two operands.
        why: the reason that the plan gives if the product does not pay and stays in float32.
    """

    wide: float
    low: float
    casts: tuple[float, float]
    why: Reason


@dataclasses.dataclass(frozen=True)
class Nodes:
    """The nodes of a class: WIDE where there is no choice."""

    rounded: int = WIDE
    crossing: int = WIDE


class StorageEnergy:
    """The energy of a program.

    Args:
        graph: the program.
        classes: of its values.
        roundable: the classes that may be rounded where they are defined.
        candidates: the products that need not be low, by row; all others that read low are.
        device: whose seconds count.
    """

    def __init__(
        self,
        graph: Graph,
        classes: StorageClasses,
        roundable: Sequence[StorageClass],
        candidates: Mapping[int, Candidate],
        device: Device = NOMINAL,
    ) -> None:
        self.graph = graph
        self.classes = classes
        self.candidates = candidates
        self.device = device
        self.energy = Energy()
        self.products = {row: self.energy.node() for row in candidates}
        self.nodes: dict[int, Nodes] = {}
        self._copies: dict[tuple[int, Any], float] = {}
        self._trips_of: dict[int, float] = {}
        self._origins = OperandOrigins(graph)
        may = set(map(id, roundable))
        for values in classes.by_root.values():
            self._store(values, id(values) in may)
        for row in candidates:
            self._product(row)
        self._share()

    def minimum(self) -> Cut:
        """The cheapest labels."""
        return self.energy.minimum()

    def without_products(self) -> Cut:
        """The cheapest labels of everything else if no candidate is lowered."""
        energy = copy.deepcopy(self.energy)
        for node in self.products.values():
            energy.fix(node, WIDE)
        return energy.minimum()

    @property
    def wide_seconds(self) -> float:
        """The seconds that the candidates take in float32."""
        return sum(of.wide * self._calls(row) for row, of in self.candidates.items())

    # ------------------------------------------------------------ what memory takes

    def _store(self, values: StorageClass, roundable: bool) -> None:
        if not (roundable or (values.crossed and self._repeats(values))):
            return
        energy = self.energy
        rounded = energy.node() if roundable else WIDE
        crossing = energy.node() if values.crossed else rounded
        self.nodes[id(values)] = Nodes(rounded, crossing if values.crossed else WIDE)
        if roundable:
            energy.pay(rounded, LOW, self.traffic(values))
            energy.pay(WIDE, rounded, self.traffic(values) / 2 + self.rounding(values))
        if values.crossed:
            energy.pay(rounded, crossing, self.beside(values))
            if roundable:
                energy.forbid(crossing, rounded)
        for body, rows in values.low_readers.items():
            energy.pay(crossing, self._copied(rows), self.copying(values, body, rows))

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

    def _copied(self, rows: Sequence[int]) -> int:
        """The node of a 16-bit copy that products of one body read; LOW if one of them must."""
        free = [self.products[row] for row in rows if row in self.products]
        if len(free) < len(rows):
            return LOW
        copied = self.energy.node()
        for product in free:
            self.energy.forbid(copied, product)
        return copied

    def traffic(self, values: StorageClass) -> float:
        """The seconds of the memory traffic of a class that is stored in float32."""
        return sum(map(_traffic, values.places)) / self.device.bandwidth

    def rounding(self, values: StorageClass) -> float:
        """The seconds of rounding the results of products; in any other fusion it is free."""
        result_bytes = (
            nbytes(self.graph.eqns[row].outvars[k].aval) * self._calls(row)
            for row, k in values.defined
            if not self._rounds_for_free(row)
        )
        return _CACHED * 1.5 * sum(result_bytes) / self.device.bandwidth

    def beside(self, values: StorageClass) -> float:
        """The seconds of 16-bit copies beside a class: its casts, and the copies' own traffic."""
        defined_bytes = sum(
            nbytes(self.graph.eqns[row].outvars[k].aval) * self._calls(row)
            for row, k in values.defined
        )
        # each slice of a stack is copied, and the copy is read afterwards
        copies = sum(p.nbytes if p.kind == "sliced" else p.nbytes / 2 for p in values.places)
        return (1.5 * (values.given_bytes + defined_bytes) + copies) / self.device.bandwidth

    def copying(self, values: StorageClass, body: int, rows: Sequence[int]) -> float:
        """The seconds of the casts for products in a body whose border no 16-bit copy crosses."""
        reads = self._reads(values, body, rows)
        each = (self._copying(values, body, row, at) for row, at in reads)
        return max(each) * self.calls_of(body)

    def _copying(self, values: StorageClass, body: int, row: int, at: int) -> float:
        """The seconds of one operand's cast; those in the product's pricing come first."""
        priced = self.candidates[row].casts[at] if row in self.candidates else 0.0
        if priced or self._origins.is_made_in(body, self.graph.eqns[row].invars[at]):
            return priced
        return 1.5 * values.low_read_bytes[body] / self.device.bandwidth

    def _reads(self, values: StorageClass, body: int, rows: Sequence[int]) -> list[tuple[int, int]]:
        """The products' operands, as (row, position), that belong to a class."""
        return [
            (row, at)
            for row in rows
            for at, atom in enumerate(self.graph.eqns[row].invars[:2])
            if self.classes.of(body, atom) is values
        ]

    # ------------------------------------------------------------ what products take

    def _product(self, row: int) -> None:
        product, candidate = self.products[row], self.candidates[row]
        calls = self._calls(row)
        self.energy.pay(product, LOW, candidate.wide * calls)
        self.energy.pay(WIDE, product, candidate.low * calls)
        for key, seconds in self.casts(row):
            self._copies[key] = max(seconds, self._copies.get(key, 0.0))

    def casts(self, row: int) -> Iterator[tuple[tuple[int, Any], float]]:
        """The operands of a candidate that have no class to copy them, and each cast's seconds."""
        body = int(self.graph.body[row])
        operands = self.graph.eqns[row].invars[:2]
        for atom, seconds in zip(operands, self.candidates[row].casts, strict=True):
            values = self.classes.of(body, atom)
            if seconds and (values is None or id(values) not in self.nodes):
                yield (body, atom), seconds * self._calls(row)

    def _share(self) -> None:
        """Charges one 16-bit copy of a value for all products of a body that read it."""
        nodes = {key: self.energy.node() for key in self._copies}
        for key, seconds in self._copies.items():
            self.energy.pay(WIDE, nodes[key], seconds)
        for row, product in self.products.items():
            for key, _ in self.casts(row):
                self.energy.forbid(nodes[key], product)

    def _rounds_for_free(self, row: int) -> bool:
        """Whether rounding a row's result takes no kernel that reads and writes all of it."""
        # Of what is put together, only the new pieces are rounded.
        is_elementwise = op(self.graph.eqns[row].primitive.name).kind is OpKind.ELEMENTWISE
        return is_elementwise or row in self.classes.put_together

    def calls_of(self, body: int) -> float:
        """How often a body runs; once if only a derivative will run it, so that it has a cost."""
        return self.graph.bodies[body].calls or 1.0

    def _calls(self, row: int) -> float:
        return self.calls_of(int(self.graph.body[row]))


def _traffic(place: Place) -> float:
    """The bytes that are written and read."""
    return place.nbytes * (2.0 if place.kind in ("carry", "kept", "written") else 1.0)
