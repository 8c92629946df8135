"""Design section 3, line 12: no product of any program of the tests is missed or counted twice.

`scripts/sweep counts` also counts every program that another test gives to the pass.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.support import counting
from tests.support.count_checks import Counting, Report
from tests.support.counting import Counts, counts
from tests.support.product_counts import PROGRAMS, settings

pytestmark = pytest.mark.programs

WITHOUT_PRODUCTS = {"graph: <lambda>"}
WITH_DEAD_PRODUCTS = {"inspection: remat"}


def traced(name: str) -> Any:
    with settings(name):
        fn, args = PROGRAMS[name]()
        return jax.jit(fn).trace(*args)


def check(name: str, program: Any) -> Counts:
    with settings(name):
        found = counts(program.jaxpr, program, program.lower())
    assert found.agree, found
    return found


@pytest.mark.release(keep=12)
@pytest.mark.parametrize("name", PROGRAMS)
def test_known_products_are_those_that_jax_lowers(name: str):
    found = check(name, traced(name))
    assert found.warned == 0
    # a count that leaves out more would hide what the graph misses
    assert bool(found.dead) == (name in WITH_DEAD_PRODUCTS)
    assert (found.lowered > 0) == (name not in WITHOUT_PRODUCTS)


def two_products(w, x):
    return jnp.tanh(x @ w) @ w


SQUARE = jnp.eye(4)


def counted_by_sweep() -> Report:
    found = Counting(None)
    found.test = "file: a test"
    checked = found.check_program(two_products, SQUARE, SQUARE)
    assert checked.got.shape == (4, 4)
    found.assert_trains_alike(lambda s, x: (s + x @ s, jnp.sum(s)), SQUARE, [SQUARE])
    return found.report


def test_the_sweep_counts_gradients_and_steps_too():
    report = counted_by_sweep()
    assert {name: found.graph for name, found in report.counted.items()} == {
        "file: a test": 2,
        "file: a test, gradient": 5,
        "file: a test #2, step": 1,
    }
    report.settle()
    assert not report.failures


def test_the_sweep_fails_where_the_graph_misses_a_product(monkeypatch: pytest.MonkeyPatch):
    known_of = counting.known_of
    missed = counting.Known(graph=-1)
    monkeypatch.setattr(counting, "known_of", lambda jaxpr: known_of(jaxpr).plus(missed))
    assert len(counted_by_sweep().failures) == 3


def test_the_sweep_fails_where_jax_refuses_a_program_or_a_test_stops():
    report = counted_by_sweep()
    report.count("file: another test", two_products, (SQUARE, jnp.eye(3)))
    report.stopped["file: a third test"] = "what a library raised"
    report.settle()
    assert report.failures.keys() == {"file: another test", "file: a third test"}
