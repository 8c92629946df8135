"""Casts of the floating arrays of a pytree, as jmp and Haliax have them."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from precpass.policy.precision import Precision

__all__ = ["cast_leaves"]

Tree = TypeVar("Tree")


def cast_leaves(tree: Tree, precision: Precision) -> Tree:
    """A pytree with its floating arrays in a precision; the caller's tree does not change.

    Args:
        tree: a pytree. Integers, booleans, complex arrays, random keys, references, Python's
            numbers and whatever is no array stay as they are.
        precision: of the floating arrays, whatever format they are in.
    """

    def cast(x: object) -> object:
        if isinstance(x, jax.Ref) or not isinstance(x, jax.Array | np.ndarray | np.generic):
            return x
        return jnp.asarray(x, precision.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)
