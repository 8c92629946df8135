"""What the forward pass keeps for the backward pass."""

from __future__ import annotations

from typing import Any

from precpass import jaxpr as ir
from precpass.graph import Graph, nbytes

__all__ = ["has_backward", "kept_bytes"]

_BACKWARD = "transpose("


def has_backward(jaxpr: Any) -> bool:
    """Whether a program contains a backward pass."""
    graph = Graph.build(jaxpr)
    return any(_BACKWARD in ir.scope_of(eqn) for eqn in graph.eqns)


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
    graph = Graph.build(jaxpr, lambda scope: _BACKWARD in scope)
    total = 0.0
    for node in graph.bodies:
        made: dict[Any, int] = {}
        kept: set[Any] = set()
        for row in range(node.start, node.stop):
            eqn = graph.eqns[row]
            # a carrier is lowered to its first operand: it reads no other
            operands = eqn.invars[:1] if ir.is_carrier(eqn) else eqn.invars
            if _BACKWARD in graph.scope(row):
                kept.update(v for v in operands if not ir.is_literal(v) and v in made)
            elif any(not ir.is_literal(v) for v in eqn.invars):
                made.update((v, row) for v in eqn.outvars)
        total += node.calls * sum(nbytes(v.aval) for v in kept)
    return total
