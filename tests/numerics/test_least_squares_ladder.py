"""Least squares with a Jacobian whose precision rises, and what a monitor sees of a fit."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precpass as pp
from tests.numerics.test_least_squares import SOLVED, START, T, Y, decay, exact
from tests.support.nist_problems import any_residual, lre, padded, problems

pytestmark = pytest.mark.programs

RISING = pp.numerics.Roles(jacobian=("bf16", "f32", "f64"))
SOLVERS = ("GaussNewton", "LevenbergMarquardt", "Dogleg")

# ---------------------------------------------------------------- the ladder


@functools.cache
def fitted(solver: str) -> pp.numerics.LeastSquares:
    return pp.numerics.least_squares(decay, START, roles=RISING, solver=solver)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("solver", SOLVERS)
def test_the_jacobian_rises_and_the_last_rung_ends_the_solve(solver: str):
    fit = fitted(solver)
    assert bool(fit.converged) and lre(fit.value, exact()) > 8.5
    used = fit.ladder.used.tolist()
    assert sum(used) == int(fit.steps) and min(used) > 0 and used[0] > used[1]
    assert int(fit.ladder.rung) == 2 and int(fit.ladder.switches) == 2
    assert "roles" not in repr(fit.ladder.rungs) and "jacobian=('bf16', 'f32', 'f64')" in repr(fit)


def test_the_summary_has_the_steps_on_each_rung():
    *_, counts, first, second = fitted("LevenbergMarquardt").summary().split("\n")
    low, middle, high = fitted("LevenbergMarquardt").ladder.used.tolist()
    assert counts == f"Jacobian: {low} in bf16, {middle} in f32, {high} in f64"
    assert re.match(rf"  after {low}: to f32, (ended|stalled) at \d", first)
    assert re.match(rf"  after {low + middle}: to f64, (ended|stalled) at \d", second)


@pytest.mark.release
@pytest.mark.parametrize("name", ["Bennett5", "Lanczos1", "Lanczos2", "Lanczos3", "MGH10"])
def test_nist_problems_that_bfloat16_does_not_solve_are_solved(name: str):
    """By its Jacobian alone, in 2,000 steps; with the ladder they are, from NIST's second start."""
    b, args = padded(problems()[name], 1)

    def digits(roles: pp.numerics.Roles) -> float:
        fit = pp.numerics.least_squares(any_residual, b, args, roles=roles, max_steps=2000)
        return lre(fit.value[: len(problems()[name].certified)], problems()[name].certified)

    assert digits(pp.numerics.Roles(jacobian="bf16")) < SOLVED <= digits(RISING)


def test_what_stalls_is_raised_before_it_ends():
    """The columns of the Jacobian are equal in bfloat16, and steps get nowhere."""
    shift = np.linspace(0.0, 1e-4, T.size)

    def residual(b: Any, _: Any) -> Any:
        return b[0] * (1 + T) + b[1] * (1 + T + shift) - Y

    want, *_ = np.linalg.lstsq(np.stack([1 + T, 1 + T + shift], 1), Y)
    fit = pp.numerics.least_squares(residual, START, roles=RISING, max_steps=4000)
    assert bool(fit.converged) and lre(fit.value, want) > SOLVED
    assert "stalled" in fit.summary()


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("rungs", [("bf16", "f32", "f64"), ("f32", "f64")])
def test_a_solution_that_a_low_rung_found_ends_the_solve(rungs: tuple[str, ...]):
    """At it the residual is all rounding, and optimistix accepts no more steps."""
    fit = pp.numerics.least_squares(
        lambda b, _: b**2 - 2, 1.0, roles={"jacobian": rungs}, max_steps=200
    )
    assert bool(fit.converged) and int(fit.steps) < 60
    assert abs(float(fit.value) - 2**0.5) < 1e-15


@pytest.mark.release
def test_the_summary_of_many_fits_counts_them():
    def fitted(c: Any) -> Any:
        return pp.numerics.least_squares(
            lambda b, c: b**2 - c.astype(b.dtype), 1.0, c, roles=RISING
        )

    text = jax.vmap(fitted)(jnp.arange(2.0, 5.0)).summary()
    assert re.search(r"\nof 3 fits 3 met their tolerances, after \d+ to \d+ steps$", text)


@pytest.mark.release
def test_a_fit_on_a_ladder_is_differentiated_and_mapped():
    def first(s: Any, roles: Any) -> Any:
        return pp.numerics.least_squares(decay, START, s, roles=roles).value[0]

    ours, want = (jax.grad(first)(1.0, roles) for roles in (RISING, pp.numerics.Roles.all("f64")))
    np.testing.assert_allclose(ours, want, rtol=1e-5)
    scales = jnp.asarray([1.0, 2.0])
    mapped = jax.vmap(functools.partial(first, roles=RISING))(scales)
    np.testing.assert_allclose(mapped, [first(s, RISING) for s in (1.0, 2.0)], rtol=1e-5)


def test_one_rung_is_no_ladder():
    assert pp.numerics.Roles(jacobian=("bf16",)) == pp.numerics.Roles(jacobian="bf16")
    assert pp.numerics.least_squares(decay, START, roles={"jacobian": ["bf16"]}).ladder is None


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ({"jacobian": ()}, r"jacobian=\(\)\): give a precision, or several that rise"),
        ({"jacobian": ("f32", "bf16")}, "does not rise: 'bf16' .* comes after 'f32'"),
        ({"jacobian": ("f32", "f32")}, "has 'f32' twice"),
        ({"jacobian": ("bf16", "f31")}, "'f31'"),
        ({"gradient": ("bf16", "f32")}, "gradient"),
        (
            {"residual": "f32", "gradient": "f32", "solve": "f32", "jacobian": ("bf16", "f64")},
            "jacobian='f64'.* is wider than residual='f32'",
        ),
    ],
)
def test_bad_ladders_are_refused(roles: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        pp.numerics.Roles(**roles)


# ---------------------------------------------------------------- the monitor


@pytest.mark.release
def test_a_quiet_fit_is_quiet_and_no_bit_changes():
    plain = pp.numerics.least_squares(decay, START)
    looked = pp.numerics.least_squares(decay, START, monitor=True)
    assert plain.health is None and looked.value.tolist() == plain.value.tolist()
    assert not looked.health.born() and int(looked.health.looked) == 2
    assert "all values are finite" in looked.summary()


@pytest.mark.release
def test_where_a_nan_is_born_in_a_fit():
    def residual(b: Any, _: Any) -> Any:
        return jnp.sqrt(b[0] - 1.5) * jnp.exp(-b[1] * T) - Y  # the line

    fit = pp.numerics.least_squares(residual, START, monitor=True)
    assert not bool(fit.converged)
    (seen, *_) = fit.health.born()
    # at the start and at the end
    assert (seen.place.primitive, seen.nans) == ("sqrt", 2)
    assert seen.place.source.function == "residual" and "the line" in fit.summary()


@pytest.mark.release
def test_a_jacobian_that_overflows_its_format_is_seen():
    large = 1e5 * np.stack([np.cos(T), np.sin(T)], 1)

    def residual(b: Any, _: Any) -> Any:
        return jnp.tanh(large @ b * 1e-5) - 0.1 * Y

    high, low = (
        pp.numerics.least_squares(residual, START, roles={"jacobian": jacobian}, monitor=True)
        for jacobian in ("f32", "f16")
    )
    assert bool(high.converged) and bool(low.converged)
    assert not high.health.born() and sum(seen.infinities for seen in low.health.born())


def test_a_monitor_is_asked_for_by_a_bool():
    with pytest.raises(TypeError, match="monitor=2: it is to be True or False"):
        pp.numerics.least_squares(decay, START, monitor=2)
