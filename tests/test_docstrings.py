"""The examples in the docstrings run and print what they say."""

import doctest
import importlib
import pkgutil

import pytest

import precpass

MODULES = [
    "precpass",
    *(info.name for info in pkgutil.walk_packages(precpass.__path__, "precpass.")),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    found = [t for name in MODULES for t in finder.find(importlib.import_module(name))]
    assert sum(bool(t.examples) for t in found) >= 10
