"""Nonlinear least squares through optimistix, with a precision for each role."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from precpass import jaxpr as ir
from precpass.numerics.float64 import in_float64, own_array
from precpass.numerics.given import check_whole, is_known, is_real, parsed_precision
from precpass.numerics.ladder import switches
from precpass.numerics.rungs import check_rising
from precpass.policy.precision import FORMATS, Precision
from precpass.units import a_value, counted

__all__ = ["LeastSquares", "Roles", "least_squares"]

_SOLVERS = ("LevenbergMarquardt", "Dogleg", "GaussNewton")
_TOLERANCES = {Precision.F64: (1e-10, 1e-14), Precision.F32: (1e-5, 1e-7)}


_LEGAL = {
    "residual": (Precision.F64, Precision.F32),
    "gradient": FORMATS,
    "jacobian": FORMATS,
    "solve": (Precision.F64, Precision.F32),
}


@dataclasses.dataclass(frozen=True)
class Roles:
    """The precision of each part of a step of nonlinear least squares.

    A step solves `(J^T J + ...) d = -J^T r`. The residual and the gradient `J^T r` decide where the
    solve ends; an inexact `J` on the left only changes the way there. So these two are float64 by
    default, and the Jacobian, which costs as many products as there are unknowns, is float32. If a
    gradient or a Jacobian in a lower format is not finite, it is computed again in the precision of
    the residual for that step.

    Attributes:
        residual: the precision of the residual `r`, of the unknowns, and of the tests that accept a
            step and end the solve; "f64" or "f32". The residual is linearised in it.
        gradient: the precision of `J^T r`, one product with the transposed linearisation.
        jacobian: the precision of `J` on the left side, one product with the linearisation for each
            unknown. A tuple such as ("bf16", "f32", "f64") is a ladder: the precision is raised if
            its steps no longer bring the residual and the Jacobian closer to a right angle, and
            when the solve would end (`Ladder`, with a patience of 10 steps).
        solve: the precision of the QR factorisation of `J` and of the step that it gives; "f64" or
            "f32", because LAPACK has no other.

    Raises:
        ValueError: for an unknown precision, one that a role cannot have, or one above that of the
            residual, a ladder that does not rise, or one for another role than the Jacobian.

    Examples:
        >>> Roles(jacobian="bf16")
        Roles(residual='f64', gradient='f64', jacobian='bf16', solve='f64')
        >>> Roles.all("f32").solve
        Precision.F32
    """

    residual: Precision | str = Precision.F64
    gradient: Precision | str = Precision.F64
    jacobian: Precision | str | tuple[Precision | str, ...] = Precision.F32
    solve: Precision | str = Precision.F64

    def __post_init__(self) -> None:
        for role in _LEGAL:
            value = getattr(self, role)
            is_ladder = role == "jacobian" and isinstance(value, Sequence)
            if not is_ladder or isinstance(value, str):
                object.__setattr__(self, role, _parsed(role, value))
                continue
            rungs = tuple(_parsed(role, p) for p in value)
            if not rungs:
                raise ValueError("Roles(jacobian=()): give a precision, or several that rise")
            check_rising(f"Roles(jacobian={tuple(map(str, rungs))!r})", rungs)
            object.__setattr__(self, role, rungs[0] if len(rungs) == 1 else rungs)
        widest = Precision.parse(self.residual)
        for role in ("gradient", "jacobian", "solve"):
            for precision in self.rungs if role == "jacobian" else (getattr(self, role),):
                if widest.is_narrower_than(precision):
                    raise ValueError(
                        f"Roles({role}={str(precision)!r}) is wider than residual={str(widest)!r}, "
                        f"from which it comes: raise the residual or lower {role}"
                    )

    @property
    def rungs(self) -> tuple[Precision, ...]:
        """The precisions of the Jacobian, beginning with that of the first step."""
        jacobian: Any = self.jacobian
        return jacobian if isinstance(jacobian, tuple) else (jacobian,)

    @classmethod
    def all(cls, precision: Precision | str) -> Roles:
        """Return roles with one precision: "f64", which does not change the solver, or "f32"."""
        return cls(precision, precision, precision, precision)

    @classmethod
    def of(cls, value: Roles | Mapping[str, Any]) -> Roles:
        """Return roles from a `Roles` or a mapping, whose missing roles have their defaults.

        Raises:
            ValueError: for an unknown role, and as `Roles` does.
            TypeError: for anything else.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(
                f"roles={value!r}: it is to be Roles(...) or a dict such as {{'jacobian': 'f32'}}"
            )
        for role in value:
            if role not in _LEGAL:
                raise ValueError(f"unknown role {role!r}: legal are {', '.join(map(repr, _LEGAL))}")
        return cls(**value)

    @property
    def is_uniform(self) -> bool:
        """Whether all roles have one precision."""
        return {self.residual, self.gradient, self.solve, *self.rungs} == {self.residual}

    def __repr__(self) -> str:
        rungs = tuple(str(p) for p in self.rungs)
        shown = {role: str(getattr(self, role)) for role in _LEGAL}
        shown |= {"jacobian": rungs[0] if len(rungs) == 1 else rungs}
        return f"Roles({', '.join(f'{role}={name!r}' for role, name in shown.items())})"


def _parsed(role: str, given: Any) -> Precision:
    return parsed_precision(f"Roles({role}", given, _LEGAL[role])


@jax.tree_util.register_dataclass
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
    roles: Roles = dataclasses.field(metadata={"static": True})

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
        lines = [
            f"{self.roles!r}",
            f"{counted(int(self.steps), 'step')}, {int(accepted)} of them accepted; ended: {ended}",
            f"next Gauss-Newton step {float(self.step):.1e} of the unknowns",
            f"residual and Jacobian at a cosine of {float(self.cosine):.1e}",
        ]
        if self.ladder is not None:
            steps, *switched = switches(self.ladder)
            lines += [f"Jacobian: {steps}", *switched]
        return "\n".join([*lines, *([] if self.health is None else [self.health.summary()])])

    def _of_many(self) -> str:
        converged, steps = np.asarray(self.converged), np.asarray(self.steps)
        return (
            f"{self.roles!r}\nof {counted(converged.size, 'fit')} {int(converged.sum())} met their "
            f"tolerances, after {steps.min()} to {steps.max()} steps"
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
            f"residual is {a_value(residual)}: it is to be a function of the unknowns and "
            "args, such as lambda b, t: b[0] * jnp.exp(-b[1] * t) - y"
        )
    roles = Roles.of({} if roles is None else roles)
    precision = Precision.parse(roles.residual)
    leaves, structure = jax.tree.flatten(x0)
    _check_inputs(x0, args)
    if not sum(jnp.size(leaf) for leaf in leaves):
        raise ValueError("x0 has no unknowns: give a pytree of floating arrays")
    check_whole("max_steps", max_steps)
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
            return fit
        ends = [jnp.ravel(leaf) for leaf in jax.tree.leaves(fit.value)]
        health = fitting.looked_at(problem, roles, (x, jnp.concatenate(ends)), args)
        return dataclasses.replace(fit, health=health)

    # float32 throughout is traced with x64 on too: JAX mixes up numpy arrays that it meets in both
    # modes, as `fitting.program` says
    return in_float64(run, leaves, args)


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
        from precpass.numerics import fitting
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("optimistix", "lineax", "equinox"):
            raise
        raise ModuleNotFoundError(
            f"least_squares needs {error.name}: pip install optimistix lineax equinox",
            name=error.name,
        ) from error
    return fitting


def _check_inputs(x0: Any, args: Any) -> None:
    """Raises TypeError for unknowns that are not real and floating, or args that are no arrays."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(x0):
        at, dtype = f"x0{jax.tree_util.keystr(path)}", _dtype_of(leaf)
        if dtype is None:
            raise TypeError(f"{at} is {_described(leaf)}: unknowns are floating arrays")
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"{at} is {dtype.name}: unknowns are real and floating, such as 1.0 for 1 (split "
                "complex ones into real and imaginary parts; close over what is not an unknown)"
            )
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        if _dtype_of(leaf) is None:
            raise TypeError(
                f"args{jax.tree_util.keystr(path)} is {_described(leaf)}: args are arrays and "
                "numbers; hold what is neither in the residual, such as by functools.partial"
            )


def _dtype_of(leaf: Any) -> Any:
    """The dtype of an array or a number; None for anything else."""
    try:
        return jax.typeof(leaf).dtype
    except TypeError:
        return None


def _described(leaf: Any) -> str:
    dtype = f" of {leaf.dtype}" if isinstance(leaf, np.ndarray) else ""
    return f"a {type(leaf).__name__}{dtype}"


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
        known: Any = value
        if is_known([value]) and not jnp.shape(value):
            known = np.asarray(value).item()
        if not (is_real(known) and 0 < known < 1):
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
