"""LU factorisations in 16 and 32 bits of matrices of any scale.

LAPACK only factorises in float32 and float64. In 16 bits it is done as on tensor cores (Haidar,
Tomov, Dongarra, Higham 2018, "Harnessing GPU tensor cores for fast FP16 arithmetic to speed up
mixed-precision iterative refinement solvers", https://doi.org/10.1109/SC.2018.00050): a blocked,
right-looking LU with partial pivoting, whose panels are factorised in float32 and whose trailing
updates, nearly all of the work, are products of 16-bit operands with float32 sums. The matrix is
rounded to 16 bits before, and the factors after.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular

from precpass.policy.precision import Precision

__all__ = ["Factors", "factors"]

_SHARE = 0.1
"""The largest entry becomes this share of the format's largest number (Higham, Pranesh, Zounon
2019)."""
_BLOCKS = 16
_BLOCK = 32


class Factors(NamedTuple):
    """`P (rows[:, None] * A * columns) = L U`, with the powers of two that make `A` fit its format.

    Attributes:
        lu: the unit lower factor below the diagonal and the upper one above, in the format.
        order: the permutation `P`, as the index of the row that comes to each place.
        rows, columns: the scales, in the precision of `A`.
    """

    lu: Any
    order: Any
    rows: Any
    columns: Any

    def apply(self, r: Any, dtype: Any, transposed: bool = False) -> Any:
        """`A^-1 r`, or `A^-T r`, to the accuracy of the factors.

        Args:
            r: a vector in the precision of `A`.
            dtype: the dtype in which the triangular systems are solved. In the dtype of `r` the
                function is linear up to rounding; in others vectors are scaled against under- and
                overflow.
            transposed: whether the matrix is transposed.
        """
        before, after = (self.columns, self.rows) if transposed else (self.rows, self.columns)
        z = before * r
        size = jnp.ones((), r.dtype)
        if dtype != r.dtype:
            size = jnp.max(jnp.abs(z))
            size = jnp.where(size > 0, size, jnp.ones_like(size))
        z, lu = (z / size).astype(dtype), self.lu.astype(dtype)
        if transposed:
            z = solve_triangular(lu, z, trans="T")
            z = solve_triangular(lu, z, trans="T", lower=True, unit_diagonal=True)
            z = z[jnp.argsort(self.order)]
        else:
            z = solve_triangular(lu, z[self.order], lower=True, unit_diagonal=True)
            z = solve_triangular(lu, z)
        return after * (size * z.astype(r.dtype))


def factors(a: Any, precision: Precision) -> Factors:
    """The factors of a matrix, scaled by rows and columns first.

    After Higham, Pranesh, Zounon 2019, "Squeezing a matrix into half precision, with an
    application to solving linear systems", https://doi.org/10.1137/18M1229511, algorithm 2.4: the
    largest entry of each row and column becomes about one, and in float16 a tenth of the
    largest number. The scales are powers of two, so that they round nothing.

    Args:
        a: a matrix of shape (n, n), in float32 or float64.
        precision: float32, bfloat16 or float16.
    """
    rows = _reciprocal_power(jnp.max(jnp.abs(a), axis=1))
    columns = _reciprocal_power(jnp.max(jnp.abs(a) * rows[:, None], axis=0))
    if precision is Precision.F16:
        # A tenth of the largest number lets U grow by a factor of ten.
        columns = columns * 2.0 ** math.floor(math.log2(_SHARE * precision.max))
    scaled = (rows[:, None] * a * columns[None]).astype(precision.dtype)
    if precision.is_low:
        lu, order = _blocked(scaled.astype(jnp.float32), precision.dtype)
    else:
        lu, _, order = lax.linalg.lu(scaled)
    return Factors(lu.astype(precision.dtype), order, rows, columns)


def _reciprocal_power(x: Any) -> Any:
    """The power of two by which a magnitude is scaled into [1/2, 1); 1 for zero."""
    _, exponent = jnp.frexp(x)
    return jnp.ldexp(jnp.ones_like(x), jnp.where(x > 0, -exponent, jnp.zeros_like(exponent)))


def _blocked(a: Any, low: Any) -> tuple[Any, Any]:
    n = a.shape[0]
    width = max(_BLOCK, -(-n // _BLOCKS))
    order = jnp.arange(n)
    for start in range(0, n, width):
        stop = min(start + width, n)
        panel, _, moved = lax.linalg.lu(a[start:, start:stop])
        a = a.at[start:].set(a[start:][moved])
        a = a.at[start:, start:stop].set(panel)
        order = order.at[start:].set(order[start:][moved])
        if stop < n:
            right = solve_triangular(
                a[start:stop, start:stop], a[start:stop, stop:], lower=True, unit_diagonal=True
            )
            update = jnp.matmul(
                a[stop:, start:stop].astype(low),
                right.astype(low),
                preferred_element_type=jnp.float32,
            )
            a = a.at[start:stop, stop:].set(right).at[stop:, stop:].add(-update)
    return a, order
