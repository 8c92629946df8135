"""The cheapest way to store a class of values, among all that are allowed."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from precpass.analysis.graph import Graph
from precpass.planner.planner import make_plan
from precpass.planner.storage.costs import StorageCosts
from precpass.planner.storage.value_classes import Place, StorageClass
from tests.support.values import f32

Bytes = dict[str, float]


def cost_of(rounded: bool, crossing: bool, given: Bytes) -> float:
    """What the labels of a class cost, by what each of them means."""
    total = given["traffic"] / 2 + given["rounding"] if rounded else given["traffic"]
    if crossing and not rounded:
        total += given["beside"]
    if not (rounded or crossing):
        total += given["copying"]
    return total


def allowed(may_round: bool, crosses: bool, repeats: bool) -> list[tuple[bool, bool]]:
    labels = itertools.product((False, True), repeat=2)
    if not may_round and not (crosses and repeats):
        return [(False, False)]
    return [
        (rounded, crossing)
        for rounded, crossing in labels
        if (may_round or not rounded)
        and (crosses or not crossing)
        # a value in 16 bits crosses as it is
        and not (rounded and crosses and not crossing)
    ]


@pytest.mark.parametrize(
    "may_round, crosses, repeats", [*itertools.product((False, True), repeat=3)]
)
def test_no_allowed_choice_is_cheaper_and_of_equal_ones_the_least_is_changed(
    monkeypatch: pytest.MonkeyPatch, may_round: bool, crosses: bool, repeats: bool
):
    costs = StorageCosts(Graph.build(jax.make_jaxpr(jnp.sin)(1.0)), None)  # pyright: ignore[reportArgumentType]
    chosen = set[tuple[bool, bool]]()
    figures = itertools.product((0.0, 2.0, 8.0), (0.0, 1.0, 4.0), (0.0, 1.0, 4.0), (0.0, 1.0, 3.0))
    for each in figures:
        given = dict(zip(("traffic", "rounding", "beside", "copying"), each, strict=True))
        monkeypatch.setattr(costs, "_repeats", lambda _: repeats)
        for name in ("rounding", "beside", "copying"):
            monkeypatch.setattr(costs, f"_{name}", lambda _, n=name, given=given: given[n])
        places = [Place(given["traffic"], 1.0, "stacked")]
        values = StorageClass(places=places, crossed={0} if crosses else set())
        found = costs.cheapest(values, may_round=may_round)
        options = allowed(may_round, crosses, repeats)
        least = min(cost_of(*labels, given) for labels in options)
        ties = [labels for labels in options if cost_of(*labels, given) == least]
        assert found == min(ties, key=sum)
        chosen.add(found)
    assert chosen == set(allowed(may_round, crosses, repeats))


# ---------------------------------------------------------------- in programs


def crossing(fn: Any, *args: Any) -> list[bool]:
    """For each operand that crosses into a loop's body in 16 bits, whether it is rounded there."""
    plan = make_plan(jax.make_jaxpr(fn)(*args), pp.AutoMixedBf16)
    return [
        border_copy.rounds
        for decision in plan.walk()
        for inner in decision.inner
        for border_copy in inner.border_copies.operands
    ]


X, W, WS = f32(64, 64), f32(64, 64), f32(8, 64, 64)


def test_a_loops_constant_is_cast_once_before_it():
    assert crossing(lambda x, w: lax.fori_loop(0, 8, lambda _, c: jnp.sin(c @ w), x), X, W) == [
        False
    ]


def test_a_constant_that_the_loop_changes_first_is_cast_for_free():
    def fn(x: Any, w: Any) -> Any:
        return lax.fori_loop(0, 8, lambda _, c: jnp.sin(c @ (w + 1)), x)

    assert crossing(fn, X, W) == []


def test_a_stack_that_a_loop_slices_once_is_cast_slice_by_slice():
    def fn(x: Any, ws: Any) -> Any:
        return lax.scan(lambda c, w: (jnp.sin(c @ w), None), x, ws)[0]

    assert crossing(fn, X, WS) == []


def test_a_stack_that_a_loop_slices_in_a_loop_is_cast_once():
    def fn(x: Any, ws: Any) -> Any:
        def again(c: Any, _: Any) -> Any:
            return lax.scan(lambda c, w: (jnp.sin(c @ w), None), c, ws)[0], None

        return lax.scan(again, x, None, length=4)[0]

    assert crossing(fn, X, WS) == [False, False]


def test_a_call_takes_no_copy_that_saves_no_cast():
    assert crossing(lambda x, w: jax.jit(lambda x: jnp.sin(x @ w))(x), X, W) == []
