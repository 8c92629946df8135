"""`solve`: solve linear systems by a low-precision factorisation and refinement.

The factorisation and GMRES are this package's own, because of the precisions. LAPACK factorises in
float32 and float64 alone. jax.scipy's GMRES (jax 0.12.0.1) and lineax's (0.1.1) orthogonalise once,
so with preconditioned matrices of condition 1e5 and more, which refinement has, their basis loses
its orthogonality: with a float16 factor, refinement with the first fails at condition numbers of
`tests/numerics/test_linear.py` at which it converges with this one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular

from precpass.numerics.float64 import in_float64
from precpass.numerics.given import check_whole, parsed_precision
from precpass.policy.precision import Precision
from precpass.units import a_value

__all__ = ["LinearSolve", "factors", "solve"]

_METHODS = ("classic", "gmres")
_FACTORS = (Precision.F32, Precision.F16, Precision.BF16)
_REFINES = (Precision.F64, Precision.F32)
_REASONS = (
    "converged",
    "stalled: a step no longer halves the backward error; the matrix is too ill-conditioned for "
    "this factorisation and method",
    "the largest number of steps was reached",
    "something is not finite: the matrix is singular, or it or its factors overflow",
    "the backward error is that of rounding, but the estimated error leaves no correct digit: "
    "the matrix is singular to the precision of refinement",
    "b or the solution is below the normal numbers of the precision of refinement, where digits "
    "are lost or all is zero: scale b",
)
_UNDERFLOW = 5


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearSolve:
    """The result of `solve`, with measures of its accuracy for each column of `b`.

    Attributes:
        x: the solution, with the shape of `b`, in the precision of refinement; complex if the
            matrix or `b` is.
        status: how it ended, an int32; `reason` says it in words.
        steps: the number of refinement steps, an int32; the first is the solve with the factors.
        backward_error: `|b - A x| / (|A| |x| + |b|)` in the largest norm, the relative change of
            `A` and `b` for which `x` is exact (Rigal and Gaches 1967).
        error: an estimate of `|x - A^-1 b| / |x|` in the largest norm: the next correction.
        factor, refine, method: the arguments of `solve`.
    """

    x: Any
    status: Any
    steps: Any
    backward_error: Any
    error: Any
    factor: Precision = dataclasses.field(metadata={"static": True})
    refine: Precision = dataclasses.field(metadata={"static": True})
    method: str = dataclasses.field(metadata={"static": True})

    @property
    def converged(self) -> Any:
        """Whether the backward error is only that of rounding, a boolean."""
        return self.status == 0

    @property
    def reason(self) -> Any:
        """How it ended in words, outside `jax.jit`: a text, or a list with one for each column."""
        status = np.asarray(self.status)
        return _REASONS[status] if status.ndim == 0 else [_REASONS[s] for s in status.ravel()]


def solve(
    A: Any,
    b: Any,
    *,
    factor: Precision | str = "f32",
    refine: Precision | str = "f64",
    method: str = "gmres",
    max_steps: int = 40,
    restart: int = 100,
) -> LinearSolve:
    """Solve `A x = b` by an LU factorisation in low precision, refined in a higher one.

    The factorisation, two thirds n^3 operations, is done once in the low format; a step of
    refinement takes n^2 (classic), or `restart` times that. It reaches the backward error of the
    high precision up to a condition number. The table has the largest condition number up to which
    all systems were solved, measured for random matrices with n = 100 whose singular values are a
    geometric sequence (notebooks/08_refinement_and_condition), and in brackets the bounds of Carson
    and Higham 2018 ("Accelerating the solution of linear systems by iterative refinement in three
    precisions", https://doi.org/10.1137/17M1140819): 1 / u_factor, 1 / (u_factor sqrt(u_refine)):

        factor    classic       gmres, restart=20    gmres, restart=n
        f32       1e7 (2e7)     1e9                  1e16 (2e15)
        f16       1e3 (2e3)     1e5                  1e15 (2e11)
        bf16      1e2 (3e2)     1e4                  1e15 (2e10)

    A solution without that backward error does not count as converged. With `restart` = n GMRES
    solves a system nearly by itself, in 2 n^3 operations a step, so nothing is gained then.

    With float16 and bfloat16, `A` and the factors are rounded to the format and nearly all matrix
    products have operands in it, with sums in float32; panels of 32 columns (n / 16 from n = 512
    on) and the triangular systems are float32. That is fast where 16-bit matrix products are fast.
    Elsewhere, such as for float16 on CPUs, it only shows the effect of the rounding.

    Args:
        A: a matrix of shape (n, n), real or complex. If it or `b` is complex, the real system `[[Re
            A, -Im A], [Im A, Re A]] [Re x; Im x] = [Re b; Im b]` is solved, which has 2 n unknowns.
            For batches use `jax.vmap`.
        b: an array of shape (n,) or (n, k), of any scale. If it, or the solution, is not zero but
            below the normal numbers of `refine` (2e-308, and 1e-38 in float32), which most
            processors take for zero, the result has not converged.
        factor: the precision of the factors, "f32", "f16" or "bf16". Rows and columns are scaled by
            powers of two first, so that matrices of any scale fit.
        refine: the precision of residuals, updates and the result: "f64" (with x64 off too) or
            "f32".
        method: "classic" solves the system of the residual with the factors and adds the solution
            to `x`; "gmres" solves it by GMRES, preconditioned with the factors in the precision of
            refinement.
        max_steps: the largest number of refinement steps.
        restart: for GMRES the largest number of products with `A` in a step; each stores a vector.

    Returns:
        A `LinearSolve`, a pytree. With x64 off, results in float64 are NumPy arrays; inside
        `jax.jit` and other transforms they are rounded to float32. You can differentiate `x` in `A`
        and `b`; the derivative uses the same solver and factors. A system that is not solved raises
        no error; check `converged`.

    Raises:
        TypeError: if `A` or `b` is not floating or complex.
        ValueError: for shapes that do not fit, an unknown precision or method, or a factor that is
            wider than the refinement.

    Examples:
        >>> import numpy as np
        >>> A = np.array([[4.0, 1.0], [2.0, 3.0]])
        >>> found = solve(A, np.array([1.0, 2.0]), factor="f16")
        >>> bool(found.converged), bool(np.allclose(found.x, [0.1, 0.6], rtol=1e-15))
        (True, True)
    """
    low = parsed_precision("factor", factor, _FACTORS)
    high = parsed_precision("refine", refine, _REFINES)
    if method not in _METHODS:
        raise ValueError(f"method={method!r}: legal are {', '.join(map(repr, _METHODS))}")
    check_whole("max_steps", max_steps)
    check_whole("restart", restart)
    _check_arrays(A, b)
    how = _How(low, high, method, max_steps, restart)
    x, status, steps, backward, error = in_float64(functools.partial(_solve, how), A, b)
    return LinearSolve(x, status, steps, backward, error, low, high, method)


class _How(NamedTuple):
    low: Precision
    high: Precision
    method: str
    max_steps: int
    restart: int


def _check_arrays(a: Any, b: Any) -> None:
    for name, x in (("A", a), ("b", b)):
        if not hasattr(x, "dtype") and not isinstance(x, int | float | complex):
            raise TypeError(f"{name} is {a_value(x)}: it is to be an array")
        if not jnp.issubdtype(dtype := jnp.result_type(x), jnp.inexact):
            raise TypeError(f"{name} is {dtype.name}: it is to be floating or complex")
    shape, other = jnp.shape(a), jnp.shape(b)
    if len(shape) != 2 or shape[0] != shape[1] or not shape[0]:
        raise ValueError(f"A has the shape {shape}: it is to be (n, n); for batches use jax.vmap")
    if len(other) not in (1, 2) or other[0] != shape[0]:
        raise ValueError(f"b has the shape {other}: it is to be ({shape[0]},) or ({shape[0]}, k)")


@functools.partial(jax.jit, static_argnums=0)
def _solve(how: _How, a: Any, b: Any) -> Any:
    a, b = jnp.asarray(a), jnp.asarray(b)
    if not (jnp.iscomplexobj(a) or jnp.iscomplexobj(b)):
        return _solve_real(how, a, b)
    whole = jnp.block([[jnp.real(a), -jnp.imag(a)], [jnp.imag(a), jnp.real(a)]])
    x, *report = _solve_real(how, whole, jnp.concatenate([jnp.real(b), jnp.imag(b)]))
    return lax.complex(*jnp.split(x, 2)), *report


def _solve_real(how: _How, a: Any, b: Any) -> Any:
    how = how._replace(restart=min(how.restart, len(a)))
    vanished = _vanishes(b, how.high)
    a, b = a.astype(how.high.dtype), b.astype(how.high.dtype)
    fixed = lax.stop_gradient(a)
    factored = factors(fixed, how.low)

    def columns(b: Any, transposed: bool) -> Any:
        matrix = fixed.T if transposed else fixed
        apply = functools.partial(factored.apply, transposed=transposed)
        one = functools.partial(_refined, how, matrix, apply)
        return jax.vmap(one, in_axes=-1, out_axes=-1)(b) if b.ndim == 2 else one(b)

    solved: Any = lax.custom_linear_solve(
        lambda x: jnp.matmul(a, x, precision="highest"),
        b,
        lambda _, b: columns(b, False),
        transpose_solve=lambda _, b: columns(b, True),
        has_aux=True,
    )
    x, (status, steps, backward, error) = solved
    status = jnp.where(vanished, _UNDERFLOW, status)
    return x, status, steps, jnp.where(vanished, 1, backward), jnp.where(vanished, jnp.inf, error)


def _vanishes(b: Any, precision: Precision) -> Any:
    """Whether a column is not zero, but would be zero in a precision without subnormal numbers."""
    unsigned = jnp.dtype(f"uint{8 * b.dtype.itemsize}")
    # Comparisons take subnormal numbers for zero if arithmetic does.
    bits = lax.bitcast_convert_type(lax.stop_gradient(b), unsigned) << 1
    size = jnp.max(jnp.abs(lax.stop_gradient(b).astype(precision.dtype)), axis=0)
    return jnp.any(bits != 0, axis=0) & (size < jnp.finfo(precision.dtype).tiny)


class _State(NamedTuple):
    x: Any
    residual: Any
    backward_error: Any
    steps: Any
    status: Any


def _refined(how: _How, a: Any, apply: Callable[..., Any], b: Any) -> tuple[Any, Any]:
    """The solution, and `LinearSolve`'s report."""
    # Residuals are smaller than b by the unit roundoff, and must not underflow.
    power = _power_below(jnp.max(jnp.abs(b)))
    b = b / power
    tolerance = math.sqrt(b.size) * how.high.unit_roundoff
    size = jnp.max(jnp.sum(jnp.abs(a), axis=1))

    def backward_error(x: Any, residual: Any) -> Any:
        scale = size * jnp.max(jnp.abs(x)) + jnp.max(jnp.abs(b))
        return jnp.max(jnp.abs(residual)) / _or_one(scale)

    def status(error: Any, before: Any, steps: Any) -> Any:
        ended = jnp.where(error > before / 2, 1, jnp.where(steps >= how.max_steps, 2, -1))
        ended = jnp.where(jnp.isfinite(error), ended, 3)
        return jnp.where(error <= tolerance, 0, ended).astype(jnp.int32)

    def step(state: _State) -> _State:
        x = state.x + _correction(how, a, apply, state.residual)
        residual = b - jnp.matmul(a, x, precision="highest")
        error = backward_error(x, residual)
        ended = status(error, state.backward_error, state.steps + 1)
        # A step that makes the result worse is not taken.
        better = functools.partial(jnp.where, error < state.backward_error)
        x, residual, error = map(better, (x, residual, error), state[:3])
        return _State(x, residual, error, state.steps + 1, ended)

    zero, count = jnp.zeros_like(b), jnp.zeros((), jnp.int32)
    error = backward_error(zero, b)
    first = _State(zero, b, error, count, status(error, jnp.inf, count))
    last = lax.while_loop(lambda state: state.status < 0, step, first)
    # The solution may be out of its format's range. Without the barrier XLA would cancel the
    # multiplication and the division.
    x = lax.optimization_barrier(last.x * power)
    kept = x / power
    is_whole = jnp.all(kept == last.x)
    residual = jnp.where(is_whole, last.residual, b - jnp.matmul(a, kept, precision="highest"))
    backward = jnp.where(is_whole, last.backward_error, backward_error(kept, residual))
    remains = jnp.max(jnp.abs(_correction(how, a, apply, residual)))
    length = jnp.max(jnp.abs(kept))
    none = jnp.where(remains > 0, jnp.inf, jnp.zeros_like(remains))
    error = jnp.where(length > 0, remains / _or_one(length), none)
    beyond = jnp.where(jnp.all(jnp.isfinite(x)), _UNDERFLOW, 3)
    ended = jnp.where((last.status == 0) & ~(backward <= tolerance), beyond, last.status)
    ended = jnp.where((ended == 0) & ~(error < 0.1), 4, ended)
    return x, (ended, last.steps, backward, error)


def _or_one(x: Any) -> Any:
    """A magnitude to divide by: 1 in the place of zero."""
    return jnp.where(x > 0, x, 1)


def _power_below(x: Any) -> Any:
    """A power of two by which a positive number can be divided to give about 1; 1 for others."""
    _, exponent = jnp.frexp(x)
    limit = jnp.finfo(x.dtype).maxexp - 3
    power = jnp.ldexp(jnp.ones_like(x), jnp.clip(exponent, -limit, limit))
    return jnp.where((x > 0) & jnp.isfinite(x), power, jnp.ones_like(x))


def _correction(how: _How, a: Any, apply: Callable[..., Any], residual: Any) -> Any:
    """The solution of the system of the residual, by the factors or by GMRES with them."""
    length = _or_one(jnp.max(jnp.abs(residual)))
    unit = residual / length
    if how.method == "classic":
        return length * apply(unit, jnp.float32)

    def preconditioned(v: Any) -> Any:
        return apply(jnp.matmul(a, v, precision="highest"), how.high.dtype)

    # The correction's error is this times the condition number of the preconditioned matrix.
    tolerance = math.sqrt(how.high.unit_roundoff)
    start = apply(unit, how.high.dtype)
    # GMRES computes squares, and A may be of any scale.
    size = _or_one(jnp.max(jnp.abs(start)))
    return length * (size * _gmres(preconditioned, start / size, tolerance, how.restart))


# ---------------------------------------------------------------- factorisations


# In 16 bits it is done as on tensor cores (Haidar, Tomov, Dongarra, Higham 2018, "Harnessing GPU
# tensor cores for fast FP16 arithmetic to speed up mixed-precision iterative refinement solvers",
# https://doi.org/10.1109/SC.2018.00050): a blocked, right-looking LU with partial pivoting, whose
# panels are factorised in float32 and whose trailing updates, nearly all of the work, are products
# of 16-bit operands with float32 sums. The matrix is rounded to 16 bits before, and the factors
# after.
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
            size = _or_one(jnp.max(jnp.abs(z)))
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
    rows = 1 / _power_below(jnp.max(jnp.abs(a), axis=1))
    columns = 1 / _power_below(jnp.max(jnp.abs(a) * rows[:, None], axis=0))
    if precision is Precision.F16:
        # A tenth of the largest number lets U grow by a factor of ten.
        columns = columns * 2.0 ** math.floor(math.log2(_SHARE * precision.max))
    scaled = (rows[:, None] * a * columns[None]).astype(precision.dtype)
    if precision.is_low:
        lu, order = _blocked(scaled.astype(jnp.float32), precision.dtype)
    else:
        lu, _, order = lax.linalg.lu(scaled)
    return Factors(lu.astype(precision.dtype), order, rows, columns)


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


# ---------------------------------------------------------------- GMRES


class _Arnoldi(NamedTuple):
    count: Any
    basis: Any
    hessenberg: Any
    null: Any
    residual: Any


def _gmres(operator: Callable[[Any], Any], b: Any, tolerance: float, size: int) -> Any:
    """The Krylov vector whose image is nearest to `b`.

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
    residual = (length > 0).astype(b.dtype)
    length = _or_one(length)
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
        safe = jnp.where(complete, 1, norm)
        null = state.null.at[k + 1].set(-(state.null @ column) / safe)
        residual = jnp.where(complete, 0, 1 / jnp.linalg.norm(null))
        hessenberg = state.hessenberg.at[:, k].set(
            column.at[k + 1].set(jnp.where(complete, 0, norm))
        )
        basis = basis.at[k + 1].set(jnp.where(complete, 0, w / safe))
        return _Arnoldi(k + 1, basis, hessenberg, null, residual)

    last = lax.while_loop(goes_on, step, first)
    q, r = jnp.linalg.qr(last.hessenberg)
    y = lax.linalg.triangular_solve(r, (length * q[0])[:, None], left_side=True)[:, 0]
    return y @ last.basis[:-1]
