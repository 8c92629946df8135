"""The search for a smallest set, against brute force over all sets."""

import itertools
import math
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, strategies as st

from precpass.policy.precision import Precision
from precpass.report.bisect.delta_debugging import OutOfBudget, shrink, smallest
from precpass.report.bisect.places import Group, Place, grouped

Items = tuple[int, ...]


def subsets(items: Iterable[int]) -> list[Items]:
    items = tuple(items)
    sizes = range(len(items) + 1)
    return [kept for n in sizes for kept in itertools.combinations(items, n)]


def asked(passes: Callable[[frozenset[int]], bool], budget: int = 10**6):
    """The check, remembering what it was asked; each set counts once."""
    verdicts: dict[frozenset[int], bool] = {}

    def check(kept: Items) -> bool:
        key = frozenset(kept)
        if key not in verdicts:
            if len(verdicts) == budget:
                raise OutOfBudget
            verdicts[key] = passes(key)
        return verdicts[key]

    return check, verdicts


@given(st.integers(1, 7), st.data())
def test_a_monotone_check_gets_a_set_of_which_no_part_passes(n, data):
    some = st.lists(st.frozensets(st.integers(0, n - 1), min_size=1), min_size=1, max_size=4)
    needs = data.draw(some)
    check, _ = asked(lambda kept: any(need <= kept for need in needs))
    *_, found = shrink(range(n), check)
    passing = [kept for kept in subsets(range(n)) if check(kept)]
    assert found in passing
    assert not [kept for kept in passing if set(kept) < set(found)]


@given(st.integers(1, 5), st.randoms(use_true_random=False))
def test_any_check_gets_a_set_that_passes_and_fails_without_each_member(n, random):
    table = {frozenset(kept): random.random() < 0.4 for kept in subsets(range(n))}
    table[frozenset()], table[frozenset(range(n))] = False, True
    check, verdicts = asked(table.__getitem__)
    sets = list(shrink(range(n), check))
    found = sets[-1]
    assert table[frozenset(found)]
    for i in found:
        without = frozenset(found) - {i}
        assert not table[without]
        assert without in verdicts or not without, "not run"
    assert all(table[frozenset(kept)] and list(kept) == sorted(kept) for kept in sets)
    assert all(len(a) >= len(b) for a, b in itertools.pairwise(sets))


@given(st.integers(2, 200), st.data())
def test_few_members_take_few_runs(n, data):
    needed = data.draw(st.frozensets(st.integers(0, n - 1), min_size=1, max_size=3))
    check, verdicts = asked(lambda kept: needed <= kept)
    *_, found = shrink(range(n), check)
    assert set(found) == needed
    assert len(verdicts) <= 2 + len(needed) * (2 * math.log2(n) + 3)


@pytest.mark.parametrize("n", [1, 2, 8, 64, 100])
def test_where_all_are_needed_there_is_about_a_run_for_each(n):
    check, verdicts = asked(lambda kept: len(kept) == n)
    *_, found = shrink(range(n), check)
    assert found == tuple(range(n))
    assert len(verdicts) <= n + 2 * math.log2(n) + 2


# ---------------------------------------------------------------- a tree of groups


def halves(group: range) -> tuple[range, ...]:
    middle = (group.start + group.stop) // 2
    return (group[: middle - group.start], group[middle - group.start :]) if len(group) > 1 else ()


def members(kept: Iterable[range]) -> frozenset[int]:
    return frozenset(i for group in kept for i in group)


def in_groups(passes: Callable[[frozenset[int]], bool], budget: int = 10**6):
    check, verdicts = asked(passes, budget)
    return lambda kept: check(tuple(members(kept))), verdicts


@given(st.integers(1, 40), st.data())
def test_groups_are_refined_down_to_their_single_members(n, data):
    needed = data.draw(st.frozensets(st.integers(0, n - 1), min_size=1, max_size=4))
    check, _ = in_groups(lambda kept: needed <= kept)
    found = smallest(range(n), halves, check)
    assert found.minimal
    assert members(found.members) == needed
    assert all(len(group) == 1 for group in found.members)


@given(st.integers(2, 30), st.integers(0, 25), st.data())
def test_a_spent_budget_leaves_the_best_set_so_far(n, budget, data):
    needed = data.draw(st.frozensets(st.integers(0, n - 1), min_size=1, max_size=4))
    check, verdicts = in_groups(lambda kept: needed <= kept, budget)
    found = smallest(range(n), halves, check)
    kept = members(found.members)
    assert needed <= kept
    assert len(verdicts) <= budget
    # no smaller set is known to pass than the one that is given
    passing = [len(seen) for seen, passed in verdicts.items() if passed]
    assert len(kept) == min(passing, default=n)
    if found.minimal:
        assert kept == needed


def test_a_group_whose_parts_do_not_make_it_up_stays_whole():
    # 0 is in no part
    parts = {range(4): (range(1, 2), range(2, 4)), range(2, 4): (range(2, 3), range(3, 4))}
    for needed, expected in (({0}, [range(4)]), ({3}, [range(3, 4)])):
        check, _ = in_groups(lambda kept, needed=needed: needed <= kept)
        found = smallest(range(4), lambda group: parts.get(group, ()), check)
        assert list(found.members) == expected
        assert found.minimal


def test_of_two_groups_the_one_that_cannot_be_refined_stays_whole():
    parts = {range(4): (range(2), range(2, 4)), range(2): (range(1),), range(2, 4): (range(2, 3),)}
    check, _ = in_groups(lambda kept: {1, 2} <= kept)
    found = smallest(range(4), lambda group: parts.get(group, ()), check)
    assert list(found.members) == [range(2), range(2, 3)]


# ---------------------------------------------------------------- places


def place(scope: str = "", file: str = "/a/model.py", function: str = "f", line: int = 1) -> Place:
    return Place(scope, file, function, line)


def leaves(group: Group) -> list[Group]:
    return [leaf for part in group.parts for leaf in leaves(part)] if group.parts else [group]


PLACES = [
    place("net", line=1),
    place("net/layer[0]/attention", line=2),
    place("net/layer[0]/attention", line=3),
    place("net/layer[1]/attention", line=2),
    place("", "/a/model.py", "loss", 7),
    place("", "/a/model.py", "loss", 8),
    place("", "/b/model.py", "loss", 7),
    place("", "/b/model.py", "<lambda>", 9),
    place("", "/b/tools[1]/mean*.py", "mean", 9),
    place("", "<stdin>", "mean", 9),
]


def test_the_finest_groups_are_the_single_places():
    found = leaves(grouped(PLACES, Precision.F32))
    matched = [[p for p in PLACES if p.is_in(leaf.rule)] for leaf in found]
    assert sorted(matched, key=lambda ps: PLACES.index(ps[0])) == [[p] for p in PLACES]


def test_a_groups_rule_matches_what_those_of_its_parts_match():
    def check(group: Group) -> None:
        for part in group.parts:
            check(part)
        if group.parts:
            inside = {p for part in group.parts for p in PLACES if p.is_in(part.rule)}
            assert inside == {p for p in PLACES if p.is_in(group.rule)}

    check(grouped(PLACES, Precision.F32))


def test_scopes_come_before_those_inside_and_functions_before_lines():
    whole = grouped(PLACES, Precision.F64)
    patterns = [
        {k: v for k, v in part.rule.patterns.items() if k != "file"} for part in whole.parts
    ]
    assert patterns == [
        {"scope": "net"},
        {"function": "loss"},
        {"function": "loss"},
        {"line": 9},
        {"function": "mean"},
        {"function": "mean"},
    ]
    assert [g.rule.scope for g in whole.parts[0].parts] == [
        "net/layer[[]0]",
        "net/layer[[]1]",
        "net",
    ]
    assert whole.rule.precision is Precision.F64


def test_a_place_without_a_source_is_in_its_scope_alone():
    unknown = [Place("net", "", "", 0), Place("", "", "", 0), place("net")]
    whole = grouped(unknown, Precision.F32)
    assert all(p.is_in(whole.rule) for p in unknown)
    assert [p.is_in(whole.parts[0].rule) for p in unknown] == [True, False, True]
    assert [g.rule.line for g in leaves(whole)] == [1]
