"""Programs in float64, whether x64 is on around them or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from precpass import jaxpr as ir

__all__ = ["in_float64", "own_array"]

Tree = Any
_NARROW = {
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
    np.dtype(np.complex128): np.dtype(np.complex64),
}


def in_float64(fn: Callable[..., Tree], *args: Tree) -> Tree:
    """`fn(*args)`, traced and run with x64 on, for pytrees of arrays.

    With x64 off and outside all transforms, 64-bit arrays of the result are numpy arrays; inside
    `jax.jit` and other transforms, which no 64-bit value can leave, they are rounded to 32 bits.
    """
    if ir.in_x64():
        return fn(*args)
    leaves, structure = jax.tree.flatten(args)
    traced = [isinstance(x, jax.core.Tracer) for x in leaves]
    if not any(traced) and not ir.is_tracing():
        with jax.enable_x64(True):
            return jax.tree.map(_as_numpy, fn(*args))
    shape: list[Any] = []

    def flat(*given: Any) -> list[Any]:
        operands = iter(given)
        # A value that is no tracer keeps its 64 bits as a constant of the program.
        mixed = [next(operands) if t else own_array(x) for t, x in zip(traced, leaves, strict=True)]
        out, tree = jax.tree.flatten(fn(*jax.tree.unflatten(structure, mixed)))
        shape.append(tree)
        return [_narrowed(jnp.asarray(x)) for x in out]

    results = ir.float64(flat, [x for t, x in zip(traced, leaves, strict=True) if t])
    return jax.tree.unflatten(shape[-1], results)


def own_array(x: Any) -> Any:
    """A JAX array from a copy of a numpy array, which no program of another x64 mode holds.

    As long as a program holds a numpy array, JAX caches one canonical form of it, in the x64 mode
    in which it first saw the array, and uses that in programs of the other mode too.
    """
    return jnp.array(np.array(x)) if isinstance(x, np.ndarray | np.generic) else x


def _as_numpy(x: Any) -> Any:
    return np.asarray(x) if isinstance(x, jax.Array) and x.dtype in _NARROW else x


def _narrowed(x: Any) -> Any:
    return x.astype(_NARROW.get(x.dtype, x.dtype))
