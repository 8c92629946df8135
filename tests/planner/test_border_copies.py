"""Where a low copy of a value crosses a loop's border beside it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import precpass as pp
from precpass.planner.planner import make_plan
from tests.support.values import f32


def crossing(fn: Any, *args: Any) -> list[bool]:
    """For each operand that crosses into a loop's body in 16 bits, whether it is rounded there."""
    plan = make_plan(jax.make_jaxpr(fn)(*args), pp.AutoMixedBf16)
    return [
        border_copy.rounds
        for decision in plan.walk()
        for inner in decision.inner
        for border_copy in inner.border_copies.operands
    ]


X, W, WS = f32(64, 64), f32(64, 64), f32(8, 64, 64)


def test_a_loops_constant_is_cast_once_before_it():
    assert crossing(lambda x, w: lax.fori_loop(0, 8, lambda _, c: jnp.sin(c @ w), x), X, W) == [
        False
    ]


def test_a_constant_that_the_loop_changes_first_is_cast_for_free():
    def fn(x: Any, w: Any) -> Any:
        return lax.fori_loop(0, 8, lambda _, c: jnp.sin(c @ (w + 1)), x)

    assert crossing(fn, X, W) == []


def test_a_stack_that_a_loop_slices_once_is_cast_slice_by_slice():
    def fn(x: Any, ws: Any) -> Any:
        return lax.scan(lambda c, w: (jnp.sin(c @ w), None), x, ws)[0]

    assert crossing(fn, X, WS) == []


def test_a_stack_that_a_loop_slices_in_a_loop_is_cast_once():
    def fn(x: Any, ws: Any) -> Any:
        def again(c: Any, _: Any) -> Any:
            return lax.scan(lambda c, w: (jnp.sin(c @ w), None), c, ws)[0], None

        return lax.scan(again, x, None, length=4)[0]

    assert crossing(fn, X, WS) == [False, False]


def test_a_call_takes_no_copy_that_saves_no_cast():
    assert crossing(lambda x, w: jax.jit(lambda x: jnp.sin(x @ w))(x), X, W) == []


def test_a_state_takes_no_copy_that_the_loop_would_make_in_every_trip():
    def fn(x: Any, w: Any) -> Any:
        return lax.fori_loop(0, 8, lambda _, c: jnp.sin(c @ w) + c, x)

    assert crossing(fn, X, W) == [False]  # the weight's


def test_a_weight_that_the_backward_pass_slices_too_is_cast_slice_by_slice():
    def loss(ws: Any, x: Any) -> Any:
        return lax.scan(lambda c, w: (jnp.sin(c @ w), None), x, ws)[0].sum()

    found = crossing(jax.grad(loss), WS, X)
    assert found and all(found)  # what the forward pass stacks, which is rounded
