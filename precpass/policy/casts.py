"""Casts of the floating arrays of a pytree, as jmp and Haliax have them."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from precpass.policy.precision import Precision

__all__ = ["cast_leaves"]

Tree = TypeVar("Tree")


def cast_leaves(tree: Tree, precision: Precision, *, params_only: bool = False) -> Tree:
    """A pytree with its floating arrays in a precision; the caller's tree does not change.

    Args:
        tree: a pytree. Integers, booleans, complex arrays, random keys, references, Python's
            numbers and whatever is no array stay as they are.
        precision: of the floating arrays, whatever format they are in.
        params_only: whether variables of flax nnx that are no `nnx.Param` keep their format.
    """

    def is_other(x: object) -> bool:
        return params_only and _is_other_variable(x)

    def cast(x: object) -> object:
        if is_other(x):
            return jax.tree.map(lambda part: part, x)  # a variable of the new tree's own
        if isinstance(x, jax.Ref) or not isinstance(x, jax.Array | np.ndarray | np.generic):
            return x
        return jnp.asarray(x, precision.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree, is_leaf=is_other)


def _is_other_variable(x: object) -> bool:
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Variable) and not isinstance(x, nnx.Param)
