"""The readers of a value, behind movement and across the borders of bodies."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from precpass.analysis.reach import Reach, hands_on
from precpass.analysis.uses import Uses
from tests.support.graph_programs import SQUARE, graph_of, only


def readers_of_the_product(fn, *, stacks=False):
    """The readers of a program's only product, by name; None where it leaves."""
    graph = graph_of(fn, SQUARE, SQUARE)
    row, reach = only(graph, "dot_general"), Reach(graph, Uses(graph), stacks=stacks)
    found = list(reach.readers(int(graph.body[row]), graph.eqns[row].outvars[0], hands_on))
    return reach, {None if r.eqn is None else r.eqn.primitive.name: r for r in found}


def in_a_body(x, w):
    @jax.jit
    def inner(h):
        return jnp.sin(h), h * 2

    a, b = inner((x @ w).T)
    return a, b + 1


def from_a_body(x, w):
    return jnp.cos(jax.jit(lambda x: (x @ w).T)(x))


def from_a_scan(x, w):
    return jnp.cos(lax.scan(lambda c, row: (c, row @ w), 0, x[:, None])[1])


def carried_by_a_scan(x, w):
    return lax.scan(lambda c, row: (c @ w, row), x, x)[0]


@pytest.mark.parametrize(
    ("fn", "stacks", "names"),
    [
        (in_a_body, False, {"transpose", "sin", "mul"}),
        (from_a_body, False, {"transpose", "cos"}),
        (from_a_scan, False, {None}),
        (from_a_scan, True, {"cos"}),
        (carried_by_a_scan, True, {None}),
        (lambda x, w: x @ w, False, {None}),
    ],
)
def test_readers_are_found_behind_movement_and_across_borders(fn, stacks, names):
    assert set(readers_of_the_product(fn, stacks=stacks)[1]) == names


def test_a_shift_subtracts_a_values_own_maximum():
    def softmax(x, w):
        h = x @ w
        return jnp.exp(h - jnp.max(h, -1, keepdims=True))

    def less_another(x, w):
        return jnp.exp(x @ w - jnp.max(x, -1, keepdims=True))

    def less_its_mean(x, w):
        h = x @ w
        return h - jnp.mean(h, -1, keepdims=True)

    for fn, expected in ((softmax, True), (less_another, False), (less_its_mean, False)):
        reach, readers = readers_of_the_product(fn)
        assert reach.is_shift(readers["sub"]) is expected
