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

    Seen from the jaxpr in which both stand: what a scan stacks counts whole. Arguments are
    there anyway and do not count, nor does what is made of constants alone. What is stored
    low counts as its 16 bits, whether they are read or what they are widened to; what is there
    for derivatives of this program alone does not count (`precpass.analysis.liveness`). XLA may
    compute a value again instead of keeping it.

    Args:
        jaxpr: that of a gradient, in which JAX names the backward pass "transpose(...)".

    Example:
        >>> import jax, jax.numpy as jnp
        >>> loss = lambda x: jnp.sin(jnp.exp(x)).sum()  # keeps exp(x) and its cosine
        >>> kept_bytes(jax.make_jaxpr(jax.grad(loss))(jnp.ones(256)))
        2048.0
    """
    graph = Graph.build(jaxpr, is_backward)
    dropped, total = unread(graph).values, 0.0
    for at, node in enumerate(graph.bodies):
        made, constant, kept = set[Any](), set[Any](), set[Any]()
        held, widened = dict[Any, Any](), dict[Any, Any]()
        for row in range(node.start, node.stop):
            eqn = graph.eqns[row]
            operands = eqn.invars[:1] if ir.is_identity_of_first_operand(eqn) else eqn.invars
            if (source := _source(eqn, widened)) is not None:
                held[eqn.outvars[0]] = held.get(source, source)
            widened.update(filter(None, [ir.widening(eqn)]))
            if is_backward(graph.scope(row)):
                read = (v for v in operands if not ir.is_literal(v) and (v, at) not in dropped)
                kept.update(home for v in read if (home := held.get(v, v)) in made)
            elif all(ir.is_literal(v) or v in constant for v in eqn.invars):
                constant.update(eqn.outvars)
            else:
                made.update(eqn.outvars)
        total += node.calls * sum(nbytes(v.aval) for v in kept)
    return total


def _source(eqn: ir.Eqn, widened: dict[Any, Any]) -> Any:
    """What holds the result of an equation that the pass has for its form alone; None for others.

    Args:
        eqn: the equation.
        widened: what each wide copy of a low value before it is a copy of.
    """
    source = eqn.invars[0] if eqn.invars else None
    if ir.is_rounded(eqn):
        return None if ir.is_literal(source) else widened.get(source, source)
    changes_form = (
        ir.is_identity_of_first_operand(eqn) or eqn.primitive.name == "bitcast_convert_type"
    )
    return source if changes_form and not ir.is_literal(source) else None
