"""Results of which some are thrown away, and with them their derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from precpass import jaxpr as ir

__all__ = ["differentiated_if_chosen"]

Tree = Any


def differentiated_if_chosen(fn: Callable[[], tuple[Tree, Any]]) -> Tree:
    """A result whose derivative is zero, and no NaN, where it is not chosen.

    What is not chosen gets a cotangent of zero, and zero times the infinite derivative of what
    overflowed is a NaN. So what is masked is the tangents of all that `fn` closes over, but of
    what the devices of a `jax.shard_map` share where they do not choose alike. Reverse mode over
    reverse mode is not masked a second time.

    Args:
        fn: gives a pytree of arrays, and whether it is chosen, a boolean scalar.
    """
    structure: list[Any] = []

    def flat() -> list[Any]:
        out, chosen = fn()
        leaves, tree = jax.tree.flatten(out)
        structure[:] = [tree]
        return [*leaves, jnp.asarray(chosen)]

    jaxpr = ir.trace(flat)

    def evaluated(operands: Any) -> list[Any]:
        return ir.evaluate(jaxpr, (), operands)

    def rule(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        (operands,), (moves,) = primals, tangents
        moving = [i for i, t in enumerate(moves) if not isinstance(t, SymbolicZero)]

        def on_moving(*xs: Any) -> tuple[list[Any], list[Any]]:
            given = dict(zip(moving, xs, strict=True))
            results = evaluated([given.get(i, x) for i, x in enumerate(operands)])
            return [x for x in results if _is_inexact(x)], results

        at = [operands[i] for i in moving]
        _, push, results = jax.linearize(on_moving, *at, has_aux=True)
        pushed = iter(push(*(_masked(results[-1], moves[i]) for i in moving)))
        return results, [
            next(pushed) if _is_inexact(x) else SymbolicZero(jax.typeof(x).to_tangent_aval())
            for x in results
        ]

    operands = ir.consts_of(jaxpr)
    # JAX refuses effects in custom rules
    if any(map(_is_inexact, operands)) and not any(map(ir.effects_of, ir.open_jaxpr(jaxpr).eqns)):
        masked = jax.custom_jvp(evaluated)
        masked.defjvp(rule, symbolic_zeros=True)
        *leaves, _ = masked(operands)
    else:
        *leaves, _ = evaluated(operands)
    return jax.tree.unflatten(structure[0], leaves)


def _masked(chosen: Any, tangent: Any) -> Any:
    masked = jnp.where(chosen, tangent, 0)
    return masked if jax.typeof(masked) == jax.typeof(tangent) else tangent


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)
