"""Which cases of a parametrized test run each time, and which before a release alone.

A test with several parameters is an enumeration: every program under every policy, in every
composition. A fault seldom needs one particular combination, so `scripts/test` runs a sample in
which each value of each parameter occurs at least once ("each choice" in the literature on
combinatorial testing), and `scripts/test_release` runs them all.
"""

import random
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any


def axes(item: Any) -> tuple[Hashable, ...]:
    """The values of a case: one for each `parametrize` of its test, one for each fixture."""
    params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    # The cases of one test share their values, which need not be hashable.
    values = {name: id(value) for name, value in params.items()}
    found: list[Hashable] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.split(",") if isinstance(names, str) else names
        found.append(tuple(values.pop(name.strip()) for name in names))
    return (*found, *values.values())


def each_choice(cases: Sequence[tuple[Hashable, ...]], seed: str) -> set[int]:
    """The indices of a sample of cases in which every value of every axis occurs.

    Args:
        cases: the values of each case, one an axis.
        seed: the same seed draws the same sample.
    """
    missing = {(axis, value) for case in cases for axis, value in enumerate(case)}
    order = list(range(len(cases)))
    random.Random(seed).shuffle(order)
    drawn: set[int] = set()
    while missing:
        best = max(order, key=lambda i: len(missing.intersection(enumerate(cases[i]))))
        missing.difference_update(enumerate(cases[best]))
        drawn.add(best)
    return drawn


def left_for_a_release(items: Sequence[Any]) -> set[int]:
    """The indices of the tests of a session that do not run each time."""
    tests: dict[str, list[int]] = defaultdict(list)
    for i, item in enumerate(items):
        tests[item.nodeid.partition("[")[0]].append(i)
    left = {i for i, item in enumerate(items) if item.get_closest_marker("release")}
    for name, cases in tests.items():
        values = [axes(items[i]) for i in cases]
        if values[0]:
            drawn = each_choice(values, name)
            left.update(index for at, index in enumerate(cases) if at not in drawn)
    return left
