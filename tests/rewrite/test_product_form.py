"""Design section 5: a lowered product, its derivatives of every order, and transposes around it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from tests.support.jaxprs import named
from tests.support.passes import COMPOSITIONS, assert_all_low, low_and_near
from tests.support.values import assert_near, normal, on_device

each_composition = pytest.mark.parametrize("compose", COMPOSITIONS.values(), ids=COMPOSITIONS)
ORDERED = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="*_general*", precision="bf16"))
"""A policy for products of vectors too, which the preset leaves in float32."""
ordered = functools.partial(pp.auto_mixed, policy=ORDERED)

# lhs shape, rhs shape, ((contracting), (batch))
DOTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]] = {
    "matrix": ((16, 24), (24, 8), (((1,), (0,)), ((), ()))),
    "both last": ((16, 24), (8, 24), (((1,), (1,)), ((), ()))),
    "both first": ((24, 16), (24, 8), (((0,), (0,)), ((), ()))),
    "first and last": ((24, 16), (8, 24), (((0,), (1,)), ((), ()))),
    "batch leading": ((3, 16, 24), (3, 24, 8), (((2,), (1,)), ((0,), (0,)))),
    "batches swapped": ((2, 3, 16, 24), (3, 2, 8, 24), (((3,), (3,)), ((1, 0), (0, 1)))),
    "batch trailing": ((16, 24, 3), (8, 24, 3), (((1,), (1,)), ((2,), (2,)))),
    "batch in the middle": ((16, 3, 24), (24, 8, 3), (((2,), (0,)), ((1,), (2,)))),
    "heads": ((2, 8, 3, 24), (2, 8, 3, 24), (((3,), (3,)), ((0, 2), (0, 2)))),
    "two contracted": ((4, 16, 12), (4, 8, 12), (((0, 2), (0, 2)), ((), ()))),
    "two contracted, swapped": ((4, 16, 12), (12, 4, 8), (((0, 2), (1, 0)), ((), ()))),
    "all contracted": ((4, 16, 12), (12, 4, 16), (((0, 1, 2), (1, 2, 0)), ((), ()))),
    "vectors": ((24,), (24,), (((0,), (0,)), ((), ()))),
    "matrix and vector": ((16, 24), (24,), (((1,), (0,)), ((), ()))),
    "vector and matrix": ((24,), (24, 8), (((0,), (0,)), ((), ()))),
    "vectors in batches": ((3, 24), (3, 24), (((1,), (1,)), ((0,), (0,)))),
    "size one": ((1, 24), (24, 1), (((1,), (0,)), ((), ()))),
    "no rows": ((0, 24), (24, 8), (((1,), (0,)), ((), ()))),
    "empty sum": ((16, 0), (0, 8), (((1,), (0,)), ((), ()))),
}
CONVS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 4, 9, 9), (6, 4, 3, 3), {}),
    "strides": ((2, 4, 9, 9), (6, 4, 3, 3), {"window_strides": (2, 2)}),
    "groups": ((2, 4, 9, 9), (6, 2, 3, 3), {"feature_group_count": 2}),
    "depthwise": ((2, 4, 9, 9), (4, 1, 3, 3), {"feature_group_count": 4}),
    "batch groups": ((4, 4, 9, 9), (6, 4, 3, 3), {"batch_group_count": 2}),
    "rhs dilation": ((2, 4, 9, 9), (6, 4, 3, 3), {"rhs_dilation": (2, 2)}),
    "lhs dilation": ((2, 4, 5, 5), (6, 4, 3, 3), {"lhs_dilation": (2, 2)}),
    "channels last": ((2, 9, 9, 4), (3, 3, 4, 6), {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}),
}


def a_dot(numbers: Any) -> Callable[..., Any]:
    return lambda x, w: lax.dot_general(x, w, numbers)


def a_conv(ndim: int, options: dict[str, Any]) -> Callable[..., Any]:
    given = {"window_strides": (1,) * (ndim - 2), "padding": ((0, 0),) * (ndim - 2), **options}
    return lambda x, w: lax.conv_general_dilated(x, w, **given)


def ragged(x, w):
    return lax.ragged_dot(x, w, jnp.asarray([5, 0, 11], jnp.int32))


def positive(seed: int, *shape: int) -> jax.Array:
    """Operands whose products do not cancel, so that an error is one of the precision."""
    return on_device(np.abs(normal(seed, *shape)) + np.float32(0.1))


Case = tuple[Callable[..., Any], jax.Array, jax.Array]
CASES: dict[str, Case] = {
    **{
        f"dot {name}": (a_dot(numbers), positive(0, *lhs), positive(1, *rhs))
        for name, (lhs, rhs, numbers) in DOTS.items()
    },
    **{
        f"conv {name}": (a_conv(len(lhs), options), positive(0, *lhs), positive(1, *rhs))
        for name, (lhs, rhs, options) in CONVS.items()
    },
    "ragged_dot": (ragged, positive(0, 16, 24), positive(1, 3, 24, 8)),
}


def weighed(product: Callable[..., Any]) -> Callable[..., Any]:
    """A scalar with derivatives of two orders, and the product itself beside it."""

    def loss(x, w):
        y = product(x, w)
        weights = 1.0 + 0.5 * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return (weights * y).sum() + 0.5 * (y * y).sum(), y

    return loss


def directions(x: Any, w: Any) -> tuple[Any, Any]:
    return 1.0 + 0.5 * jnp.cos(3.0 * x), 1.0 + 0.5 * jnp.sin(2.0 * w)


def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(f, (0, 1), has_aux=True)


def forward(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w: jax.jvp(f, (x, w), directions(x, w))


def forward_over_reverse(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w: jax.jvp(gradient(f), (x, w), directions(x, w))[1]


def reverse_over_reverse(f: Callable[..., Any]) -> Callable[..., Any]:
    def along(x, w):
        dx, dw = lax.stop_gradient(directions(x, w))
        gx, gw = jax.grad(f, (0, 1), has_aux=True)(x, w)[0]
        return (gx * dx).sum() + (gw * dw).sum()

    return jax.grad(along, (0, 1))


ORDERS = {
    "first": gradient,
    "forward": forward,
    "forward over reverse": forward_over_reverse,
    "reverse over reverse": reverse_over_reverse,
}


@pytest.mark.parametrize("name", CASES)
def test_the_product_is_low_and_its_result_is_float32(name: str):
    product, x, w = CASES[name]
    mixed = ordered(product)
    assert_all_low(mixed, x, w, dtype=jnp.bfloat16)
    assert jax.eval_shape(mixed, x, w) == jax.eval_shape(product, x, w)


@pytest.mark.release(keep=1)
@each_composition
@pytest.mark.parametrize("name", CASES)
def test_value_and_first_derivatives_are_low_and_near(name: str, compose: Any):
    product, x, w = CASES[name]
    mixed = compose(weighed(product), gradient, ORDERED)
    low_and_near(mixed, gradient(weighed(product)), x, w, least=3)


def all_low_and_near(mixed: list[Any], plain: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """`low_and_near` of several functions, compiled as one."""
    for fn in mixed:
        assert_all_low(fn, *args, least=3)
    got, want = jax.jit(lambda *xs: ([fn(*xs) for fn in mixed], plain(*xs)))(*args)
    for found in got:
        assert_near(found, want)


SOME = ["dot matrix", "dot first and last", "dot batch in the middle", "conv strides"]
MORE = [
    "dot first and last",
    "dot batch in the middle",
    "dot vectors",
    "conv strides",
    "ragged_dot",
]
# JAX itself has no second transpose of a ragged_dot: "Unimplemented grad_y_dims".
SECOND = [
    (name, order)
    for name in MORE
    for order in ORDERS
    if order != "first" and (name, order) != ("ragged_dot", "reverse over reverse")
]


@pytest.mark.release(keep=1)
@each_composition
@pytest.mark.enumerated
@pytest.mark.parametrize(("name", "order"), SECOND)
def test_other_derivatives_are_low_and_near(name: str, order: str, compose: Any):
    product, x, w = CASES[name]
    mixed = compose(weighed(product), ORDERS[order], ORDERED)
    low_and_near(mixed, ORDERS[order](weighed(product)), x, w, least=3)


IN_AXES = {"lhs": (0, None), "rhs": (None, 0), "both": (-1, -1)}


MAPPED = [(n, a) for n in SOME for a in IN_AXES if not n.startswith("conv") or a == "both"]


@pytest.mark.release(keep=1)
@pytest.mark.enumerated
@pytest.mark.parametrize(("name", "axes"), MAPPED)
def test_vmap_over_each_operand(name: str, axes: str):
    product, x, w = CASES[name]
    in_axes = IN_AXES[axes]

    def many(a: Any, axis: int | None) -> Any:
        return a if axis is None else np.stack([a, 2.0 * a, a + 1.0], axis)

    args = many(np.asarray(x), in_axes[0]), many(np.asarray(w), in_axes[1])
    loss = weighed(product)
    mapped = jax.vmap(gradient(loss), in_axes)
    all_low_and_near([jax.vmap(gradient(ordered(loss)), in_axes), ordered(mapped)], mapped, args)


# ---------------------------------------------------------------- transposes around a product

# XLA:CPU folds a transpose into a (bf16, bf16) -> f32 product, which compiles and then fails
# at run time: "Unsupported element type for DotThunk". So each of these is run.


def swap(y: Any) -> Any:
    return jnp.swapaxes(y, -1, -2)


def contracted_first(x: Any, w: Any) -> Any:
    return lax.dot_general(x, w, (((0,), (0,)), ((), ())))


def first_and_last(x: Any, w: Any) -> Any:
    return lax.dot_general(x, w, (((0,), (1,)), ((), ())))


def in_scan(step: Callable[..., Any]) -> Callable[..., Any]:
    def looped(x, w):
        def body(c, _):
            y = step(x + c, w)
            return c + 0.001 * y.mean(), y

        return lax.scan(body, jnp.zeros(()), None, length=3)[1]

    return looped


A, B = positive(4, 64, 128), positive(5, 128, 32)
TRANSPOSED: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "T": (lambda x, w: (x @ w).T, A, B),
    "T everywhere": (lambda x, w: (x.T @ w.T).T, A.T, B.T),
    "contracted first": (lambda x, w: contracted_first(x, w).T, A.T, B),
    "first and last": (first_and_last, A.T, B.T),
    "first and last, T": (lambda x, w: first_and_last(x, w).T, A.T, B.T),
    "moveaxis": (lambda x, w: jnp.moveaxis(x.reshape(4, 16, 128) @ w, 0, -1), A, B),
    "T, reshape, T": (lambda x, w: (x @ w).T.reshape(64, 32).T, A, B),
    "in a scan": (in_scan(lambda x, w: (x @ w).T), A, B),
    "contracted first in a scan": (in_scan(lambda x, w: contracted_first(x, w).T), A.T, B),
    "first and last in a scan": (in_scan(first_and_last), A.T, B.T),
    "behind jit": (lambda x, w: jax.jit(jnp.matmul)(x, w).T, A, B),
    "behind two jits": (lambda x, w: jax.jit(swap)(jax.jit(contracted_first)(x, w)), A.T, B),
    "behind remat": (lambda x, w: jax.checkpoint(contracted_first)(x, w).T, A.T, B),
    "vmap out_axes": (jax.vmap(lambda x, w: x @ w, (0, None), out_axes=1), A[None], B),
    "vmap in a scan": (in_scan(jax.vmap(jnp.matmul, (0, None), out_axes=-1)), A[None], B),
    "tied": (lambda x, w: (x @ w) @ w.T, A, B),
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposes_run(name: str):
    fn, x, w = TRANSPOSED[name]
    loss = weighed(fn)
    mixed = [compose(loss, gradient) for compose in COMPOSITIONS.values()]
    all_low_and_near(mixed, gradient(loss), (x, w))


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("swapped", [False, True])
def test_the_weight_gradient_of_a_loop_body_runs(swapped: bool):
    """Design section 6: the stacked output of such a product's transpose fails at run time."""
    x, g = positive(6, 4, 256, 512), positive(7, 4, 256, 2048)

    def fn(x, g):
        def body(c, _):
            product = lax.dot_general(x + c, g, (((0, 1), (0, 1)), ((), ())))
            return c, product.T if not swapped else product

        return lax.scan(body, jnp.zeros(()), None, length=2)[1]

    mixed = pp.auto_mixed(fn)
    low_and_near(mixed, fn, x, g)


@pytest.mark.release(keep=1)
@each_composition
def test_the_weight_gradient_of_a_scanned_layer_runs(compose: Any):
    x, ws = positive(8, 4, 64, 128), np.asarray(positive(9, 3, 128, 128)) / 128

    def loss(ws, x):
        def layer(h, w):
            return jnp.tanh(jnp.einsum("bsd,df->bsf", h, w)), None

        return lax.scan(layer, x, ws)[0].sum()

    low_and_near(compose(loss), jax.grad(loss), ws, x, least=3)


def test_the_cotangents_of_a_low_value_that_several_equations_read_add_up_in_float32():
    def fn(x: Any) -> Any:
        y = jnp.arctan(x)
        return (jnp.sin(y) * jnp.cos(y)).sum()

    traced = jax.make_jaxpr(jax.grad(pp.auto_mixed(fn, policy="AlwaysBf16")))(normal(8, 8))
    assert [eqn.outvars[0].aval.dtype for eqn in named(traced, "sin")] == [jnp.bfloat16] * 2
    assert {eqn.outvars[0].aval.dtype for eqn in named(traced, "add_any")} == {np.dtype("float32")}
