"""Design section 3, line 12: no product of any program of the tests is missed or counted twice.

Under JAX's flags this is a sample: `scripts/sweep counts` counts every program of these tables, and
every one that another test gives to the pass, without a flag and with each.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.support import counting
from tests.support.count_checks import Counting, Report
from tests.support.counting import FLAGS, Counts, counts
from tests.support.jaxprs import named
from tests.support.passes import config
from tests.support.product_counts import PROGRAMS, settings

pytestmark = pytest.mark.programs

UNDER_FLAGS = ("compositions", "graph", "scopes")
# What JAX itself refuses: jax_scan3 has no rule for references inside of custom_linear_solve, and
# its scans cannot be differentiated in reverse or batched.
REFUSED = {
    "compositions: custom_linear_solve",
    *(
        f"scopes: {program}, {transform}"
        for program in ("scan_in_a_scope", "scope_in_a_scan")
        for transform in ("grad", "vmap", "vmap of grad")
    ),
}
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


@pytest.mark.parametrize("flag", FLAGS)
def test_known_products_are_those_that_jax_lowers_with_a_flag_on(flag: str):
    """Programs that the flag leaves as they are have been counted above."""
    refused: set[str] = set()
    compared: dict[str, int] = {}
    with config(flag, True):
        for name in PROGRAMS:
            if not name.startswith(UNDER_FLAGS):
                continue
            try:
                program = traced(name)
                if not named(program.jaxpr, "call_hi_primitive"):
                    continue
                compared[name] = check(name, program).lowered
            except NotImplementedError:
                refused.add(name)
    assert refused == (REFUSED if flag == "jax_scan3" else set())
    assert len(compared) >= 2
    assert any(compared.values())


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
    report.settle(None)
    assert not report.failures


def test_the_sweep_fails_where_the_graph_misses_a_product(monkeypatch: pytest.MonkeyPatch):
    known_of = counting.known_of
    missed = counting.Known(graph=-1)
    monkeypatch.setattr(counting, "known_of", lambda jaxpr: known_of(jaxpr).plus(missed))
    assert len(counted_by_sweep().failures) == 3


def test_the_sweep_fails_where_it_compares_nothing():
    plain = counted_by_sweep()
    flagged = Report()
    flagged.count("file: a test", two_products, (SQUARE, jnp.eye(3)))
    flagged.stopped["file: a test #2"] = "what a library raised"
    flagged.settle(plain)
    flagged.must_hold_more(plain)
    assert flagged.refused.keys() == {"file: a test", "file: a test #2, step"}
    assert flagged.failures.keys() == {"file: a test, gradient", "all"}
    flagged.settle(None)
    assert len(flagged.failures) == 5
