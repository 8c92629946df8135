"""The cheapest choice between WIDE and LOW: minima of energies over two labels.

An energy is a sum of terms, each a cost that is paid if one node is WIDE and another is LOW. So it
is submodular, and its minimum is a minimum cut: WIDE is the source, LOW the sink, a term an edge
from its wide node to its low node. Among all minima the one with the most nodes WIDE is taken: LOW
is what still reaches the sink when no more flow fits through the edges.

Costs are seconds, which may lie many orders of magnitude apart: for the flow they become integers
of 60 bits, by a unit of their own in each connected component.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from precpass.planner.storage.max_flow import (
    LARGEST,
    SINK,
    SOURCE,
    components,
    reach_sink,
    reached,
    sums,
)

__all__ = ["LOW", "WIDE", "Cut", "Energy"]

WIDE, LOW = SOURCE, SINK
"""The labels, and the two nodes that bear them from the start."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# All costs of a component are together less than this power of two, which leaves room for LARGEST.
_BITS = 60
# Sums that would be equal but for the rounding of their terms are nearer than this to each other.
_NOISE = 2.0**-46


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """A cheapest labelling.

    Attributes:
        low: of each node, whether it is LOW.
        seconds: the energy at these labels.
    """

    low: Bools
    seconds: float


class Energy:
    """A sum of costs over nodes that are WIDE or LOW, with labels that are ruled out.

    A product that takes 5 s WIDE and 2 s LOW, where the cast of its operand takes 1 s:

        >>> energy = Energy()
        >>> product, operand = energy.node(), energy.node()
        >>> energy.pay(product, LOW, 5.0)
        >>> energy.pay(WIDE, product, 2.0)
        >>> energy.pay(operand, product, 1.0)
        >>> energy.fix(operand, WIDE)
        >>> cut = energy.minimum()
        >>> bool(cut.low[product]), cut.seconds
        (True, 3.0)

    Nodes are numbers, and every method that takes one takes an array of them too. A node that
    `fix` and `forbid` bind to both labels is WIDE: that is never wrong, only slow.
    """

    def __init__(self) -> None:
        self.size = 2
        # what is forbidden is a term of infinite cost
        self._terms = array("q"), array("q"), array("d")
        # WIDE and a node that is bound to it, or a node that is bound to LOW and LOW
        self._fixed = array("q"), array("q")

    def node(self) -> int:
        """A new node."""
        return self.nodes(1)

    def nodes(self, count: int) -> int:
        """The first of `count` new nodes; the others follow it."""
        first, self.size = self.size, self.size + count
        return first

    def pay(self, wide: ArrayLike, low: ArrayLike, seconds: ArrayLike) -> None:
        """Adds a cost that is paid if node `wide` is WIDE and node `low` is LOW."""
        # arrays of one element take far longer
        if isinstance(wide, int) and isinstance(low, int) and isinstance(seconds, float):
            inside = 0 <= wide < self.size and 0 <= low < self.size
            if inside and 0 <= seconds < math.inf:
                self._add(wide, low, seconds)
                return
        w, l, paid = _rows(self._known(wide), self._known(low), np.asarray(seconds, np.float64))
        for i in np.flatnonzero(~((paid >= 0) & (paid < np.inf))):
            raise ValueError(
                f"the cost of node {w[i]} WIDE with node {l[i]} LOW is {paid[i]}: costs are "
                "finite and at least 0, and what may not be takes `forbid`"
            )
        _extend(self._terms, w, l, paid)

    def _add(self, wide: int, low: int, seconds: float) -> None:
        wides, lows, costs = self._terms
        wides.append(wide)
        lows.append(low)
        costs.append(seconds)

    def forbid(self, wide: ArrayLike, low: ArrayLike) -> None:
        """Rules out that node `wide` is WIDE and node `low` is LOW."""
        # as in `pay`, of two nodes that are neither WIDE nor LOW themselves
        if isinstance(wide, int) and isinstance(low, int):
            unbound = min(wide, low) > LOW
            if unbound and max(wide, low) < self.size:
                self._add(wide, low, math.inf)
                return
        w, l = _rows(self._known(wide), self._known(low))
        self.fix(l[w == WIDE], WIDE)
        self.fix(w[l == LOW], LOW)
        free = (w > LOW) & (l > LOW)
        _extend(self._terms, w[free], l[free], np.full(np.sum(free), np.inf))

    def fix(self, node: ArrayLike, label: int) -> None:
        """Gives a node the label WIDE or LOW."""
        if label not in (WIDE, LOW):
            raise ValueError(f"{label!r} is no label: give WIDE ({WIDE}) or LOW ({LOW})")
        (nodes,) = _rows(self._known(node))
        if np.any(nodes == LOW - label):
            raise ValueError(f"the nodes WIDE ({WIDE}) and LOW ({LOW}) cannot have one label")
        bound, end = nodes[nodes > LOW], np.full(np.sum(nodes > LOW), label)
        _extend(self._fixed, *((end, bound) if label == WIDE else (bound, end)))

    def cost(self, low: ArrayLike) -> float:
        """The energy at these labels, true for LOW; infinite if two of them are forbidden together.

        Labels that `fix` excludes have their cost too.
        """
        labels = np.asarray(low, np.bool_)
        wide_end, low_end, seconds = _read(self._terms)
        return float(seconds[~labels[wide_end] & labels[low_end]].sum())

    def bound(self) -> Ints:
        """Each node's label, WIDE or LOW, where `fix` and `forbid` leave no choice; else itself."""
        *pairs, seconds = _read(self._terms)
        ruled = np.isinf(seconds)
        pairs = zip(pairs, _read(self._fixed), strict=True)
        tail, head = (np.append(ends[ruled], fixed) for ends, fixed in pairs)
        # a tail that is WIDE binds its head to WIDE, and a head that is LOW its tail to LOW
        inner = head != LOW
        bound_wide = reached(self.size, WIDE, tail[inner], head[inner])
        free = ~bound_wide[tail]
        bound_low = reached(self.size, LOW, head[free], tail[free])
        return np.where(bound_wide, WIDE, np.where(bound_low, LOW, np.arange(self.size)))

    def minimum(self) -> Cut:
        """The cheapest labels, and of several cheapest those with the most nodes WIDE.

        Costs are rounded to 2^-60 of their sum, and a node is LOW only if that gains more than
        2^-46 of the costs that it is in: sums that should be equal differ by less. So the energy
        is the minimum to within (2^-45 + m 2^-57) of the sum of all costs, in each connected
        component of m terms by itself; where no other labels come as near, it is the minimum.

        The time is linear where costs are settled among near nodes, as in programs: 100,000
        nodes with 300,000 terms take about half a second. Each length of the paths on which
        costs meet adds a search of the graph, so chains that are dear to cut take longer.
        """
        bound = self.bound()
        wide, low, seconds = _read(self._terms)
        wide, low = bound[wide], bound[low]
        kept = (wide != low) & (wide != LOW) & (low != WIDE) & (seconds > 0)
        kept &= (wide != WIDE) | (low != LOW)
        pairs, which = np.unique(wide[kept] * self.size + low[kept], return_inverse=True)
        wide, low = np.divmod(pairs, self.size)
        costs = sums(seconds[kept], which, len(pairs))
        labels = _cheapest(self.size, wide, low, costs)[bound]
        return Cut(labels, self.cost(labels))

    def _known(self, nodes: ArrayLike) -> Ints:
        known = np.asarray(nodes)
        if known.size == 0:
            return known.astype(np.int64)
        if known.dtype.kind not in "iu":
            raise TypeError(f"nodes are integers, not {known.dtype}: {nodes!r}")
        for wrong in known[(known < 0) | (known >= self.size)].flat:
            raise ValueError(f"there is no node {wrong}: this energy has 0 to {self.size - 1}")
        return known.astype(np.int64)


def _rows(*values: Any) -> Any:
    """The values as flat arrays of one length."""
    return tuple(np.ravel(value) for value in np.broadcast_arrays(*values))


def _extend(columns: tuple[array[Any], ...], *rows: NDArray[Any]) -> None:
    for column, row in zip(columns, rows, strict=True):
        column.frombytes(row.tobytes())


def _read(columns: tuple[array[Any], ...]) -> Any:
    return tuple(map(np.array, columns))


def _cheapest(size: int, wide: Ints, low: Ints, costs: Floats) -> Bools:
    """The nodes that are LOW in the cheapest labelling; each pair of nodes has one cost."""
    of_wide, of_low = low == LOW, wide == WIDE  # the costs of a label: the other end is bound
    inner = ~(of_wide | of_low)
    component = components(size, wide[inner], low[inner])
    place = component[np.where(of_low, low, wide)]
    units = _units(costs, place)

    # what a node costs WIDE flows from it to LOW, and what it costs LOW from WIDE to it
    source, sink = np.zeros((2, size), np.int64)
    source[low[of_low]], sink[wide[of_wide]] = units[of_low], units[of_wide]
    chosen = np.isin(component, component[source > 0]) & np.isin(component, component[sink > 0])
    source += np.where(chosen, _hesitation(size, wide, low, units), 0)
    through = np.minimum(source, sink)
    source, sink = source - through, sink - through

    fed, drained = np.flatnonzero(source), np.flatnonzero(sink)
    tail = np.concatenate([wide[inner], np.full(len(fed), WIDE), drained])
    head = np.concatenate([low[inner], fed, np.full(len(drained), LOW)])
    capacity = np.concatenate([units[inner], source[fed], sink[drained]])
    return reach_sink(size, tail, head, capacity, component)


def _units(costs: Floats, component: Ints) -> Ints:
    """The costs as integers, by the unit of their component."""
    finite = np.isfinite(costs)
    totals = np.bincount(component, np.where(finite, costs, 0))
    if np.isinf(totals).any():
        raise OverflowError("the costs add up to more than a float64 holds: give them in seconds")
    exponents = np.frexp(totals)[1][component]
    scaled = np.ldexp(np.where(finite, costs, 0), _BITS - exponents)
    return np.where(finite, np.rint(scaled).astype(np.int64), LARGEST)


def _hesitation(size: int, wide: Ints, low: Ints, units: Ints) -> Ints:
    """What LOW must gain at each node: more than the rounding of the node's costs."""
    costs = np.where(units < LARGEST, units, 0)
    ends = np.concatenate([wide, low])
    incident = sums(np.concatenate([costs, costs]), ends, size)
    return (_NOISE * incident).astype(np.int64) + np.bincount(ends, minlength=size)
