"""Trees of arrays, multiplied and divided by a loss scale."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["is_inexact", "scaled", "unscaled", "wide"]

Tree = Any


def scaled(tree: Tree, scale: Any) -> Tree:
    """A tree multiplied by a scale, in float32 at least and back in its own dtypes.

    Args:
        tree: a pytree; leaves that are not floating do not change.
        scale: a scalar.
    """
    return _mapped(lambda x, factor: x * factor, tree, scale)


def unscaled(gradient: Tree, scale: Any) -> Tree:
    """A gradient divided by a scale, in float32 at least and back in its own dtypes.

    Args:
        gradient: a pytree; leaves that are not floating (float0 of integers) do not change.
        scale: a scalar.
    """
    return _mapped(lambda x, divisor: x / divisor, gradient, scale)


def _mapped(operation: Any, tree: Tree, scale: Any) -> Tree:
    def applied(x: Any) -> Any:
        if not is_inexact(x):
            return x
        operand = jnp.asarray(x, wide(x))
        factor = jnp.asarray(scale, jnp.finfo(operand.dtype).dtype)
        return operation(operand, factor).astype(jnp.result_type(x))

    return jax.tree.map(applied, tree)


def wide(x: Any) -> Any:
    """The dtype of a value, or float32 where that has more digits."""
    dtype = jnp.result_type(x)
    return dtype if jnp.finfo(dtype).bits >= 32 else np.dtype(np.float32)


def is_inexact(x: Any) -> bool:
    """Whether a leaf is floating or complex."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
