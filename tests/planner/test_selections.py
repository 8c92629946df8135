"""On a GPU selections of what products made are evaluated in 16 bits if no reader needs more."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import precpass as pp
from precpass.devices.detect import planned_for
from precpass.devices.targets import target_of
from tests.support.jaxprs import inner_jaxprs, named, opened, walk
from tests.support.values import normal_array, rel_error

X, W, V = normal_array(0, 16, 32), normal_array(1, 32, 32) / 6, normal_array(2, 32, 32) / 6


def dtypes(fn: Callable[..., Any], name: str, *args: Any, **options: Any) -> list[str]:
    """The dtypes of the results of a primitive's equations, as they are planned for a GPU."""
    jaxpr = pp.inspect(fn, **{"target": "h100", **options})(*args).after
    return [str(eqn.outvars[0].aval.dtype) for eqn in named(jaxpr, name)]


def mlp(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(jax.nn.relu(x @ w) @ V) @ V).sum()


def test_the_cotangent_of_a_relu_is_chosen_in_bfloat16_on_accelerators_alone():
    assert set(dtypes(jax.grad(mlp), "select_n", W, X)) == {"bfloat16"}
    assert set(dtypes(jax.grad(mlp), "select_n", W, X, target="tpu v5e")) == {"bfloat16"}
    assert set(dtypes(jax.grad(mlp), "select_n", W, X, target=None)) == {"float32"}
    wide = pp.AutoMixedBf16.with_results("f32")
    assert set(dtypes(jax.grad(mlp), "select_n", W, X, policy=wide)) == {"float32"}
    assert "bfloat16" not in dtypes(jax.grad(mlp), "select_n", W, X, policy="AutoMixed")


@pytest.mark.release
def test_what_is_chosen_has_the_one_rounding():
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        h = jnp.where(x > 0, x @ w, 0.0)
        return jnp.tanh(h) @ w + h.sum()

    found = pp.inspect(fn, target="h100")(X, W)
    (select,) = named(found.after, "select_n")
    assert str(select.outvars[0].aval.dtype) == "bfloat16"
    got = jax.extend.core.jaxpr_as_fun(found.after)(X, W)[0]
    assert rel_error(got, jax.jit(fn)(X, W)) < 0.02


def masked(q: jax.Array, k: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention with the mask that flax and equinox have: float32's lowest number."""
    lowest = jnp.finfo(jnp.float32).min
    return jax.nn.softmax(jnp.where(mask, (q @ W) @ k.T, lowest), axis=-1) @ k


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("target", ["h100", "tpu v5e"])
def test_float32s_lowest_number_in_a_mask_becomes_bfloat16s_and_no_infinity(target: str):
    mask = np.tril(np.ones((16, 16), bool))
    mask[3] = False  # a row that may read nothing

    def loss(q: jax.Array) -> jax.Array:
        return jnp.square(masked(q, X, mask)).sum()

    found = pp.inspect(jax.grad(loss), target=target)(X)
    chosen = [e.outvars[0].aval for e in named(found.after, "select_n")]
    # A TPU's kernel does not write the masked scores, but their exponentials.
    of_scores = "bfloat16" if target == "h100" else "float32"
    assert [str(a.dtype) for a in chosen if a.shape == (16, 16)] == [of_scores, "bfloat16"]
    run = jax.extend.core.jaxpr_as_fun
    got, wanted = run(found.after)(X)[0], jax.jit(jax.grad(loss))(X)
    assert np.isfinite(got).all()
    assert rel_error(got, wanted) < 0.02
    forward = run(pp.inspect(masked, target=target)(X, X, mask).after)(X, X, mask)[0]
    assert (
        rel_error(np.asarray(forward)[3], np.asarray(X).mean(0)) < 0.02
    )  # all weights of that row are equal


@pytest.mark.release
def test_an_infinity_and_what_reaches_beyond_bfloat16_are_no_lowest_number():
    def fn(x: jax.Array, w: jax.Array, fill: float | jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.where(x > 0, x @ w, fill), axis=-1) @ w

    def without_numbers(x: jax.Array, w: jax.Array) -> jax.Array:
        return fn(x, w, -jnp.inf)

    def computed(x: jax.Array, w: jax.Array) -> jax.Array:
        return fn(x, w, jnp.minimum(x, 0) - 3.4e38)

    def weights(of: Any) -> jax.Array:
        after = pp.inspect(of, target="h100")(X, W).after
        return jax.extend.core.jaxpr_as_fun(after)(X, W)[0]

    assert rel_error(weights(without_numbers), without_numbers(X, W)) < 0.02
    assert "bfloat16" not in dtypes(computed, "select_n", X, W)
    assert rel_error(weights(computed), computed(X, W)) < 0.02


@pytest.mark.parametrize(
    "fn",
    [
        # it is asked which operand it is equal to, as the gradient of older releases of JAX does
        lambda x, w: jnp.where(jnp.maximum(x @ w, 0.1) == x @ w, x, 2.0) @ w,
        # a difference magnifies the rounding
        lambda x, w: jnp.square(jnp.maximum(x @ w, 0.1) - 1.0) @ w,
        # it is the program's result
        lambda x, w: jnp.maximum(x @ w, 0.1),
        # the order of its elements is asked for
        lambda x, w: x @ w + jnp.argmax(jnp.maximum(x @ w, 0.1)).astype(jnp.float32),
        # no product has rounded it
        lambda x, w: (lambda chosen: chosen @ w + chosen.sum())(jnp.maximum(x, 0.1)),
    ],
    ids=["equality", "difference", "result", "order", "all digits"],
)
def test_a_choice_that_is_read_exactly_stays_in_float32(fn: Callable[..., Any]):
    assert set(dtypes(fn, "max", X, W)) == {"float32"}


def test_exact_numbers_that_a_product_chooses_between_keep_their_digits():
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        slope = jnp.where(x @ w > 0, x, 0.1)
        return (x * slope) @ w + slope.sum()

    assert dtypes(fn, "select_n", X, W) == ["float32"]


def test_a_loops_state_is_not_chosen_in_16_bits():
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        def step(c: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            c = jnp.maximum(c + c @ w, -1.0)
            return c, c.sum()

        return jax.lax.scan(step, x, None, length=5)[1]

    assert set(dtypes(fn, "max", X, W)) == {"float32"}


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("composition", ["auto(grad)", "grad(auto)"])
def test_gradients_of_chosen_values_are_near_to_float32s(composition: str):
    from precpass.devices.detect import planned_for
    from precpass.devices.targets import target_of

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        h = jnp.maximum(x @ w, 0.3 * (x @ V))
        return jnp.where(x > 0.5, h, jnp.minimum(h, 2.0)).sum() + jnp.square(h @ V).sum()

    fn = (
        pp.auto_mixed(jax.grad(loss))
        if composition == "auto(grad)"
        else jax.grad(pp.auto_mixed(loss))
    )
    with planned_for(target_of("h100")):
        got = jax.jit(fn)(W, X)
    assert str(got.dtype) == "float32"
    assert rel_error(got, jax.jit(jax.grad(loss))(W, X)) < 0.05


@pytest.mark.release
def test_the_result_of_a_product_is_moved_in_the_bits_that_it_has():
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        left, right = jnp.split((x @ w).T, 2)
        return jnp.tanh(left).sum() + (jnp.exp(right) * left).sum()

    assert dtypes(fn, "split", X, W) == ["bfloat16"]
    assert dtypes(fn, "split", X, W, target=None) == ["float32"]
    assert dtypes(fn, "split", X, W, policy=pp.AutoMixedBf16.with_results("f32")) == ["float32"]
    ordered = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="split", precision="f32"))
    assert dtypes(fn, "split", X, W, policy=ordered) == ["float32"]
    found = pp.inspect(jax.grad(fn, argnums=(0, 1)), target="h100")(X, W)
    got = jax.extend.core.jaxpr_as_fun(found.after)(X, W)
    for mine, wanted in zip(got, jax.grad(fn, argnums=(0, 1))(X, W), strict=True):
        assert rel_error(mine, wanted) < 0.02


def test_every_part_of_a_result_is_followed_to_a_difference():
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        left, right = jnp.split(x @ w, 2)
        return jnp.square(right - 1.0).sum() + jnp.tanh(left).sum()

    assert dtypes(fn, "dot_general", X, W) == ["float32"]


def makers_of_operands(jaxpr: Any, name: str, shape: tuple[int, ...]) -> list[str]:
    """The primitives that make the 16-bit operands of equations, in the equations' own bodies."""
    found: list[str] = []
    for body in [opened(jaxpr), *(inner for eqn in walk(jaxpr) for inner in inner_jaxprs(eqn))]:
        makers = {v: eqn for eqn in body.eqns for v in eqn.outvars}
        for eqn in body.eqns:
            for v in eqn.invars if eqn.primitive.name == name else ():
                is_low = v.aval.shape == shape and str(v.aval.dtype) == "bfloat16"
                if is_low and not hasattr(v, "val") and v in makers:
                    read = map(id, makers[v].invars)
                    comes_in = not set(map(id, body.invars)).isdisjoint(read)
                    found.append(makers[v].primitive.name + " of an operand" * comes_in)
    return found


def attention(stack: jax.Array, x: jax.Array, fill: Any) -> jax.Array:
    mask = jnp.tril(jnp.ones((16, 16), bool))

    def layer(c: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        scores = jnp.where(mask, (c @ w) @ c.T, fill)
        return jnp.tanh(jax.nn.softmax(scores, axis=-1) @ c), None

    return jax.lax.scan(layer, x, stack)[0].sum()


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("fill", [-1e9, float(jnp.finfo(jnp.float32).min), -jnp.inf])
def test_what_a_mask_fills_in_is_no_float32_array_that_a_loop_reads(fill: float):
    """JAX makes it once before the loop, so that every trip would read it from memory."""
    stack = np.stack([W] * 3)
    gradient = jax.grad(lambda s, x: attention(s, x, fill))
    found = pp.inspect(gradient, target="h100")(stack, X).after
    makers = makers_of_operands(found, "select_n", (16, 16))
    assert "broadcast_in_dim" in makers
    # the scores come into the selecting bodies, and in the backward pass their cotangent
    assert makers.count("convert_element_type of an operand") == 2
    got, wanted = jax.extend.core.jaxpr_as_fun(found)(stack, X)[0], jax.jit(gradient)(stack, X)
    assert np.isfinite(got).all() and rel_error(got, wanted) < 0.03


def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def pooled_by(size: int, stride: int) -> Callable[[jax.Array], jax.Array]:
    windows, strides = (1, size, size, 1), (1, stride, stride, 1)
    return lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, windows, strides, "VALID")


def pooling(size: int, stride: int) -> Callable[..., jax.Array]:
    def loss(kernel: jax.Array, image: jax.Array) -> jax.Array:
        hidden = jax.nn.gelu(convolved(image, kernel))
        return jnp.square(convolved(pooled_by(size, stride)(hidden), kernel)).mean()

    return loss


KERNEL, IMAGE = normal_array(7, 3, 3, 8, 8) / 8, normal_array(8, 4, 12, 12, 8)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize(
    ("size", "stride", "target", "dtype"),
    [
        (2, 2, "h100", "bfloat16"),
        (2, 3, "a100", "bfloat16"),
        (3, 2, "h100", "float32"),  # some elements are in two windows, so cotangents are added up
        (2, 2, "tpu v5e", "float32"),  # which computes in float32 anyway
        (2, 2, None, "float32"),
    ],
)
def test_a_pooling_of_windows_apart_is_in_bfloat16_on_a_gpu(
    size: int, stride: int, target: str | None, dtype: str
):
    loss = pooling(size, stride)
    gradient, options = jax.grad(loss), {"target": target}
    assert dtypes(gradient, "select_and_scatter_add", KERNEL, IMAGE, **options) == [dtype]
    assert dtypes(gradient, "reduce_window_max", KERNEL, IMAGE, **options) == [dtype]
    assert dtypes(loss, "reduce_window_max", KERNEL, IMAGE, **options) == [dtype]
    with planned_for(target_of(target)) if target else contextlib.nullcontext():
        outside = jax.make_jaxpr(jax.grad(pp.auto_mixed(loss)))(KERNEL, IMAGE)
        found = [pp.auto_mixed(gradient)(KERNEL, IMAGE), jaxpr_as_fun(outside)(KERNEL, IMAGE)[0]]
    put_back = [str(e.outvars[0].aval.dtype) for e in named(outside, "select_and_scatter_add")]
    assert put_back == [dtype]
    wanted = jax.jit(gradient)(KERNEL, IMAGE)
    assert all(1e-5 < rel_error(got, wanted) < 0.03 for got in found)


def test_a_pooling_of_exact_numbers_finds_the_largest_by_all_digits():
    """The largest of 1000.1 and 1000.2 would be the first of two equal ones in bfloat16."""
    image = np.arange(4 * 12 * 12 * 8).reshape(IMAGE.shape) % 7 / np.float32(10) + np.float32(1000)
    image = image.astype(np.float32)

    def loss(image: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.square(convolved(pooled_by(2, 2)(image) - 1000.0, kernel)).mean()

    gradient = jax.grad(loss)
    assert dtypes(gradient, "reduce_window_max", image, KERNEL) == ["float32"]
    assert dtypes(gradient, "select_and_scatter_add", image, KERNEL) == ["float32"]
    with planned_for(target_of("h100")):
        got = pp.auto_mixed(gradient)(image, KERNEL)
    wanted = jax.jit(gradient)(image, KERNEL)
    assert ((np.asarray(got) != 0) == (np.asarray(wanted) != 0)).all()
    assert rel_error(got, wanted) < 0.02


def test_what_float16_cannot_hold_is_not_pooled_in_float16():
    def loss(kernel: jax.Array, image: jax.Array) -> jax.Array:
        hidden = 1e6 * convolved(image, kernel)
        return (convolved(1e-6 * pooled_by(2, 2)(hidden), kernel)).sum()

    options = {"policy": "AutoMixed"}
    for name in ("reduce_window_max", "select_and_scatter_add"):
        assert dtypes(jax.grad(loss), name, KERNEL, IMAGE, **options) == ["float32"]
