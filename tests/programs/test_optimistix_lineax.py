"""Programs of optimistix and lineax: solves inside of programs with products, implicit gradients.

What a solver multiplies inside of lineax's `linear_solve` keeps its precision, with a warning that
names it. Outside, products stay float32 in a loop that ends on a tolerance, and where their result
is factorized; the others are low, such as those of an implicit gradient.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import lineax as lx
import optimistix as optx
import pytest

import precpass as pp
from tests.support.jaxprs import is_low, low_products, split_products
from tests.support.libraries import FAST, assert_leaves_near, is_ordered
from tests.support.passes import look
from tests.support.values import identical, normal

pytestmark = pytest.mark.programs

A = jnp.asarray(normal(0, 16, 16)) / 20
B = jnp.asarray(normal(1, 16))
X = jnp.asarray(normal(2, 64, 16)) / 4
Y = jnp.tanh(X @ jnp.asarray(normal(3, 16)) / 2) + jnp.asarray(normal(4, 64)) / 10
LOWS = (pp.AutoMixedBf16, pp.AutoMixed)
HEAD = jnp.asarray(normal(5, 16, 16)) / 4
TOLERANCES: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2}


def check_solver(
    fn: Callable[..., Any], *args: Any, least: int, exact: int, late: int, factor: float = 4
) -> None:
    """A solution, the steps to it, and its gradient from both sides of the pass.

    Bfloat16 inside and float16 outside, so that each format and each side is met in one form.

    Args:
        fn: gives the solution and the number of steps.
        args: what the gradient is taken of.
        least: the number of low products is larger.
        exact: how many products stay wide because their results are needed exactly.
        late: how many products the derivatives of a `linear_solve` and of a product that stays wide
            add behind the pass.
        factor: the bound on relative errors in units of the policy's unit roundoff.
    """

    def loss(*args: Any) -> Any:
        solution, steps = fn(*args)
        leaves = jax.tree.leaves(solution)
        return sum(jnp.sum(jnp.arctan(x @ HEAD)) for x in leaves), {
            "solution": solution,
            "steps": steps,
        }

    gradient = functools.partial(jax.grad, argnums=range(len(args)), has_aux=True)
    want = jax.jit(gradient(loss), **FAST)(*args)
    inside = pp.auto_mixed(gradient(loss), policy=LOWS[0], **FAST)
    outside = jax.jit(gradient(pp.auto_mixed(loss, policy=LOWS[1])), **FAST)
    for policy, form, kept in zip(LOWS, (inside, outside), (0, late), strict=True):
        with pytest.warns(pp.PrecisionWarning, match=r"linear_solve.* products?: "):
            traced = form.trace(*args)
        entered, _ = split_products(traced.jaxpr, "linear_solve")
        low = [e for e in entered if is_low(e, policy.low.dtype)]
        assert len(low) > least
        assert len(entered) - len(low) - sum(map(is_ordered, entered)) == exact + kept
        got = traced.lower().compile()(*args)
        assert_leaves_near(got, want, factor * policy.low.unit_roundoff)


# ---------------------------------------------------------------- optimistix


@pytest.mark.release
def test_a_root_and_a_fixed_point():
    def fn(a: Any, b: Any) -> Any:
        root = optx.root_find(lambda y, _: y + jnp.tanh(a @ y) - b, optx.Newton(**TOLERANCES), b)
        iteration = optx.FixedPointIteration(**TOLERANCES)
        point = optx.fixed_point(lambda y, _: jnp.tanh(a @ y) + b, iteration, b)
        return (root.value, point.value), (root.stats["num_steps"], point.stats["num_steps"])

    check_solver(fn, A, B, least=1, exact=7, late=2)


@pytest.mark.release
def test_a_minimum():
    def fn(a: Any, b: Any) -> Any:
        found = optx.minimise(
            lambda y, _: jnp.sum((y + a @ y - b) ** 2), optx.BFGS(**TOLERANCES), jnp.zeros(16)
        )
        return found.value, found.stats["num_steps"]

    check_solver(fn, A, B, least=1, exact=4, late=2)


def test_a_nonlinear_fit():
    def fn(x: Any, y: Any) -> Any:
        solver = optx.LevenbergMarquardt(**TOLERANCES)
        found = optx.least_squares(lambda p, _: jnp.tanh(x @ p) - y, solver, jnp.zeros(16))
        return found.value, found.stats["num_steps"]

    check_solver(fn, X, Y, least=4, exact=3, late=2)


# ---------------------------------------------------------------- lineax

STRUCTURE = jax.eval_shape(lambda: B)


def regular(a: Any) -> Any:
    """Twice the identity and something small: its condition number is below 3."""
    return a + 2 * jnp.eye(16)


def gmres(a: Any, b: Any) -> Any:
    operator = lx.FunctionLinearOperator(lambda v: regular(a) @ v, STRUCTURE)
    return lx.linear_solve(operator, b, lx.GMRES(1e-3, 1e-3)).value


def conjugate_gradients(a: Any, b: Any) -> Any:
    operator = lx.MatrixLinearOperator(regular(a + a.T), lx.positive_semidefinite_tag)
    return lx.linear_solve(operator, b, lx.CG(1e-3, 1e-3)).value


def factorized(a: Any, b: Any) -> Any:
    """By LU, QR and Cholesky, of matrices that are products."""
    matrix = regular(a @ a.T)
    operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
    solvers = lx.LU(), lx.QR(), lx.Cholesky()
    return [lx.linear_solve(operator, b, solver).value for solver in solvers]


@pytest.mark.release
def test_linear_solves_between_products():
    def fn(a: Any, b: Any) -> Any:
        rhs = jnp.tanh(a @ b)
        batched = jax.vmap(functools.partial(conjugate_gradients, a))(jnp.stack([rhs, b]))
        return {"cg": batched, "factorized": factorized(a, rhs)}, ()

    check_solver(fn, A, B, least=1, exact=1, late=2)


@pytest.mark.parametrize(
    "solve",
    [gmres, jax.vmap(conjugate_gradients, (None, 0))],
    ids=["a function's operator", "a matrix's, batched"],
)
def test_products_inside_of_a_linear_solve_keep_their_precision(solve: Callable[..., Any]):
    """An operator made of a function holds jaxprs; one made of a matrix shows none."""
    args = A, B if solve is gmres else jnp.stack([B, -B])
    with pytest.warns(pp.PrecisionWarning, match=r"linear_solve\b.* products?: "):
        got = pp.auto_mixed(lambda a, b: (solve(a, b), a @ a), **FAST)(*args)
    assert identical(got[0], jax.jit(solve, **FAST)(*args))
    assert not identical(got[1], A @ A)


def test_a_direct_solve_has_no_products_and_no_warning():
    found = look(lambda a, b: factorized(jnp.tanh(a @ a), b), pp.AutoMixedBf16, A, B)
    assert found.plan.notes == ()
    assert len(low_products(found.after)) == 2


def test_always_f32_is_the_plain_program():
    def fn(a: Any, b: Any) -> Any:
        root = optx.root_find(lambda y, _: y + jnp.tanh(a @ y) - b, optx.Newton(**TOLERANCES), b)
        return root.value.sum() + gmres(a, b).sum()

    found = look(jax.grad(fn), pp.AlwaysF32, A, B)
    assert found.after is found.before


# ---------------------------------------------------------------- equinox


def test_a_function_that_is_not_inlined_keeps_its_precision_with_a_warning():
    def fn(a: Any, b: Any) -> Any:
        return eqxi.noinline(lambda a, b: jnp.tanh(a @ b))(a, b)

    def both(a: Any, b: Any) -> Any:
        return fn(a, b), a @ b

    with pytest.warns(pp.PrecisionWarning, match="noinline.* calls Python"):
        got = pp.auto_mixed(both)(A, B)
    assert identical(got[0], jax.jit(fn)(A, B))
    assert not identical(got[1], A @ B)
