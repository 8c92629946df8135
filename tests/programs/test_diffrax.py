"""Programs of diffrax: a neural differential equation under each adjoint, noise, implicit steps."""

import functools
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import pytest

import precpass as pp
from tests.support.jaxprs import is_low, split_products
from tests.support.libraries import (
    FAST,
    assert_leaves_near,
    check_products,
    check_program,
    ordered,
)
from tests.support.values import identical, normal, rel_error

pytestmark = pytest.mark.programs

NET = eqx.nn.MLP(8, 8, 16, 1, activation=jnp.tanh, key=jax.random.key(0))
WEIGHTS, STATIC = eqx.partition(NET, eqx.is_array)
Y0 = jnp.asarray(normal(0, 4, 8))
each_low = pytest.mark.parametrize("policy", [pp.AutoMixedBf16, pp.AutoMixed], ids=lambda p: p.name)


def field(_t: Any, y: Any, weights: Any) -> Any:
    return jax.vmap(eqx.combine(weights, STATIC))(y)


def solve(weights: Any, y0: Any, solver: Any, **options: Any) -> Any:
    defaults: dict[str, Any] = {"t0": 0.0, "t1": 1.0, "dt0": 0.25, "max_steps": 8, "throw": False}
    terms = options.pop("terms", diffrax.ODETerm(field))
    return diffrax.diffeqsolve(terms, solver, y0=y0, args=weights, **(defaults | options))


# ---------------------------------------------------------------- adjoints

ADJOINTS = {
    "recursive": (diffrax.RecursiveCheckpointAdjoint(), pp.AutoMixed),
    "backsolve": (diffrax.BacksolveAdjoint(), pp.AutoMixedBf16),
}


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("name", ADJOINTS)
def test_a_neural_ode_and_its_adjoints(name: str):
    """The third one, DirectAdjoint, is that of the implicit solver below."""
    adjoint, policy = ADJOINTS[name]

    def fn(weights: Any, y0: Any) -> Any:
        solution = solve(weights, y0, diffrax.Euler(), adjoint=adjoint)
        return {"ys": solution.ys, "steps": solution.stats["num_steps"]}

    checked = check_program(fn, WEIGHTS, Y0, policy=policy, wrt=(0, 1), least=2)
    assert checked.want["steps"] == 4


@pytest.mark.parametrize(
    "form", [lambda f: pp.auto_mixed(jax.grad(f)), lambda f: jax.grad(pp.auto_mixed(f))]
)
def test_a_solver_that_may_raise_an_error_is_low(form: Any):
    """Its error is a whole number that a callback reads."""

    def fn(weights: Any, y0: Any) -> Any:
        return jnp.sum(solve(weights, y0, diffrax.Euler(), throw=True).ys)

    check_products(jax.make_jaxpr(form(fn))(WEIGHTS, Y0), pp.AutoMixedBf16, least=4)


def test_forward_mode():
    def tangent(fn: Any) -> Any:
        return lambda weights, y0, dw: jax.jvp(lambda w: fn(w, y0), (weights,), (dw,))

    def fn(weights: Any, y0: Any) -> Any:
        return solve(weights, y0, diffrax.Euler(), adjoint=diffrax.ForwardMode()).ys

    args = WEIGHTS, Y0, jax.tree.map(jnp.ones_like, WEIGHTS)
    want = jax.jit(tangent(fn), **FAST)(*args)
    forms = pp.auto_mixed(tangent(fn), **FAST), jax.jit(tangent(pp.auto_mixed(fn)), **FAST)
    for form in forms:
        traced = form.trace(*args)
        check_products(traced.jaxpr, pp.AutoMixedBf16, least=6)
        got = traced.lower().compile()(*args)
        assert_leaves_near(got, want, 8 * pp.types.Precision.BF16.unit_roundoff)


# ---------------------------------------------------------------- step sizes


@pytest.mark.release(keep=1)
@each_low
def test_an_adaptive_solver_takes_about_the_steps_of_float32(policy: Any):
    def fn(weights: Any, y0: Any) -> Any:
        controller = diffrax.PIDController(rtol=1e-2, atol=1e-2)
        solution = solve(
            weights, 4 * y0, diffrax.Bosh3(), stepsize_controller=controller, max_steps=64
        )
        return solution.ys, solution.stats["num_steps"]

    mixed = pp.auto_mixed(fn, policy=policy, **FAST)
    check_products(mixed.trace(WEIGHTS, Y0).jaxpr, policy, 2, ordered(fn, WEIGHTS, Y0))
    ys, steps = mixed(WEIGHTS, Y0)
    wanted, wanted_steps = jax.jit(fn, **FAST)(WEIGHTS, Y0)
    # each step is wrong by the tolerance at most, in float32 too
    assert rel_error(ys, wanted) < 2e-2 + 4 * policy.low.unit_roundoff
    assert 2 <= wanted_steps <= steps <= wanted_steps + 2


@pytest.mark.release
def test_an_implicit_solver_with_its_own_root_finder():
    """Its iterations end above the formats' rounding; the solves of its derivative are lineax's."""
    finder = diffrax.VeryChord(rtol=1e-2, atol=1e-2, kappa=1.0)

    def loss(weights: Any, y0: Any) -> Any:
        solution = solve(
            weights, y0, diffrax.ImplicitEuler(finder), adjoint=diffrax.DirectAdjoint()
        )
        aux = {"ys": solution.ys, "steps": solution.stats["num_steps"]}
        return jnp.sum(jnp.arctan(solution.ys)), aux

    gradient = functools.partial(jax.grad, has_aux=True)
    inside = pp.auto_mixed(gradient(loss), policy=pp.AutoMixedBf16, **FAST)
    outside = jax.jit(gradient(pp.auto_mixed(loss, policy=pp.AutoMixed)), **FAST)
    want = jax.jit(gradient(loss), **FAST)(WEIGHTS, Y0)
    # Wide are two products of Jacobians, which are factorized, and those of a loop that ends on a
    # tolerance. The derivative of a linear_solve applies its operator once more, behind the pass.
    for policy, form, late in ((pp.AutoMixedBf16, inside, 0), (pp.AutoMixed, outside, 2)):
        with pytest.warns(pp.PrecisionWarning, match=r"linear_solve .* products?: "):
            traced = form.trace(WEIGHTS, Y0)
        entered, hidden = split_products(traced.jaxpr, "linear_solve")
        assert hidden and len(entered) > 10
        assert sum(not is_low(e, policy.low.dtype) for e in entered) == 4 + late
        got = traced.lower().compile()(WEIGHTS, Y0)
        assert_leaves_near(got, want, 4 * policy.low.unit_roundoff)


# ---------------------------------------------------------------- noise


@pytest.mark.release
def test_noise_is_that_of_float32_to_the_last_bit():
    """Drift and diffusion have products; the path of the noise beside them has the same bits."""

    def fn(weights: Any, y0: Any, key: Any) -> Any:
        path = diffrax.VirtualBrownianTree(0.0, 1.0, tol=0.2, shape=(4, 8), key=key)

        def diffusion(t: Any, y: Any, weights: Any) -> Any:
            return lineax.DiagonalLinearOperator(0.1 * field(t, y, weights))

        terms = diffrax.MultiTerm(diffrax.ODETerm(field), diffrax.ControlTerm(diffusion, path))
        ys = solve(weights, y0, diffrax.Euler(), terms=terms).ys
        return ys, jax.vmap(path.evaluate)(jnp.linspace(0.1, 1.0, 5))

    args = WEIGHTS, Y0, jax.random.key(1)
    traced = pp.auto_mixed(fn, **FAST).trace(*args)
    check_products(traced.jaxpr, pp.AutoMixedBf16, least=4)
    ys, noise = traced.lower().compile()(*args)
    wanted, plain_noise = jax.jit(fn, **FAST)(*args)
    assert identical(noise, plain_noise)
    assert_leaves_near(ys, wanted, 4 * pp.types.Precision.BF16.unit_roundoff)
    assert not identical(ys, wanted)
