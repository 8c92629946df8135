"""What of a rewritten program is there only for derivatives that somebody may take of it later."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import precpass as pp
from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.analysis.liveness import unread
from precpass.analysis.sizes import nbytes
from precpass.measure.counts import count
from tests.support.values import f32

X, W = f32(8, 8), f32(8, 8)


def loss(x: Any, w: Any) -> Any:
    return lax.scan(lambda c, _: (jnp.tanh(jnp.tanh(c @ w) @ w), None), x, length=5)[0].sum()


def casts(after: Any) -> list[Any]:
    return [eqn for eqn in ir.all_eqns(after) if ir.cast_formats(eqn)]


def test_the_wide_stacks_of_what_is_stored_low_are_unread_and_not_counted():
    after = pp.inspect(jax.grad(loss, 1))(X, W).after
    graph = Graph.build(after)
    found = unread(graph)
    stacks = [v for v, body in found.values if body == 0 and v.aval.shape == (5, 8, 8)]
    dtypes = {v.aval.dtype for v in stacks}
    assert np.dtype(np.float32) in dtypes and np.dtype(np.uint16) not in dtypes
    dropped = [eqn for row, eqn in enumerate(graph.eqns) if found.rows[row]]
    widened = [eqn for eqn in dropped if eqn.primitive.name == "convert_element_type"]
    # what leaves the forward loop on 16 bits is widened for derivatives alone
    assert [e for e in widened if e.outvars[0].aval.shape == (5, 8, 8)]
    assert all(ir.cast_formats(e)[1] is pp.types.Precision.F32 for e in widened)
    counts = count(after)
    assert counts.casts == len(casts(after)) - len(widened)
    calls = dict(zip(map(id, graph.eqns), graph.calls.tolist(), strict=True))
    read = (e for e in casts(after) if e not in widened)
    assert counts.cast_bytes == sum(nbytes(e.outvars[0].aval) * calls[id(e)] for e in read)


def test_what_a_result_or_an_effect_reads_is_read():
    def kept(x: Any, w: Any) -> Any:
        h = jnp.tanh(x @ w)
        jax.debug.callback(lambda _: None, h)
        return jnp.sin(h @ w)

    found = pp.inspect(jax.grad(lambda x, w: kept(x, w).sum(), 1))(X, W)
    graph = Graph.build(found.after)
    assert not unread(graph).rows.any()


def test_nothing_is_unread_in_a_program_as_it_was_written():
    jaxpr = jax.make_jaxpr(jax.grad(loss, 1))(X, W)
    found = unread(Graph.build(jaxpr))
    assert not found.rows.any() and not found.values


def test_a_wide_value_that_only_products_read_is_unread_beside_its_low_copy():
    def fn(w: Any, xs: Any) -> Any:
        return lax.scan(lambda c, x: (c + (x @ w).sum(), None), jnp.float32(0), xs)[0]

    after = pp.inspect(fn)(W, f32(5, 8, 8)).after
    (loop,) = (eqn for eqn in after.eqns if eqn.primitive.name == "scan")
    (body,) = ir.bodies(loop)
    opened = ir.open_jaxpr(body.jaxpr)
    found = unread(Graph.build(after))
    wide = [v for v in opened.invars if v.aval.shape == (8, 8) and v.aval.dtype == np.float32]
    assert {id(v) for v, _ in found.values} >= {id(wide[0])}
