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
    """The values of a case: one for each `parametrize` of its test, one for each fixture.

    Those of a list of tuples come together, unless the test is marked `enumerated`.
    """
    params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    # The cases of one test share their values, which need not be hashable.
    values = {name: id(value) for name, value in params.items()}
    found: list[Hashable] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.split(",") if isinstance(names, str) else names
        of_case = tuple(values.pop(name.strip()) for name in names)
        found += of_case if item.get_closest_marker("enumerated") else [of_case]
    return (*found, *values.values())


def each_choice(cases: Sequence[tuple[Hashable, ...]], seed: str) -> list[int]:
    """The indices of a sample of cases in which every value of every axis occurs.

    Args:
        cases: the values of each case, one an axis.
        seed: the same seed draws the same sample.
    """
    missing = {(axis, value) for case in cases for axis, value in enumerate(case)}
    order = list(range(len(cases)))
    random.Random(seed).shuffle(order)
    drawn: list[int] = []
    while missing:
        best = max(order, key=lambda i: len(missing.intersection(enumerate(cases[i]))))
        missing.difference_update(enumerate(cases[best]))
        drawn.append(best)
    return drawn


def left_for_a_release(items: Sequence[Any]) -> set[int]:
    """The indices of the tests of a session that do not run each time."""
    tests: dict[str, list[int]] = defaultdict(list)
    for i, item in enumerate(items):
        tests[item.nodeid.partition("[")[0]].append(i)
    left: set[int] = set()
    for name, cases in tests.items():
        marks = {i: list(items[i].iter_markers("release")) for i in cases}
        left.update(i for i in cases if any(not mark.kwargs for mark in marks[i]))
        cases = [i for i in cases if i not in left]
        values = [axes(items[i]) for i in cases]
        if values and values[0]:
            most = min((mark.kwargs["keep"] for mark in marks[cases[0]]), default=len(cases))
            kept = {cases[at] for at in each_choice(values, name)[:most]}
            left.update(i for i in cases if i not in kept)
    return left
