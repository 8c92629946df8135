"""Least squares of residuals that have one mode of differentiation, and derivatives of fits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from tests.numerics.test_least_squares import START, T, Y, decay, exact
from tests.support.nist_problems import lre

pytestmark = pytest.mark.programs

ROLES = {
    "default": pp.numerics.Roles(),
    "float64": pp.numerics.Roles.all("f64"),
    "float32": pp.numerics.Roles.all("f32"),
    "bfloat16": pp.numerics.Roles(jacobian="bf16", gradient="f32", solve="f32"),
}


def looped(b: Any, scale: Any = None) -> Any:
    """`decay` with the exponential by its series, to a tolerance of its own."""

    def body(state: Any) -> Any:
        k, term, total = state
        term = term * (-b[1] * T) / k
        return k + 1, term, total + term

    one = jnp.ones_like(T) + 0 * b[0]
    start = (jnp.ones_like(b[0]), one, one)
    return b[0] * lax.while_loop(lambda s: jnp.max(jnp.abs(s[1])) > 1e-20, body, start)[2] - Y


@jax.custom_vjp
def exponential(x: Any) -> Any:
    return jnp.exp(x)


exponential.defvjp(lambda x: (jnp.exp(x), jnp.exp(x)), lambda y, g: (g * y,))


def backwards(b: Any, scale: Any = None) -> Any:
    return b[0] * exponential(-b[1] * T) - (1.0 if scale is None else scale) * Y


@pytest.mark.release(keep=2)
@pytest.mark.parametrize(
    "roles, solver",
    [(roles, "LevenbergMarquardt") for roles in ROLES]
    + [("float64", "Dogleg"), ("default", "GaussNewton")],
)
@pytest.mark.parametrize("residual", [looped, backwards])
def test_one_mode_of_differentiation_is_enough(residual: Any, roles: str, solver: str):
    found = pp.numerics.least_squares(residual, START, roles=ROLES[roles], solver=solver)
    assert bool(found.converged)
    assert lre(found.value, exact()) > (3 if roles == "float32" else 7)


def test_a_loop_that_ends_in_no_lower_precision_ends():
    """Newton's square root; in float32 and bfloat16 it never comes to its tolerance."""

    def root(x: Any) -> Any:
        return lax.while_loop(
            lambda y: jnp.abs(y * y - x) > 1e-14 * x, lambda y: (y + x / y) / 2, x
        )

    target = np.array([2.0, 3.0])
    found = pp.numerics.least_squares(
        lambda b, _: jnp.stack([root(b[0]), root(b[1])]) - target,
        np.array([3.0, 5.0]),
        roles={"jacobian": "bf16"},
    )
    assert bool(found.converged)
    np.testing.assert_allclose(found.value, [4.0, 9.0], rtol=1e-9)


@pytest.mark.release
def test_what_has_no_forward_mode_has_derivatives_of_its_fit():
    def first(fn: Any, s: Any) -> Any:
        return pp.numerics.least_squares(fn, START, s).value[0]

    ours, want = (jax.grad(functools.partial(first, fn))(1.0) for fn in (backwards, decay))
    np.testing.assert_allclose(ours, want, rtol=1e-6)


def test_what_has_no_derivative_is_refused():
    def called(b: Any, _: Any) -> Any:
        return jax.pure_callback(lambda b: b - 1, jax.typeof(b), b)

    with pytest.raises(TypeError, match=r"neither forwards nor backwards.*Forwards: "):
        pp.numerics.least_squares(called, START)


@pytest.mark.release
def test_the_diagnostics_are_constants_in_derivatives():
    """And those of the value stay what they are beside them, for a wide Jacobian too."""

    def fit(s: Any, held: bool = False) -> Any:
        residual, args = (lambda b, _: decay(b, s), None) if held else (decay, s)
        found = pp.numerics.least_squares(residual, START, args)
        return found.value[0], found.step, found.cosine

    def wide(s: Any) -> Any:
        found = pp.numerics.least_squares(lambda b, s: b[:1] - s, START, s)
        return found.step + found.cosine

    for held in (False, True):
        value, step, cosine = jax.jacrev(functools.partial(fit, held=held))(1.0)
        assert float(step) == 0 == float(cosine)
        # b[0] is proportional to the scale
        np.testing.assert_allclose(value, exact()[0], rtol=1e-4)
    assert float(jax.grad(wide)(1.0)) == 0
