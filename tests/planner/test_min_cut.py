"""Energies over WIDE and LOW: their minima against every labelling, tried one by one.

The oracle holds the costs as fractions and knows nothing of flows, classes or units.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csgraph

from precpass.planner.storage.min_cut import LOW, WIDE, Energy

# of the sum of all costs, with the few terms that the energies here have
BOUND = Fraction(1, 2**44)

Labels = tuple[int, ...]


@dataclass
class Stated:
    """An energy and, beside it, what it was told."""

    energy: Energy = field(default_factory=Energy)
    costs: list[tuple[int, int, float]] = field(default_factory=list)
    forbidden: list[tuple[int, int]] = field(default_factory=list)
    fixed: list[tuple[int, int]] = field(default_factory=list)

    def pay(self, wide: int, low: int, seconds: float) -> None:
        self.costs.append((wide, low, seconds))
        self.energy.pay(wide, low, seconds)

    def forbid(self, wide: int, low: int) -> None:
        self.forbidden.append((wide, low))
        self.energy.forbid(wide, low)

    def equate(self, a: int, b: int) -> None:
        self.forbid(a, b)
        self.forbid(b, a)

    def fix(self, node: int, label: int) -> None:
        self.fixed.append((node, label))
        self.energy.fix(node, label)

    def cost(self, labels: Labels) -> Fraction:
        paid = (c for w, l, c in self.costs if labels[w] == WIDE and labels[l] == LOW)
        return sum(map(Fraction, paid), Fraction(0))

    def allowed(self, labels: Labels) -> bool:
        return all(labels[a] == label for a, label in self.fixed) and not any(
            labels[w] == WIDE and labels[l] == LOW for w, l in self.forbidden
        )

    def labellings(self) -> Iterator[Labels]:
        for free in itertools.product((WIDE, LOW), repeat=self.energy.size - 2):
            if self.allowed(labels := (WIDE, LOW, *free)):
                yield labels

    def minima(self) -> tuple[Fraction, list[Labels]]:
        costs = [(self.cost(labels), labels) for labels in self.labellings()]
        least = min((cost for cost, _ in costs), default=Fraction(0))
        return least, [labels for cost, labels in costs if cost == least]

    def total(self) -> Fraction:
        return sum((Fraction(c) for *_, c in self.costs), Fraction(0))


def made(seed: int, cost: Callable[[random.Random], float], constraints: bool = True) -> Stated:
    """A random energy over at most nine nodes, in up to three parts that share no term."""
    rng = random.Random(seed)
    stated = Stated()
    for _ in range(rng.randint(1, 3)):
        nodes = [stated.energy.node() for _ in range(rng.randint(1, 3))]
        ends = [WIDE, LOW, *nodes, *nodes]
        for _ in range(rng.randint(0, 4 * len(nodes))):
            stated.pay(rng.choice(ends), rng.choice(ends), cost(rng))
        if not constraints:
            continue
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            stated.forbid(rng.choice(nodes), rng.choice(nodes))
        for _ in range(rng.choice((0, 0, 0, 1))):
            stated.equate(rng.choice(nodes), rng.choice(nodes))
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            stated.fix(rng.choice(nodes), rng.choice((WIDE, LOW)))
    return stated


def few(rng: random.Random) -> float:
    """Costs so few that most energies have several minima."""
    return float(rng.randint(0, 3))


def many(rng: random.Random) -> float:
    return float(rng.randint(0, 1000))


def spanning(rng: random.Random) -> float:
    """Nanoseconds to what terabytes take, with full mantissas."""
    return 10 ** rng.uniform(-9, 3)


# ---------------------------------------------------------------- minima


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("cost", (few, many))
def test_minima_are_those_of_all_labellings_tried_and_ties_go_to_wide(cost: Any):
    ties = constrained = 0
    for seed in range(1000):
        stated = made(seed, cost)
        least, minima = stated.minima()
        cut = stated.energy.minimum()
        assert cut.low[LOW] and not cut.low[WIDE]
        if not minima:  # what it was told contradicts itself: the rule has a test of its own
            continue
        ties += len(minima) > 1
        constrained += bool(stated.forbidden or stated.fixed)
        assert cut.seconds == least, seed
        # LOW is what every minimum has LOW, and that is a minimum itself
        assert cut.low.tolist() == [all(low) for low in zip(*minima, strict=True)], seed
    assert ties > 100 and constrained > 100


@pytest.mark.release
def test_costs_over_twelve_orders_of_magnitude():
    hard = 0
    for seed in range(600):
        stated = made(seed, spanning, constraints=False)
        least, minima = stated.minima()
        cut = stated.energy.minimum()
        found = stated.cost(tuple(map(int, cut.low)))
        assert found - least <= BOUND * stated.total(), seed
        assert cut.seconds == pytest.approx(float(least), rel=1e-12)
        assert cut.low.tolist() == [all(low) for low in zip(*minima, strict=True)], seed
        # what a single scale to 30 bits cannot tell from nothing
        hard += min(c for *_, c in stated.costs) < stated.total() / 2**31 if stated.costs else 0
    assert hard > 100


def test_a_nanosecond_counts_beside_terabytes():
    stated = Stated()
    large, small, least = (stated.energy.node() for _ in range(3))
    stated.pay(large, LOW, 4e12 / 1e9)
    stated.pay(WIDE, large, 2e12 / 1e9)
    stated.pay(large, small, 1e12 / 1e9)
    stated.pay(small, LOW, 3e-9)
    stated.pay(WIDE, small, 2e-9)
    stated.pay(small, least, 1e12 / 1e9)
    stated.pay(least, LOW, 2e-9)
    stated.pay(WIDE, least, 3e-9)
    assert stated.energy.minimum().low[[large, small, least]].tolist() == [True, True, False]


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("scale", (2.0**-300, 1e-30, 1e-9, 1.0, 1e30, 2.0**300))
def test_the_unit_of_the_costs_is_no_matter(scale: float):
    for seed in range(100):
        stated, scaled = made(seed, many), Energy()
        scaled.nodes(stated.energy.size - 2)
        for w, l, cost in stated.costs:
            scaled.pay(w, l, cost * scale)
        for call, told in (("forbid", "forbidden"), ("fix", "fixed")):
            for pair in getattr(stated, told):
                getattr(scaled, call)(*pair)
        assert scaled.minimum().low.tolist() == stated.energy.minimum().low.tolist()


def test_a_component_is_decided_alone():
    """However large the rest of the program is."""
    energy = Energy()
    one, other, wide = (energy.node() for _ in range(3))
    energy.pay([one, WIDE, wide, WIDE], [LOW, other, LOW, wide], [3e-13, 2e-13, 2e-13, 3e-13])
    energy.pay([one, one], [other, wide], [1e-14, 1e-14])
    far = energy.nodes(2)
    energy.pay([far, WIDE, far + 1], [LOW, far + 1, far], [1e15, 1e15, 1e14])
    low = energy.minimum().low
    assert low[[one, other, wide]].tolist() == [True, False, False]
    assert low[[far, far + 1]].tolist() == [True, False]


def test_sums_that_differ_by_their_rounding_are_ties():
    energy = Energy()
    one, other, third = (energy.node() for _ in range(3))
    assert 0.1 + 0.2 > 0.3 and 0.1 + 0.7 < 0.8
    energy.pay([one, one], LOW, [0.1, 0.2])
    energy.pay(WIDE, one, 0.3)
    # the same, through casts
    energy.pay([other, third], LOW, [0.1, 0.2])
    energy.pay([WIDE, other, third], [other, third, other], [0.3, 5.0, 5.0])
    # and where flipping gains what a float64 holds only just
    more = energy.node()
    energy.pay(more, LOW, 0.8)
    energy.pay(WIDE, [more, more], [0.1, 0.7])
    assert energy.minimum().low.tolist() == [False, True] + 4 * [False]


@pytest.mark.release
def test_so_are_small_sums_beside_large_costs():
    """Where what is small is rounded to the unit of what is large."""
    rng = random.Random(0)
    for _ in range(100):
        energy = Energy()
        node, large = energy.node(), energy.node()
        one, other = (1e-9 * rng.random() for _ in range(2))
        energy.pay(node, LOW, one)
        energy.pay(node, LOW, other / 2)
        energy.pay(node, large, other / 2)
        energy.pay(WIDE, node, one + other)
        energy.pay([WIDE, large], [large, LOW], [1e3, 1e4])
        assert energy.minimum().low.tolist() == [False, True, False, True]


def test_more_than_rounding_is_no_tie():
    energy = Energy()
    node = energy.node()
    energy.pay(node, LOW, 1 + 2.0**-40)
    energy.pay(WIDE, node, 1.0)
    assert energy.minimum().low[node]


def test_flows_that_scipys_integers_do_not_hold():
    """A path whose narrowest edge is 2^31 times its finest cost, and more than 2^31 in all."""
    energy = Energy()
    path = energy.nodes(4) + np.arange(4)
    energy.pay(WIDE, path[0], 2.0**40)
    energy.pay(path[:-1], path[1:], [2.0**33 + 1, 2.0**33, 2.0**33 + 1])
    energy.pay(path[-1], LOW, 2.0**41)
    cut = energy.minimum()
    assert cut.low[path].tolist() == [False, False, True, True]
    assert cut.seconds == 2.0**33


# ---------------------------------------------------------------- what may not be


def test_what_may_not_differ_either_way_has_one_label():
    energy = Energy()
    nodes = energy.nodes(5) + np.arange(5)
    energy.forbid(nodes[:3], nodes[1:4])
    energy.forbid(nodes[1:4], nodes[:3])
    energy.pay(nodes[0], LOW, 1.0)
    energy.pay(WIDE, nodes[3], 2.0)
    energy.pay(nodes[4], LOW, 1.0)
    assert energy.bound().tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert energy.minimum().low[nodes].tolist() == [False] * 4 + [True]
    energy.pay(nodes[1], LOW, 2.0)
    assert energy.minimum().low[nodes].all()


def test_a_node_that_is_bound_to_both_labels_is_wide():
    energy = Energy()
    a, b, c, d = (energy.node() for _ in range(4))
    energy.fix([a, b], LOW)
    energy.fix(b, WIDE)
    energy.forbid(b, a)
    energy.fix(d, LOW)
    energy.forbid(b, c)
    energy.forbid(c, d)
    cut = energy.minimum()
    assert not cut.low[[a, b, c, d]].any()
    assert cut.seconds == 0
    energy.forbid([b, d], LOW)
    assert energy.bound().tolist() == [WIDE, LOW, WIDE, WIDE, WIDE, WIDE]


def test_a_node_that_is_wide_after_all_binds_none_to_low():
    energy = Energy()
    a, b = energy.node(), energy.node()
    energy.fix(a, WIDE)
    energy.fix(a, LOW)
    energy.forbid(b, a)
    energy.pay(WIDE, b, 1.0)
    assert energy.minimum().low.tolist() == [False, True, False, False]


@pytest.mark.parametrize("times", (1, 128, 256, 2**16))
def test_what_is_said_often_is_said(times: int):
    energy = Energy()
    a, b, c = (energy.node() for _ in range(3))
    energy.forbid([a] * times, b)
    energy.forbid([b] * times, c)
    energy.fix([a] * times, WIDE)
    energy.pay(c, LOW, 1.0)
    assert energy.bound().tolist() == [0, 1, 0, 0, 0]


def test_what_a_label_forbids_binds():
    energy = Energy()
    a, b, c = (energy.node() for _ in range(3))
    energy.forbid(WIDE, a)
    energy.forbid(b, LOW)
    energy.forbid(LOW, c)  # never the case
    energy.forbid(c, WIDE)
    assert energy.bound().tolist() == [0, 1, 0, 1, 4]


# ---------------------------------------------------------------- costs of labels


def test_costs_are_those_of_the_oracle():
    for seed in range(300):
        stated, rng = made(seed, many), random.Random(seed)
        size = stated.energy.size
        labels = (WIDE, LOW, *(rng.choice((WIDE, LOW)) for _ in range(size - 2)))
        forbidden = any(labels[w] == WIDE and labels[l] == LOW for w, l in stated.forbidden)
        low = np.array(labels) == LOW
        assert stated.energy.cost(low) == (np.inf if forbidden else stated.cost(labels))


def test_no_single_node_improves_a_minimum():
    tried = 0
    for seed in range(200):
        energy = made(seed, few).energy
        cut = energy.minimum()
        for node in np.flatnonzero(energy.bound() > LOW):
            tried += 1
            change = energy.cost(flipped(cut.low, node)) - cut.seconds
            # none that is LOW could as well be WIDE
            assert change > 0 if cut.low[node] else change >= 0
    assert tried > 200


def flipped(low: np.ndarray, node: int) -> np.ndarray:
    """The labels, that of one node exchanged."""
    other = low.copy()
    other[node] = not other[node]
    return other


# ---------------------------------------------------------------- input


def test_an_empty_energy():
    cut = Energy().minimum()
    assert (cut.low.tolist(), cut.seconds) == ([False, True], 0.0)
    energy = Energy()
    assert energy.nodes(0) == energy.nodes(3) == 2
    energy.pay([], [], [])
    assert energy.minimum().low.tolist() == [False, True, False, False, False]


@pytest.mark.release
def test_arrays_and_numbers_are_the_same():
    for seed in range(50):
        stated, flat = made(seed, many), Energy()
        flat.nodes(stated.energy.size - 2)
        if stated.costs:
            flat.pay(*(np.array(column) for column in zip(*stated.costs, strict=True)))
        if stated.forbidden:
            flat.forbid(*np.array(stated.forbidden, np.int32).T)
        for label in (WIDE, LOW):
            flat.fix([node for node, bound in stated.fixed if bound == label], label)
        assert flat.minimum().low.tolist() == stated.energy.minimum().low.tolist()


@pytest.mark.parametrize("cost", (-1.0, -1, np.nan, np.inf, [1.0, -1.0], [1.0, np.nan]))
def test_a_cost_that_is_none_is_named(cost: Any):
    energy = Energy()
    node = energy.node()
    wrong = float(np.ravel(cost)[-1])
    with pytest.raises(ValueError, match=f"node {node} WIDE with node 1 LOW is {wrong}: .*forbid"):
        energy.pay(node, LOW, cost)
    assert energy.cost([False, True, False]) == 0


@pytest.mark.parametrize("node", (3, -1, [2, 3]))
@pytest.mark.parametrize("call", ("pay", "forbid", "fix"))
def test_a_node_that_is_none_is_named(call: str, node: Any):
    energy = Energy()
    energy.node()
    calls: dict[str, Callable[[], Any]] = {
        "pay": lambda: energy.pay(LOW, node, 1.0),
        "forbid": lambda: energy.forbid(node, LOW),
        "fix": lambda: energy.fix(node, LOW),
    }
    with pytest.raises(ValueError, match=rf"no node {np.ravel(node)[-1]}: .* 0 to 2"):
        calls[call]()


def test_other_errors():
    energy = Energy()
    node = energy.node()
    with pytest.raises(TypeError, match="nodes are integers, not float64"):
        energy.fix(2.0, LOW)
    with pytest.raises(ValueError, match=r"2 is no label: give WIDE \(0\) or LOW \(1\)"):
        energy.fix(node, 2)
    for wrong in (
        lambda: energy.fix(WIDE, LOW),
        lambda: energy.fix(LOW, WIDE),
        lambda: energy.forbid(WIDE, LOW),
    ):
        with pytest.raises(ValueError, match=r"WIDE \(0\) and LOW \(1\) cannot have one label"):
            wrong()
    energy.pay([node, WIDE], [LOW, node], 1.5e308)
    with pytest.raises(OverflowError, match="give them in seconds"):
        energy.minimum()


# ---------------------------------------------------------------- work


@pytest.fixture
def flows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of nodes of each flow that scipy is asked for."""
    sizes: list[int] = []
    maximum_flow = csgraph.maximum_flow

    def counted(graph: Any, *args: Any) -> Any:
        sizes.append(graph.shape[0])
        assert graph.data.dtype == np.int32 and graph.data.max() <= 2**30
        return maximum_flow(graph, *args)

    monkeypatch.setattr(csgraph, "maximum_flow", counted)
    return sizes


def large(count: int, seed: int = 0) -> Energy:
    """Values in a row, each with a preference, and casts to a few of the last before it."""
    rng = np.random.default_rng(seed)
    energy = Energy()
    nodes = energy.nodes(count) + np.arange(count)
    wide = rng.random(count) < 0.5
    costs = 10 ** rng.uniform(-9, 3, count)
    energy.pay(np.where(wide, nodes, WIDE), np.where(wide, LOW, nodes), costs)
    one = np.repeat(nodes, 2)
    other = np.maximum(one - rng.geometric(0.2, 2 * count), nodes[0])
    flipped = rng.random(2 * count) < 0.5
    casts = 10 ** rng.uniform(-9, 3, 2 * count)
    energy.pay(np.where(flipped, one, other), np.where(flipped, other, one), casts)
    return energy


def test_a_large_energy_takes_few_flows(flows: list[int]):
    large(3000).minimum()
    assert 1 < len(flows) <= 6
    assert max(flows) <= 3002


def test_what_has_no_choice_is_handed_to_no_flow(flows: list[int]):
    energy = Energy()
    nodes = energy.nodes(1000) + np.arange(1000)
    energy.pay(nodes[1:500], nodes[:499], 1.0)
    energy.pay(nodes[:100], LOW, 1.0)  # nothing against LOW
    energy.pay(WIDE, nodes[500:600], 1.0)  # nothing against WIDE
    energy.pay(nodes[500:599], nodes[501:600], 1.0)
    energy.pay(nodes[700:800], LOW, 2.0)  # each alone
    energy.pay(WIDE, nodes[700:800], 1.0)
    cut = energy.minimum()
    assert not flows
    low = np.zeros(1000, np.bool_)
    low[:500] = low[700:800] = True
    assert cut.low[nodes].tolist() == low.tolist()
    energy.pay(WIDE, nodes[300], 1.0)
    energy.minimum()
    assert flows and max(flows) == 502


def test_parallel_terms_are_one(flows: list[int]):
    energy = Energy()
    a, b = energy.node(), energy.node()
    energy.pay([a] * 50, LOW, 3.0)
    energy.pay(WIDE, [b] * 50, 2.0)
    energy.pay([b] * 50, a, 1.0)
    assert energy.minimum().low[[a, b]].tolist() == [True, False]
    assert set(flows) <= {4}


def test_the_same_energy_has_the_same_cut():
    one, other = (large(2000).minimum() for _ in range(2))
    assert one.low.tolist() == other.low.tolist() and one.seconds == other.seconds
    again = large(2000)
    assert again.minimum().low.tolist() == again.minimum().low.tolist() == one.low.tolist()


@pytest.mark.release
def test_no_node_of_a_large_cut_is_better_flipped():
    energy = large(5000)
    cut = energy.minimum()
    for node in range(2, 5002):
        assert energy.cost(flipped(cut.low, node)) >= cut.seconds * (1 - 1e-12)
