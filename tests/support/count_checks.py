"""Counts the products of every program of the tests; `scripts/sweep counts` runs it.

Each is lowered by JAX alone: those of the tables (`product_counts.py`), those that `check_program`
and `assert_trains_alike` check, with their gradients, and all that any test gives to the pass
(`given_programs.py`).
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

from tests.support import libraries, training
from tests.support.counting import Counts, counts
from tests.support.given_programs import LEFT_OUT, NOT_LOWERED, Given

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
    """

    counted: dict[str, Counts] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    stopped: dict[str, str] = dataclasses.field(default_factory=dict)

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

    def settle(self) -> None:
        """Takes for failures what JAX refused, unless that is known, and the tests that stopped."""
        is_known = {n: any(is_in(n, test) for test in NOT_LOWERED) for n in self.refused}
        self.failures.update({n: e for n, e in self.refused.items() if not is_known[n]})
        self.failures.update(self.stopped)
        self.refused = {n: e for n, e in self.refused.items() if is_known[n]}


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


def count_file(name: str, only: str | None) -> Report:
    """Counts what the tests of a file check, and give to the pass.

    Args:
        name: of the file, as `name_of` gives it.
        only: text that the names of the tests hold.
    """
    counting = Counting(only)
    # what a test warns of where it is only counted is no failure
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", f"--rootdir={TESTS.parent}"]
    with (
        mock.patch.object(libraries, "check_program", counting.check_program),
        mock.patch.object(training, "assert_trains_alike", counting.assert_trains_alike),
        counting.given.watch(lambda: counting.test),
    ):
        pytest.main([*options, str(FILES[name])], plugins=[counting])
    return counting.report


class Counting:
    """A plugin for pytest: programs are counted where a test would check them."""

    def __init__(self, only: str | None = None) -> None:
        self.only = only
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
        items[:] = [item for item in items if self._wanted(item)]

    def _wanted(self, item: Any) -> bool:
        # the name of a program is longer than that of its test
        test = _label(item.nodeid)
        return self.only is None or self.only in test or is_in(self.only, test)

    def pytest_runtest_setup(self, item: Any) -> None:
        self.test = _label(item.nodeid)

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
