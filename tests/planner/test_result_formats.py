"""On a GPU products have results in 16 bits where no sum loses digits, and convolutions always."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import precpass as pp
from precpass.devices.detect import planned_for
from tests.support.devices import AbsentDevice
from tests.support.jaxprs import low_products, named, products
from tests.support.values import normal_array, rel_error


def conv(x: jax.Array, w: jax.Array) -> jax.Array:
    axes = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=axes)


def convolutions(w: Any, x: jax.Array) -> jax.Array:
    h = jax.nn.relu(conv(x, w[0]))
    return jnp.square(conv(h, w[1])).sum()


W = normal_array(0, 3, 3, 4, 8), normal_array(1, 3, 3, 8, 8)
X = normal_array(2, 2, 6, 6, 4)
A, B = normal_array(3, 32, 32) / 6, normal_array(4, 16, 32)


def results(jaxpr: Any, name: str = "dot_general") -> list[str]:
    """The dtypes of the results of a primitive's equations."""
    return [str(eqn.outvars[0].aval.dtype) for eqn in named(jaxpr, name)]


def after(fn: Any, *args: Any, policy: Any = "AutoMixedBf16", target: Any = "h100") -> Any:
    return pp.inspect(fn, policy, target=target)(*args).after


@pytest.mark.parametrize("composition", ["auto(grad)", "grad(auto)"])
def test_every_convolution_has_operands_and_a_result_in_bfloat16(composition: str):
    with planned_for(AbsentDevice()):
        if composition == "auto(grad)":
            jaxpr = pp.auto_mixed(jax.grad(convolutions)).trace(W, X).jaxpr
        else:
            jaxpr = jax.make_jaxpr(jax.grad(pp.auto_mixed(convolutions)))(W, X)
    assert len(low_products(jaxpr)) == len(products(jaxpr)) >= 5
    assert set(results(jaxpr, "conv_general_dilated")) == {"bfloat16"}


def test_on_a_cpu_results_stay_in_float32():
    jaxpr = after(jax.grad(convolutions), W, X, target=None)
    assert len(low_products(jaxpr)) == len(products(jaxpr)) >= 5
    assert set(results(jaxpr, "conv_general_dilated")) == {"float32"}


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("composition", ["auto(grad)", "grad(auto)"])
def test_gradients_are_near_to_float32s_and_keep_their_dtype(composition: str):
    def loss(w: Any, x: jax.Array) -> jax.Array:
        h = jax.nn.relu(conv(x, w[0])).reshape(2, -1)
        return jnp.tanh(h[:, :32] @ w[1] @ w[1].T).sum()

    w = (W[0], A)
    want = jax.jit(jax.grad(loss))(w, X)
    with planned_for(AbsentDevice()):
        is_inside = composition == "auto(grad)"
        fn = pp.auto_mixed(jax.grad(loss)) if is_inside else jax.grad(pp.auto_mixed(loss))
        got = fn(w, X)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype == jnp.float32
        assert 1e-5 < rel_error(a, b) < 0.02


def test_what_is_returned_is_not_rounded():
    assert results(after(lambda a, b: b @ a, A, B)) == ["float32"]
    assert results(after(lambda a, b: (b @ a).T.reshape(-1), A, B)) == ["float32"]
    assert results(after(lambda a, b: jnp.tanh(b @ a), A, B)) == ["bfloat16"]


def test_weight_gradients_are_not_rounded_and_what_is_inside_is():
    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(b @ a) @ a).sum()

    jaxpr = after(jax.grad(loss), A, B)
    assert sorted(results(jaxpr)).count("bfloat16") >= 3
    two = after(jax.grad(lambda a, b: jnp.tanh(b @ a).sum()), A, B)
    assert results(two) == ["bfloat16", "float32"]


def test_a_term_of_a_weights_gradient_is_not_rounded():
    def tied(table: jax.Array, tokens: jax.Array) -> jax.Array:
        """The table is looked up and multiplied, so two terms make its gradient."""
        return jnp.tanh(jnp.tanh(table[tokens]) @ table.T).sum()

    found = results(after(jax.grad(tied), A, jnp.arange(16)))
    # the forward product, the cotangent of what was looked up, and the table's gradient
    assert sorted(found) == ["bfloat16", "bfloat16", "float32"]


def test_a_result_is_followed_through_calls_and_not_out_of_loops():
    @jax.jit
    def inner(a: jax.Array, b: jax.Array) -> jax.Array:
        return b @ a

    assert results(after(lambda a, b: jnp.tanh(inner(a, b)), A, B)) == ["bfloat16"]
    assert results(after(inner, A, B)) == ["float32"]

    def both(a: jax.Array, b: jax.Array) -> Any:
        return jnp.tanh(inner(a, b)), inner(a, b)

    assert set(results(after(both, A, B))) == {"float32"}

    def carried(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 3, lambda _, c: c @ a, b)

    def inside(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c @ a), b)

    assert results(after(carried, A, B)) == ["float32"]
    assert results(after(inside, A, B)) == ["bfloat16"]


def test_a_result_is_followed_into_calls():
    @jax.jit
    def moved(x: jax.Array) -> jax.Array:
        return 2.0 * x.T

    assert results(after(lambda a, b: moved(b @ a), A, B)) == ["float32"]
    assert results(after(lambda a, b: jnp.tanh(moved(b @ a)), A, B)) == ["bfloat16"]


@pytest.mark.parametrize("softmax", [jax.nn.softmax, jax.nn.log_softmax, jax.nn.logsumexp])
def test_a_softmax_subtracts_the_maximum_of_its_operand(softmax: Any):
    assert results(after(lambda a, b: jnp.tanh(softmax(b @ a)), A, B)) == ["bfloat16"]
    assert results(after(lambda a, b: softmax(0.3 * (b @ a)).sum(), A, B)) == ["bfloat16"]


def test_a_difference_is_of_unrounded_results():
    def residual(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.square(b @ a - b).sum()

    def distances(a: jax.Array, b: jax.Array) -> jax.Array:
        squares = jnp.square(b).sum(1)[:, None] + jnp.square(a).sum(1)[None]
        return jnp.sqrt(squares - 2.0 * (b @ a.T)).sum()

    def other_sign(a: jax.Array, b: jax.Array) -> jax.Array:
        squares = jnp.square(b).sum(1)[:, None] + jnp.square(a).sum(1)[None]
        return jnp.sqrt(-2.0 * (b @ a.T) + squares).sum()

    assert results(after(residual, A, B)) == ["float32"]
    assert results(after(other_sign, A, B)) == ["float32"]
    assert results(after(lambda a, b: jnp.tanh(b @ a + 1.0), A, B)) == ["bfloat16"]
    assert results(after(distances, A, B)) == ["float32"]


def test_a_squared_distance_keeps_the_digits_that_it_has_with_float32_results():
    near = normal_array(5, 1, 2048) + 1e-2 * normal_array(6, 64, 2048)

    def distances(x: jax.Array) -> jax.Array:
        squares = jnp.square(x).sum(1)
        return squares[:, None] + squares[None] - 2.0 * (x @ x.T)

    def one_by_one(target: str | None) -> jax.Array:
        # compiled as a whole, XLA:CPU would leave out roundings that are undone at once
        (out,) = jaxpr_as_fun(after(distances, near, target=target))(near)
        return out

    want = distances(near)
    assert rel_error(one_by_one("h100"), want) <= 1.01 * rel_error(one_by_one(None), want)


def test_a_long_sum_of_rounded_terms_keeps_its_digits():
    ones, halves = jnp.ones((2, 2)), jnp.full((1, 2), 0.5)

    def total(x: jax.Array) -> jax.Array:
        def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return carry + (x @ ones)[0, 0], None

        return lax.scan(body, jnp.zeros(()), None, length=4096)[0]

    with planned_for(AbsentDevice()):
        mixed = pp.auto_mixed(total, policy=pp.Custom({"compute": "bf16"}))
        assert float(mixed(halves)) == 4096
        assert float(jax.grad(lambda x: mixed(x))(halves)[0, 0]) == 4096


def test_float16_results_stay_in_float32():
    # the products of operands in float16's range may be out of it
    jaxpr = after(jax.grad(convolutions), W, X, policy="AutoMixed")
    assert set(results(jaxpr, "conv_general_dilated")) == {"float32"}
    big = 300.0 * jnp.ones((16, 64))
    out = pp.inspect(lambda x: jnp.tanh(x @ x.T / 1e7), "AutoMixed", target="h100")(big)
    assert results(out.after) == ["float32"]


def test_one_function_has_a_program_for_each_kind_of_device():
    fn = pp.auto_mixed(lambda a, b: jnp.tanh(b @ a))
    first = results(fn.trace(A, B).jaxpr)
    with planned_for(AbsentDevice()):
        second = results(fn.trace(A, B).jaxpr)
    third = results(fn.trace(A, B).jaxpr)
    assert (first, second, third) == (["float32"], ["bfloat16"], ["float32"])


@pytest.mark.release
def test_a_plan_for_a_gpu_is_right_under_vmap_jvp_and_checkpoint():
    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.tanh(jax.checkpoint(lambda c: jnp.tanh(c @ a) @ a)(b)).sum()

    with planned_for(AbsentDevice()):
        mixed = pp.auto_mixed(loss)
        per_row = jax.vmap(jax.grad(mixed), (None, 0))(A, B[:, None])
        tangent = jax.jvp(functools.partial(mixed, b=B), (A,), (A,))[1]
        hessian = jax.jvp(jax.grad(functools.partial(mixed, b=B)), (A,), (A,))[1]
    plain = functools.partial(loss, b=B)
    assert rel_error(per_row, jax.vmap(jax.grad(loss), (None, 0))(A, B[:, None])) < 0.02
    assert rel_error(tangent, jax.jvp(plain, (A,), (A,))[1]) < 0.02
    assert rel_error(hessian, jax.jvp(jax.grad(plain), (A,), (A,))[1]) < 0.03


def test_the_diff_says_in_which_format_the_result_is():
    def fn(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.tanh(b @ a)

    on_gpu = pp.inspect(fn, target="h100")(A, B).diff(color=False)
    on_cpu = pp.inspect(fn)(A, B).diff(color=False)
    assert "in bf16, accumulated in f32, result in bf16" in on_gpu
    assert "result in bf16" not in on_cpu


# ---------------------------------------------------------------- gradients of rewritten programs


def gradient_results(fn: Any, *args: Any, argnums: Any = 0) -> list[str]:
    """The dtypes of the dots' results in `jax.grad` of a program that is planned for a GPU."""
    with planned_for(AbsentDevice()):
        return results(jax.make_jaxpr(jax.grad(pp.auto_mixed(fn), argnums))(*args))


def test_a_cotangent_that_stays_inside_is_rounded_and_a_gradient_is_not():
    def loss(w: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]).sum()

    # two products, the cotangent of the inner value, and the gradients of two weights
    found = gradient_results(loss, (A, A), B)
    assert sorted(found) == ["bfloat16"] * 3 + ["float32"] * 2
    # and the gradient of the argument
    found = gradient_results(loss, (A, A), B, argnums=(0, 1))
    assert sorted(found) == ["bfloat16"] * 3 + ["float32"] * 3


@pytest.mark.parametrize(
    "operand",
    [
        lambda x: x.T.T,
        lambda x: x * 3.0,
        lambda x: x.reshape(-1).reshape(x.shape),
        lambda x: jax.jit(lambda y: y)(x),
        lambda x: jnp.tanh(x) - jnp.cos(x),
        lambda x: -jnp.tanh(x),
    ],
    ids=["moved", "scaled", "reshaped", "called", "difference", "negated"],
)
def test_a_cotangent_that_leaves_or_is_subtracted_keeps_its_digits(operand: Any):
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(operand(x) @ w).sum()

    assert gradient_results(loss, B, A) == ["bfloat16", "float32"]


def test_the_cotangent_of_a_loops_state_keeps_its_digits():
    def loss(h: jax.Array, w: jax.Array) -> jax.Array:
        return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, None, length=3)[0].sum()

    # the forward pass, the state's cotangent, and the terms whose float32 sum is the weight's
    found = gradient_results(loss, B, A, argnums=(0, 1))
    assert sorted(found) == ["bfloat16", "bfloat16", "float32"]
    with planned_for(AbsentDevice()):
        got = jax.jit(jax.grad(pp.auto_mixed(loss), (0, 1)))(B, A)
    want = jax.jit(jax.grad(loss, (0, 1)))(B, A)
    assert rel_error(got, want) < 0.02


def test_on_a_cpu_no_cotangent_is_rounded():
    def loss(w: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]).sum()

    jaxpr = jax.make_jaxpr(jax.grad(pp.auto_mixed(loss)))((A, A), B)
    assert set(results(jaxpr)) == {"float32"}


@pytest.mark.parametrize("target", ["h100", "tpu v5e"])
def test_a_result_that_a_checkpoint_saves_is_rounded_by_its_kernel(target: str):
    """The loop stacks it in 16 bits, so a float32 result would only be written and cast."""

    def layer(c: jax.Array, a: jax.Array) -> tuple[jax.Array, None]:
        return c + jnp.tanh(jax.nn.gelu(c @ a) @ A), None

    def loss(stack: jax.Array, c: jax.Array) -> jax.Array:
        saves = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return lax.scan(jax.checkpoint(layer, policy=saves), c, stack)[0].sum()

    jaxpr = after(jax.grad(loss), jnp.stack([A] * 3), B, target=target)
    shapes = [str(e.outvars[0].aval) for e in named(jaxpr, "dot_general")]
    # the backward loop stacks the gradient of the weights, which is the program's result
    assert shapes.count("float32[32,32]") == 1
    assert set(shapes) - {"float32[32,32]"} == {"bfloat16[16,32]"}
    stacks = [str(v.aval.dtype) for e in named(jaxpr, "scan") for v in e.outvars]
    assert stacks.count("bfloat16") >= 2 and "uint16" not in stacks


@pytest.mark.release
def test_what_crosses_a_border_in_16_bits_is_differentiated_as_on_a_cpu():
    def loss(stack: jax.Array, c: jax.Array) -> jax.Array:
        def layer(c: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
            c = jnp.tanh(c @ a) @ A
            return c, c.sum()

        return lax.scan(layer, c, stack)[1].sum()

    def fitted(stack: jax.Array, c: jax.Array) -> jax.Array:
        gradient = jax.grad(loss)(stack, c)
        return loss(stack - 0.01 * gradient, c)

    args = jnp.stack([A] * 3), B
    wanted = jax.jit(jax.grad(fitted))(*args)
    found = []
    for place in (AbsentDevice(), None):
        with planned_for(place) if place else contextlib.nullcontext():
            fn = pp.auto_mixed(lambda *xs: fitted(*xs))
            reverse, forward = jax.jit(lambda *xs: (jax.grad(fn)(*xs), jax.jacfwd(fn)(*xs)))(*args)  # noqa: B023
        assert reverse.dtype == jnp.float32
        assert rel_error(reverse, wanted) < 0.02 and rel_error(forward, wanted) < 0.02
        inspected = pp.inspect(jax.grad(fitted), target=place, compiled=False)
        found.append("uint16" in str(inspected(*args).after))
    assert found == [False, True]
