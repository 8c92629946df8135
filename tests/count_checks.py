"""Counts the products of every program of the tests; `scripts/sweep counts` runs it.

Each is traced and lowered by JAX alone: those of the tables (`product_counts.py`), and those that
`test_programs_*` check, with their gradients. Under a flag of JAX's (`counting.FLAGS`) that takes a
process of its own, where nothing was traced or imported without it. What JAX then cannot trace or
lower, it refuses.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import program_helpers
import pytest
import training_helpers
from counting import Counts, counts

TESTS = Path(__file__).parent
LIBRARIES = [path.stem.removeprefix("test_") for path in sorted(TESTS.glob("test_programs_*.py"))]


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
        try:
            traced = jax.jit(fn).trace(*args)
            lowered = traced.lower()
        except Exception as error:
            self.refused[name] = said(error)
            return None
        try:
            found = self.counted[name] = counts(traced, lowered)
        except Exception as error:
            self.failures[name] = f"cannot be counted: {said(error)}"
            return lowered
        if not found.agree:
            self.failures[name] = str(found)
        return lowered

    def settle(self, plain: Report | None) -> None:
        """Judges what was refused or not met, given the report without a flag (None: this one)."""
        if plain is None:
            self.failures.update({**self.refused, **self.stopped})
            self.refused.clear()
            return
        for name in plain.names - self.names:
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
    from product_counts import PROGRAMS, settings

    report = Report()
    for name in names:
        with settings(name):
            report.count(name, *PROGRAMS[name]())
    return report


def count_library(library: str, only: str | None = None) -> Report:
    """Counts what a file `test_programs_*` checks, in those tests whose names hold `only`."""
    counting = Counting(only)
    file = TESTS / f"test_{library}.py"
    # the flags of JAX are experiments: what they warn of is no failure
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", f"--rootdir={TESTS.parent}"]
    with (
        mock.patch.object(program_helpers, "check_program", counting.check_program),
        mock.patch.object(training_helpers, "assert_trains_alike", counting.assert_trains_alike),
    ):
        pytest.main([*options, str(file)], plugins=[counting])
    return counting.report


class Counting:
    """A plugin for pytest: programs are counted where a test would check them."""

    def __init__(self, only: str | None) -> None:
        self.only = only
        self.report = Report()
        self.test = ""
        self.met: Counter[str] = Counter()

    def check_program(
        self, fn: Callable[..., Any], *args: Any, wrt: int | Sequence[int] | None = 0, **_: Any
    ) -> _Plain:
        name = self._name()
        lowered = self.report.count(name, fn, args)
        if wrt is not None:
            chosen = (wrt,) if isinstance(wrt, int) else tuple(wrt)
            gradient, inputs = program_helpers.gradient_by(args, chosen)
            self.report.count(f"{name}, gradient", gradient(fn), inputs)
        return _Plain(lowered, args)

    def assert_trains_alike(
        self, step: Callable[..., Any], state: Any, batches: Sequence[Any], **_: Any
    ) -> tuple[Any, Any]:
        self.report.count(f"{self._name()}, step", step, (state, batches[0]))
        last, _losses = training_helpers.trained(
            jax.jit(step, **program_helpers.FAST), state, batches
        )
        return last, last

    def _name(self) -> str:
        self.met[self.test] += 1
        number = self.met[self.test]
        return self.test if number == 1 else f"{self.test} #{number}"

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if _checks(item.function) and self._wanted(item)]

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
        return self.lowered.compile(**program_helpers.FAST)(*self.args)

    @property
    def got(self) -> Any:
        return self.want


def _label(nodeid: str) -> str:
    file, _, test = nodeid.partition("::")
    name = Path(file).stem.removeprefix("test_")
    return f"{name}: {test.removeprefix('test_')}" if test else name


def _checks(fn: Any, seen: set[Any] | None = None) -> bool:
    """Whether a test checks a program, by itself or through functions of its module."""
    seen = {fn} if seen is None else seen
    for name in _names_in(fn.__code__):
        if name in ("check_program", "assert_trains_alike"):
            return True
        other = fn.__globals__.get(name)
        own = isinstance(other, types.FunctionType) and other.__module__ == fn.__module__
        if own and other not in seen:
            seen.add(other)
            if _checks(other, seen):
                return True
    return False


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names_in(inner)
