"""The cut of random nested programs: no other choice of what is stored and lowered is cheaper."""

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import pytest

import precpass as pp
from precpass.planner.planner import make_plan
from precpass.planner.profit import Product, ProductTimes
from precpass.planner.storage import assignment
from precpass.planner.storage.energy import NOMINAL, StorageEnergy
from precpass.planner.storage.value_classes import StorageClass
from tests.support import (
    random_flow,  # noqa: F401 -- fills the ingredients
    random_ops,  # noqa: F401 -- likewise
)
from tests.support.random_programs import build, seeded_program

pytestmark = pytest.mark.programs

SMALL = 12
"""So many nodes are tried in all ways."""
CHUNKS, PROGRAMS = 10, 101


class Drawn:
    """Times that are drawn for each product: whole microseconds, so that there are ties."""

    costs, device = "drawn", NOMINAL

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._known: dict[str, ProductTimes] = {}

    def product_times(self, product: Product) -> ProductTimes:
        wide, low = self._rng.randint(1, 4) * 1e-6, self._rng.randint(1, 4) * 1e-6
        return self._known.setdefault(product.text, ProductTimes(wide, low, "drawn"))

    def least_gain(self, wide: float) -> float:
        return 0.0

    def sentence(self, product: Product, verdict: ProductTimes) -> str:
        return f"{verdict.low} s low, {verdict.wide} s wide"

    def new_warnings(self) -> tuple[str, ...]:
        return ()


Choice = dict[Any, bool]


def cost_of(costs: StorageEnergy, choice: Choice) -> float:
    """What a choice costs; infinite where it is none.

    Args:
        costs: whose figures are taken, but not its energy.
        choice: of ("rounded", class), ("crossing", class) and ("low", row).
    """
    total = 0.0
    needed, dearest = set[Any](), dict[Any, float]()

    def is_low(row: int) -> bool:
        return choice.get(("low", row), True)

    for values in costs.classes.by_root.values():
        if id(values) not in costs.nodes:
            continue
        rounded = choice.get(("rounded", id(values)), False)
        crossing = choice.get(("crossing", id(values)), False)
        if rounded and values.crossed and not crossing:
            return float("inf")
        if rounded:
            total += costs.traffic(values) / 2 + costs.rounding(values)
        elif ("rounded", id(values)) in choice:
            total += costs.traffic(values)
        if crossing and not rounded:
            total += costs.beside(values)
        for body, rows in values.low_readers.items():
            if any(map(is_low, rows)) and not (rounded or crossing):
                total += costs.copying(values, body, rows)
    for row, candidate in costs.candidates.items():
        calls = costs.calls_of(int(costs.graph.body[row]))
        total += (candidate.low if is_low(row) else candidate.wide) * calls
        for key, seconds in costs.casts(row):
            # as dear as to the product that pays most for it
            dearest[key] = max(seconds, dearest.get(key, 0.0))
            if is_low(row):
                needed.add(key)
    return total + sum(dearest[key] for key in needed)


def choices(costs: StorageEnergy, may: set[int]) -> Iterator[Choice]:
    """All of them."""
    free: list[Any] = [("low", row) for row in costs.candidates]
    for values in costs.classes.by_root.values():
        if id(values) in costs.nodes:
            free += [("rounded", id(values))] * (id(values) in may)
            free += [("crossing", id(values))] * bool(values.crossed)
    if len(free) > SMALL:
        return
    for labels in itertools.product((False, True), repeat=len(free)):
        yield dict(zip(free, labels, strict=True))


def taken(costs: StorageEnergy, may: set[int]) -> Choice:
    """The choice of the cut."""
    cut = costs.minimum()
    found: Choice = {("low", r): bool(cut.low[n]) for r, n in costs.products.items()}
    for of, nodes in costs.nodes.items():
        if of in may:
            found["rounded", of] = bool(cut.low[nodes.rounded])
        if nodes.crossing:
            found["crossing", of] = bool(cut.low[nodes.crossing])
    return found


@pytest.fixture
def energies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[StorageEnergy, set[int]]]:
    """The costs of each program that is planned, and the classes that may be rounded."""
    made: list[tuple[StorageEnergy, set[int]]] = []

    class Noted(StorageEnergy):
        def __init__(self, graph: Any, classes: Any, roundable: list[StorageClass], *args: Any):
            super().__init__(graph, classes, roundable, *args)
            made.append((self, set(map(id, roundable))))

    monkeypatch.setattr(assignment, "StorageEnergy", Noted)
    return made


def traced(fn: Callable[..., Any], args: Sequence[Any], is_gradient: bool) -> Any:
    """A program, or its gradient with what the forward pass keeps; a while loop has none."""
    if is_gradient:
        with contextlib.suppress(ValueError, TypeError, NotImplementedError):
            return jax.make_jaxpr(jax.grad(fn, has_aux=True))(*args)
    return jax.make_jaxpr(fn)(*args)


@pytest.mark.release
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_cut_is_the_cheapest_of_all_choices(energies: Any, chunk: int):
    rng = random.Random(chunk)
    tried, kinds = 0, set[tuple[bool, bool, bool]]()
    for index in itertools.count():
        if tried >= PROGRAMS:
            break
        program = seeded_program(chunk, index)
        if program.x64:
            continue
        fn, _log = build(program)
        try:
            jaxpr = traced(fn, program.args(), is_gradient=index % 2 == 1)
        except NotImplementedError:  # of JAX: a ragged_dot under two vmaps
            continue
        energies.clear()
        make_plan(jaxpr, pp.AutoMixedBf16, profit_model=Drawn(rng))
        for costs, may in energies:
            options = [(cost_of(costs, c), c) for c in choices(costs, may)]
            if len(options) < 2:
                continue
            choice = taken(costs, may)
            least = min(cost for cost, _ in options)
            assert cost_of(costs, choice) == pytest.approx(least, rel=1e-9)
            ties = [c for cost, c in options if cost <= least * (1 + 1e-12)]
            # of equal choices the one that leaves the most as it is
            assert all(choice[k] <= c[k] for c in ties for k in choice)
            tried += 1
            kinds.add(tuple(any(c for (k, _), c in choice.items() if k == kind) for kind in KINDS))
    assert len(kinds) > 2, kinds


KINDS = ("low", "rounded", "crossing")
