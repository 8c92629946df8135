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
"""Whose figures count where a plan is to be the same on every device: only ratios matter then."""

_CACHED = 0.25
"""The time of a byte that was just written, in that of one from memory (assumed)."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A product that is low if that pays.

    Attributes:
        wide: seconds of one execution in float32.
        low: the same in the low format, casts apart.
        casts: those of each of its two operands.
        why: the reason for which it stays wide where it does not pay.
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
        for found in classes.found.values():
            self._store(found, id(found) in may)
        for row in candidates:
            self._product(row)
        self._share()

    def minimum(self) -> Cut:
        """The cheapest labels."""
        return self.energy.minimum()

    def without_products(self) -> Cut:
        """The cheapest labels of all else where no product that need not be low is."""
        energy = copy.deepcopy(self.energy)
        for node in self.products.values():
            energy.fix(node, WIDE)
        return energy.minimum()

    @property
    def wide_seconds(self) -> float:
        """What the products that need not be low take wide."""
        return sum(of.wide * self._calls(row) for row, of in self.candidates.items())

    # ------------------------------------------------------------ what memory takes

    def _store(self, found: StorageClass, roundable: bool) -> None:
        if not (roundable or (found.crossed and self._repeats(found))):
            return
        energy = self.energy
        rounded = energy.node() if roundable else WIDE
        crossing = energy.node() if found.crossed else rounded
        self.nodes[id(found)] = Nodes(rounded, crossing if found.crossed else WIDE)
        if roundable:
            energy.pay(rounded, LOW, self.held(found))
            energy.pay(WIDE, rounded, self.held(found) / 2 + self.rounding(found))
        if found.crossed:
            energy.pay(rounded, crossing, self.beside(found))
            if roundable:
                energy.forbid(crossing, rounded)
        for body, rows in found.low.items():
            energy.pay(crossing, self._copied(rows), self.copying(found, body, rows))

    def _repeats(self, found: StorageClass) -> bool:
        """Whether a loop casts again what was there before it.

        Elsewhere a low copy would stay in memory from its first reader to its last.
        """
        begins = [self._trips(int(self.graph.body[row])) for row, _ in found.defined]
        first = 1.0 if found.given or not begins else min(begins)
        return any(self._trips(body) > first for body in found.low)

    def _trips(self, body: int) -> float:
        """How often the loops around a body, as it is called first, run it."""
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
        """The node of a low copy that some products in one body read: LOW where one must."""
        free = [self.products[row] for row in rows if row in self.products]
        if len(free) < len(rows):
            return LOW
        copied = self.energy.node()
        for product in free:
            self.energy.forbid(copied, product)
        return copied

    def held(self, found: StorageClass) -> float:
        """Where a class is in memory, at its own width."""
        return sum(map(_traffic, found.places)) / self.device.bandwidth

    def rounding(self, found: StorageClass) -> float:
        """The pass that rounds what products make; in any other fusion it is free."""
        made = (
            nbytes(self.graph.eqns[row].outvars[k].aval) * self._calls(row)
            for row, k in found.defined
            if not self._is_fused(row)
        )
        return _CACHED * 1.5 * sum(made) / self.device.bandwidth

    def beside(self, found: StorageClass) -> float:
        """Low copies beside a class: the casts where it begins, and their own traffic."""
        made = sum(
            nbytes(self.graph.eqns[row].outvars[k].aval) * self._calls(row)
            for row, k in found.defined
        )
        # of a stack a slice is copied, and read then
        copies = sum(p.nbytes if p.kind == "sliced" else p.nbytes / 2 for p in found.places)
        return (1.5 * (found.given + made) + copies) / self.device.bandwidth

    def copying(self, found: StorageClass, body: int, rows: Sequence[int]) -> float:
        """The casts of what products read in a body, where no low copy crosses its border."""
        calls = self.graph.bodies[body].calls
        reads = self._reads(found, body, rows)
        return max(self._copying(found, body, row, at) for row, at in reads) * calls

    def _copying(self, found: StorageClass, body: int, row: int, at: int) -> float:
        """The cast of a product's operand: as it is a part of the product's own time, if it is."""
        own = self.candidates[row].casts[at] if row in self.candidates else 0.0
        if own or self._origins.is_made_in(body, self.graph.eqns[row].invars[at]):
            return own
        return 1.5 * found.read[body] / self.device.bandwidth

    def _reads(self, found: StorageClass, body: int, rows: Sequence[int]) -> list[tuple[int, int]]:
        """The operands of products that are of a class."""
        return [
            (row, at)
            for row in rows
            for at, atom in enumerate(self.graph.eqns[row].invars[:2])
            if self.classes.of(body, atom) is found
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
        """The operands of a candidate whose low copies are no class's, and the seconds of each."""
        body = int(self.graph.body[row])
        operands = self.graph.eqns[row].invars[:2]
        for atom, seconds in zip(operands, self.candidates[row].casts, strict=True):
            found = self.classes.of(body, atom)
            if seconds and (found is None or id(found) not in self.nodes):
                yield (body, atom), seconds * self._calls(row)

    def _share(self) -> None:
        """One low copy for all products in a body that read it."""
        nodes = {key: self.energy.node() for key in self._copies}
        for key, seconds in self._copies.items():
            self.energy.pay(WIDE, nodes[key], seconds)
        for row, product in self.products.items():
            for key, _ in self.casts(row):
                self.energy.forbid(nodes[key], product)

    def _is_fused(self, row: int) -> bool:
        eqn = self.graph.eqns[row]
        return op(eqn.primitive.name).kind is OpKind.ELEMENTWISE

    def _calls(self, row: int) -> float:
        return self.graph.bodies[int(self.graph.body[row])].calls


def _traffic(place: Place) -> float:
    """The bytes that are written and read."""
    return place.nbytes * (2.0 if place.kind in ("carry", "kept") else 1.0)
