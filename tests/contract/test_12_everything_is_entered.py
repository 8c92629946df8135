"""Design section 3, line 12: every primitive with a body is entered, and no product is missed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from tests.support import compositions
from tests.support.compositions import W, X
from tests.support.jaxprs import jaxprs_in, named, walk
from tests.support.lowered_text import stablehlo_products
from tests.support.passes import assert_all_low
from tests.support.values import assert_near


def in_fori(x, w):
    return lax.fori_loop(0, jnp.asarray(3), lambda i, c: jnp.tanh(c @ w), x)


def in_switch(x, w):
    index = (x[0, 0] > 0).astype(jnp.int32)
    return lax.switch(index, [lambda: x @ w, lambda: x * 2, lambda: -(x @ w)])


def in_three_layers(x, w):
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))
    return layer(layer(layer(x, w), w), w)


def in_nested(x, w):
    def step(c, _):
        inner = jax.checkpoint(lambda c: lax.cond(c.sum() > 0, lambda: c @ w, lambda: c))
        return jax.jit(inner)(c), None

    return lax.scan(step, x, None, length=3)[0]


def in_gradient(x, w):
    return jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)


def in_scan_gradient(x, w):
    def loss(w):
        step = jax.checkpoint(lambda c, _: (jnp.tanh(c @ w), c.sum()))
        return lax.scan(step, x, None, length=3)[0].sum()

    return jax.grad(loss)(w)


def in_convolution(x, w):
    image, kernel = x.reshape(1, 2, 3, 4), w.reshape(3, 3, 4, 1)
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=numbers)


FURTHER = {
    "scan": (in_fori, in_nested, in_scan_gradient),
    "cond": (in_switch,),
    "jit": (in_three_layers, in_gradient),
}
"""Programs beside the one that each primitive with a body has in `compositions`."""
INSIDE = {fn.__name__: primitive for primitive, fns in FURTHER.items() for fn in fns}
PROGRAMS: dict[str, Callable[..., Any]] = {
    **{name: fn for name, fn in compositions.PROGRAMS.items() if name != "call_hi_primitive"},
    **{fn.__name__: fn for fns in FURTHER.values() for fn in fns},
    "in_convolution": in_convolution,
}
"""Those with hi-primitives are in `test_12_hi_primitives`, and below, by JAX's flags."""

each_program = pytest.mark.parametrize("name", PROGRAMS)


def graph_products(graph: Graph) -> int:
    return sum(p in ("dot_general", "conv_general_dilated") for p in graph.primitives)


def not_lowered(name: str, jaxpr: Any) -> int:
    """The products in jaxprs that JAX itself leaves out of the lowered text.

    `lax.custom_linear_solve` lowers its `solve` alone; the matvec and the vecmat, which this
    symmetric one shares with the transposed solve, are only run by derivatives.
    """
    if name != "custom_linear_solve":
        return 0
    (eqn,) = named(jaxpr, "custom_linear_solve")
    jaxprs = eqn.params["jaxprs"]
    lowered = {id(e) for e in walk(jaxprs.solve)}
    held = [getattr(jaxprs, n) for n in ("matvec", "vecmat", "transpose_solve")]
    others = {id(e): e for n in held for j in jaxprs_in(n) for e in walk(j)}
    return sum(e.primitive.name == "dot_general" for k, e in others.items() if k not in lowered)


@each_program
def test_a_product_inside_comes_out_low(name: str):
    """Values, and every transformation, are in `sweeps/test_enumeration_compositions.py`."""
    fn = PROGRAMS[name]
    before, after = jax.make_jaxpr(fn)(X, W), jax.make_jaxpr(pp.auto_mixed(fn))(X, W)
    compositions.check_low(after, before, INSIDE.get(name, name), None)


@each_program
def test_the_graph_has_every_product_of_the_stablehlo(name: str):
    fn = PROGRAMS[name]
    jaxpr = jax.make_jaxpr(fn)(X, W)
    expected = stablehlo_products(fn, X, W)
    assert expected > 0
    assert graph_products(Graph.build(jaxpr)) == expected + not_lowered(name, jaxpr)


COMBINERS: dict[str, Callable[..., Any]] = {
    "scatter-add": lambda x: jnp.zeros(8).at[jnp.arange(4)].add(x[:, 0]),
    "reduce": lambda x: lax.reduce(
        (x, x), (0.0, 0.0), lambda a, b: (a[0] + b[0], a[1] + b[1]), (0,)
    ),
    "reduce_window": lambda x: lax.reduce_window(
        x, 0.0, lambda a, b: a + b - a * b, (2, 2), (1, 1), "SAME"
    ),
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("primitive", COMBINERS)
def test_a_scalar_combiner_is_no_body(primitive: str):
    def fn(x, w):
        return COMBINERS[primitive](x @ w)

    before = jax.make_jaxpr(fn)(X, W)
    (eqn,) = named(before, primitive)
    assert any(list(jaxprs_in(v)) for v in eqn.params.values())
    assert ir.bodies(eqn) == ()
    graph = Graph.build(before)
    assert primitive in graph.primitives
    assert all(id(eqn) != id(e) or row not in graph.children for row, e in enumerate(graph.eqns))
    for policy in (pp.AutoMixedBf16, pp.AlwaysBf16):
        after = assert_all_low(pp.auto_mixed(fn, policy=policy), X, W)
        (kept,) = named(after, primitive)
        assert {v.aval.dtype for v in kept.outvars} == {jnp.dtype("float32")}
    assert_near(pp.auto_mixed(fn)(X, W), jax.jit(fn)(X, W), 0.02)
