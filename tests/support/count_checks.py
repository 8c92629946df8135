"""Counts the products of every program of the tests; `scripts/sweep counts` runs it.

Each is lowered by JAX alone: those of the tables (`product_counts.py`), those that `check_program`
and `assert_trains_alike` check, with their gradients, and all that any test gives to the pass
(`given_programs.py`). Under a flag of JAX's (`counting.FLAGS`) that takes a process of its own,
where nothing was traced or imported without it. What JAX then cannot trace or lower, it refuses.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest

import precpass as pp
from tests.support import libraries, training
from tests.support.counting import Counts, counts
from tests.support.given_programs import LEFT_OUT, MARK, NOT_LOWERED, WITH_A_BROKEN_PASS, Given

TESTS = Path(__file__).parents[1]


def name_of(path: Path) -> str:
    """`contract/13_control_flow` of `tests/contract/test_13_control_flow.py`."""
    return path.relative_to(TESTS).with_name(path.stem.removeprefix("test_")).as_posix()


FILES = {
    name: path
    for path in sorted(TESTS.rglob("test_*.py"))
    if (name := name_of(path)) not in LEFT_OUT
}
"""The names and paths of the files whose tests are run."""


@dataclasses.dataclass
class Report:
    """What was found, by the programs' names.

    Attributes:
        counted: of each program that could be lowered.
        refused: JAX's errors.
        failures: what is wrong.
        stopped: the errors of tests that ended early; what they would have checked has no name.
        given: how many programs each test that ran gave to the pass, repetitions included.
        alike: the tests that were left to another one, which differs by a policy alone.
    """

    counted: dict[str, Counts] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    stopped: dict[str, str] = dataclasses.field(default_factory=dict)
    given: dict[str, int] = dataclasses.field(default_factory=dict)
    alike: set[str] = dataclasses.field(default_factory=set)

    @property
    def names(self) -> set[str]:
        return {*self.counted, *self.refused, *self.failures}

    def add(self, other: Report) -> None:
        """Puts two reports together."""
        for field in dataclasses.fields(self):
            getattr(self, field.name).update(getattr(other, field.name))

    def total(self, what: str) -> int:
        """A count, such as "lowered", over all programs."""
        return sum(getattr(found, what) for found in self.counted.values())

    def count(self, name: str, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Counts a program; returns it lowered, if JAX does that."""

        def made() -> tuple[Any, Any]:
            traced = jax.jit(fn).trace(*args)
            return traced, traced.lower()

        return self.compare(name, made)

    def compare(self, name: str, make: Callable[[], tuple[Any, Any]], jaxpr: Any = None) -> Any:
        """Counts a program that `make` traces and lowers; `jaxpr` is what the pass gets of it."""
        try:
            traced, lowered = make()
        except Exception as error:
            self.refused[name] = said(error)
            return None
        try:
            found = self.counted[name] = counts(jaxpr or traced.jaxpr, traced, lowered)
        except Exception as error:
            self.failures[name] = f"cannot be counted: {said(error)}"
            return lowered
        if not found.agree:
            self.failures[name] = str(found)
        return lowered

    def settle(self, plain: Report | None) -> None:
        """Judges what was refused or not met, given the report without a flag (None: this one)."""
        if plain is None:
            tests = NOT_LOWERED.items()
            known = {n: why for n in self.refused for test, why in tests if is_in(n, test)}
            self.failures.update({n: e for n, e in self.refused.items() if n not in known})
            self.failures.update(self.stopped)
            self.refused = known
            return
        self.refused.update({n: error for n, error in self.stopped.items() if ": " not in n})
        for test, number in plain.given.items():
            # under a flag a test is not run for each policy
            if self.given.get(test, number) < number and test not in self.stopped:
                self.failures[test] = "gave fewer programs to the pass, though it went to its end"
        for name in plain.names - self.names:
            # that one was known, or the test gave it no more
            if MARK in name or any(is_in(name, test) for test in self.alike):
                continue
            why = [error for test, error in self.stopped.items() if is_in(name, test)]
            kind = self.refused if why else self.failures
            kind[name] = why[0] if why else "not met, though its test went on to its end"

    def must_hold_more(self, plain: Report) -> None:
        """Fails where a flag makes no hi-primitives, given the report without one."""
        if self.total("hi") <= plain.total("hi"):
            self.failures["all"] = "no product stands in a hi-primitive that the flag makes"


def is_in(name: str, test: str) -> bool:
    """Whether a program is one of a test, or of a file of tests."""
    return name.startswith(test) and name[len(test) :][:1] in ("", ",", ":", " ")


def said(error: BaseException) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def count_tables(names: Sequence[str]) -> Report:
    """Counts programs of the tables."""
    from tests.support.product_counts import PROGRAMS, settings

    report = Report()
    for name in names:
        with settings(name):
            report.count(name, *PROGRAMS[name]())
    return report


def count_file(name: str, only: str | None, flag: str | None) -> Report:
    """Counts what the tests of a file check, and give to the pass.

    Args:
        name: of the file, as `name_of` gives it.
        only: text that the names of the tests hold.
        flag: the flag that is on. With one, tests that differ by a policy alone are run once.
    """
    counting = Counting(only, once=flag is not None)
    # the flags of JAX are experiments: what they warn of is no failure
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", f"--rootdir={TESTS.parent}"]
    with (
        mock.patch.object(libraries, "check_program", counting.check_program),
        mock.patch.object(training, "assert_trains_alike", counting.assert_trains_alike),
        counting.given.watch(lambda: counting.test),
    ):
        pytest.main([*options, str(FILES[name])], plugins=[counting])
    counting.report.given.update(counting.given.met)
    return counting.report


class Counting:
    """A plugin for pytest: programs are counted where a test would check them."""

    def __init__(self, only: str | None = None, once: bool = False) -> None:
        self.only = only
        self.once = once
        self.report = Report()
        self.given = Given(self.report.compare)
        self.test = ""
        self.met: Counter[str] = Counter()

    def check_program(
        self, fn: Callable[..., Any], *args: Any, wrt: int | Sequence[int] | None = 0, **_: Any
    ) -> _Plain:
        name = self._name()
        lowered = self.report.count(name, fn, args)
        if wrt is not None:
            chosen = (wrt,) if isinstance(wrt, int) else tuple(wrt)
            gradient, inputs = libraries.gradient_by(args, chosen)
            self.report.count(f"{name}, gradient", gradient(fn), inputs)
        return _Plain(lowered, args)

    def assert_trains_alike(
        self, step: Callable[..., Any], state: Any, batches: Sequence[Any], **_: Any
    ) -> tuple[Any, Any]:
        self.report.count(f"{self._name()}, step", step, (state, batches[0]))
        last, _losses = training.trained(jax.jit(step, **libraries.FAST), state, batches)
        return last, last

    def _name(self) -> str:
        self.met[self.test] += 1
        number = self.met[self.test]
        return self.test if number == 1 else f"{self.test} #{number}"

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        wanted = [item for item in items if self._wanted(item)]
        if self.once:
            # the policy is no part of the program that it is given
            kept = list({_apart_from_policies(item): item for item in wanted}.values())
            left = set(map(id, wanted)) - set(map(id, kept))
            self.report.alike |= {_label(item.nodeid) for item in wanted if id(item) in left}
            wanted = kept
        items[:] = wanted

    def _wanted(self, item: Any) -> bool:
        # the name of a program is longer than that of its test
        test = _label(item.nodeid)
        if test.partition("[")[0] in WITH_A_BROKEN_PASS:
            return False
        return self.only is None or self.only in test or is_in(self.only, test)

    def pytest_runtest_setup(self, item: Any) -> None:
        self.test = _label(item.nodeid)
        self.report.given[self.test] = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._stopped(report)

    def pytest_collectreport(self, report: Any) -> None:
        self._stopped(report)

    def _stopped(self, report: Any) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash else report.longreprtext
            self.report.stopped[_label(report.nodeid)] = " ".join(text.split())[:300]


@dataclasses.dataclass
class _Plain:
    """In the place of a `Checked`: float32's results as those under the policy too."""

    lowered: Any
    args: tuple[Any, ...]

    @functools.cached_property
    def want(self) -> Any:
        assert self.lowered is not None, "JAX refuses the program"
        return self.lowered.compile(**libraries.FAST)(*self.args)

    @property
    def got(self) -> Any:
        return self.want


def _label(nodeid: str) -> str:
    file, _, test = nodeid.partition("::")
    name = name_of(TESTS.parent / file)
    return f"{name}: {test.removeprefix('test_')}" if test else name


def _apart_from_policies(item: Any) -> Any:
    spec = getattr(item, "callspec", None)
    if spec is None:
        return item.nodeid
    others = [n for n, x in spec.params.items() if not isinstance(x, pp.types.PrecisionPolicy)]
    if len(others) == len(spec.params):
        return item.nodeid
    return item.function, tuple((n, spec.indices[n]) for n in others)
