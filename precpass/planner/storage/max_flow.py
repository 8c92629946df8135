"""Searches and maximum flows in networks, with capacities of up to 61 bits.

scipy's maximum flow has capacities of 32 bits and truncates larger ones without a word. So a flow
is found from the top bits down. Each round scales the remaining capacities to integers that scipy
holds and pushes as much as fits. After a round, what can still flow is less than the lowest bit
of its integers times the edges of its cut, so a few rounds reach the last bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["LARGEST", "SINK", "SOURCE", "components", "reach_sink", "reached", "sums"]

SOURCE, SINK = 0, 1
"""The nodes that a flow comes from and goes to."""

LARGEST = 1 << 61
"""The largest capacity: an int64 holds what is left of two of them."""

# An int32 holds what scipy leaves of a capacity together with the flow against it.
_ROUND_BITS = 29

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def sums(values: NDArray[Any], groups: Ints, count: int) -> NDArray[Any]:
    """The sum of each group, exact for integers, where `np.bincount` is not."""
    totals = np.zeros(count, values.dtype)
    np.add.at(totals, groups, values)
    return totals


def components(size: int, a: Ints, b: Ints) -> Ints:
    """The number of each node's connected component."""
    if not len(a):
        return np.arange(size)  # scipy takes as long for none as for a hundred
    # scipy's graphs are imported where a plan needs one: that takes as long as a third of jax
    from scipy.sparse.csgraph import connected_components

    return connected_components(_graph(size, a, b), directed=False)[1]


def reached(size: int, start: int, tail: Ints, head: Ints) -> Bools:
    """For each node, whether a path of edges leads to it from `start`."""
    is_reached = np.zeros(size, np.bool_)
    if not len(tail):
        is_reached[start] = True
        return is_reached
    from scipy.sparse.csgraph import breadth_first_order

    is_reached[breadth_first_order(_graph(size, tail, head), start, return_predecessors=False)] = (
        True
    )
    return is_reached


def reach_sink(size: int, tail: Ints, head: Ints, capacity: Ints, component: Ints) -> Bools:
    """The nodes that still reach the sink through the capacities that the maximum flow leaves.

    They are the smallest set that can be the sink's side of a minimum cut.

    Args:
        size: the number of nodes.
        tail: of each edge, the node it leaves; no two edges have one tail and one head.
        head: of each edge, the node it enters.
        capacity: of each edge, at most LARGEST.
        component: of each node, its connected component, the source and the sink left out.
    """
    # each edge beside its reverse, sorted as scipy has them: its flow has the same edges
    keys = np.concatenate([tail * size + head, head * size + tail])
    keys, which = np.unique(keys, return_inverse=True)
    left = sums(capacity, which[: len(tail)], len(keys))
    tail, head = np.divmod(keys, size)
    place = component[np.where(tail > SINK, tail, head)]
    count = int(place.max(initial=-1)) + 1
    out, into = tail == SOURCE, head == SINK
    bound = np.minimum(sums(left[out], place[out], count), sums(left[into], place[into], count))
    while bound.any():
        edges = np.flatnonzero(bound[place])
        left[edges], bound = _push(tail[edges], head[edges], left[edges], place[edges], bound)
    return reached(size, SINK, head[left > 0], tail[left > 0])


def _push(tail: Ints, head: Ints, left: Ints, place: Ints, bound: Ints) -> tuple[Ints, Ints]:
    """Pushes the top bits of the flow; returns the remaining capacities and the remaining bound.

    The bound limits the flow in each component; `place` is the component of each edge.
    """
    from scipy.sparse import csgraph, csr_array

    shifts = np.maximum(np.frexp(bound.astype(np.float64))[1] - _ROUND_BITS, 0)
    shift = shifts[place]
    # an edge that takes more than can flow is never full
    capacity = np.minimum(left >> shift, (bound[place] >> shift) + 1)

    first = np.diff(tail, prepend=-1) > 0
    nodes, rows = tail[first], np.cumsum(first) - 1
    size, number = len(nodes), np.zeros(nodes[-1] + 1, np.int64)
    number[nodes] = np.arange(size)
    columns, starts = number[head], np.append(np.flatnonzero(first), len(tail))
    csr = (part.astype(np.int32) for part in (capacity, columns, starts))
    flow = csgraph.maximum_flow(csr_array(tuple(csr), shape=(size, size)), SOURCE, SINK).flow.data
    left = left - (flow.astype(np.int64) << shift)

    some = capacity > flow
    low = reached(size, SINK, columns[some], rows[some])
    full = ~low[rows] & low[columns]
    return left, np.where(shifts > 0, sums(left[full], place[full], len(bound)), 0)


def _graph(size: int, tail: Ints, head: Ints) -> Any:
    from scipy.sparse import csr_array

    return csr_array((np.ones(len(tail)), (tail, head)), shape=(size, size))
