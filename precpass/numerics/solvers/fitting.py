"""Nonlinear least squares with a precision for each role, built from optimistix's pieces.

optimistix's Gauss-Newton, Levenberg-Marquardt and Dogleg linearise the residual, ask a descent
for a step, and ask a search whether the step is good. `precpass.numerics.solvers.descents` has
the descents. This module traces the residual, runs the solver, and judges the solution.

This module needs optimistix, so it is only imported when it is used.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx

from precpass import jaxpr as ir
from precpass.api import auto_mixed
from precpass.jaxpr.weak import Recent, WeakIdMap
from precpass.jit.own_arrays import with_own_arrays
from precpass.numerics.monitor.monitor import monitor
from precpass.numerics.solvers.descents import (
    BoundedAdjoint,
    RisingState,
    WithBounds,
    active,
    applied_in,
    evaluated_in,
    lengths,
    solver_with,
)
from precpass.numerics.solvers.float64 import own_array
from precpass.numerics.solvers.roles import Roles
from precpass.policy.precision import Precision
from precpass.policy.presets import Custom
from precpass.policy.warned import quietly

__all__ = ["Problem", "Spec", "fit", "looked_at", "program"]


class Problem(eqx.Module):
    """A traced residual as a function from a vector to a vector.

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
        (out,) = ir.evaluate(self.jaxpr, [*self.consts, x, *jax.tree.leaves(args)])
        return out


@dataclasses.dataclass(frozen=True)
class Spec:
    """The unknowns and the precision with which a residual is traced.

    Attributes:
        structure: the tree structure of the unknowns.
        shapes: the shapes of the unknowns.
        precision: the precision of the residual's role.
    """

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
        _check_residual(leaf, fn, spec)
    if not sum(leaf.size for leaf in leaves):
        raise ValueError(f"{_named(fn)} returned no residuals")
    return jnp.concatenate([leaf.ravel().astype(x.dtype) for leaf in leaves])


def _named(fn: Callable[..., Any]) -> str:
    return f"the residual {getattr(fn, '__name__', repr(fn))}"


def _check_residual(leaf: Any, fn: Callable[..., Any], spec: Spec) -> None:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise TypeError(
            f"{_named(fn)} returned {leaf.dtype}[{','.join(map(str, leaf.shape))}], and is to "
            "return floating or complex arrays"
        )
    if leaf.dtype.itemsize < spec.precision.dtype.itemsize:
        raise TypeError(
            f"{_named(fn)} returned {leaf.dtype.name}, and its role is {spec.precision}: cast "
            "nothing in it and give its data in float64, or ask for Roles.all('f32')"
        )


def program(fn: Callable[..., Any], spec: Spec, x: Any, args: Any, x64: bool) -> Problem:
    """A residual traced at its unknowns in float64, with copies of the arrays that it closes over.

    It is traced in every call, because values that it reads may have changed, and compiled again
    only if that made it another program.

    As long as a program holds a numpy array, JAX caches one canonical form of it, in the x64 mode
    in which it first saw the array, and uses that in programs of the other mode too. So cached
    programs hold no numpy array, and with x64 off the residual is traced with copies.

    Args:
        fn: the residual.
        spec: the unknowns' shapes and the precision.
        x: its unknowns.
        args: its second argument.
        x64: whether x64 is on outside.
    """
    leaves, structure = jax.tree.flatten(args)
    avals = jax.typeof(x.astype(np.float64)), *map(jax.typeof, leaves)

    is_copied = spec.precision is Precision.F64 and not x64
    read, arrays = with_own_arrays(fn) if is_copied else (fn, [])

    def flat(x: Any, *leaves: Any) -> list[Any]:
        return [_residuals(read, spec, x, jax.tree.unflatten(structure, leaves))]

    closed = ir.trace(flat, *avals)
    for const in _all_consts(closed) if is_copied else ():
        if _is_narrow(const) and not any(map(functools.partial(_is_alike, const), arrays)):
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


def _is_narrow(x: Any) -> bool:
    """Whether it is a numpy array of float32, or JAX's form of another in a float32 program."""
    return isinstance(x, np.ndarray) and x.dtype in (np.float32, np.complex64)


class Fit(NamedTuple):
    """The result of `fit`.

    Attributes:
        solution: optimistix's `Solution`, with the pytree of unknowns as its value.
        fun: the residuals there.
        jac: their Jacobian there.
        cosine: the largest cosine between the residual and a column of the Jacobian.
        step: the size of the next Gauss-Newton step relative to the unknowns.
        ladder: the Jacobian's ladder; None if it has one precision.
    """

    solution: Any
    fun: Any
    jac: Any
    cosine: Any
    step: Any
    ladder: Any


@eqx.filter_jit
def fit(
    problem: Problem,
    solver: Any,
    roles: Roles,
    x0: Any,
    args: Any,
    max_steps: int,
    bounds: tuple[Any, Any] | None,
) -> Fit:
    """The solution by optimistix, with measures of how good it is.

    Args:
        problem: the residual.
        solver: an optimistix solver.
        roles: the precision of each part.
        x0: the start, a vector.
        args: the residual's second argument.
        max_steps: the largest number of steps.
        bounds: the lower and the upper bounds, vectors; None for none.
    """
    fn = _of_its_precision(problem)
    forward, backward = _derivatives(fn, x0, args)
    solution = optx.least_squares(
        fn if bounds is None else WithBounds(fn),
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
    shown = eqx.tree_at(
        lambda s: (s.value, s.state, s.stats),
        solution,
        (problem.spec.unflat(value), None, accepted),
        is_leaf=lambda x: x is None,
    )
    jacobian_of = jax.jacfwd if forward else jax.jacrev
    return Fit(shown, *_quality(fn, value, args, jacobian_of, bounds), ladder)


@eqx.filter_jit
def looked_at(problem: Problem, roles: Roles, points: Sequence[Any], args: Any) -> Any:
    """The `Health` of the residual and its linearisation at some points, in a separate program."""
    points, args = jax.tree.map(jax.lax.stop_gradient, (points, args))
    points, args = jax.lax.optimization_barrier((points, args))
    fn = _of_its_precision(problem)
    forward, backward = _derivatives(fn, points[0], args)
    monitored = monitor(_Looked(fn, roles, forward, backward).linearised, Custom({}))
    with quietly():
        healths = [monitored(x, args)[1] for x in points]
    return functools.reduce(lambda one, other: one.merged(other), healths)


class _Looked(NamedTuple):
    """A residual and its linearisation by roles, to be monitored."""

    fn: Callable[..., Any]
    roles: Roles
    forward: bool
    backward: bool

    def linearised(self, x: Any, args: Any) -> Any:
        """The residual, and the parts of its Jacobian and gradient that a first step reads."""
        eye = jnp.eye(x.size, dtype=x.dtype)
        if not self.forward:
            return self.fn(x, args), jax.jacrev(lambda x: self.fn(x, args))(x)
        out, push = jax.linearize(lambda x: self.fn(x, args), x)
        if not self.backward:
            return out, jax.vmap(push)(eye)
        jacobian = applied_in(self.roles.rungs[0], self.roles, jax.vmap(push))(eye)
        pull = jax.linear_transpose(push, x)
        precision = Precision.parse(self.roles.gradient)
        return out, jacobian, applied_in(precision, self.roles, lambda out: pull(out)[0])(out)


def _derivatives(fn: Callable[..., Any], x: Any, args: Any) -> tuple[bool, bool]:
    """Whether a residual can be differentiated forwards, and backwards.

    A `lax.while_loop` has no transpose, and a `jax.custom_vjp` no forward mode.

    Raises:
        TypeError: if neither is possible.
    """

    def backward(x: Any) -> Any:
        out, transposed = jax.vjp(lambda x: fn(x, args), x)
        return transposed(out)

    errors: list[Exception | None] = []
    for derivative in (jax.jacfwd(lambda x: fn(x, args)), backward):
        try:
            jax.eval_shape(derivative, x)
        except Exception as error:  # a derivative rule may raise anything
            errors.append(error)
        else:
            errors.append(None)
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


def _of_its_precision(problem: Problem) -> Callable[..., Any]:
    if problem.spec.precision is Precision.F32:
        return eqx.Partial(_in_float32, problem)
    return problem


def _in_float32(problem: Problem, x: Any, args: Any) -> Any:
    def called(problem: Problem, x: Any, args: Any) -> Any:
        return problem(x, args)

    lowered = auto_mixed(called, evaluated_in(Precision.F32))
    with quietly():
        return lowered(problem, x.astype(np.float64), args).astype(np.float32)


def _quality(
    fn: Callable[..., Any],
    x: Any,
    args: Any,
    jacobian_of: Callable[..., Any],
    bounds: tuple[Any, Any] | None,
) -> tuple[Any, Any, Any, Any]:
    # These only judge a solve, and the QR factorisation of a wide matrix has no derivative.
    inexact, rest = eqx.partition((fn, x, args), eqx.is_inexact_array)
    fn, x, args = eqx.combine(jax.lax.stop_gradient(inexact), rest)
    r, whole = fn(x, args), jacobian_of(lambda x: fn(x, args))(x)
    jacobian = jnp.where(active(x, r @ whole, bounds), 0, whole)
    columns = lengths(jacobian)[None]
    size = jnp.linalg.norm(r)
    cosines = r @ (jacobian / columns) / jnp.where(size > 0, size, jnp.ones_like(size))
    step = jnp.linalg.lstsq(jacobian / columns, r)[0] / columns[0]
    unknowns = jnp.maximum(jnp.abs(x), jnp.finfo(x.dtype).tiny)
    return r, whole, jnp.max(jnp.abs(cosines)), jnp.max(jnp.abs(step) / unknowns)
