"""Nonlinear least squares with a precision for each role, built from optimistix's pieces.

optimistix's Gauss-Newton, Levenberg-Marquardt and Dogleg linearise the residual, ask a descent
for a step, and ask a search whether the step is good. Only a descent sees the Jacobian as a matrix.
So a descent that passes a narrower problem to an inner descent gives each role its precision. Loop,
search and termination are optimistix's, in the precision of the residual.

The narrower problem has as many rows as unknowns. With `J` the Jacobian in its role's precision and
`D` the lengths of its columns, `Q R` is the QR factorisation of `[J; u D]`, and `z = R^-T g` for
the gradient `g = J^T r` of its own role: then `R^T R = J^T J + u^2 D^2` and `R^T z = g`, so that
the inner descent makes its step from the inexact matrix and the exact gradient. The unit roundoff
`u` of the Jacobian is the accuracy of its columns; without `u D`, `R` could be rounding errors.

This module needs optimistix, so it is only imported when it is used.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
from jax import lax

from precpass import jaxpr as ir
from precpass.api import auto_mixed
from precpass.jaxpr.weak import Recent, WeakIdMap
from precpass.jit.own_arrays import with_own_arrays
from precpass.numerics.float64 import own_array
from precpass.numerics.given import shown
from precpass.numerics.ladder import Ladder
from precpass.numerics.least_squares import LeastSquares, Roles
from precpass.numerics.monitor.monitor import monitor
from precpass.policy.policy import PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.policy.presets import Custom
from precpass.policy.primitives import OpKind
from precpass.policy.warned import quietly

__all__ = ["Problem", "Spec", "fit", "looked_at", "program"]


# ---------------------------------------------------------------- the residual


class Problem(eqx.Module):
    """A traced residual in its precision, as a function from a vector to a vector.

    Attributes:
        consts: the values that the residual closes over.
        jaxpr: the residual's jaxpr, with these values as its first arguments.
        spec: the shapes and the precision with which it was traced.
    """

    consts: list[Any]
    jaxpr: ir.Jaxpr = eqx.field(static=True)
    spec: Spec = eqx.field(static=True)

    def __call__(self, x: Any, args: Any) -> Any:
        """The residuals, concatenated."""

        def run(*operands: Any) -> Any:
            (out,) = ir.evaluate(self.jaxpr, operands)
            return out

        operands = *self.consts, x.astype(np.float64), *jax.tree.leaves(args)
        if self.spec.precision is Precision.F64:
            return run(*operands)
        with quietly():
            return auto_mixed(run, evaluated_in(Precision.F32))(*operands).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Spec:
    """The tree and the shapes of the unknowns, and the precision of the residual's role."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    precision: Precision

    def unflat(self, x: Any) -> Any:
        """The pytree of the unknowns."""
        sizes = [math.prod(s) for s in self.shapes]
        ends = list(itertools.accumulate(sizes))
        parts = [x[e - n : e].reshape(s) for e, n, s in zip(ends, sizes, self.shapes, strict=True)]
        return jax.tree.unflatten(self.structure, parts)


def _residuals(fn: Callable[..., Any], spec: Spec, x: Any, args: Any) -> Any:
    """The residuals, concatenated."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(fn(spec.unflat(x), args))]
    parts = [(z.real, z.imag) if jnp.iscomplexobj(z) else (z,) for z in leaves]
    leaves = list(itertools.chain(*parts))
    for leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"{_named(fn)} returned {shown(leaf)}, and is to return floating or complex arrays"
            )
        if leaf.dtype.itemsize < spec.precision.dtype.itemsize:
            raise TypeError(
                f"{_named(fn)} returned {leaf.dtype.name}, and its role is {spec.precision}: cast "
                "nothing in it and give its data in float64, or ask for Roles.all('f32')"
            )
    if not sum(leaf.size for leaf in leaves):
        raise ValueError(f"{_named(fn)} returned no residuals")
    return jnp.concatenate([leaf.ravel().astype(x.dtype) for leaf in leaves])


def _named(fn: Callable[..., Any]) -> str:
    return f"the residual {getattr(fn, '__name__', repr(fn))}"


def program(fn: Callable[..., Any], spec: Spec, x: Any, args: Any, x64: bool) -> Problem:
    """A residual traced at its unknowns in float64, with copies of the arrays that it closes over.

    It is traced in every call, because values that it reads may have changed, and compiled again
    only if that made it another program.

    As long as a program holds a numpy array, JAX caches one canonical form of it, in the x64 mode
    in which it first saw the array, and uses that in programs of the other mode too. So cached
    programs hold no numpy array, and with x64 off outside the residual is traced with copies.
    """
    leaves, structure = jax.tree.flatten(args)
    avals = jax.typeof(x.astype(np.float64)), *map(jax.typeof, leaves)

    is_copied = spec.precision is Precision.F64 and not x64
    read, arrays = with_own_arrays(fn) if is_copied else (fn, [])

    def flat(x: Any, *leaves: Any) -> list[Any]:
        return [_residuals(read, spec, x, jax.tree.unflatten(structure, leaves))]

    closed = ir.trace(flat, *avals)
    for const in _all_consts(closed) if is_copied else ():
        # A numpy array of float32, or JAX's form of another in a float32 program.
        is_narrow = isinstance(const, np.ndarray) and const.dtype in (np.float32, np.complex64)
        if is_narrow and not any(map(functools.partial(_is_alike, const), arrays)):
            raise TypeError(
                f"{_named(fn)} reads a numpy array of shape {const.shape} where least_squares "
                "cannot find it, and a float32 program may hold it, for which JAX has rounded "
                "it: close over it, or give it to least_squares as args"
            )
    consts = ir.consts_of(closed)

    def with_consts(consts: Any, *args: Any) -> list[Any]:
        return ir.evaluate(closed, args, consts)

    inner = _all_consts(closed)[len(consts) :]
    program = spec, structure, avals, str(closed)
    # A program in an outer trace may hold that trace's tracers.
    kept = [] if ir.is_tracing() else _kept(fn, (*program, *map(_told_by_value, inner)))
    if not kept:
        # the first holds its own constants itself; the others' `id`s are in the key
        kept += [ir.trace(with_consts, list(map(jax.typeof, consts)), *avals), inner]
    return Problem([own_array(c) for c in consts], kept[0], spec)


_known = WeakIdMap[Recent[list[Any]]]()


def _kept(fn: Callable[..., Any], key: tuple[Any, ...]) -> list[Any]:
    """The cache for a residual's programs, which lives as long as it, or as a method's object."""
    # A bound method is a new object each time that it is looked up.
    owner, of = (fn.__self__, fn.__func__) if isinstance(fn, types.MethodType) else (fn, None)
    try:
        return _known.setdefault(owner, Recent(64)).get((of, *key), list)
    except TypeError:  # unhashable static arguments, or an object without weak references
        return []


def _all_consts(jaxpr: Any) -> list[Any]:
    inner = [body.jaxpr for eqn in ir.open_jaxpr(jaxpr).eqns for body in ir.bodies(eqn)]
    return [*ir.consts_of(jaxpr), *(const for body in inner for const in _all_consts(body))]


_COMPARED = 1 << 16
"""Arrays of more elements are compared by identity, because comparing bytes would copy them."""


def _told_by_value(x: Any) -> Any:
    """A key that constants share only if they are equal."""
    if isinstance(x, jax.Array) and (x.size > _COMPARED or not x.is_fully_addressable):
        return id(x)
    try:
        return str(x.dtype), x.shape, np.asarray(x).tobytes()
    except (TypeError, AttributeError):  # an array of keys, for instance
        return id(x)


def _is_alike(const: Any, x: Any) -> bool:
    return x.dtype == const.dtype and np.array_equal(x, const, equal_nan=True)


# ---------------------------------------------------------------- the fit


@eqx.filter_jit
def fit(
    problem: Problem,
    solver: Any,
    roles: Roles,
    x0: Any,
    args: Any,
    max_steps: int,
    bounds: tuple[Any, Any] | None,
) -> LeastSquares:
    """The solution by optimistix from a vector `x0`, with measures of how good it is."""
    forward, backward = _derivatives(problem, x0, args)
    solution = optx.least_squares(
        problem if bounds is None else WithBounds(problem),
        solver_with(roles, solver, backward, bounds),
        x0,
        args if bounds is None else (args, bounds),
        {"jac": "fwd" if forward else "bwd"},
        max_steps=max_steps,
        adjoint=optx.ImplicitAdjoint() if bounds is None else BoundedAdjoint(),
        throw=False,
    )
    state, ladder = solution.state, None
    if isinstance(state, RisingState):
        state, ladder = state.inner, state.ladder
    value = solution.value if bounds is None else jnp.clip(solution.value, *bounds)
    accepted = {"num_accepted_steps": state.num_accepted_steps, **solution.stats}
    solved = eqx.tree_at(
        lambda s: (s.value, s.state, s.stats),
        solution,
        (problem.spec.unflat(value), None, accepted),
        is_leaf=lambda x: x is None,
    )
    jacobian_of = jax.jacfwd if forward else jax.jacrev
    quality = _quality(problem, value, args, jacobian_of, bounds)
    return LeastSquares(solved, *quality, ladder, None, roles)


@eqx.filter_jit
def looked_at(problem: Problem, roles: Roles, points: Sequence[Any], args: Any) -> Any:
    """The `Health` of the residual and its linearisation at some points, in a separate program."""
    points, args = jax.tree.map(lax.stop_gradient, (points, args))
    points, args = lax.optimization_barrier((points, args))
    forward, backward = _derivatives(problem, points[0], args)

    def linearised(x: Any, args: Any) -> Any:
        """The residual, and the parts of its Jacobian and gradient that a first step reads."""
        eye = jnp.eye(x.size, dtype=x.dtype)
        if not forward:
            return problem(x, args), jax.jacrev(lambda x: problem(x, args))(x)
        out, push = jax.linearize(lambda x: problem(x, args), x)
        if not backward:
            return out, jax.vmap(push)(eye)
        jacobian = applied_in(roles.rungs[0], roles, jax.vmap(push))(eye)
        pull = jax.linear_transpose(push, x)
        precision = Precision.parse(roles.gradient)
        return out, jacobian, applied_in(precision, roles, lambda out: pull(out)[0])(out)

    monitored = monitor(linearised, Custom({}))
    with quietly():
        healths = [monitored(x, args)[1] for x in points]
    return functools.reduce(lambda one, other: one.merged(other), healths)


def _derivatives(fn: Callable[..., Any], x: Any, args: Any) -> tuple[bool, bool]:
    """Whether a residual can be differentiated forwards, and backwards.

    A `lax.while_loop` has no transpose, and a `jax.custom_vjp` no forward mode.

    Raises:
        TypeError: if neither is possible.
    """

    def backward(x: Any) -> Any:
        out, transposed = jax.vjp(lambda x: fn(x, args), x)
        return transposed(out)

    def error_of(derivative: Callable[..., Any]) -> Exception | None:
        try:
            jax.eval_shape(derivative, x)
        except Exception as error:  # a derivative rule may raise anything
            return error
        return None

    errors = [error_of(each) for each in (jax.jacfwd(lambda x: fn(x, args)), backward)]
    if all(errors):
        raise TypeError(
            "the residual can be differentiated neither forwards nor backwards, and least_squares "
            "needs its Jacobian: give what is in the way a derivative by jax.custom_jvp (or all "
            "of the residual one by jax.custom_vjp). "
            f"Forwards: {_first_line(errors[0])}. Backwards: {_first_line(errors[1])}."
        ) from errors[0]
    return errors[0] is None, errors[1] is None


def _first_line(error: Exception | None) -> str:
    line = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {line[:300]}"


def _quality(
    fn: Callable[..., Any],
    x: Any,
    args: Any,
    jacobian_of: Callable[..., Any],
    bounds: tuple[Any, Any] | None,
) -> tuple[Any, Any, Any, Any]:
    # These only judge a solve, and the QR factorisation of a wide matrix has no derivative.
    inexact, rest = eqx.partition((fn, x, args), eqx.is_inexact_array)
    fn, x, args = eqx.combine(lax.stop_gradient(inexact), rest)
    r, whole = fn(x, args), jacobian_of(lambda x: fn(x, args))(x)
    jacobian = jnp.where(active(x, r @ whole, bounds), 0, whole)
    columns = lengths(jacobian)[None]
    size = jnp.linalg.norm(r)
    cosines = r @ (jacobian / columns) / jnp.where(size > 0, size, jnp.ones_like(size))
    step = jnp.linalg.lstsq(jacobian / columns, r)[0] / columns[0]
    unknowns = jnp.maximum(jnp.abs(x), jnp.finfo(x.dtype).tiny)
    return r, whole, jnp.max(jnp.abs(cosines)), jnp.max(jnp.abs(step) / unknowns)


# ---------------------------------------------------------------- a step


def evaluated_in(precision: Precision) -> PrecisionPolicy:
    """The policy under which all arithmetic is done in one precision."""
    kinds: dict[OpKind | str, Precision | str] = {
        kind: precision for kind in OpKind if kind is not OpKind.BOUNDARY
    }
    return Custom(kinds).with_retypes("f64", "f32")


def applied_in(precision: Precision, roles: Roles, fn: Callable[..., Any]) -> Callable[..., Any]:
    """A linear function of the linearised residual in the precision of a role."""
    if precision is Precision.parse(roles.residual):
        return fn
    return auto_mixed(fn, policy=evaluated_in(precision))


class _DescentState(eqx.Module):
    """The inner descent's state, the largest cosine between the residual and a column, and `y`."""

    inner: Any
    cosine: Any
    y: Any


Limits = tuple[Any, Any] | None
"""The lower and the upper bounds of the unknowns, vectors; None if there are none."""


def active(y: Any, gradient: Any, bounds: Limits) -> Any:
    """Which unknowns are at a bound, and would move beyond it along the negative gradient."""
    if bounds is None:
        return jnp.zeros(y.shape, bool)
    low, high = _at(y, bounds)
    return (low & (gradient > 0)) | (high & (gradient < 0))


def _at(y: Any, bounds: tuple[Any, Any]) -> tuple[Any, Any]:
    """Which unknowns are at their lower and at their upper bounds, up to rounding."""
    low, high = bounds
    least = 4 * jnp.finfo(y.dtype).eps
    return y <= low + least * jnp.abs(low), y >= high - least * jnp.abs(high)


class WithBounds(eqx.Module):
    """A residual whose second argument has the bounds too, where `BoundedAdjoint` finds them."""

    fn: Any

    def __call__(self, y: Any, args: Any) -> Any:
        """The residuals."""
        return self.fn(y, args[0])


def _fixed_point(optimum: Any, _: Any, inputs: Any) -> Any:
    """A function whose root is the optimum, and in which unknowns at a bound stay there."""
    residual, _, _, args, *_ = inputs
    low, high = _at(optimum, args[1])
    fixed, value = low | high, lax.stop_gradient(optimum)

    def objective(y: Any) -> Any:
        return 0.5 * jnp.sum(residual(y, args)[0] ** 2)

    gradient = jax.grad(objective)(jnp.where(fixed, value, optimum))
    return jnp.where(fixed, optimum - value, gradient)


class BoundedAdjoint(optx.ImplicitAdjoint):
    """The implicit function theorem for the unknowns that are not at a bound."""

    def apply(self, primal_fn: Any, rewrite_fn: Any, inputs: Any, tags: Any) -> Any:
        """As optimistix's, whose function of the optimum is replaced."""
        del rewrite_fn
        return super().apply(primal_fn, _fixed_point, inputs, tags)


class RoledDescent(optx.AbstractDescent[Any, Any, Any]):
    """A descent whose Jacobian, gradient and factorisation have precisions of their own.

    Unknowns that their bounds stop are left out of a step, which ends at the bounds (the active set
    of projected Levenberg-Marquardt methods: Kanzow, Yamashita and Fukushima 2004,
    https://doi.org/10.1016/j.cam.2004.02.013).

    Attributes:
        inner: the descent that makes the step.
        rung: the index of the Jacobian's present precision, int32[].
        roles: the precisions.
        has_transpose: whether the linearised residual can be transposed.
        bounds: those of the unknowns.
    """

    inner: optx.AbstractDescent[Any, Any, Any]
    rung: Any
    roles: Roles = eqx.field(static=True)
    has_transpose: bool = eqx.field(static=True)
    bounds: Any = None

    def init(self, y: Any, f_info_struct: Any) -> Any:
        narrow, _ = eqx.filter_eval_shape(self.narrowed, f_info_struct, y)
        state = self.inner.init(y.astype(self._dtype), narrow)
        # its scalars have JAX's default type
        state = jax.tree.map(
            lambda x: x.astype(self._dtype) if eqx.is_inexact_array(x) else x, state
        )
        return _DescentState(state, jnp.asarray(jnp.inf, self._dtype), y)

    def query(self, y: Any, f_info: Any, state: Any) -> Any:
        narrow, cosine = self.narrowed(f_info, y)
        inner = self.inner.query(y.astype(self._dtype), narrow, state.inner)
        return _DescentState(inner, cosine, y)

    def step(self, step_size: Any, state: Any) -> Any:
        diff, result = self.inner.step(step_size.astype(self._dtype), state.inner)
        diff = diff.astype(Precision.parse(self.roles.residual).dtype)
        if self.bounds is not None:
            diff = jnp.clip(state.y + diff, *self.bounds) - state.y
        return diff, result

    @property
    def _dtype(self) -> Any:
        return Precision.parse(self.roles.solve).dtype

    def narrowed(self, f_info: Any, y: Any) -> tuple[Any, Any]:
        """The problem of `n` rows with this problem's gradient and matrix, and the cosine."""
        structure = f_info.jac.in_structure()
        eye = jnp.eye(structure.size, dtype=structure.dtype)
        jac = f_info.jac
        if not self.has_transpose:
            # what it has is a loop, which may never end in a precision below its tolerance
            jac = lx.MatrixLinearOperator(jax.vmap(jac.mv)(eye).T)
        rungs = self.roles.rungs
        columns = [self._in(rung, jax.vmap(jac.mv)) for rung in rungs]
        rows = columns[0](eye) if len(rungs) == 1 else lax.switch(self.rung, columns, eye)
        jacobian = rows.T.astype(self._dtype)
        transposed = self._in(Precision.parse(self.roles.gradient), jac.transpose().mv)
        gradient = transposed(f_info.residual).astype(self._dtype)
        stopped = active(y, gradient, self.bounds)
        jacobian, gradient = (jnp.where(stopped, 0, x) for x in (jacobian, gradient))
        least = Precision.parse(self.roles.solve).unit_roundoff
        roundoffs = jnp.asarray([max(p.unit_roundoff, least) for p in rungs], self._dtype)
        sizes = lengths(jacobian)
        stacked = jnp.concatenate([jacobian, jnp.diag(roundoffs[self.rung] * sizes)])
        triangle = jnp.linalg.qr(stacked, mode="r")
        problem = jax.scipy.linalg.solve_triangular(triangle, gradient, trans="T")
        norm = jnp.linalg.norm(f_info.residual).astype(self._dtype)
        cosine = jnp.max(jnp.abs(gradient) / sizes) / jnp.where(norm > 0, norm, 1)
        info = optx.FunctionInfo.ResidualJac(problem, lx.MatrixLinearOperator(triangle))
        return info, cosine

    def _in(self, precision: Precision, fn: Callable[..., Any]) -> Callable[..., Any]:
        lowered = applied_in(precision, self.roles, fn)
        if lowered is fn:
            return fn

        def with_fallback(x: Any) -> Any:
            # an intermediate value may overflow the low format far from the solution
            with quietly():  # a Jacobian without arithmetic would warn that nothing is lowered
                low = lowered(x)
            # a method of an operator is not hashable, and cond asks for that
            finite = jnp.all(jnp.isfinite(low))
            return lax.cond(finite, lambda _: low, lambda x: fn(x), x)

        return with_fallback


class RisingState(eqx.Module):
    """The inner solver's state, the Jacobian's ladder, and if tolerances were met on a low rung."""

    inner: Any
    ladder: Ladder
    met: Any


class RisingSolver(optx.AbstractLeastSquaresSolver[Any, Any, Any, Any]):
    """An optimistix solver whose descent has a Jacobian of rising precision.

    The precision is raised by a `Ladder` whose measure is the cosine between the residual and the
    Jacobian, and when the solver would end, because steps of a low Jacobian may meet a tolerance
    only because they are small. On the last rung the solver ends as it does by itself.

    If none of `patience` steps on the last rung leads further than the low rung on which the
    solver ended, the solve ends too.
    """

    rtol: Any
    atol: Any
    norm: Any
    solver: Any

    def init(
        self, fn: Any, y: Any, args: Any, options: Any, f_struct: Any, aux_struct: Any, tags: Any
    ) -> Any:
        inner = self.solver.init(fn, y, args, options, f_struct, aux_struct, tags)
        rungs = self.solver.descent.roles.rungs
        return RisingState(inner, Ladder.create(rungs, (), scale=1.0), jnp.asarray(False))

    def step(
        self, fn: Any, y: Any, args: Any, options: Any, state: Any, tags: Any
    ) -> tuple[Any, Any, Any]:
        rung = state.ladder.rung
        y, inner, aux = self._on(rung).step(fn, y, args, options, state.inner, tags)
        done, result = self.solver.terminate(fn, y, args, options, inner, tags)
        failed = result != optx.RESULTS.successful
        measure = inner.descent_state.cosine
        ladder = state.ladder.updated(measure, (), exact=True, ended=done | failed)
        raised = ladder.rung > rung
        met = state.met | (done & ~failed)
        # optimistix only ends after an accepted step, and at the solution it may accept none.
        exhausted = state.met & ~raised & ~ladder.running
        dynamic, static = eqx.partition(inner.descent_state, eqx.is_array)

        def again() -> Any:
            new = self._on(ladder.rung).descent.query(y, inner.f_info, inner.descent_state)
            return eqx.filter(new, eqx.is_array)

        descent = eqx.combine(lax.cond(raised, again, lambda: dynamic), static)
        inner = eqx.tree_at(
            lambda s: (s.descent_state, s.terminate, s.result),
            inner,
            (
                descent,
                (inner.terminate | exhausted) & ~raised,
                optx.RESULTS.where(raised, optx.RESULTS.successful, inner.result),
            ),
        )
        return y, RisingState(inner, ladder, met), aux

    def terminate(
        self, fn: Any, y: Any, args: Any, options: Any, state: Any, tags: Any
    ) -> tuple[Any, Any]:
        return self.solver.terminate(fn, y, args, options, state.inner, tags)

    def postprocess(
        self,
        fn: Any,
        y: Any,
        aux: Any,
        args: Any,
        options: Any,
        state: Any,
        tags: Any,
        result: Any,
    ) -> tuple[Any, Any, dict[str, Any]]:
        return self.solver.postprocess(fn, y, aux, args, options, state.inner, tags, result)

    def _on(self, rung: Any) -> Any:
        return eqx.tree_at(lambda s: s.descent.rung, self.solver, rung)


def solver_with(
    roles: Roles, solver: Any, has_transpose: bool = True, bounds: Limits = None
) -> Any:
    """An optimistix solver whose steps have the roles' precisions, and stay within bounds."""
    if bounds is None and roles.is_uniform and roles.residual is Precision.F64 and has_transpose:
        return solver
    first = jnp.asarray(0, jnp.int32)
    descent = RoledDescent(solver.descent, first, roles, has_transpose, bounds)
    solver = eqx.tree_at(lambda s: s.descent, solver, descent)
    if len(roles.rungs) == 1:
        return solver
    return RisingSolver(solver.rtol, solver.atol, solver.norm, solver)


def lengths(jacobian: Any) -> Any:
    """The lengths of the columns; 1 for columns that are zero."""
    norms = jnp.linalg.norm(jacobian, axis=0)
    return jnp.where(norms > 0, norms, jnp.ones_like(norms))
