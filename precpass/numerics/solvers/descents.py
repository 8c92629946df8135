"""Pieces for optimistix that give each role in a step of least squares its own precision.

Only a descent sees the Jacobian as a matrix. So a descent that passes a narrower problem to an
inner descent gives each role its precision. Loop, search and termination are optimistix's, in the
precision of the residual.

The narrower problem has as many rows as unknowns. With `J` the Jacobian in its role's precision and
`D` the lengths of its columns, `Q R` is the QR factorisation of `[J; u D]`, and `z = R^-T g` for
the gradient `g = J^T r` of its own role: then `R^T R = J^T J + u^2 D^2` and `R^T z = g`, so that
the inner descent makes its step from the inexact matrix and the exact gradient. The unit roundoff
`u` of the Jacobian is the accuracy of its columns; without `u D`, `R` could be rounding errors.

This module needs optimistix, so it is only imported when it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import optimistix as optx
from jax import lax

from precpass.api import auto_mixed
from precpass.numerics.ladder.ladder import Ladder
from precpass.numerics.solvers.roles import Roles
from precpass.policy.policy import PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.policy.presets import Custom
from precpass.policy.primitives import OpKind
from precpass.policy.warned import quietly

__all__ = [
    "BoundedAdjoint",
    "RisingState",
    "WithBounds",
    "active",
    "applied_in",
    "evaluated_in",
    "lengths",
    "solver_with",
]

Info = Any


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
    """The state of a `RoledDescent`.

    Attributes:
        inner: the inner descent's state.
        cosine: the largest cosine between the residual and a column of the Jacobian; inf before
            the first step.
        y: the unknowns.
    """

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

    Attributes:
        inner: the descent that makes the step.
        rung: the index of the Jacobian's present precision, int32[].
        roles: the precisions.
        has_transpose: whether the linearised residual can be transposed.
        bounds: those of the unknowns. Unknowns that they stop are left out of a step, which ends at
            the bounds (the active set of projected Levenberg-Marquardt methods: Kanzow, Yamashita
            and Fukushima 2004, https://doi.org/10.1016/j.cam.2004.02.013).
    """

    inner: optx.AbstractDescent[Any, Any, Any]
    rung: Any
    roles: Roles = eqx.field(static=True)
    has_transpose: bool = eqx.field(static=True)
    bounds: Any = None

    def init(self, y: Any, f_info_struct: Info) -> Any:
        narrow, _ = eqx.filter_eval_shape(self.narrowed, f_info_struct, y)
        state = self.inner.init(y.astype(self._dtype), narrow)
        # its scalars have JAX's default type
        state = jax.tree.map(
            lambda x: x.astype(self._dtype) if eqx.is_inexact_array(x) else x, state
        )
        return _DescentState(state, jnp.asarray(jnp.inf, self._dtype), y)

    def query(self, y: Any, f_info: Info, state: Any) -> Any:
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

    def narrowed(self, f_info: Info, y: Any) -> tuple[Info, Any]:
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
    """The state of a `RisingSolver`.

    Attributes:
        inner: the inner solver's state.
        ladder: the Jacobian's ladder.
        met: whether the solver's tolerances were met on a low rung, bool[].
    """

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

    Attributes:
        rtol, atol, norm: the solver's.
        solver: with a `RoledDescent`.
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
