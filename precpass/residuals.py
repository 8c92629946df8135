"""What the forward pass keeps for the backward pass."""

from __future__ import annotations

from typing import Any

from precpass import jaxpr as ir
from precpass.graph import Graph, nbytes
from precpass.rules import is_backward

__all__ = ["kept_bytes"]


def kept_bytes(jaxpr: Any) -> float:
    """The bytes of the values that the forward pass computes and the backward pass reads.

    Seen from the jaxpr in which both stand: what a scan stacks counts whole. Arguments are
    there anyway and do not count, nor does what is made of constants alone. XLA may
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
    total = 0.0
    for node in graph.bodies:
        made, constant, kept = set[Any](), set[Any](), set[Any]()
        for row in range(node.start, node.stop):
            eqn = graph.eqns[row]
            # a carrier is lowered to its first operand: it reads no other
            operands = eqn.invars[:1] if ir.is_carrier(eqn) else eqn.invars
            if is_backward(graph.scope(row)):
                kept.update(v for v in operands if not ir.is_literal(v) and v in made)
            elif all(ir.is_literal(v) or v in constant for v in eqn.invars):
                constant.update(eqn.outvars)
            else:
                made.update(eqn.outvars)
        total += node.calls * sum(nbytes(v.aval) for v in kept)
    return total
