"""Constants of float64 regions: numbers in the code, and numpy arrays that it closes over.

Each program loses what it computes if its constants are rounded to float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from tests.support.float64_programs import region

Fn = Callable[..., Any]
START = 2456463.0
DAYS = START + np.array([0.052272, 0.31, 0.77])
TENTHS = np.array([0.1, 0.2, 0.7])
ONE = np.float32(1.0)


def mixed(fn: Fn) -> Fn:
    return pp.auto_mixed(fn, policy=pp.AlwaysF32)


@jax.jit
def helper(x: Any) -> Any:
    return x * 0.1 - 0.1


@jax.custom_jvp
def with_rule(x: Any) -> Any:
    return x * 0.1 - 0.1


with_rule.defjvp(lambda p, t: (with_rule(p[0]), t[0] * 0.1 * 3.0 - t[0] * 0.3))


class Model:
    def __init__(self) -> None:
        self.weights = np.array([0.1, 0.7])

    def __call__(self, x: Any) -> Any:
        return jnp.sum(x * self.weights) - 0.8


def phase(x: Any) -> Any:
    turns = 2 * np.pi * 3000 * (jnp.asarray(DAYS) - START)
    return jnp.sum(jnp.sin(turns) * x)


WAVES = float(np.sum(np.sin(2 * np.pi * 3000 * (DAYS - START))))
PROGRAMS: dict[str, tuple[Fn, float]] = {
    "a number": (lambda x: (x * 0.1) * 3.0 - 0.3, 0.1 * 3.0 - 0.3),
    "where": (lambda x: jnp.where(x > 0, 0.1, x) * 3.0 - x * 0.3, 0.0),
    "full": (lambda x: jnp.sum(jnp.full(3, 0.1) * x) - 0.3, 0.0),
    "clip": (lambda x: jnp.clip(x, -0.7, 0.7) * 3.0 - 2.1, 0.0),
    "jit": (helper, 0.0),
    "custom_jvp": (with_rule, 0.0),
    "cond": (lambda x: lax.cond(x > 0, lambda x: x * 0.1, lambda x: x * 0.2, x) - 0.1 * x, 0.0),
    "scan": (lambda x: lax.scan(lambda c, t: (c + t * x, None), x * 0.0, TENTHS)[0] - 1.0, 0.0),
    "array": (lambda x: jnp.sum(TENTHS * x) - 1.0, 0.0),
    "array in the trace": (lambda x: jnp.sum(jnp.array([0.1, 0.2, 0.7]) * x) - 1.0, 0.0),
    "log": (lambda x: jnp.sum(jnp.log(DAYS) * x) - 44.0, float(np.sum(np.log(DAYS)) - 44.0)),
    "method": (Model(), 0.0),
    "dates": (phase, WAVES),
}
COMPOSITIONS: dict[str, Fn] = {
    "outermost": lambda f: mixed(region(f)),
    "keep in a scan": lambda f: mixed(
        lambda x: lax.scan(lambda c, _: (c, region(f)(x)), x, None, length=1)[1][0]
    ),
    "keep around the call": lambda f: region(mixed(f)),
    "vmap outside": lambda f: lambda x: jax.vmap(mixed(region(f)))(x[None])[0],
    "vmap inside": lambda f: mixed(lambda x: jax.vmap(region(f))(x[None])[0]),
    "rung": lambda f: lambda x: pp.with_fallback(f, ("f32", "f64"), lambda _r: True)(x)[0],
    "a rule": lambda f: pp.auto_mixed(
        jax.named_scope("here")(lambda x: f(x)),
        pp.AlwaysF32.with_rules(pp.Rule(scope="here", precision="f64")),
    ),
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_constants_have_all_digits(name: str, composition: str):
    fn, want = PROGRAMS[name]
    got = jax.jit(COMPOSITIONS[composition](fn))(ONE)
    assert got.dtype == np.float32
    assert abs(float(got) - want) <= 1e-7 * abs(want) + 1e-12


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", ["dates", "method", "a number"])
def test_gradients_read_the_same_constants_on_either_side(name: str):
    def loss(x: Any) -> Any:
        return region(PROGRAMS[name][0])(x) * 1.0

    want = {"dates": WAVES, "method": 0.1 + 0.7, "a number": 0.1 * 3.0}[name]
    for gradient in (mixed(jax.grad(loss)), jax.grad(mixed(loss))):
        np.testing.assert_allclose(gradient(ONE), np.float32(want), rtol=1e-7)


@pytest.mark.parametrize("x64", [False, True])
def test_a_float32_operand_does_not_round_the_numbers_beside_it(x64: bool):
    with jax.enable_x64(x64):
        got = mixed(region(lambda x: (x * 0.1) * 3.0 - 0.3))(jnp.asarray(ONE))
    assert got.dtype == np.float32
    assert abs(float(got)) < 1e-16


def test_numbers_of_one_line_that_are_rounded_alike_are_told_apart():
    def fn(x: Any) -> Any:
        return (x * 0.999999999 - x * 1.0) * 1e9 + (x * 0.1 - x * 0.1000000001) * 1e10

    np.testing.assert_allclose(mixed(region(fn))(ONE), -2.0, rtol=1e-6)


def test_an_array_whose_rounding_has_few_digits_is_not_taken_for_exact():
    days = np.array([2**21 + 0.05, 2**21 + 0.06])
    got = mixed(region(lambda x: jnp.sum(jnp.asarray(days) - 2.0**21) * x))(ONE)
    np.testing.assert_allclose(got, 0.11, rtol=1e-6)


def test_outside_of_the_region_the_program_is_that_of_float32():
    def fn(x: Any) -> Any:
        outside = x * 0.1 + jnp.sum(jnp.asarray(TENTHS))
        with pp.keep("f64"):
            inside = (x * 0.1) * 3.0 - 0.3
        return outside, inside

    outside, inside = mixed(fn)(ONE)
    plain, _ = jax.jit(fn)(ONE)
    assert abs(float(inside)) < 1e-16
    np.testing.assert_array_equal(outside, plain)
    # JAX gives a program the form of an array that another one holds
    after = jax.jit(lambda x: x * jnp.asarray(TENTHS))(ONE)
    assert after.dtype == np.float32


def test_a_body_that_is_called_with_an_array_and_with_values_reads_its_operand():
    @jax.jit
    def inner(t: Any) -> Any:
        with pp.keep("f64"):
            return jnp.sum(t) * 1.0

    def fn(x: Any) -> Any:
        return inner(jnp.asarray(TENTHS)), inner(x)

    of_array, of_values = mixed(fn)(np.asarray([5.0, 6.0, 7.0], np.float32))
    np.testing.assert_allclose([of_array, of_values], [1.0, 18.0], rtol=1e-7)


def test_a_function_that_x64_cannot_trace_is_told_what_was_rounded():
    def fn(x: Any) -> Any:
        start = jnp.zeros((), jnp.float32)
        return lax.scan(lambda c, _: (c + x * 0.1, None), start, None, length=3)[0]

    with pytest.warns(pp.PrecisionWarning, match=r"test_float64_constants.py:\d+: 0.1") as told:
        mixed(region(fn))(ONE)
    assert "cannot be traced with x64 on" in str(told[0].message)


def test_a_rule_that_is_traced_after_the_pass_is_told_what_was_rounded():
    with pytest.warns(pp.PrecisionWarning, match="was rounded to float32"):
        jax.grad(mixed(region(with_rule)))(ONE)
