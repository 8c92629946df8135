"""Design section 3, line 12: no product of any program of the tests is missed or counted twice."""

from typing import Any

import jax
import pytest
from counting import assert_counted, dead, not_lowered, warned_of
from flow_helpers import config, named
from product_counts import PROGRAMS, settings

FLAGS = [
    flag
    for flag in ("jax_remat3", "jax_custom_jvp3", "jax_custom_vjp3", "jax_scan3")
    if hasattr(jax.config, flag)
]


# tracing every table once more under every flag takes long; "entered" has a test of its own
UNDER_FLAGS = ("compositions", "graph")
# What JAX itself refuses: jax_scan3 has no rule for references inside of custom_linear_solve.
REFUSED = {"compositions: custom_linear_solve"}
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
