"""How the result of a product is read, behind movement and across the borders of bodies."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from precpass.analysis.analysis import Analysis
from precpass.analysis.digits import Digits
from tests.support.graph_programs import SQUARE, graph_of, only

L, S, C, R, M = (
    *(Digits.LEAVING, Digits.SUBTRACTED, Digits.COMPARED, Digits.RANKED, Digits.MAGNIFIED),
)


def reads(fn: Callable[..., Any]) -> int:
    """How a program reads the result of its only product."""
    graph = graph_of(fn, SQUARE, SQUARE)
    row = only(graph, "dot_general")
    return Analysis(graph).digits.digits_of(int(graph.body[row]), graph.eqns[row].outvars[0])


def in_a_body(x: Any, w: Any) -> Any:
    return jax.jit(lambda h: jnp.tanh(h) - h * 2)((x @ w).T)


def from_a_scan(x: Any, w: Any) -> Any:
    return jnp.tanh(lax.scan(lambda c, row: (c, row @ w), 0, x[:, None])[1])


def carried_by_a_scan(x: Any, w: Any) -> Any:
    return lax.scan(lambda c, row: (c @ w, row), x, x)[0]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, w: jnp.tanh(x @ w), 0),
        (lambda x, w: x @ w, L),
        (lambda x, w: (2.0 * (x @ w)).T.reshape(-1), L),
        (lambda x, w: jnp.maximum(x @ w, 0.0), Digits.CHOSEN),
        (carried_by_a_scan, Digits.STATE),
        (from_a_scan, Digits.STACKED),
        (lambda x, w: jnp.tanh(jax.jit(lambda x: (x @ w).T)(x)), 0),
        (in_a_body, S),
        (lambda x, w: jnp.tanh(x - x @ w), S),
        (lambda x, w: jnp.tanh(-2.0 * (x @ w) + x), S),
        (lambda x, w: jnp.tanh(x * (x @ w) - x), Digits.FACTOR),
        (lambda x, w: jnp.tanh(x + (x @ w) - w), Digits.TERM),
        (lambda x, w: jnp.tanh(jnp.exp(x @ w)), M),
        (lambda x, w: jnp.where(x @ w > w, 1.0, 2.0), C),
        (lambda x, w: jnp.where(x @ w > 0.0, x, 2.0), 0),
        (lambda x, w: jnp.where(x @ w > 0.5, x, 2.0), Digits.NEAR),
        (lambda x, w: jnp.where(x @ w > 300.0, x, 2.0), Digits.NEAR | C),
        (lambda x, w: x * jnp.argmax(jnp.tanh(x @ w)).astype(jnp.float32), R),
        (lambda x, w: jnp.tanh(jax.nn.softmax(x @ w)), 0),
    ],
)
def test_how_a_result_is_read(fn: Callable[..., Any], expected: int):
    assert reads(fn) == expected
