"""How `scripts/sweep counts` counts what tests give to the pass: exactly, nothing left out.

The programs are those whose numbers of products in the jaxpr and in what JAX lowers differ.
"""

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from precpass.analysis.graph import Graph
from precpass.jaxpr.bodies import ENTERED
from tests.support import counting
from tests.support.compositions import over_rows
from tests.support.count_checks import Counting, Report
from tests.support.passes import quiet

X = jnp.eye(4) / 2


@jax.jit
def shared(x):
    return x @ x, x @ X


def shared_and_dead(x):
    """Each call leaves one of its two products unread."""
    return shared(x)[0] + shared(x + 1)[1]


def unrolled(x):
    """Five steps, of which the loop holds two and its rest one."""
    return lax.scan(lambda h, _: (h @ x, None), x, None, length=5, unroll=2)[0]


def lanes(x):
    """JAX lowers the predicate twice: to go on, and to choose the lanes that do."""
    return jax.vmap(lambda row: lax.while_loop(lambda v: v @ x @ v < 0, lambda v: v @ x, row))(x)


def solves(x):
    """Two solves share the jaxprs; their derivatives' are not lowered."""

    def solve(b):
        return lax.custom_linear_solve(lambda v: x @ v, b, lambda _, v: X @ v, lambda _, v: X.T @ v)

    return solve(x[0]) + solve(x[1])


def linear_call(x):
    """Its transpose is not lowered; its body is inlined at each call."""
    once = lambda y: jax.custom_derivatives.linear_call(  # noqa: E731
        lambda r, v: r @ v, lambda r, v: r.T @ v, x, y
    )
    return once(once(x))


PROGRAMS: dict[Callable[..., Any], tuple[int, int]] = {
    shared_and_dead: (2, 2),
    unrolled: (3, 0),
    lanes: (5, 0),
    solves: (2, 0),
    linear_call: (2, 0),
}
"""Program -> its numbers of products that JAX lowers, and drops."""


def given(fn: Callable[..., Any]) -> Report:
    found = Counting()
    found.test = "a test"
    with quiet(), found.given.watch(lambda: found.test):
        pp.inspect(fn)(X)
        pp.auto_mixed(fn).trace(X)
    return found.report


@pytest.mark.parametrize("fn", PROGRAMS)
def test_the_numbers_are_jaxs(fn: Callable[..., Any]):
    report = given(fn)
    report.settle()
    assert not report.failures
    (found,) = report.counted.values()
    assert (found.lowered, found.dead) == PROGRAMS[fn]


@pytest.mark.parametrize(
    "fn, primitive",
    [(shared_and_dead, "jit"), (unrolled, "scan"), (lanes, "while"), (linear_call, "linear_call")],
)
def test_what_is_not_entered_is_a_failure(
    fn: Callable[..., Any], primitive: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delitem(ENTERED, primitive)
    report = given(fn)
    assert report.failures.keys() == {"a test, given 1"}


def test_what_the_graph_lacks_or_has_twice_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    def lacking(jaxpr: Any) -> Graph:
        graph = Graph.build(jaxpr)
        return Graph(graph.bodies, graph.eqns, {})

    def doubled(jaxpr: Any) -> Graph:
        graph = Graph.build(jaxpr)
        return Graph(graph.bodies, graph.eqns, {k: v * 2 for k, v in graph.children.items()})

    for broken in (lacking, doubled):
        monkeypatch.setattr(counting, "Graph", types.SimpleNamespace(build=broken))
        assert len(given(unrolled).failures) == 1


def test_it_is_counted_where_it_is_planned():
    """In the middle of outer transforms, under their axes, and with x64 as it is there."""
    found = Counting()

    def inner(x):
        return lax.psum(x @ x, "i")

    with quiet(), found.given.watch(lambda: "a test"):
        with jax.enable_x64(True):
            jax.vmap(pp.auto_mixed(inner), axis_name="i")(jnp.ones((3, 2, 2)))
            pp.auto_mixed(lambda x: x @ x)(jnp.ones((2, 2)))
        jax.make_jaxpr(over_rows(pp.auto_mixed(lambda x, w: jnp.sum(x @ w)[None])))(X, X)
    found.report.settle()
    assert not found.report.failures
    assert found.report.total("lowered") == 3
