"""Design section 3, line 12: no product of any program of the tests is missed or counted twice.

Under JAX's flags this is a sample: `scripts/sweep counts` counts every program of these tables, and
those that `test_programs_*` check with their gradients, without a flag and with each.
"""

from typing import Any

import counting
import jax
import jax.numpy as jnp
import pytest
from count_checks import Counting, Report
from counting import FLAGS, assert_counted, dead, not_lowered, warned_of
from flow_helpers import config, named
from product_counts import PROGRAMS, settings

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


def check(name: str, program: Any) -> int:
    with settings(name):
        return assert_counted(program)


@pytest.mark.parametrize("name", PROGRAMS)
def test_known_products_are_those_that_jax_lowers(name: str):
    program = traced(name)
    assert warned_of(program.jaxpr) == 0
    # a count that leaves out more would hide what the graph misses
    assert bool(dead(program.jaxpr)) == (name in WITH_DEAD_PRODUCTS)
    assert bool(not_lowered(program.jaxpr)) == name.endswith("custom_linear_solve")
    assert (check(name, program) > 0) == (name not in WITHOUT_PRODUCTS)


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
                compared[name] = check(name, program)
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
    found.test = "a test"
    checked = found.check_program(two_products, SQUARE, SQUARE)
    assert checked.got.shape == (4, 4)
    found.assert_trains_alike(lambda s, x: (s + x @ s, jnp.sum(s)), SQUARE, [SQUARE])
    return found.report


def test_the_sweep_counts_gradients_and_steps_too():
    report = counted_by_sweep()
    assert {name: found.graph for name, found in report.counted.items()} == {
        "a test": 2,
        "a test, gradient": 5,
        "a test #2, step": 1,
    }
    report.settle(None)
    assert not report.failures


def test_the_sweep_fails_where_the_graph_misses_a_product(monkeypatch: pytest.MonkeyPatch):
    in_graph = counting.in_graph
    monkeypatch.setattr(counting, "in_graph", lambda jaxpr: in_graph(jaxpr) - 1)
    assert len(counted_by_sweep().failures) == 3


def test_the_sweep_fails_where_it_compares_nothing():
    plain = counted_by_sweep()
    flagged = Report()
    flagged.count("a test", two_products, (SQUARE, jnp.eye(3)))
    flagged.stopped["a test #2"] = "what a library raised"
    flagged.settle(plain)
    flagged.must_hold_more(plain)
    assert flagged.refused.keys() == {"a test", "a test #2, step"}
    assert flagged.failures.keys() == {"a test, gradient", "all"}
    flagged.settle(None)
    assert len(flagged.failures) == 5
