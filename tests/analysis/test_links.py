"""The graph's links across borders, and its view as a networkx graph."""

from jax import lax

from tests.support.graph_programs import (
    SQUARE,
    a_branch,
    a_while,
    each_program,
    five_layers,
    graph_of,
    nested_scans,
    only,
    rows,
)
from tests.support.values import f32


def link_pairs(graph):
    """The links as pairs of (body, variable)."""
    values = [(at, var) for var, at in graph.values]
    return {(values[a], values[b]) for a, b in graph.links}


def opened(graph, at):
    return getattr(graph.bodies[at].jaxpr, "jaxpr", graph.bodies[at].jaxpr)


def crossing(graph, row, child, operands, results, carry=()):
    """The links that an equation with one body must have, by the positions that it maps."""
    eqn, inner, at = graph.eqns[row], opened(graph, child), int(graph.body[row])
    into = {((at, eqn.invars[o]), (child, v)) for o, v in zip(operands, inner.invars, strict=True)}
    out = {((child, v), (at, eqn.outvars[r])) for v, r in zip(inner.outvars, results, strict=False)}
    back = {((child, inner.outvars[o]), (child, inner.invars[i])) for i, o in carry}
    return into | out | back


def test_each_call_of_a_shared_body_is_linked_to_it():
    graph = graph_of(five_layers, SQUARE, SQUARE)
    calls = [crossing(graph, row, 1, (0, 1), (0,)) for row in rows(graph, "jit")]
    assert link_pairs(graph) == set.union(*calls)
    # w enters by the same link each time
    assert len(link_pairs(graph)) == 5 * 2 + 1


def test_a_scan_links_constants_carry_slices_and_the_way_back():
    def fn(x, w, xs):
        return lax.scan(lambda h, x: (h @ w, h + x), x, xs)

    graph = graph_of(fn, SQUARE, SQUARE, f32(3, 8, 8))
    expected = crossing(graph, only(graph, "scan"), 1, (0, 1, 2), (0, 1), carry=[(1, 0)])
    assert link_pairs(graph) == expected


def test_a_while_links_its_predicate_inward_and_its_body_round():
    graph = graph_of(a_while, SQUARE, SQUARE)
    row = only(graph, "while")
    (_, cond), (_, body) = graph.children[row]
    # operands: the body's constant w, then the carry
    expected = crossing(graph, row, cond, (1,), ())
    expected |= crossing(graph, row, body, (0, 1), (0,), carry=[(1, 0)])
    assert link_pairs(graph) == expected


def test_both_branches_of_a_cond_are_linked_past_its_index():
    graph = graph_of(a_branch, SQUARE, SQUARE)
    row = only(graph, "cond")
    operands = range(1, len(graph.eqns[row].invars))
    children = [child for _, child in graph.children[row]]
    assert len(children) == 2
    expected = [crossing(graph, row, child, operands, (0,)) for child in children]
    assert link_pairs(graph) == set.union(*expected)


@each_program
def test_networkx_has_every_equation_value_edge_and_link(fn):
    graph = graph_of(fn, SQUARE, SQUARE)
    nx_graph = graph.to_networkx()
    eqns = {("eqn", row) for row in range(len(graph.eqns))}
    assert set(nx_graph) == eqns | {("value", row) for row in range(len(graph.values))}
    made = int((graph.producers >= 0).sum())
    links = [1 for *_, link in nx_graph.edges(data="link") if link]
    assert len(links) == len(graph.links)
    assert nx_graph.number_of_edges() == len(graph.sources) + made + len(graph.links)


def test_networkx_nodes_say_what_they_are():
    graph = graph_of(nested_scans, SQUARE, SQUARE)
    nx_graph = graph.to_networkx()
    node = nx_graph.nodes["eqn", only(graph, "dot_general")]
    assert {k: node[k] for k in ("primitive", "kind", "flops", "calls")} == {
        "primitive": "dot_general",
        "kind": "compute",
        "flops": 2 * 8**3,
        "calls": 77,
    }
    line = nested_scans.__code__.co_firstlineno + 2
    assert node["source"].endswith(f"graph_programs.py:{line}")
    assert nx_graph.nodes["value", 0] == {"dtype": "float32", "shape": (8, 8), "bytes": 256}
