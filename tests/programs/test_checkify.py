"""Programs with checkify on either side of the pass: they report what the plain one reports."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import checkify

import precpass as pp
from tests.support.libraries import FAST, assert_leaves_near, check_products
from tests.support.passes import look
from tests.support.values import normal

pytestmark = pytest.mark.programs

X = jnp.asarray(normal(0, 8, 16))
W = jnp.asarray(normal(1, 16, 16)) / 4
ERRORS = checkify.all_checks | checkify.user_checks


def layer(x: Any, w: Any) -> Any:
    y = x @ w
    rows = jnp.int32(len(x))
    checkify.check(jnp.all(jnp.abs(y) < 50.0), "an activation of {rows} rows is large", rows=rows)
    return jnp.tanh(y)


def in_loop(x: Any, w: Any) -> Any:
    def body(h: Any, trip: Any) -> Any:
        h = jnp.tanh(h @ w)
        checkify.check(jnp.all(jnp.abs(h) < 0.999), "saturated in trip {trip}", trip=trip)
        return h, None

    return lax.scan(body, x, jnp.arange(3))[0]


def in_branch(x: Any, w: Any) -> Any:
    return lax.cond(x[0, 0] > 0, lambda: layer(x, w), lambda: x @ w * 2)


def in_while(x: Any, w: Any) -> Any:
    def body(carry: Any) -> Any:
        trip, h = carry
        checkify.check(jnp.all(jnp.abs(h) < 50.0), "large in trip {trip}", trip=trip)
        return trip + 1, h @ w

    return lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))[1]


def index(x: Any, w: Any) -> Any:
    """Reads row 8 where the first element is above 5."""
    return (x @ w)[jnp.where(x[0, 0] > 5, 8, 7)]


PROGRAMS = {
    "user": (layer, X * 30),
    "scan": (in_loop, X * 50),
    "cond": (in_branch, jnp.abs(X) * 40),
    "while": (in_while, X * 50),
    "nan": (lambda x, w: jnp.log(x @ w @ w.T + 40), X * 100),
    "nan operand": (layer, X.at[0, 0].set(jnp.nan)),
    "div": (lambda x, w: (x @ w) / x[0, 0], X.at[0, 0].set(0.0)),
    "index": (index, X.at[0, 0].set(6.0)),
}
"""Name -> a program that passes at X and W, and an operand in the place of X that does not."""


@pytest.mark.release(keep=4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_errors_and_messages_are_those_of_the_plain_program(name: str):
    fn, bad = PROGRAMS[name]
    plain = jax.jit(checkify.checkify(fn, errors=ERRORS), **FAST)
    around = jax.jit(
        checkify.checkify(pp.auto_mixed(fn, policy=pp.AutoMixed), errors=ERRORS), **FAST
    )
    inside = pp.auto_mixed(checkify.checkify(fn, errors=ERRORS), **FAST)
    for policy, form in ((pp.AutoMixed, around), (pp.AutoMixedBf16, inside)):
        traced = form.trace(X, W)
        check_products(traced.jaxpr, policy, least=1)
        for x in (X, bad):
            (error, got), (wanted_error, want) = traced.lower().compile()(x, W), plain(x, W)
            assert error.get() == wanted_error.get()
            assert (error.get() is None) == (x is X)
            if x is X:
                assert_leaves_near(got, want, 6 * policy.low.unit_roundoff)


def test_errors_of_a_gradient():
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(in_loop(layer(x, w), w))

    def checked(gradient: Any) -> Any:
        return checkify.checkify(gradient, errors=ERRORS)

    plain = jax.jit(checked(jax.grad(loss)), **FAST)
    forms = {
        "auto_mixed(checkify(grad))": pp.auto_mixed(checked(jax.grad(loss)), **FAST),
        "checkify(auto_mixed(grad))": jax.jit(checked(pp.auto_mixed(jax.grad(loss))), **FAST),
        "checkify(grad(auto_mixed))": jax.jit(checked(jax.grad(pp.auto_mixed(loss))), **FAST),
    }
    for form in forms.values():
        traced = form.trace(W, X)
        check_products(traced.jaxpr, pp.AutoMixedBf16, least=5)
        compiled = traced.lower().compile()
        for x, fails in ((X / 8, False), (X * 30, True)):
            (error, got), (wanted_error, want) = compiled(W, x), plain(W, x)
            assert error.get() == wanted_error.get()
            assert (error.get() is not None) == fails
            if not fails:
                assert_leaves_near(got, want, 12 * pp.types.Precision.BF16.unit_roundoff)


def test_a_failed_check_raises():
    error, _ = pp.auto_mixed(checkify.checkify(layer, errors=ERRORS), **FAST)(X * 30, W)
    with pytest.raises(checkify.JaxRuntimeError, match="an activation of 8 rows is large"):
        error.throw()


@pytest.mark.parametrize("name", PROGRAMS)
def test_always_f32_is_the_plain_program(name: str):
    found = look(checkify.checkify(PROGRAMS[name][0], errors=ERRORS), pp.AlwaysF32, X, W)
    assert found.after is found.before
