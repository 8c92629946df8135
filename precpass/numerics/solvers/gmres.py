"""GMRES for small Krylov spaces whose basis stays orthogonal.

Refinement applies GMRES to systems whose preconditioned matrix has condition numbers of 1e5 and
more. There `jax.scipy`'s (jax 0.12.0.1) and lineax's (0.1.1) stagnate: they do Gram-Schmidt
once, the basis loses its orthogonality, and restarts do not restore it. On the matrices of
`tests/numerics/test_linear.py` with a float16 factor, refinement with the first fails at
condition numbers at which it converges with this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

__all__ = ["gmres"]


class _Arnoldi(NamedTuple):
    count: Any
    basis: Any
    hessenberg: Any
    null: Any
    residual: Any


def gmres(operator: Callable[[Any], Any], b: Any, tolerance: float, size: int) -> tuple[Any, Any]:
    """Return the Krylov vector whose image is nearest to `b`, and the number of products.

    After Saad and Schultz 1986, https://doi.org/10.1137/0907058. With the vector `u` that is
    orthogonal to the columns of the Hessenberg matrix, the norm of the residual is `|b| |u_1| /
    |u|`.

    Args:
        operator: a linear function of a vector.
        b: a vector.
        tolerance: it ends when the norm of the residual relative to that of `b` is this small.
        size: the largest dimension of the space.
    """
    length = jnp.linalg.norm(b)
    residual = jnp.where(length > 0, jnp.ones_like(length), jnp.zeros_like(length))
    length = jnp.where(length > 0, length, jnp.ones_like(length))
    basis = jnp.zeros((size + 1, b.size), b.dtype).at[0].set(b / length)
    # Columns that are not reached are those of an identity matrix.
    hessenberg = jnp.eye(size + 1, size, k=-1, dtype=b.dtype)
    null = jnp.zeros(size + 1, b.dtype).at[0].set(1)
    first = _Arnoldi(jnp.zeros((), jnp.int32), basis, hessenberg, null, residual)

    def goes_on(state: _Arnoldi) -> Any:
        return (state.count < size) & (state.residual > tolerance)

    def step(state: _Arnoldi) -> _Arnoldi:
        k, basis = state.count, state.basis
        w = operator(basis[k])
        before = jnp.linalg.norm(w)
        column = jnp.zeros(size + 1, b.dtype)
        for _ in range(2):  # twice is enough (Giraud et al. 2005, doi 10.1007/s00211-005-0615-4)
            along = basis @ w
            w = w - along @ basis
            column = column + along
        norm = jnp.linalg.norm(w)
        # The space contains the solution.
        complete = norm <= jnp.finfo(b.dtype).eps * before
        safe = jnp.where(complete, jnp.ones_like(norm), norm)
        null = state.null.at[k + 1].set(-(state.null @ column) / safe)
        residual = jnp.where(complete, jnp.zeros_like(norm), 1 / jnp.linalg.norm(null))
        column = column.at[k + 1].set(jnp.where(complete, jnp.zeros_like(norm), norm))
        return _Arnoldi(
            k + 1,
            basis.at[k + 1].set(jnp.where(complete, jnp.zeros_like(w), w / safe)),
            state.hessenberg.at[:, k].set(column),
            null,
            residual,
        )

    last = lax.while_loop(goes_on, step, first)
    q, r = jnp.linalg.qr(last.hessenberg)
    y = lax.linalg.triangular_solve(r, (length * q[0])[:, None], left_side=True)[:, 0]
    return y @ last.basis[:-1], last.count
