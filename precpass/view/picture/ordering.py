"""Where things in layers stand from left to right: by what they are joined to, without overlap."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["Joint", "placed"]

_MARGIN, _SORTED, _ROUNDS = 20.0, 4, 10


class Joint(NamedTuple):
    """A line from a layer to the next.

    Attributes:
        upper, lower: what it joins.
        out_of, into: where it leaves and enters them, from their left sides.
    """

    upper: Hashable
    out_of: float
    lower: Hashable
    into: float


def placed(
    layers: Sequence[Sequence[Hashable]],
    widths: Mapping[Hashable, float],
    joints: Sequence[Joint],
    light: frozenset[Hashable],
) -> dict[Hashable, float]:
    """The left sides of all things, of which the leftmost is 0.

    Things are sorted by the mean position of what they are joined to (Sugiyama's barycentres), and
    then moved there as far as their neighbours let them, by least squares.

    Args:
        layers: the things in each layer, from top to bottom.
        widths: their widths.
        joints: the lines between neighbouring layers.
        light: those that make room for the others.
    """
    above: dict[Hashable, list[Joint]] = collections.defaultdict(list)
    below: dict[Hashable, list[Joint]] = collections.defaultdict(list)
    for joint in joints:
        above[joint.lower].append(joint)
        below[joint.upper].append(joint)
    rows = [list(layer) for layer in layers]
    x: dict[Hashable, float] = {}
    for row in rows:
        at = 0.0
        for thing in row:
            x[thing] = at
            at += widths[thing] + _MARGIN

    def wanted(thing: Hashable, *, down: bool) -> float:
        if down:
            spots = [x[j.upper] + j.out_of - j.into for j in above[thing]]
        else:
            spots = [x[j.lower] + j.into - j.out_of for j in below[thing]]
        return sum(spots) / len(spots) if spots else x[thing]

    # The last turn is downwards, so that things stand below what they read.
    for turn in range(2 * _ROUNDS + 1):
        down = turn % 2 == 0
        for row in rows if down else reversed(rows):
            goals = {thing: wanted(thing, down=down) for thing in row}
            if turn < _SORTED:
                row.sort(key=lambda thing: goals[thing] + widths[thing] / 2)
            for left, thing in itertools.pairwise(row):
                if not above[thing] and not below[thing]:  # nothing draws it anywhere else
                    goals[thing] = goals[left] + widths[left] + _MARGIN
            weights = [1.0 if thing in light else 4.0 for thing in row]
            spread = _spread([goals[t] for t in row], [widths[t] for t in row], weights)
            x.update(zip(row, spread, strict=True))
    left = min(x.values(), default=0.0)
    return {thing: at - left for thing, at in x.items()}


def _spread(
    goals: Sequence[float], widths: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """The left sides nearest to goals, by weighted least squares, at which nothing overlaps.

    With the widths before each one subtracted, the left sides must not descend: neighbours that
    would are pooled at their mean.
    """
    before = [0.0]
    for width in widths[:-1]:
        before.append(before[-1] + width + _MARGIN)
    pools: list[tuple[float, float, int]] = []  # mean, weight, size
    for goal, start, weight in zip(goals, before, weights, strict=True):
        mean, size = goal - start, 1
        while pools and pools[-1][0] > mean:
            other, more, n = pools.pop()
            mean, weight = (mean * weight + other * more) / (weight + more), weight + more
            size += n
        pools.append((mean, weight, size))
    means = [mean for mean, _, size in pools for _ in range(size)]
    return [mean + start for mean, start in zip(means, before, strict=True)]
