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
    np.dtype(wide): np.dtype(narrow)
    for wide, narrow in (
        (np.float64, np.float32),
        (np.int64, np.int32),
        (np.uint64, np.uint32),
        (np.complex128, np.complex64),
    )
}


def in_float64(fn: Callable[..., Tree], *args: Tree) -> Tree:
    """`fn(*args)`, traced and run with x64 on.

    Args:
        fn: from pytrees of arrays to one of arrays.
        args: its arguments.

    Returns:
        With x64 on what `fn` returns. With x64 off, outside of `jax.jit` and of other transforms,
        the same with numpy arrays in the place of those of 64 bits; inside of them, where no
        value of 64 bits can leave, those rounded to 32 bits.
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
        # what is no tracer keeps its 64 bits as a constant of the program
        mixed = [next(operands) if t else own_array(x) for t, x in zip(traced, leaves, strict=True)]
        out, tree = jax.tree.flatten(fn(*jax.tree.unflatten(structure, mixed)))
        shape.append(tree)
        return [_narrowed(jnp.asarray(x)) for x in out]

    results = ir.float64(flat, [x for t, x in zip(traced, leaves, strict=True) if t])
    return jax.tree.unflatten(shape[-1], results)


def own_array(x: Any) -> Any:
    """A numpy array as one of JAX, by way of a copy, which no program of another mode holds.

    JAX keeps one canonical form of a numpy array as long as any program holds it, in the mode of
    x64 in which it was first met, and hands that to programs of the other mode too.
    """
    return jnp.array(np.array(x)) if isinstance(x, np.ndarray | np.generic) else x


def _as_numpy(x: Any) -> Any:
    return np.asarray(x) if isinstance(x, jax.Array) and x.dtype in _NARROW else x


def _narrowed(x: Any) -> Any:
    return x.astype(_NARROW.get(x.dtype, x.dtype))
