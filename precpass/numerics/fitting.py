"""Nonlinear least squares with a precision for each role, of optimistix's own pieces.

optimistix's Gauss-Newton, Levenberg-Marquardt and Dogleg linearise the residual, ask a descent for
a step, and a search whether it is good. The descent alone sees the Jacobian as a matrix. So a
descent that hands the one inside it a narrower problem gives each role its precision, and loop,
search and termination are optimistix's, in the precision of the residual.

The narrower problem has as many rows as unknowns. With `J` the Jacobian in its role's precision and
`D` the lengths of its columns, `Q R` is the QR factorisation of `[J; u D]`, and `z = R^-T g` for
the gradient `g = J^T r` of its own role: then `R^T R = J^T J + u^2 D^2` and `R^T z = g`, so that
the descent inside makes its step of the inexact matrix and the exact gradient. The unit roundoff
`u` of the Jacobian is how well its columns are known; below that `R` would be rounding errors.

This module needs optimistix, and is imported where it is used.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx

from precpass import jaxpr as ir
from precpass.api import auto_mixed
from precpass.numerics.roles import Roles
from precpass.numerics.wide import own_array
from precpass.opkinds import OpKind
from precpass.policy import Custom, PrecisionPolicy, quietly
from precpass.precision import Precision

__all__ = ["Problem", "Spec", "fit", "program", "solver_with"]

Info = Any


class Problem(eqx.Module):
    """What `program` makes of a residual: a function of one vector, to one vector.

    Attributes:
        consts: what the residual holds.
        jaxpr: the residual, traced, with those as its first arguments.
        spec: what it was traced from.
    """

    consts: list[Any]
    jaxpr: Any = eqx.field(static=True)
    spec: Spec = eqx.field(static=True)

    def __call__(self, x: Any, args: Any) -> Any:
        """The residuals, one behind the other."""
        (out,) = ir.evaluate(self.jaxpr, [*self.consts, x, *jax.tree.leaves(args)])
        return out


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a residual is traced at.

    Attributes:
        structure: the tree of the unknowns.
        shapes: theirs.
        precision: of its role.
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
    """The residuals, one behind the other."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(fn(spec.unflat(x), args))]
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
            "return real floating arrays: split complex numbers into real and imaginary parts"
        )
    if leaf.dtype.itemsize < spec.precision.dtype.itemsize:
        raise TypeError(
            f"{_named(fn)} returned {leaf.dtype.name}, and its role is {spec.precision}: cast "
            "nothing in it and give its data in float64, or ask for Roles.all('f32')"
        )


def program(fn: Callable[..., Any], spec: Spec, x: Any, args: Any, x64: bool) -> Problem:
    """A residual traced at its unknowns in float64, with what it holds as arrays of its own.

    It is traced in every call, since what it reads may have changed, and compiled again only where
    that made it another program.

    JAX keeps one canonical form of a numpy array as long as any program holds it, in the mode of
    x64 in which it was first met, and hands that to programs of the other mode too. So none is
    left in a program that is kept, and one that was met in the other mode before is refused.

    Args:
        fn: the residual.
        spec: what it is traced at.
        x: its unknowns.
        args: its second argument.
        x64: whether x64 is on outside.
    """
    leaves, structure = jax.tree.flatten(args)
    avals = jax.typeof(x.astype(np.float64)), *map(jax.typeof, leaves)

    def flat(x: Any, *leaves: Any) -> list[Any]:
        return [_residuals(fn, spec, x, jax.tree.unflatten(structure, leaves))]

    closed = ir.trace(flat, *avals)
    consts = ir.consts_of(closed)
    for const in consts:
        if not x64 and spec.precision is Precision.F64 and _is_rounded(const):
            raise TypeError(
                f"{_named(fn)} holds a numpy array of float32 of shape {const.shape}: either it "
                "is that, or a float32 program holds it too, and then JAX gives it to both "
                "rounded. Give it to least_squares as args"
            )

    def with_consts(consts: Any, *args: Any) -> list[Any]:
        return ir.evaluate(closed, args, consts)

    # a program of an outer trace may hold its tracers
    kept = [] if ir.is_tracing() else _kept((fn, spec, structure, avals, ir.told_by(closed)))
    if not kept:
        # the first holds them itself
        kept.append(ir.trace(with_consts, list(map(jax.typeof, consts)), *avals))
    return Problem([own_array(c) for c in consts], kept[0], spec)


def _kept(key: tuple[Any, ...]) -> list[Any]:
    """Where the program of a key is kept; of a residual that cannot be hashed none is."""
    try:
        return _place(key)
    except TypeError:
        return []


@functools.lru_cache(maxsize=64)
def _place(_key: tuple[Any, ...]) -> list[Any]:
    return []


def _is_rounded(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype == np.float32


def evaluated_in(precision: Precision) -> PrecisionPolicy:
    """The policy under which all arithmetic is done in one precision."""
    kinds: dict[OpKind | str, Precision | str] = {
        kind: precision for kind in OpKind if kind is not OpKind.BOUNDARY
    }
    return Custom(kinds).with_retypes("f64", "f32")


class RoledDescent(optx.AbstractDescent[Any, Any, Any]):
    """A descent whose step comes of a Jacobian, a gradient and a factorisation of other precisions.

    Attributes:
        inner: what makes the step.
        roles: the precisions.
        has_transpose: whether the linearised residual has one.
    """

    inner: optx.AbstractDescent[Any, Any, Any]
    roles: Roles = eqx.field(static=True)
    has_transpose: bool = eqx.field(static=True)

    def init(self, y: Any, f_info_struct: Info) -> Any:
        narrow = eqx.filter_eval_shape(self.narrowed, f_info_struct)
        state = self.inner.init(y.astype(self._dtype), narrow)
        # its scalars have JAX's default type
        return jax.tree.map(
            lambda x: x.astype(self._dtype) if eqx.is_inexact_array(x) else x, state
        )

    def query(self, y: Any, f_info: Info, state: Any) -> Any:
        return self.inner.query(y.astype(self._dtype), self.narrowed(f_info), state)

    def step(self, step_size: Any, state: Any) -> Any:
        diff, result = self.inner.step(step_size.astype(self._dtype), state)
        return diff.astype(Precision.parse(self.roles.residual).dtype), result

    @property
    def _dtype(self) -> Any:
        return Precision.parse(self.roles.solve).dtype

    def narrowed(self, f_info: Info) -> Info:
        """The problem of `n` rows that has the gradient and the matrix of this one, by roles."""
        structure = f_info.jac.in_structure()
        eye = jnp.eye(structure.size, dtype=structure.dtype)
        jac = f_info.jac
        if not self.has_transpose:
            # what it has is a loop, which may never end in a precision below its tolerance
            jac = lx.MatrixLinearOperator(jax.vmap(jac.mv)(eye).T)
        jacobian = self._in("jacobian", jax.vmap(jac.mv))(eye).T.astype(self._dtype)
        transposed = self._in("gradient", jac.transpose().mv)
        gradient = transposed(f_info.residual).astype(self._dtype)
        roundoff = max(
            Precision.parse(p).unit_roundoff for p in (self.roles.jacobian, self.roles.solve)
        )
        stacked = jnp.concatenate([jacobian, jnp.diag(roundoff * _lengths(jacobian))])
        triangle = jnp.linalg.qr(stacked, mode="r")
        rows = jax.scipy.linalg.solve_triangular(triangle, gradient, trans="T")
        return optx.FunctionInfo.ResidualJac(rows, lx.MatrixLinearOperator(triangle))

    def _in(self, role: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        precision = Precision.parse(getattr(self.roles, role))
        if precision is Precision.parse(self.roles.residual):
            return fn
        lowered = auto_mixed(fn, policy=evaluated_in(precision))

        def with_fallback(x: Any) -> Any:
            # an intermediate value may overflow the low format far from the solution
            with quietly():  # a Jacobian without arithmetic has nothing to lower
                low = lowered(x)
            # a method of an operator is not hashable, and cond asks for that
            finite = jnp.all(jnp.isfinite(low))
            return jax.lax.cond(finite, lambda _: low, lambda x: fn(x), x)

        return with_fallback


def solver_with(roles: Roles, solver: Any, has_transpose: bool = True) -> Any:
    """An optimistix solver whose descent has the roles' precisions."""
    if roles.is_uniform and roles.residual is Precision.F64 and has_transpose:
        return solver
    return eqx.tree_at(
        lambda s: s.descent, solver, RoledDescent(solver.descent, roles, has_transpose)
    )


@eqx.filter_jit
def fit(problem: Problem, solver: Any, roles: Roles, x0: Any, args: Any, max_steps: int) -> Any:
    """The solution by optimistix, and how well it satisfies what it should.

    Args:
        problem: the residual.
        solver: of optimistix.
        roles: the precision of each part.
        x0: where to start, a vector.
        args: of the residual.
        max_steps: at most.

    Returns:
        The `Solution` with the pytree as its value, the largest cosine between the residual and a
        column of the Jacobian, and the size of the next Gauss-Newton step relative to the
        unknowns.
    """
    fn: Callable[..., Any] = problem
    if problem.spec.precision is Precision.F32:
        fn = eqx.Partial(_in_float32, problem)
    forward, backward = _derivatives(fn, x0, args)
    found = optx.least_squares(
        fn,
        solver_with(roles, solver, backward),
        x0,
        args,
        {"jac": "fwd" if forward else "bwd"},
        max_steps=max_steps,
        throw=False,
    )
    accepted = {"num_accepted_steps": found.state.num_accepted_steps, **found.stats}
    shown = eqx.tree_at(
        lambda s: (s.value, s.state, s.stats),
        found,
        (problem.spec.unflat(found.value), None, accepted),
        is_leaf=lambda x: x is None,
    )
    return shown, *_quality(fn, found.value, args, jax.jacfwd if forward else jax.jacrev)


def _derivatives(fn: Callable[..., Any], x: Any, args: Any) -> tuple[bool, bool]:
    """Whether a residual can be differentiated forwards, and backwards.

    A `lax.while_loop` has no transpose, and a `jax.custom_vjp` no forward mode.

    Raises:
        TypeError: where it is neither.
    """

    def backward(x: Any) -> Any:
        out, transposed = jax.vjp(lambda x: fn(x, args), x)
        return transposed(out)

    errors: list[Exception | None] = []
    for derivative in (jax.jacfwd(lambda x: fn(x, args)), backward):
        try:
            jax.eval_shape(derivative, x)
        except Exception as error:  # a rule for derivatives may raise anything
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


def _in_float32(problem: Problem, x: Any, args: Any) -> Any:
    lowered = auto_mixed(lambda *call: call[0](*call[1:]), policy=evaluated_in(Precision.F32))
    with quietly():
        return lowered(problem, x.astype(np.float64), args).astype(np.float32)


def _quality(
    fn: Callable[..., Any], x: Any, args: Any, jacobian_of: Callable[..., Any]
) -> tuple[Any, Any]:
    # these judge a solve, and the QR factorisation of a wide matrix has no derivative
    held, rest = eqx.partition((fn, x, args), eqx.is_inexact_array)
    fn, x, args = eqx.combine(jax.lax.stop_gradient(held), rest)
    r, jacobian = fn(x, args), jacobian_of(lambda x: fn(x, args))(x)
    lengths = _lengths(jacobian)[None]
    size = jnp.linalg.norm(r)
    cosines = r @ (jacobian / lengths) / jnp.where(size > 0, size, jnp.ones_like(size))
    step = jnp.linalg.lstsq(jacobian / lengths, r)[0] / lengths[0]
    unknowns = jnp.maximum(jnp.abs(x), jnp.finfo(x.dtype).tiny)
    return jnp.max(jnp.abs(cosines)), jnp.max(jnp.abs(step) / unknowns)


def _lengths(jacobian: Any) -> Any:
    """The lengths of the columns, one for those that are zero."""
    lengths = jnp.linalg.norm(jacobian, axis=0)
    return jnp.where(lengths > 0, lengths, jnp.ones_like(lengths))
