"""On a GPU products have results in 16 bits where no sum loses digits, and convolutions always."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, PartitionSpec

import precpass as pp
from precpass.devices.detect import planned_for
from tests.support.devices import AbsentDevice
from tests.support.jaxprs import named
from tests.support.values import normal_array, rel_error

A, B = normal_array(3, 32, 32) / 6, normal_array(4, 16, 32)


def results(jaxpr: Any, name: str = "dot_general") -> list[str]:
    """The dtypes of the results of a primitive's equations."""
    return [str(eqn.outvars[0].aval.dtype) for eqn in named(jaxpr, name)]


def after(fn: Any, *args: Any, policy: Any = "AutoMixedBf16", target: Any = "h100") -> Any:
    return pp.inspect(fn, policy, target=target)(*args).after


KERNEL, IMAGE = normal_array(0, 3, 3, 4, 8), normal_array(2, 2, 6, 6, 4)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("composition", ["auto(grad)", "grad(auto)"])
def test_gradients_are_near_to_float32s_and_keep_their_dtype(composition: str):
    axes = ("NHWC", "HWIO", "NHWC")

    def loss(w: Any, x: jax.Array) -> jax.Array:
        h = jax.nn.relu(
            lax.conv_general_dilated(x, w[0], (1, 1), "SAME", dimension_numbers=axes)
        ).reshape(2, -1)
        return jnp.tanh(h[:, :32] @ w[1] @ w[1].T).sum()

    w = (KERNEL, A)
    want = jax.jit(jax.grad(loss))(w, IMAGE)
    with planned_for(AbsentDevice()):
        is_inside = composition == "auto(grad)"
        fn = pp.auto_mixed(jax.grad(loss)) if is_inside else jax.grad(pp.auto_mixed(loss))
        got = fn(w, IMAGE)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype == jnp.float32
        assert 1e-5 < rel_error(a, b) < 0.02


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


def test_one_function_has_a_program_for_each_kind_of_device():
    fn = pp.auto_mixed(lambda a, b: jnp.tanh(b @ a))
    first = results(fn.trace(A, B).jaxpr)
    with planned_for(AbsentDevice()):
        second = results(fn.trace(A, B).jaxpr)
    third = results(fn.trace(A, B).jaxpr)
    assert (first, second, third) == (["float32"], ["bfloat16"], ["float32"])


def test_the_diff_says_in_which_format_the_result_is():
    def fn(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.tanh(b @ a)

    on_gpu = pp.inspect(fn, target="h100")(A, B).diff(color=False)
    on_cpu = pp.inspect(fn)(A, B).diff(color=False)
    assert "in bf16, accumulated in f32, result in bf16" in on_gpu
    assert "result in bf16" not in on_cpu


# ---------------------------------------------------------------- gradients of rewritten programs


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


def _shared(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.tanh(x @ w) @ w).sum()


def _stacked(ws: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.tanh(x @ ws[:, :32]) @ ws[:, 32:]).sum()


def _split(w: jax.Array, x: jax.Array) -> jax.Array:
    one, other = jnp.split(w, 2, 1)
    return (jnp.tanh(x @ one) * jnp.sin(x @ other)).sum()


def _elsewhere(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ jax.device_put(w, jax.memory.Space.Device)).sum()


def _on_shards(gathered: bool) -> Any:
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    spec = PartitionSpec("d")

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        w = lax.all_gather(w, "d", tiled=True) if gathered else w
        return lax.psum(jnp.tanh(x @ w).sum(), "d")

    specs = spec if gathered else PartitionSpec(), spec
    return jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())


IN_PARTS = {
    "shared": (_shared, A, 2),
    "stacked": (_stacked, jnp.concatenate([A, A], 1), 2),
    "split": (_split, A, 2),
    "elsewhere": (_elsewhere, A, 1),
    "added up over devices": (_on_shards(gathered=False), A, 1),
    "gathered from devices": (_on_shards(gathered=True), A, 1),
}


@pytest.mark.parametrize("composition", ["auto(grad)", "grad(auto)"])
@pytest.mark.parametrize("name", IN_PARTS)
def test_no_part_of_a_weights_gradient_is_rounded(name: str, composition: str):
    """A weight of which parts are read, or that several devices or layers read."""
    fn, w, terms = IN_PARTS[name]
    if composition == "auto(grad)":
        found = after(jax.grad(fn), w, B)
    else:
        with planned_for(AbsentDevice()):
            found = jax.make_jaxpr(jax.grad(pp.auto_mixed(fn)))(w, B)
    assert results(found).count("float32") >= terms
