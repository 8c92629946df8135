"""A fallback that overflowed on a low rung has the derivatives of the rung taken, to any order."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from tests.support.jaxprs import walk
from tests.support.passes import quiet
from tests.support.values import normal

pytestmark = pytest.mark.programs

W = jnp.asarray(normal(0, 4, 4))
HIGH, LOW = jnp.linspace(300, 400, 4), jnp.linspace(3, 4, 4)
"""The squares of the first are above float16's largest number."""

LADDERS: dict[tuple[str, ...], float] = {
    ("f16", "f32"): 300,
    ("f16", "f64"): 300,
    ("bf16", "f32", "f64"): 1e20,
}
"""Of each the size of an operand whose square only the last rung holds."""

DOTS = {p: pp.Rule(primitive="dot_general", precision=p) for p in ("bf16", "f16")}
ORDERED = pp.AutoMixedBf16.with_rules(DOTS["bf16"])
ORDERED_F16 = pp.AutoMixed.with_rules(DOTS["f16"])
"""Policies for a derivative's outer products too, which the presets leave in float32. A vmap makes
sums of those in what its elements share, and a preset lowers these."""

grad, rev = jax.grad, jax.jacrev


def fn(w: Any, x: Any) -> Any:
    return jnp.log(jnp.sum((w @ (x * x)) ** 2))


def squared(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of a gradient, with derivatives of its own."""
    return lambda x: jnp.sum((x * f(x)) ** 2)


ORDERS: dict[str, Callable[[Any], Any]] = {
    "grad": grad,
    "grad of grad": lambda f: grad(squared(grad(f))),
    "jacrev of jacrev": lambda f: rev(rev(f)),
    "jacrev of jacfwd": lambda f: rev(jax.jacfwd(f)),
    "jacfwd of jacrev": lambda f: jax.jacfwd(rev(f)),
    "third": lambda f: rev(rev(rev(f))),
    "third, forward between": lambda f: rev(jax.jacfwd(rev(f))),
}


def result(guarded: Any, w: Any = W) -> Callable[[Any], Any]:
    return lambda x: guarded(w, x)[0]


def alone(policy: Any, f: Any = fn) -> Any:
    """A rung of its own; None is float64."""

    def kept(*args: Any) -> Any:
        with pp.keep("f64"):
            return f(*args)

    return pp.auto_mixed(f if policy else kept, policy=policy or pp.AlwaysF32)


def assert_close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    want = np.asarray(want, np.float64)
    assert np.all(np.isfinite(want)) and np.any(want)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("ladder", LADDERS)
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_is_of_the_rung_taken(order: str, ladder: tuple[str, ...], x64: bool):
    derive, size = ORDERS[order], LADDERS[ladder]

    def scaled(x: Any, size: Any, w: Any) -> Any:
        return fn(w, x * size)

    with jax.enable_x64(x64):
        dtype = np.float64 if x64 else np.float32
        x, given = np.linspace(1, 1.5, 4, dtype=dtype), (dtype(size), np.asarray(W, dtype))
        guarded = pp.with_fallback(scaled, ladder)
        assert int(guarded(x, *given)[1].rung) == len(ladder) - 1
        high = alone(pp.AlwaysF32 if ladder[-1] == "f32" and not x64 else None, scaled)
        # with x64 on, products of float64 values are in float32 on the rung of that
        tolerance = 1e-3 if ladder[-1] == "f32" and x64 else 1e-5
        got = jax.jit(derive(lambda x: guarded(x, *given)[0]))(x)
        assert_close(got, jax.jit(derive(lambda x: high(x, *given)))(x), tolerance)


@pytest.mark.release
@pytest.mark.parametrize("order", ["grad of grad", "jacrev of jacrev", "third"])
def test_every_order_under_vmap_and_without_jit(order: str):
    derive, guarded = ORDERS[order], pp.with_fallback(fn, ("f16", "f32"))
    low, high = alone(pp.AutoMixed), alone(pp.AlwaysF32)
    got = jax.vmap(derive(result(guarded)))(jnp.stack([HIGH, LOW]))
    assert_close(got[0], derive(lambda x: high(W, x))(HIGH))
    assert_close(got[1], derive(lambda x: low(W, x))(LOW))
    assert_close(derive(result(guarded))(HIGH), derive(lambda x: high(W, x))(HIGH))


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("order", ["grad", "grad of grad", "jacrev of jacrev", "jacrev of jacfwd"])
def test_what_the_elements_of_a_vmap_share(order: str, nested: bool):
    """A matrix, that one of them overflows with, and another does not."""

    def logs(w: Any, x: Any) -> Any:
        return jnp.log(jnp.sum(jnp.exp(w @ x)))

    derive, guarded = ORDERS[order], pp.with_fallback(logs, (ORDERED, "f64"))
    w, xs = jnp.abs(W[:2, :2]) + 0.1, jnp.asarray([[0.3, 0.2], [200.0, 300.0], [3.0, 2.0]])
    assert jax.vmap(guarded, (None, 0))(w, xs)[1].rung.tolist() == [0, 1, 0]

    def total(w: Any) -> Any:
        each = jax.vmap(lambda x: guarded(w, x)[0] ** 2)
        return jnp.sum(jax.vmap(lambda s: each(s * xs))(jnp.ones(1)) if nested else each(xs))

    def want(w: Any) -> Any:
        low, high = alone(ORDERED, logs), alone(None, logs)
        return low(w, xs[0]) ** 2 + high(w, xs[1]) ** 2 + low(w, xs[2]) ** 2

    assert_close(jax.jit(derive(total))(w), jax.jit(derive(want))(w))


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("order", ["grad of grad", "jacrev of jacrev", "jacrev of jacfwd"])
def test_what_a_checkpoint_computes_again_of_elements_not_chosen(order: str, nested: bool):
    """Of their operands: it overflows there, and what is shared has a sum of that."""

    @jax.checkpoint
    def logs(w: Any, x: Any, i: Any) -> Any:
        # of a one, which is not in the function's domain, the logarithm is no number either
        scaled = x * jnp.asarray([1.0, 6e4])[i]
        return jnp.log(jnp.sum((w @ scaled) ** 2)) * jnp.sum(jnp.log(x - 1.25))

    derive, guarded = ORDERS[order], pp.with_fallback(logs, (ORDERED_F16, "f32"))
    low, high = alone(ORDERED_F16, logs), alone(pp.AlwaysF32, logs)
    # scaled as the second, both are above float16's largest number
    xs, at = jnp.stack([LOW * 5, LOW / 2]), jnp.arange(2)
    assert jax.vmap(guarded, (None, 0, 0))(W, xs, at)[1].rung.tolist() == [0, 1]

    def total(w: Any) -> Any:
        each = jax.vmap(lambda x, i: guarded(w, x, i)[0])
        batched = jax.vmap(lambda s: each(s * xs, at))
        return jnp.sum(batched(jnp.ones(1)) if nested else each(xs, at))

    def want(w: Any) -> Any:
        return low(w, xs[0], at[0]) + high(w, xs[1], at[1])

    assert_close(jax.jit(derive(total))(W), jax.jit(derive(want))(W))


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("order", ["grad", "jacrev of jacrev"])
def test_a_batch_without_elements(order: str):
    guarded = pp.with_fallback(fn, ("f16", "f32"))
    none = jnp.zeros((0, 4))
    each = jax.vmap(ORDERS[order](result(guarded)))(none)
    assert each.shape == (0, *(4,) * (1 if order == "grad" else 2))
    shared = ORDERS[order](lambda w: jnp.sum(jax.vmap(lambda x: guarded(w, x)[0])(none)))(W)
    assert not np.any(shared)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("order", ["grad", "jacfwd", "grad of grad"])
def test_a_result_of_what_is_shared_alone(order: str):
    def both(w: Any, x: Any) -> Any:
        return {"shared": w.T * 2, "own": w @ x}

    derive = {**ORDERS, "jacfwd": jax.jacfwd}[order]
    guarded = pp.with_fallback(both, ("f16", "f32"))
    xs = jnp.stack([LOW, LOW * 1e5])

    def total(f: Any) -> Callable[[Any], Any]:
        def loss(w: Any) -> Any:
            out = jax.vmap(f, (None, 0))(w, xs)
            return jnp.sum(out["shared"] ** 2) + jnp.sum(jnp.log(out["own"] ** 2))

        return derive(loss)

    got = total(lambda w, x: guarded(w, x)[0])(W)
    # the first of the two is from float16
    assert_close(got, total(both)(W), 0.01)


def test_a_gradient_under_vmap_does_not_copy_what_is_shared():
    guarded = pp.with_fallback(fn, ("bf16", "f32"))
    slopes = jax.vmap(grad(lambda x, w: guarded(w, x)[0]), (0, None))
    jaxpr = jax.make_jaxpr(slopes)(jnp.stack([LOW] * 3), W)
    made = [v.aval for eqn in walk(jaxpr) for v in eqn.outvars]
    shapes = [a.shape for a in made if getattr(a, "dtype", None) == jnp.bfloat16]
    assert (4, 4) in shapes and (3, 4, 4) not in shapes


@pytest.mark.parametrize("order", ["grad", "grad of grad", "jacrev of jacrev"])
def test_in_a_loop_with_a_checkpoint(order: str):
    guarded, high = pp.with_fallback(fn, ("f16", "f32")), alone(pp.AlwaysF32)

    def looped(f: Any) -> Callable[[Any], Any]:
        def body(c: Any, scale: Any, x: Any) -> Any:
            return c + f(W, x * scale), None

        def total(x: Any) -> Any:
            step = jax.checkpoint(lambda c, scale: body(c, scale, x))
            return lax.scan(step, jnp.float32(0), jnp.asarray([1.0, 1.5]))[0]

        return ORDERS[order](total)

    assert_close(jax.jit(looped(lambda *a: guarded(*a)[0]))(HIGH), jax.jit(looped(high))(HIGH))


@pytest.mark.release
def test_custom_rules_inside():
    """A custom VJP's derivative is a primitive of its own, which reverse mode alone can take."""

    @jax.custom_vjp
    def cube(x: Any) -> Any:
        return x**3

    cube.defvjp(lambda x: (x**3, x), lambda x, g: (g * 3 * x**2,))

    def logs(x: Any) -> Any:
        return jnp.log(jnp.sum(jnp.exp(cube(x))) + jnp.exp(jax.nn.logsumexp(x)))

    x = jnp.asarray([4.6, 4.61, 4.62])  # exp(x ** 3) is infinite in float32
    with quiet():  # there are no products
        guarded, high = pp.with_fallback(logs, ("f32", "f64")), alone(None, logs)
        assert int(guarded(x)[1].rung) == 1
        for derive in (ORDERS["grad of grad"], ORDERS["third"]):
            got = jax.jit(derive(lambda x: guarded(x)[0]))(x)
            assert_close(got, jax.jit(derive(high))(x))


def test_a_policy_around_a_derivative_changes_no_rung_and_warns_of_nothing():
    """The primitives that mask are known to the pass, and every rung has a policy of its own."""
    derivative = rev(rev(result(pp.with_fallback(fn, ("f16", "f32")))))
    twice, high = pp.auto_mixed(derivative, policy=pp.AutoMixedBf16), alone(pp.AlwaysF32)
    eqns = walk(twice.trace(HIGH).jaxpr)
    dtypes = {str(getattr(v.aval, "dtype", "")) for eqn in eqns for v in eqn.outvars}
    assert "float16" in dtypes and "bfloat16" not in dtypes
    np.testing.assert_array_equal(twice(HIGH), jax.jit(derivative)(HIGH))
    assert_close(twice(HIGH), rev(rev(lambda x: high(W, x)))(HIGH))
