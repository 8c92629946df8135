"""Programs with every kind of body, and how the tests of the graph look things up in it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from precpass.analysis.graph import Graph
from tests.support.values import f32


def graph_of(fn, *args):
    return Graph.build(jax.make_jaxpr(fn)(*args))


def rows(graph, primitive):
    return [row for row, name in enumerate(graph.primitives) if name == primitive]


def only(graph, primitive):
    (row,) = rows(graph, primitive)
    return row


@jax.jit
def layer(x, w):
    return jnp.tanh(x @ w)


def five_layers(x, w):
    for _ in range(5):
        x = layer(x, w)
    return x


def nested_scans(x, w):
    def inner(h, _):
        return h @ w, h.sum()

    def outer(h, _):
        return lax.scan(inner, jnp.sin(h), length=7)

    return lax.scan(outer, x, length=11)


def a_while(x, w):
    return lax.while_loop(lambda h: h[0, 0] < 10, lambda h: h @ w, x)


def a_branch(x, w):
    return lax.cond(x[0, 0] > 0, lambda h: h @ w, lambda h: -h, x)


def a_gradient(x, w):
    def loss(w):
        return jnp.where(jax.checkpoint(layer)(x, w) > 0, 1.0, five_layers(x, w)).sum()

    return jax.value_and_grad(loss)(w)


PROGRAMS = [five_layers, nested_scans, a_while, a_branch, a_gradient, lambda x, w: (x, w)]
each_program = pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
SQUARE = f32(8, 8)
