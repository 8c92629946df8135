"""What JAX's derivative of a rewritten program saves and makes in 16 bits, on GPUs and TPUs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import jet

import precpass as pp
from precpass.analysis.residuals import kept_bytes
from precpass.devices.detect import planned_for
from precpass.devices.targets import target_of
from precpass.jaxpr.primitives.low_derivative import rounded_factor
from tests.support.jaxprs import named, walk
from tests.support.values import normal_array, rel_error

F32 = jnp.float32
W, V, X = normal_array(0, 32, 128) / 6, normal_array(1, 32, 128) / 6, normal_array(2, 12, 16, 32)
SQUARE, BIAS = normal_array(3, 32, 32) / 6, normal_array(4, 32)


def recurrent(w: jax.Array, v: jax.Array, xs: jax.Array) -> jax.Array:
    """An LSTM that is scanned over time."""

    def cell(carry: Any, x: jax.Array) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(x @ w + h @ v, 4, axis=-1)
        c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros_like(xs[0])
    _, hs = lax.scan(cell, (zeros, zeros), jnp.sin(xs))
    return jnp.square(hs).mean()


def dense(w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
    h = jax.nn.gelu(x @ w + bias[None], approximate=False)
    return jnp.square(h @ w + bias[None]).sum()


def forms(fn: Callable[..., Any], *args: Any, **options: Any) -> list[tuple[str, Any]]:
    """The equations of a program that a derivative treats in another way, with how it does."""
    found = pp.inspect(fn, **{"target": "h100", "policy": "AutoMixedBf16", **options})(*args)
    each = ((eqn.primitive.name, decision.backward) for eqn, decision, _ in found.decisions())
    return [(name, form) for name, form in each if form is not None]


def grad_of_mixed(fn: Callable[..., Any], *args: Any, argnums: Any = 0, target: Any) -> Any:
    with planned_for(target_of(target)):
        return jax.make_jaxpr(jax.grad(pp.auto_mixed(fn, "AutoMixedBf16"), argnums))(*args)


@pytest.mark.parametrize("target", ["h100", "tpu v5e"])
def test_a_loop_saves_for_its_backward_pass_in_16_bits(target: str):
    whole = jax.make_jaxpr(jax.grad(recurrent, (0, 1)))(W, V, X)
    mixed = grad_of_mixed(recurrent, W, V, X, argnums=(0, 1), target=target)
    assert kept_bytes(mixed) < 0.6 * kept_bytes(whole)
    (backward,) = (e for e in named(mixed, "scan") if e.params["reverse"])
    stacks = [v.aval.dtype for v in backward.invars if v.aval.shape == X.shape]
    # the gate that multiplies the state in every trip, and the cotangent of the results
    assert stacks.count(jnp.dtype(F32)) == 2
    assert stacks.count(jnp.dtype(jnp.bfloat16)) == 12


def test_the_gradients_of_a_loop_are_close_and_its_value_has_its_digits():
    with planned_for(target_of("h100")):
        mixed = pp.auto_mixed(recurrent, "AutoMixedBf16")
        got = jax.jit(jax.grad(mixed, (0, 1, 2)))(W, V, X)
        wanted = jax.jit(jax.grad(recurrent, (0, 1, 2)))(W, V, X)
        errors = [rel_error(a, b) for a, b in zip(got, wanted, strict=True)]
    assert all(1e-5 < error < 0.02 for error in errors)
    assert errors[2] > 1e-4  # a sine's factors are exact: no product is before it


@pytest.mark.release(keep=1)
@pytest.mark.parametrize(
    "transform", ["jvp", "grad", "hessian", "reverse twice", "vmap", "remat", "jet"]
)
def test_derivatives_of_every_kind_are_those_of_the_function(transform: str):
    def fn(x: jax.Array) -> jax.Array:
        def step(carry: jax.Array, _: Any) -> Any:
            h = jnp.tanh(carry @ SQUARE)
            return h * jax.nn.sigmoid(h @ SQUARE) + jnp.exp(-jnp.square(h)) / (2 + h), None

        return lax.scan(step, x, None, length=3)[0].sum()

    def hessian_product(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: jax.jvp(jax.grad(f), (x,), (jnp.sin(x),))[1]

    def taylor(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: jnp.stack(jet.jet(f, (x,), ([jnp.ones_like(x), jnp.cos(x)],))[1])

    of: dict[str, Callable[..., Any]] = {
        "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1],
        "grad": jax.grad,
        "hessian": hessian_product,
        "reverse twice": lambda f: jax.grad(lambda x: jnp.arctan(jax.grad(f)(x)).sum()),
        "vmap": lambda f: lambda x: jax.vmap(jax.grad(f))(x[:, None]),
        "remat": lambda f: jax.grad(jax.checkpoint(f)),
        "jet": taylor,
    }
    plain = fn if transform != "jet" else _unrolled
    x = normal_array(5, 16, 32)
    with planned_for(target_of("h100")):
        mixed = pp.auto_mixed(plain, "AutoMixedBf16")
        assert "precpass_low_derivative" in str(jax.make_jaxpr(mixed)(x))
        got = jax.jit(of[transform](mixed))(x)
    wanted = jax.jit(of[transform](plain))(x)
    assert got.dtype == F32
    assert rel_error(got, wanted) < 0.03


def _unrolled(x: jax.Array) -> jax.Array:
    """jax.experimental.jet has no rule for a scan."""
    return (jnp.tanh(x @ SQUARE) * jax.nn.sigmoid(x @ SQUARE)).sum()


def test_only_functions_of_what_products_made_are_rounded():
    def gated(x: jax.Array, gate: jax.Array) -> jax.Array:
        def step(h: jax.Array, _: Any) -> Any:
            return jnp.tanh(h @ SQUARE) * gate, None

        return lax.scan(step, x, None, length=4)[0].sum()

    gate = normal_array(6, 16, 32)
    found = dict(forms(gated, gate, gate))
    # the factor of the product's first operand is the gate, an argument
    assert found["mul"].low_factors == (False, True)
    assert found["tanh"].low_factors == (True,)


def test_outside_of_loops_factors_are_rounded_of_functions_whose_values_are():
    found = dict(forms(dense, SQUARE, BIAS, X[0]))
    assert found["erfc"].low_factors == (True,)


def test_the_cotangent_of_a_product_with_a_bias_is_rounded_once_for_all_readers():
    jaxpr = grad_of_mixed(dense, SQUARE, BIAS, X[0], argnums=(0, 1), target="h100")
    makers = {v: eqn.primitive.name for eqn in walk(jaxpr) for v in eqn.outvars}
    sums = [e for e in named(jaxpr, "reduce_sum") if e.params["axes"] == (0,)]
    summed = [e.invars[0] for e in sums if e.invars[0].aval.shape == (16, 32)]
    assert [makers[v] for v in summed] == ["precpass_rounded"] * 2
    with planned_for(target_of("h100")):
        got = jax.jit(jax.grad(pp.auto_mixed(dense), (0, 1, 2)))(SQUARE, BIAS, X[0])
    wanted = jax.jit(jax.grad(dense, (0, 1, 2)))(SQUARE, BIAS, X[0])
    assert all(1e-5 < rel_error(a, b) < 0.01 for a, b in zip(got, wanted, strict=True))


def test_what_is_around_a_loop_computes_the_loop_again_which_saves_what_it_did():
    around = jax.checkpoint(lambda w, xs: recurrent(w, V, xs))
    assert {name for name, _ in forms(around, W, X)} >= {"logistic", "tanh", "mul"}


@pytest.mark.parametrize("bias", [BIAS[None], jnp.float32(2.0)[None, None]], ids=["row", "number"])
def test_a_bias_that_nobody_broadcast_is_one(bias: jax.Array):
    def tall(bias: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
        return (jax.nn.gelu(x @ w + bias) @ w).sum()

    found = forms(tall, bias, SQUARE, X[0])
    assert [form.low_cotangent for name, form in found if name == "add"] == [True]


def decayed(w: jax.Array, x: jax.Array) -> jax.Array:
    """A state that is multiplied by a gate near 1 in every trip."""
    gate = jax.nn.sigmoid(x @ w + 7.0)
    return lax.scan(lambda h, _: (gate * h + 0.01 * jnp.arctan(h @ w), None), x, None, length=300)[
        0
    ]


def turned(w: jax.Array, x: jax.Array) -> jax.Array:
    def step(q: jax.Array, _: Any) -> Any:
        return jax.jit(lambda q: q * (1 + 0.005 * jnp.arctan(q @ w)))(q), None

    return lax.scan(step, x, None, length=300)[0]


def selective(w: jax.Array, x: jax.Array) -> jax.Array:
    """A state space whose decay is of the input, scanned in a loop over layers."""

    def layer(h: jax.Array, _: Any) -> Any:
        def step(state: jax.Array, u: jax.Array) -> Any:
            state = jnp.exp(-jax.nn.softplus(u @ w - 7.0)) * state + 0.1 * u
            return state, state

        states = lax.scan(step, jnp.zeros_like(h[0]), h)[1]
        return states @ w, None

    xs = jnp.tile(x, (6, 1))[:, None]
    return lax.scan(layer, xs, None, length=2)[0]


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("fn", [decayed, turned, selective], ids=lambda fn: fn.__name__)
def test_factors_that_all_trips_multiply_keep_their_digits(fn: Callable[..., Any]):
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.square(fn(w, x)).sum()

    with planned_for(target_of("h100")):
        got = jax.jit(jax.grad(pp.auto_mixed(loss, "AutoMixedBf16"), (0, 1)))(SQUARE, X[0])
        plain = pp.AutoMixedBf16.with_results("f32")
        wide = jax.jit(jax.grad(pp.auto_mixed(loss, plain), (0, 1)))(SQUARE, X[0])
    wanted = jax.jit(jax.grad(loss, (0, 1)))(SQUARE, X[0])
    assert forms(loss, SQUARE, X[0])
    for a, b, c in zip(got, wide, wanted, strict=True):
        assert rel_error(a, c) < max(3 * rel_error(b, c), 0.01)


def test_a_finite_factor_that_bfloat16_does_not_reach_is_not_infinite():
    lowest = jnp.finfo(F32).min
    mask = np.where(np.tril(np.ones((16, 16), bool)), 0.0, lowest).astype(np.float32)

    def masked(w: jax.Array, t: jax.Array, x: jax.Array) -> jax.Array:
        def block(x: jax.Array, _: Any) -> Any:
            return x + jax.nn.softmax((x @ w @ x.T + mask) * t) @ x, None

        return jnp.square(lax.scan(block, x, None, length=2)[0]).sum()

    args = SQUARE, np.full((16, 16), 0.5, np.float32), np.asarray(X)[0]
    with planned_for(target_of("h100")):
        got = jax.jit(jax.grad(pp.auto_mixed(masked, "AutoMixedBf16"), (0, 1, 2)))(*args)
    wanted = jax.jit(jax.grad(masked, (0, 1, 2)))(*args)
    assert all(np.isfinite(a).all() for a in got)
    assert all(rel_error(a, b) < 0.03 for a, b in zip(got, wanted, strict=True))
    numbers = jnp.array([3.4e38, -3.4e38, jnp.inf, -jnp.inf, jnp.nan, 1e-45, -0.0, 1.0], F32)
    low = rounded_factor(numbers, jnp.bfloat16, is_bounded=False)
    largest = float(jnp.finfo(jnp.bfloat16).max)
    wanted = [largest, -largest, np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0]
    np.testing.assert_array_equal(
        np.asarray(low[:5], np.float32), np.asarray(wanted[:5], np.float32)
    )
    np.testing.assert_array_equal(np.asarray(low[6:], np.float32), wanted[6:])


def test_what_is_subtracted_has_exact_factors():
    def near(w: jax.Array, xs: jax.Array) -> jax.Array:
        def step(total: jax.Array, x: jax.Array) -> Any:
            a = x @ w
            return total + jnp.square(a + 100.0) - jnp.square(a + 99.9), None

        return lax.scan(step, jnp.zeros_like(xs[0]), xs)[0].sum()

    with planned_for(target_of("h100")):
        got = jax.jit(jax.grad(pp.auto_mixed(near, "AutoMixedBf16")))(SQUARE, X)
    assert rel_error(got, jax.jit(jax.grad(near))(SQUARE, X)) < 0.01


def test_between_two_jits_only_the_rounded_factors_are_saved():
    mixed = pp.auto_mixed(recurrent, "AutoMixedBf16")
    with planned_for(target_of("h100")):
        saved = jax.eval_shape(lambda *xs: jax.vjp(mixed, *xs)[1], W, V, X)
    plain = jax.eval_shape(lambda *xs: jax.vjp(recurrent, *xs)[1], W, V, X)

    def stacked(tree: Any) -> int:
        stacks = [v for v in jax.tree.leaves(tree) if v.shape[:2] == X.shape[:2]]
        return sum(v.size * v.dtype.itemsize for v in stacks)

    assert stacked(saved) < stacked(plain)


def test_a_functions_value_is_the_same_and_an_inner_one_is_said_in_the_diff():
    found = pp.inspect(recurrent, target="h100")(W, V, X)
    text = found.diff()
    assert "factors of its derivative saved in bf16" in text
    assert "its cotangent in bf16" in pp.inspect(dense, target="h100")(SQUARE, BIAS, X[0]).diff()

    def loop(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 3, lambda _, h: jnp.arctan(h @ SQUARE) * h, x)

    with planned_for(target_of("h100")):
        mixed = pp.auto_mixed(loop, "AutoMixedBf16")
        plain = pp.auto_mixed(loop, pp.AutoMixedBf16.with_rules(_KEPT))
        a, b = jax.jit(mixed)(X[0]), jax.jit(plain)(X[0])
    np.testing.assert_array_equal(a, b)


_KEPT = pp.Rule(primitive="atan", precision="f32")


def test_the_gradient_of_a_ragged_products_weights_is_added_up_and_returned_in_float32():
    groups = jnp.array([4, 8, 4])
    w, x = normal_array(7, 3, 32, 32) / 6, X[0]

    def experts(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.square(lax.ragged_dot(jnp.tanh(lax.ragged_dot(x, w, groups)), w, groups)).sum()

    jaxpr = grad_of_mixed(experts, w, x, target="tpu v5e")
    weights = [e for e in named(jaxpr, "ragged_dot_general") if e.outvars[0].aval.shape == w.shape]
    assert [e.outvars[0].aval.dtype for e in weights] == [F32, F32]
    assert {v.aval.dtype for e in weights for v in e.invars[:2]} == {jnp.dtype(jnp.bfloat16)}


def test_the_cotangent_of_what_a_loop_takes_from_a_stack_is_in_16_bits():
    """Otherwise XLA joins it with the next state's product, and copies both weights every trip."""

    def of(stack: Callable[[jax.Array], jax.Array]) -> list[Any]:
        def fn(w: jax.Array, v: jax.Array, xs: jax.Array) -> jax.Array:
            return recurrent(w, v, stack(xs @ SQUARE))

        found = pp.inspect(fn, target="h100")(W, V, X)
        inside = [d for e, d, _ in found.decisions() if e.outvars[0].aval.shape == (16, 128)]
        return [d.product.low_cotangents for d in inside if d.kind is pp.types.OpKind.COMPUTE]

    assert of(lambda xs: xs) == [(True, True), (False, True)]  # a state's cotangent adds up
