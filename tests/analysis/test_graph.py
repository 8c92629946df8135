"""The graph: its columns, what an equation costs, how often it runs, and what crosses borders."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from precpass.analysis.graph import Graph
from precpass.analysis.sizes import NOMINAL_SIZE, nbytes
from precpass.policy.primitives import op
from precpass.types import OpKind
from tests.support.graph_programs import (
    SQUARE,
    a_while,
    each_program,
    five_layers,
    graph_of,
    layer,
    nested_scans,
    only,
    rows,
)
from tests.support.values import f32

KINDS = list(OpKind)


# ---------------------------------------------------------------- columns


@each_program
def test_the_columns_of_one_thing_have_one_length(fn):
    graph = graph_of(fn, SQUARE, SQUARE)
    eqns, values = len(graph.eqns), len(graph.values)
    for column in (graph.primitives, graph.kinds, graph.body, graph.flops, graph.calls):
        assert len(column) == eqns
    assert len(graph.value_bytes) == len(graph.producers) == values
    assert len(graph.sources) == len(graph.targets)
    assert graph.links.shape[1:] == (2,)


@each_program
def test_every_index_points_into_its_column(fn):
    graph = graph_of(fn, SQUARE, SQUARE)
    for index, size in (
        (graph.sources, len(graph.values)),
        (graph.targets, len(graph.eqns)),
        (graph.links, len(graph.values)),
        (graph.body, len(graph.bodies)),
        (graph.kinds, len(KINDS)),
    ):
        assert ((index >= 0) & (index < size)).all()
    assert (graph.producers >= -1).all()
    assert (graph.producers < len(graph.eqns)).all()


@each_program
def test_the_bodies_divide_the_rows(fn):
    graph = graph_of(fn, SQUARE, SQUARE)
    covered = sorted(row for b in graph.bodies for row in range(b.start, b.stop))
    assert covered == list(range(len(graph.eqns)))
    for at, body in enumerate(graph.bodies):
        assert (graph.body[body.start : body.stop] == at).all()
        assert graph.eqns[body.start : body.stop] == tuple(
            getattr(body.jaxpr, "jaxpr", body.jaxpr).eqns
        )


@each_program
def test_names_kinds_edges_and_producers_are_those_of_the_equations(fn):
    graph = graph_of(fn, SQUARE, SQUARE)
    edges = set(zip(graph.sources.tolist(), graph.targets.tolist(), strict=True))
    place = {value: row for row, value in enumerate(graph.values)}
    expected = set()
    for row, eqn in enumerate(graph.eqns):
        assert graph.primitives[row] == eqn.primitive.name
        assert KINDS[graph.kinds[row]] is op(eqn.primitive.name).kind
        at = int(graph.body[row])
        expected |= {(place[v, at], row) for v in eqn.invars if not hasattr(v, "val")}
        assert all(graph.producers[place[v, at]] == row for v in eqn.outvars)
    assert edges == expected


def test_arguments_and_constants_have_no_producer():
    table = np.arange(4, dtype=np.float32)
    closed = jax.make_jaxpr(lambda x: x + table)(f32(4))
    graph = Graph.build(closed)
    inputs = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
    assert len(inputs) == 2
    assert [graph.producers[graph.values.index((v, 0))] for v in inputs] == [-1, -1]


def test_the_graph_of_nothing_is_empty():
    graph = graph_of(lambda: ())
    assert graph.eqns == graph.values == ()
    assert len(graph.bodies) == 1
    assert graph.links.shape == (0, 2)


# ---------------------------------------------------------------- costs


@pytest.mark.parametrize(
    ("spec", "lhs", "rhs", "flops"),
    [
        ("ij,jk->ik", (3, 5), (5, 7), 2 * 3 * 7 * 5),
        ("bij,bjk->bik", (2, 3, 5), (2, 5, 7), 2 * 2 * 3 * 7 * 5),
        ("ij,ij->", (3, 5), (3, 5), 2 * 3 * 5),
        ("ijk,jkl->il", (3, 5, 7), (5, 7, 11), 2 * 3 * 11 * 5 * 7),
        ("i,j->ij", (3,), (5,), 2 * 3 * 5),
    ],
)
def test_a_dot_costs_two_operations_per_term(spec, lhs, rhs, flops):
    graph = graph_of(lambda a, b: jnp.einsum(spec, a, b), f32(*lhs), f32(*rhs))
    row = rows(graph, "dot_general") or rows(graph, "mul")
    if graph.primitives[row[0]] == "mul":  # an outer product may be traced as a plain one
        flops //= 2
    assert graph.flops[row[0]] == flops


@pytest.mark.parametrize(
    ("image", "kernel", "groups", "flops"),
    [
        # 16 output rows and columns, 5 output features, 3 input features, a window of 3 x 3
        ((2, 3, 16, 16), (5, 3, 3, 3), 1, 2 * (2 * 5 * 16 * 16) * (3 * 3 * 3)),
        # in two groups each output feature sees half of the input features
        ((2, 4, 16, 16), (6, 2, 3, 3), 2, 2 * (2 * 6 * 16 * 16) * (2 * 3 * 3)),
        # depthwise: one input feature each
        ((1, 4, 16, 16), (4, 1, 5, 5), 4, 2 * (1 * 4 * 16 * 16) * (5 * 5)),
    ],
)
def test_a_convolution_costs_two_operations_per_term(image, kernel, groups, flops):
    def conv(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=groups)

    graph = graph_of(conv, f32(*image), f32(*kernel))
    assert graph.flops[only(graph, "conv_general_dilated")] == flops


def test_the_layout_of_a_convolution_does_not_change_its_cost():
    def conv(x, w):
        return lax.conv_general_dilated(
            x, w, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    graph = graph_of(conv, f32(2, 9, 9, 3), f32(3, 3, 3, 5))
    # 4 x 4 positions of a window of 3 x 3 in steps of 2
    assert graph.flops[only(graph, "conv_general_dilated")] == 2 * (2 * 4 * 4 * 5) * (3 * 3 * 3)


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_zeros_that_a_convolution_inserts_cost_nothing(dimensions):
    """A strided convolution and each half of its gradient have the same number of terms."""
    steps = (2,) * dimensions

    def conv(x, w):
        return lax.conv_general_dilated(x, w, steps, "SAME")

    args = f32(4, 8, *(32,) * dimensions), f32(16, 8, *(4,) * dimensions)
    terms = (4 * 16 * 16**dimensions) * (8 * 4**dimensions)
    gradient = jax.grad(lambda *args: conv(*args).sum(), argnums=(0, 1))
    for fn, products in ((conv, 1), (gradient, 2)):
        graph = graph_of(fn, *args)
        found = [graph.flops[r] for r in rows(graph, "conv_general_dilated")]
        assert found[-products:] == [2 * terms] * products


def test_a_transposed_convolution_costs_what_its_elements_cost():
    def up(x, w):
        return lax.conv_transpose(x, w, (2, 2), "SAME")

    graph = graph_of(up, f32(16, 32, 32, 256), f32(4, 4, 256, 128))
    # each element of the operand is multiplied with a window of 4 x 4, for each output feature
    assert graph.flops[only(graph, "conv_general_dilated")] == 2 * 16 * 32**2 * 256 * 128 * 4**2


def test_a_ragged_product_costs_what_its_rows_cost():
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    # each of the 24 rows is multiplied with the matrix of its own group, whichever it is
    graph = graph_of(lax.ragged_dot, f32(24, 8), f32(4, 8, 6), sizes)
    row = next(r for r, n in enumerate(graph.primitives) if n.startswith("ragged_dot"))
    assert graph.flops[row] == 2 * 24 * 6 * 8


def test_other_kinds_cost_one_operation_per_element_or_none():
    graph = graph_of(lambda x: jnp.tanh(x.reshape(6, 4)).sum(0), f32(4, 6))
    cost = dict(zip(graph.primitives, graph.flops.tolist(), strict=True))
    assert cost == {"reshape": 0, "tanh": 24, "reduce_sum": 24}


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [((), "float32", 4), ((3, 5), "bfloat16", 30), ((0, 5), "float32", 0), ((7,), "int8", 7)],
)
def test_a_value_has_its_bytes(shape, dtype, size):
    closed = jax.make_jaxpr(lambda x: x)(jax.ShapeDtypeStruct(shape, dtype))
    assert nbytes(closed.jaxpr.invars[0].aval) == size
    assert Graph.build(closed).value_bytes.tolist() == [size]


# ---------------------------------------------------------------- how often


def test_trips_multiply_through_nested_scans():
    graph = graph_of(nested_scans, SQUARE, SQUARE)
    assert graph.calls[only(graph, "sin")] == 11
    assert graph.calls[only(graph, "dot_general")] == 7 * 11
    outer, inner = rows(graph, "scan")
    assert (graph.calls[outer], graph.calls[inner]) == (1, 11)
    assert (graph.flops * graph.calls).sum() == 11 * (64 + 7 * (2 * 8**3 + 64))


def test_a_shared_layer_is_one_body_with_its_number_of_calls():
    graph = graph_of(five_layers, SQUARE, SQUARE)
    assert [body.calls for body in graph.bodies] == [1, 5]
    assert graph.primitives == (*["jit"] * 5, "dot_general", "tanh")
    assert graph.calls[only(graph, "dot_general")] == 5
    assert {child for inner in graph.children.values() for _, child in inner} == {1}


def test_a_layer_shared_by_two_bodies_counts_both():
    def twice(x, w):
        return layer(layer(x, w), w)

    def fn(x, w):
        h = lax.scan(lambda h, _: (layer(h, w), None), x, length=3)[0]
        return layer(jax.jit(twice)(h, w), w)

    graph = graph_of(fn, SQUARE, SQUARE)
    # three trips, two calls inside `twice`, one of its own
    assert graph.calls[only(graph, "dot_general")] == 3 + 2 + 1


def test_a_layer_first_seen_deep_inside_counts_later_calls_and_callers():
    def fn(x, w):
        @jax.jit
        def pair(x):
            return layer(layer(x, w), w)

        @jax.jit
        def four(x):
            return pair(pair(x))

        # `pair` is first met inside `four`; the call below comes later and is a caller too
        return lax.scan(lambda h, _: (pair(four(h)), None), x, length=10)[0]

    graph = graph_of(fn, SQUARE, SQUARE)
    assert graph.calls[only(graph, "dot_general")] == 10 * (2 * 2 + 2)


def test_a_body_met_early_whose_caller_is_met_late_counts_it():
    def fn(x, w):
        h = layer(x, w)

        @jax.jit
        def late(h):
            return lax.scan(lambda h, _: (layer(h, w), None), h, length=7)[0]

        return late(late(h))

    graph = graph_of(fn, SQUARE, SQUARE)
    assert graph.calls[only(graph, "dot_general")] == 1 + 2 * 7


def test_scopes_divide_a_shared_body_only_where_they_are_told_apart():
    def fn(x, w):
        with jax.named_scope("a"):
            x = layer(x, w)
        with jax.named_scope("b"):
            return layer(layer(x, w), w)

    closed = jax.make_jaxpr(fn)(SQUARE, SQUARE)
    assert [b.calls for b in Graph.build(closed).bodies] == [1, 3]
    apart = Graph.build(closed, lambda scope: scope)
    assert [(b.scope, b.calls) for b in apart.bodies] == [("", 1), ("a", 1), ("b", 2)]
    assert [apart.scope(row) for row in rows(apart, "dot_general")] == ["a", "b"]


def test_a_while_loop_counts_the_nominal_number_of_trips():
    graph = graph_of(a_while, SQUARE, SQUARE)
    assert graph.calls[only(graph, "dot_general")] == NOMINAL_SIZE
    assert graph.calls[only(graph, "lt")] == NOMINAL_SIZE


def test_a_fori_loop_of_known_length_counts_its_trips():
    graph = graph_of(lambda x, w: lax.fori_loop(0, 9, lambda _, h: h @ w, x), SQUARE, SQUARE)
    assert graph.calls[only(graph, "dot_general")] == 9


def test_symbolic_dimensions_count_the_nominal_size():
    batch, width = jax.export.symbolic_shape("batch, width")
    x = jax.ShapeDtypeStruct((batch, 8), jnp.float32)
    graph = graph_of(
        lambda x, w: jnp.tanh(x @ w), x, jax.ShapeDtypeStruct((8, 2 * width), jnp.float32)
    )
    # an expression over a symbolic dimension is one symbolic dimension
    assert graph.flops[only(graph, "dot_general")] == 2 * NOMINAL_SIZE * NOMINAL_SIZE * 8
    assert graph.flops[only(graph, "tanh")] == NOMINAL_SIZE**2
    assert graph.value_bytes[0] == 4 * NOMINAL_SIZE * 8


def test_a_symbolic_dimension_that_is_contracted_counts_the_nominal_size():
    (batch,) = jax.export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, 8), jnp.float32)
    graph = graph_of(lambda x: x.T @ x, x)
    assert graph.flops[only(graph, "dot_general")] == 2 * 8 * 8 * NOMINAL_SIZE
