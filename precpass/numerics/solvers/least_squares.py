"""Nonlinear least squares through optimistix, with a precision for each role."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from precpass import jaxpr as ir
from precpass.numerics.ladder.terms import switches
from precpass.numerics.solvers.float64 import in_float64, own_array
from precpass.numerics.solvers.roles import Roles
from precpass.policy.precision import Precision
from precpass.units import counted

__all__ = ["LeastSquares", "least_squares"]

_SOLVERS = ("LevenbergMarquardt", "Dogleg", "GaussNewton")
_TOLERANCES = {Precision.F64: (1e-10, 1e-14), Precision.F32: (1e-5, 1e-7)}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("solution", "fun", "jac", "cosine", "step", "ladder", "health"),
    meta_fields=("roles",),
)
@dataclasses.dataclass(frozen=True)
class LeastSquares:
    """The result of `least_squares`, with measures of its accuracy.

    Attributes:
        solution: optimistix's `Solution`, without its solver's inner state: `value` has the tree of
            the start, `result` says why the solve ended, `stats` has `num_steps` and
            `num_accepted_steps`.
        fun: the residuals there, as one vector; of complex ones first the real parts.
        jac: their Jacobian there, with a column for each unknown in the order of `jax.tree.leaves`.
        cosine: the largest cosine between the residual and a column of its Jacobian, zero at a
            stationary point (MINPACK's `gnorm`; Moré 1978, "The Levenberg-Marquardt algorithm",
            https://doi.org/10.1007/BFb0067700). For an exact fit the residual is rounding errors,
            and so is its cosine. Columns of unknowns that their bounds stop do not count.
        step: the size of the next Gauss-Newton step, the largest relative to its unknown. It is
            about the relative error of the value if the problem is nearly linear at that distance
            from the solution.
        ladder: the `Ladder` of the Jacobian, with the steps on each rung and the switches; None if
            it has one precision.
        health: with `monitor=True` the `Health` of the residual, the Jacobian and the gradient in
            their precisions, at the start and at the end; otherwise None.
        roles: the precisions.

    `fun`, `jac`, `cosine` and `step` are in the residual's precision, whatever the other roles'.
    """

    solution: Any
    fun: Any
    jac: Any
    cosine: Any
    step: Any
    ladder: Any
    health: Any
    roles: Roles

    @property
    def value(self) -> Any:
        """The unknowns, a pytree like the start."""
        return self.solution.value

    @property
    def steps(self) -> Any:
        """The number of steps that were tried, an integer scalar."""
        return self.solution.stats["num_steps"]

    @property
    def converged(self) -> Any:
        """Whether the solver's tolerances were met, a boolean scalar."""
        import optimistix as optx

        return self.solution.result == optx.RESULTS.successful

    @property
    def covariance(self) -> Any:
        """The estimated covariance matrix of the unknowns, in the order of `jac`'s columns.

        It is `inverse(J^T J) s^2` with `s^2 = r^T r / (m - n)` for `m` residuals and `n` unknowns
        (Seber and Wild 1989, "Nonlinear Regression", section 2.1), the `pcov` of
        `scipy.optimize.curve_fit`. Divide by `s^2` if the residuals are in units of their known
        errors. It is infinite if there are no more residuals than unknowns, or `J` does not have
        full rank. Bounds are not taken into account.

        Examples:
            >>> y = np.array([1.0, 2.0, 4.0])
            >>> np.round(least_squares(lambda b, _: b * jnp.ones(3) - y, np.ones(1)).covariance, 6)
            array([[0.777778]])
        """
        return in_float64(_covariance, self.fun, self.jac)

    def summary(self) -> str:
        """Return the result in four lines, outside `jax.jit`; more with a ladder or a health."""
        import optimistix as optx

        if jnp.ndim(self.step):
            return self._of_many()
        ended = optx.RESULTS[self.solution.result] or "its tolerances were met"
        accepted = self.solution.stats["num_accepted_steps"]
        more = [] if self.ladder is None else [f"Jacobian: {switches(self.ladder)}"]
        if self.health is not None:
            more.append(self.health.summary())
        return "\n".join(
            (
                f"{self.roles!r}",
                f"{counted(int(self.steps), 'step')}, {int(accepted)} of them accepted; "
                f"ended: {ended}",
                f"next Gauss-Newton step {float(self.step):.1e} of the unknowns",
                f"residual and Jacobian at a cosine of {float(self.cosine):.1e}",
                *more,
            )
        )

    def _of_many(self) -> str:
        converged, steps = np.asarray(self.converged), np.asarray(self.steps)
        return "\n".join(
            (
                f"{self.roles!r}",
                f"of {counted(converged.size, 'fit')} {int(converged.sum())} met their tolerances, "
                f"after {steps.min()} to {steps.max()} steps",
            )
        )


def least_squares(
    residual: Callable[..., Any],
    x0: Any,
    args: Any = None,
    *,
    roles: Roles | Mapping[str, Any] | None = None,
    bounds: tuple[Any, Any] = (-np.inf, np.inf),
    solver: Any = "LevenbergMarquardt",
    options: Mapping[str, Any] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    max_steps: int = 1024,
    monitor: bool = False,
) -> LeastSquares:
    """Minimise a sum of squares in mixed precision, with a solver of optimistix.

    The solver's loop, search and termination are optimistix's. By default the residual and the
    gradient are float64, and the Jacobian on the left side of a step is float32: it decides how
    many steps are taken, not where they end. Float64 is float64 with x64 off too.

    Args:
        residual: a function of the unknowns and `args` that returns a pytree of floating or complex
            arrays; of complex ones the squares of both parts are summed. It is traced with unknowns
            in float64 in every call, and evaluated in the precision of its role. It is compiled
            again if it reads other shapes or other numbers that are not arrays, or cannot be
            hashed. NumPy arrays that it closes over are read in float64.
        x0: the start, a pytree of floating arrays.
        args: the second argument of `residual`, a pytree of arrays and numbers.
        roles: the precision of each part, `Roles()` by default; a dict only names those that
            differ. For a residual with a `lax.while_loop`, which has no reverse mode, or a
            `jax.custom_vjp`, which has no forward mode, the Jacobian is computed in the precision
            of the residual and then rounded.
        bounds: the lower and the upper bounds of the unknowns, each a number or a pytree like `x0`,
            with infinities for no bound. A step is cut off at the bounds, and leaves out the
            unknowns that are at one and would move beyond it.
        solver: "LevenbergMarquardt", "Dogleg" or "GaussNewton", or a solver of optimistix with a
            `descent` (an `AbstractGaussNewton`) and tolerances of its own.
        options: more arguments of a solver that is given by name: `norm`, `linear_solver`,
            `verbose`, as optimistix documents them.
        rtol: the relative tolerance of steps in the unknowns and of changes of the residual; 1e-10
            for a residual in float64, and 1e-5 in float32.
        atol: the absolute tolerance; 1e-14, and 1e-7 in float32.
        max_steps: the largest number of steps that are tried.
        monitor: whether the result has a `health`. It costs two more linearisations.

    Returns:
        A `LeastSquares`, a pytree. Its arrays have the precision of the residual. With x64 off,
        those of float64 are NumPy arrays; inside `jax.jit` and other transforms they are rounded to
        float32. A solve that does not converge raises no error; check `converged`. You can
        differentiate `solution` in `args` and the values that `residual` closes over, by the
        implicit function theorem, if `residual` has a reverse mode; everything else is constant.

    Raises:
        ModuleNotFoundError: if optimistix is not installed.
        TypeError: for a start that is not real and floating, a residual that is not a function, has
            no derivative or is narrower than its role, `args` that are not arrays, or an object
            that is not a solver.
        ValueError: for an unknown role, precision, solver or option, for a start without unknowns,
            and for bounds that do not fit it.

    Examples:
        >>> import numpy as np
        >>> t = np.linspace(0.0, 1.0, 8)
        >>> y = 2.0 * np.exp(-3.0 * t)
        >>> fit = least_squares(lambda b, _: b[0] * jnp.exp(-b[1] * t) - y, np.array([1.0, 1.0]))
        >>> bool(fit.converged), np.round(fit.value, 9).tolist()
        (True, [2.0, 3.0])
    """
    fitting = _fitting()
    if not callable(residual):
        raise TypeError(
            f"residual is a {type(residual).__name__}: it is to be a function of the unknowns and "
            "args, such as lambda b, t: b[0] * jnp.exp(-b[1] * t) - y"
        )
    roles = Roles.of({} if roles is None else roles)
    precision = Precision.parse(roles.residual)
    leaves, structure = jax.tree.flatten(x0)
    for path, leaf in jax.tree_util.tree_flatten_with_path(x0)[0]:
        _check_start(jax.tree_util.keystr(path), leaf)
    for path, leaf in jax.tree_util.tree_flatten_with_path(args)[0]:
        if _dtype_of(leaf) is None:
            raise TypeError(
                f"args{jax.tree_util.keystr(path)} is {_described(leaf)}: args are arrays and "
                "numbers; hold what is neither in the residual, such as by functools.partial"
            )
    if not sum(jnp.size(leaf) for leaf in leaves):
        raise ValueError("x0 has no unknowns: give a pytree of floating arrays")
    is_whole = isinstance(max_steps, int) and not isinstance(max_steps, bool)  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
    if not is_whole or max_steps < 1:
        raise ValueError(f"max_steps={max_steps!r}: it is to be a whole number of 1 or more")
    if not isinstance(monitor, bool):  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
        raise TypeError(f"monitor={monitor!r}: it is to be True or False")
    shapes = tuple(jnp.shape(leaf) for leaf in leaves)
    spec = fitting.Spec(structure, shapes, precision)
    x64 = ir.in_x64()
    solver = _solver(solver, precision, rtol, atol, dict(options or {}))
    limits = _limits(bounds, x0)

    def run(leaves: Any, args: Any) -> Any:
        leaves, args = jax.tree.map(own_array, (leaves, args))
        flat = [jnp.asarray(leaf).ravel().astype(precision.dtype) for leaf in leaves]
        x, args = jnp.concatenate(flat), jax.tree.map(jnp.asarray, args)
        problem = fitting.program(residual, spec, x, args, x64)
        fit = fitting.fit(problem, solver, roles, x, args, max_steps, limits)
        if not monitor:
            return *fit, None
        ends = [jnp.ravel(leaf) for leaf in jax.tree.leaves(fit.solution.value)]
        return *fit, fitting.looked_at(problem, roles, (x, jnp.concatenate(ends)), args)

    # float32 throughout is traced with x64 on too: JAX mixes up numpy arrays that it meets in both
    # modes, as `fitting.program` says
    found: list[Any] = [*in_float64(run, leaves, args), roles]
    return LeastSquares(*found)


def _limits(bounds: Any, x0: Any) -> tuple[Any, Any] | None:
    """The lower and the upper bounds as vectors; None if there are none."""
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise ValueError(f"bounds={bounds!r}: give (lower, upper), such as (0, np.inf)")
    leaves, structure = jax.tree.flatten(x0)
    limits: list[Any] = []
    for name, bound in zip(("lower", "upper"), bounds, strict=True):
        alike = jax.tree.structure(bound) == structure
        each: list[Any] = jax.tree.leaves(bound) if alike else [bound] * len(leaves)
        try:
            if not alike and len(leaves) > 1 and np.ndim(bound):
                raise ValueError
            parts = [np.broadcast_to(b, jnp.shape(x)) for b, x in zip(each, leaves, strict=True)]
        except ValueError:
            raise ValueError(
                f"the {name} bounds {bound!r} do not fit x0: give a number, or a pytree like x0"
            ) from None
        limits.append(np.concatenate([part.ravel() for part in parts]).astype(np.float64))
    low, high = limits
    if not np.all(low < high):
        raise ValueError(f"bounds={bounds!r}: each lower bound is to be below its upper bound")
    if not any(isinstance(x, jax.core.Tracer) for x in leaves):
        start = np.concatenate([np.ravel(np.asarray(x)) for x in leaves])
        if not np.all((low <= start) & (start <= high)):
            raise ValueError(f"x0={x0!r} is outside of bounds={bounds!r}: start within them")
    return None if np.all(np.isinf(low) & np.isinf(high)) else (low, high)


def _covariance(fun: Any, jac: Any) -> Any:
    fun, jac = jnp.asarray(fun), jnp.asarray(jac)
    count, unknowns = jac.shape[-2:]
    if count <= unknowns:
        return jnp.full((*jac.shape[:-2], unknowns, unknowns), jnp.inf, jac.dtype)
    columns = jnp.linalg.norm(jac, axis=-2, keepdims=True)
    columns = jnp.where(columns > 0, columns, 1)
    _, values, rows = jnp.linalg.svd(jac / columns, full_matrices=False)
    least = jnp.finfo(jac.dtype).eps * count * values[..., :1]
    has_rank = jnp.all(values > least, axis=-1)[..., None, None]
    root = rows / jnp.where(values > 0, values, 1)[..., None] / columns
    variance = jnp.sum(fun**2, axis=-1)[..., None, None] / (count - unknowns)
    return jnp.where(has_rank, jnp.matrix_transpose(root) @ root * variance, jnp.inf)


def _fitting() -> Any:
    try:
        from precpass.numerics.solvers import fitting
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("optimistix", "lineax", "equinox"):
            raise
        raise ModuleNotFoundError(
            f"least_squares needs {error.name}: pip install optimistix lineax equinox",
            name=error.name,
        ) from error
    return fitting


def _dtype_of(leaf: Any) -> Any:
    """The dtype of an array or a number; None for anything else."""
    is_array = hasattr(leaf, "dtype") or hasattr(leaf, "__jax_array__")
    # A string or class that names a dtype would be taken for an array of that dtype.
    if isinstance(leaf, type) or not (is_array or isinstance(leaf, int | float | complex)):
        return None
    try:
        return jnp.result_type(leaf)
    except TypeError:
        return None


def _described(leaf: Any) -> str:
    dtype = f" of {leaf.dtype}" if isinstance(leaf, np.ndarray) else ""
    return f"a {type(leaf).__name__}{dtype}"


def _check_start(path: str, leaf: Any) -> None:
    dtype = _dtype_of(leaf)
    if dtype is None:
        raise TypeError(f"x0{path} is {_described(leaf)}: unknowns are floating arrays")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"x0{path} is {dtype.name}: unknowns are real and floating, such as 1.0 for 1 (split "
            "complex ones into real and imaginary parts; close over what is not an unknown)"
        )


def _solver(
    solver: Any,
    precision: Precision,
    rtol: float | None,
    atol: float | None,
    options: dict[str, Any],
) -> Any:
    import optimistix as optx

    legal = f"{', '.join(map(repr, _SOLVERS))} or a solver of optimistix with a `descent`"
    if not isinstance(solver, str):
        if not isinstance(solver, optx.AbstractGaussNewton):
            raise TypeError(f"solver={solver!r}: legal are {legal}")
        if rtol is not None or atol is not None or options:
            raise ValueError(
                "rtol, atol and options are the solver's own where a solver is given: set them in "
                "it"
            )
        return solver
    if solver not in _SOLVERS:
        raise ValueError(f"solver={solver!r}: legal are {legal}")
    given = (rtol, atol)
    tolerances = [d if g is None else g for g, d in zip(given, _TOLERANCES[precision], strict=True)]
    for name, value in zip(("rtol", "atol"), tolerances, strict=True):
        if not (_is_number(value) and 0 < value < 1):
            raise ValueError(
                f"{name}={value!r}: it is to be a number between 0 and 1, known while it is "
                f"traced; None for {name} of the residual's precision"
            )
    make = getattr(optx, solver)
    known = [name for name in inspect.signature(make).parameters if name not in ("rtol", "atol")]
    for name in options:
        if name not in known:
            raise ValueError(f"options has {name!r}: {solver} takes {', '.join(known)}")
    return make(*map(float, tolerances), **options)


def _is_number(x: Any) -> bool:
    """Whether it is a real number whose value is known."""
    if isinstance(x, jax.Array):
        is_known = not isinstance(x, jax.core.Tracer)
        return is_known and not x.shape and jnp.issubdtype(x.dtype, jnp.floating)
    return isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool)
