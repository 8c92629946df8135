"""The examples in the docstrings run and print what they say."""

import doctest
import importlib
import pkgutil

import jax
import pytest

import precpass

MODULES = [
    "precpass",
    *(info.name for info in pkgutil.walk_packages(precpass.__path__, "precpass.")),
]


# optimistix alone leaves tracers behind
LEAK = {"precpass.numerics.least_squares"}


@pytest.mark.release(keep=3)
@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str):
    with jax.check_tracer_leaks(jax.config.jax_check_tracer_leaks and name not in LEAK):
        failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    found = [t for name in MODULES for t in finder.find(importlib.import_module(name))]
    assert sum(bool(t.examples) for t in found) >= 10
