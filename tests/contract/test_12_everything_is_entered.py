"""Design section 3, line 12: every primitive with a body is entered, and no product is missed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest
from jax import lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call
from jax.sharding import PartitionSpec

import precpass as pp
from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from tests.support.jaxprs import jaxprs_in, low_products, named, walk
from tests.support.lowered_text import stablehlo_products
from tests.support.passes import assert_all_low
from tests.support.values import assert_near, normal_array

X, W = normal_array(0, 4, 8), normal_array(1, 8, 8)
PROGRAMS: dict[str, Callable[..., Any]] = {}
INSIDE: dict[str, tuple[str, ...]] = {}


def program(*primitives: str) -> Callable[..., Any]:
    """A program whose product stands inside one of these primitives, by JAX release."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[fn.__name__] = fn
        INSIDE[fn.__name__] = primitives
        return fn

    return add


@program("jit")
def in_jit(x, w):
    return jax.jit(lambda x, w: x @ w)(x, w)


@program("scan")
def in_scan(x, w):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), c.sum()), x, None, length=3)


@program("while")
def in_while(x, w):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))


@program("while", "scan")
def in_fori(x, w):
    return lax.fori_loop(0, jnp.asarray(3), lambda i, c: jnp.tanh(c @ w), x)


@program("cond")
def in_cond(x, w):
    return lax.cond(x.sum() > 0, lambda: x @ w, lambda: x @ (w + 1))


@program("cond")
def in_switch(x, w):
    index = (x[0, 0] > 0).astype(jnp.int32)
    return lax.switch(index, [lambda: x @ w, lambda: x * 2, lambda: -(x @ w)])


@program("remat2", "checkpoint")
def in_remat(x, w):
    return jax.checkpoint(lambda x, w: jnp.arctan(x @ w))(x, w)


@program("shard_map")
def in_shard_map(x, w):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = PartitionSpec("i"), PartitionSpec()

    def local(x, w):
        return lax.psum(x @ w, "i")

    return jax.shard_map(local, mesh=mesh, in_specs=(rows, whole), out_specs=whole)(x, w)


@program("closed_call", "eval_jaxpr")
def in_closed_call(x, w):
    call = jex.primitives.closed_call_p
    inner = jax.make_jaxpr(lambda x, w: x @ w)(x, w)
    return call.bind(x, w, **call.get_bind_params({"call_jaxpr": inner}))[0]


@program("custom_linear_solve")
def in_custom_linear_solve(x, w):
    matrix = w @ w.T + 8 * jnp.eye(8)

    def solve(matvec, b):
        return lax.fori_loop(0, 20, lambda _, v: v + (b - matvec(v)) * 0.03, b)

    return lax.custom_linear_solve(lambda v: matrix @ v, x[0], solve, symmetric=True)


@program("custom_jvp_call")
def in_custom_jvp(x, w):
    product = jax.custom_jvp(lambda x, w: x @ w)
    product.defjvp(lambda p, t: (p[0] @ p[1], t[0] @ p[1] + p[0] @ t[1]))
    return product(x, w)


@program("custom_vjp_call")
def in_custom_vjp(x, w):
    product = jax.custom_vjp(lambda x, w: x @ w)
    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    return product(x, w)


@program("custom_vmap_call")
def in_custom_vmap(x, w):
    product = custom_vmap(lambda x, w: x @ w)
    product.def_vmap(lambda n, b, x, w: (jnp.einsum("nij,jk->nik", x, w), True))
    return product(x, w)


@program("linear_call")
def in_linear_call(x, w):
    return linear_call(lambda w, x: x @ w, lambda w, t: t @ w.T, w, x)


@program("composite")
def in_composite(x, w):
    return lax.composite(lambda x, w: x @ w, "my.product")(x, w)


@program("jit")
def in_three_layers(x, w):
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))
    return layer(layer(layer(x, w), w), w)


@program("scan")
def in_nested(x, w):
    def step(c, _):
        inner = jax.checkpoint(lambda c: lax.cond(c.sum() > 0, lambda: c @ w, lambda: c))
        return jax.jit(inner)(c), None

    return lax.scan(step, x, None, length=3)[0]


@program("jit")
def in_gradient(x, w):
    return jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)


@program("scan")
def in_scan_gradient(x, w):
    def loss(w):
        step = jax.checkpoint(lambda c, _: (jnp.tanh(c @ w), c.sum()))
        return lax.scan(step, x, None, length=3)[0].sum()

    return jax.grad(loss)(w)


@program("conv_general_dilated")
def in_convolution(x, w):
    return lax.conv_general_dilated(x.reshape(1, 2, 4, 4), w.reshape(4, 2, 2, 4), (1, 1), "SAME")


each_program = pytest.mark.parametrize("name", PROGRAMS)
# lax.custom_linear_solve lowers its `solve` alone; the matvec and the vecmat, which this symmetric
# one shares with the transposed solve, are only run by derivatives.
NOT_LOWERED = {"in_custom_linear_solve": {"matvec", "vecmat", "transpose_solve"}}


def graph_products(graph: Graph) -> int:
    return sum(p in ("dot_general", "conv_general_dilated") for p in graph.primitives)


def not_lowered(name: str, jaxpr: Any) -> int:
    """The products in jaxprs that JAX itself leaves out of the lowered text."""
    held = NOT_LOWERED.get(name)
    if held is None:
        return 0
    (eqn,) = named(jaxpr, "custom_linear_solve")
    jaxprs = eqn.params["jaxprs"]
    lowered = {id(e) for e in walk(jaxprs.solve)}
    others = {id(e): e for n in held for j in jaxprs_in(getattr(jaxprs, n)) for e in walk(j)}
    return sum(e.primitive.name == "dot_general" for k, e in others.items() if k not in lowered)


@each_program
def test_a_product_inside_comes_out_low(name: str):
    fn = PROGRAMS[name]
    before = jax.make_jaxpr(fn)(X, W)
    after = jax.make_jaxpr(pp.auto_mixed(fn))(X, W)
    wanted = INSIDE[name]
    if name not in ("in_gradient", "in_convolution"):
        present = [n for n in wanted if named(before, n)]
        assert present, f"the program has none of {wanted}:\n{before}"
        inside = [
            eqn
            for n in present
            for outer in named(after, n)
            for j in jaxprs_in(list(outer.params.values()))
            for eqn in low_products(j)
        ]
        assert inside, f"no low product inside {present}:\n{after}"
    assert_all_low(pp.auto_mixed(fn), X, W)


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
