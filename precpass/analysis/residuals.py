"""The bytes that the forward pass saves for the backward pass."""

from __future__ import annotations

from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.analysis.liveness import unread
from precpass.analysis.sizes import nbytes
from precpass.policy.scopes import is_backward

__all__ = ["kept_bytes"]


def kept_bytes(jaxpr: ir.Jaxpr) -> float:
    """The bytes of the values that the forward pass computes and the backward pass reads.

    They are counted in the jaxpr that holds both passes, so a scan's stack counts whole.
    Arguments do not count, because they are in memory anyway, nor do values made of constants
    only. A value that is stored in 16 bits counts with these, whether readers read it directly or
    widened. A value that only derivatives of this program read does not count
    (`precpass.analysis.liveness`). XLA may compute a value again instead of saving it.

    Args:
        jaxpr: a gradient's, in which JAX names the backward pass "transpose(...)".

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> loss = lambda x: jnp.sin(jnp.exp(x)).sum()  # keeps exp(x) and its cosine
        >>> kept_bytes(jax.make_jaxpr(jax.grad(loss))(jnp.ones(256)))
        2048.0
    """
    graph = Graph.build(jaxpr, is_backward)
    dropped, total = unread(graph).values, 0.0
    for at, node in enumerate(graph.bodies):
        forward_values, constant, kept = set[Any](), set[Any](), set[Any]()
        stored_as, widened = dict[Any, Any](), dict[Any, Any]()
        for row in range(node.start, node.stop):
            eqn = graph.eqns[row]
            operands = eqn.invars[:1] if ir.is_identity_of_first_operand(eqn) else eqn.invars
            if (source := _source(eqn, widened)) is not None:
                stored_as[eqn.outvars[0]] = stored_as.get(source, source)
            widened.update(filter(None, [ir.widening(eqn)]))
            if is_backward(graph.scope(row)):
                read = (v for v in operands if not ir.is_literal(v) and (v, at) not in dropped)
                kept.update(home for v in read if (home := stored_as.get(v, v)) in forward_values)
            elif all(ir.is_literal(v) or v in constant for v in eqn.invars):
                constant.update(eqn.outvars)
            else:
                forward_values.update(eqn.outvars)
        total += node.calls * sum(nbytes(v.aval) for v in kept)
    return total


def _source(eqn: ir.Eqn, widened: dict[Any, Any]) -> Any:
    """The value that an equation of the pass only gives another form; None for other equations.

    Args:
        eqn: the equation.
        widened: maps each widened copy before it to the 16-bit value that it is a copy of.
    """
    source = eqn.invars[0] if eqn.invars else None
    if ir.is_rounded(eqn):
        return None if ir.is_literal(source) else widened.get(source, source)
    changes_form = (
        ir.is_identity_of_first_operand(eqn) or eqn.primitive.name == "bitcast_convert_type"
    )
    return source if changes_form and not ir.is_literal(source) else None
