"""The condition number of a matrix, estimated from one factorisation."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from precpass.api import auto_mixed
from precpass.jit.region import keep
from precpass.policy.precision import Precision
from precpass.policy.presets import AlwaysF32

__all__ = ["condition_number"]

_ROUNDS = 4
_RESOLVED = 0.01 / Precision.F32.unit_roundoff
"""The largest condition number that float32 factors resolve: their own error grows as kappa u."""


def condition_number(matrix: Any) -> jax.Array:
    """An estimate of the condition number |A| |A^-1| of a real square matrix, in the 1-norm.

    The estimate of |A^-1| is the one that LAPACK's xGECON makes of an LU factorisation: a lower
    bound, rarely less than a third of it (Hager 1984, https://doi.org/10.1137/0905023; Higham
    1988, https://doi.org/10.1145/50063.214386). The factors are in float32, or in float64 if
    float32 does not resolve the number, with x64 on or off. The second factorisation only runs if
    it is needed (under `jax.vmap` it always runs).

    Args:
        matrix: of a floating dtype, [..., n, n].

    Returns:
        A float32 scalar, the largest of a batch; inf if a matrix is singular or not finite.

    Raises:
        TypeError: for a matrix that is not real and floating.
        ValueError: for one that is not square.

    Examples:
        >>> float(condition_number(jnp.diag(jnp.asarray([1.0, 0.5, 0.25]))))
        4.0
    """
    a = jnp.asarray(lax.stop_gradient(matrix))
    if not jnp.issubdtype(a.dtype, jnp.floating):
        raise TypeError(f"condition_number takes a real floating matrix, not one of {a.dtype}")
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise ValueError(f"condition_number takes a square matrix, not one of shape {a.shape}")
    if not a.size:
        return jnp.zeros((), jnp.float32)
    a = a.reshape(-1, *a.shape[-2:])
    if a.dtype != jnp.float64:
        a = a.astype(jnp.float32)
    # A multiple of a matrix has the same condition number, and its elements fit float32.
    largest = jnp.max(jnp.abs(a), (1, 2), keepdims=True)
    a = a / jnp.where(largest > 0, largest, 1)
    with keep("f32"):
        rough = _estimated(a.astype(jnp.float32))
    return lax.cond(rough <= _RESOLVED, lambda: rough, lambda: _in_float64(a))


def _estimated(a: jax.Array) -> jax.Array:
    """The largest estimate of a batch, `[batch, n, n]`, in float32."""
    n = a.shape[-1]
    factors, _, order = lax.linalg.lu(a)
    order = order[:, :, None]
    solved = functools.partial(lax.linalg.triangular_solve, factors, left_side=True)

    def better(_: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, largest = state
        y = jnp.take_along_axis(x, order, 1)
        y = solved(solved(y, lower=True, unit_diagonal=True))
        # jnp.maximum propagates a NaN.
        largest = jnp.maximum(largest, jnp.sum(jnp.abs(y), 1))
        signs = jnp.where(y < 0, -1, 1).astype(a.dtype)
        z = solved(signs, transpose_a=True)
        z = solved(z, lower=True, unit_diagonal=True, transpose_a=True)
        steepest = jnp.take_along_axis(
            order, jnp.argmax(jnp.abs(z), 1, keepdims=True).astype(order.dtype), 1
        )
        return (jnp.arange(n, dtype=order.dtype)[None, :, None] == steepest).astype(
            a.dtype
        ), largest

    # Higham's second vector catches matrices that mislead the ascent from the first one.
    signs = jnp.where(jnp.arange(n) % 2 == 0, 1, -1).astype(a.dtype)
    other = signs * (1 + jnp.arange(n, dtype=a.dtype) / max(n - 1, 1)) * (2 / (3 * n))
    starts = jnp.stack([jnp.full(n, 1 / n, a.dtype), other], 1)
    start = jnp.broadcast_to(starts[None], (*a.shape[:2], 2)), jnp.zeros((a.shape[0], 2), a.dtype)
    _, inverse = lax.fori_loop(0, _ROUNDS, better, start)
    norms = jnp.max(jnp.sum(jnp.abs(a), 1), 1)
    estimate = jnp.max(norms * jnp.max(inverse, 1))
    return jnp.where(jnp.isnan(estimate), jnp.inf, estimate).astype(jnp.float32)


@auto_mixed(policy=AlwaysF32)
def _in_float64(a: jax.Array) -> jax.Array:
    with keep("f64"):
        return _estimated(a)
