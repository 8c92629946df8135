"""What a lowered product keeps for the backward pass of a loop that is differentiated from outside.

XLA:CPU of jax 0.10 holds a stack of bfloat16 as float32, and converts the whole of it in every
trip: its time grows with the square of the number of trips, by hand as through the pass.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import precpass as pp
from precpass import jaxpr as ir
from tests.support.jaxprs import is_low, products
from tests.support.values import assert_near, normal_array

TRIPS, BATCH, WIDTH = 192, 4, 16
ARGS = normal_array(0, WIDTH, WIDTH) / 8, normal_array(1, TRIPS, BATCH, WIDTH) / 2
STACK = f"{TRIPS},{BATCH},{WIDTH}"


def rnn(w: Any, xs: Any) -> Any:
    h = jnp.zeros((BATCH, WIDTH))
    return lax.scan(lambda h, x: (jnp.tanh(h @ w + x),) * 2, h, xs)[1].sum()


def mixed(w: Any, xs: Any) -> Any:
    return pp.auto_mixed(rnn)(w, xs)


def under_remat(w: Any, xs: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        return (jnp.tanh(h @ w + x),) * 2

    h = jnp.zeros((BATCH, WIDTH))
    policy = jax.checkpoint_policies.dots_saveable
    fn = pp.auto_mixed(lambda xs: lax.scan(jax.checkpoint(step, policy=policy), h, xs)[1].sum())
    return fn(xs)


def whole_conversions(fn: Callable[..., Any]) -> list[str]:
    """The conversions of a whole stack to or from bfloat16 in the compiled program."""
    text = jax.jit(fn).lower(*ARGS).compile().as_text()
    of_a_stack = rf"(?:f32|bf16)\[{STACK}\]\S* convert\("
    return re.findall(of_a_stack, text)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("fn", [mixed, under_remat], ids=lambda fn: fn.__name__)
def test_no_trip_converts_a_whole_stack(fn: Callable[..., Any]):
    assert whole_conversions(jax.grad(fn)) == []


def test_the_backward_pass_reads_the_bits_where_a_stack_would_be_widened():
    text = str(jax.make_jaxpr(jax.grad(mixed))(*ARGS))
    assert (f"u16[{STACK}]" in text) == ir.WIDENS_STACKS
    # the product itself reads a bfloat16 operand either way
    assert f"bf16[{BATCH},{WIDTH}]" in text


DERIVATIVES: dict[str, Callable[[Any], Any]] = {
    "grad": jax.grad,
    "grad of grad": lambda f: jax.grad(lambda w, xs: (jax.grad(f)(w, xs) ** 2).sum()),
    "grad of jvp": lambda f: jax.grad(lambda w, xs: jax.jvp(f, (w, xs), (w, xs))[1]),
    "jvp of grad": lambda f: lambda w, xs: jax.jvp(jax.grad(f), (w, xs), (w, xs))[1],
    "grad of vmap": lambda f: jax.grad(
        lambda w, xs: jax.vmap(f, (0, None))(jnp.stack([w] * 3), xs).sum()
    ),
    "vmap of grad": lambda f: (
        lambda w, xs: jax.vmap(jax.grad(f), (None, 0))(w, jnp.stack([xs, xs / 2], 0))
    ),
    "grad of vmap within the trips": lambda f: jax.grad(
        lambda w, xs: jax.vmap(f, (None, 1), 0)(w, jnp.stack([xs, xs / 2], 1)).sum()
    ),
}


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_are_near(name: str):
    of = DERIVATIVES[name]
    assert_near(*jax.jit(lambda *args: (of(mixed)(*args), of(rnn)(*args)))(*ARGS), 0.03)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize(
    "low",
    [jax.grad(mixed), pp.auto_mixed(jax.grad(rnn))],
    ids=["grad of mixed", "mixed grad"],
)
def test_products_are_wide_again_under_always_f32(low: Callable[..., Any]):
    """What crossed a border as 16 bits has lost its digits there, and stays as it is."""
    jaxpr = jax.make_jaxpr(low)(*ARGS)
    assert "u16" in str(jaxpr) or not ir.WIDENS_STACKS
    found = pp.inspect(jaxpr_as_fun(jaxpr), "AlwaysF32")(*ARGS)
    assert "precpass" not in str(found.after)
    assert not any(map(is_low, products(found.after)))
    again = jaxpr_as_fun(found.after)
    assert_near(*jax.jit(lambda *args: (again(*args)[0], jax.grad(rnn)(*args)))(*ARGS))


# ---------------------------------------------------------------- branches in loops

SQUARE, ROW = normal_array(2, WIDTH, WIDTH) / 4, normal_array(3, BATCH, WIDTH)


def looped(body: Callable[..., Any]) -> Callable[..., Any]:
    def fn(w: Any, x: Any) -> Any:
        def step(c: Any, i: Any) -> Any:
            # what a trip makes is soon forgotten, and its rounding with it
            return 0.5 * body(c, i, w) + x, None

        return lax.scan(step, x, jnp.arange(TRIPS))[0].sum()

    return fn


BRANCHES: dict[str, Callable[..., Any]] = {
    "cond": lambda c, i, w: lax.cond(i % 2 == 0, lambda c: jnp.tanh(c @ w), lambda c: c, c),
    "cond with an operand": lambda c, i, w: lax.cond(
        i % 2 == 0, lambda c, w: jnp.tanh(c @ w), lambda c, w: c, c, w
    ),
    "switch": lambda c, i, w: lax.switch(
        i % 3, [lambda c: jnp.tanh(c @ w), lambda c: c, lambda c: jnp.arctan(c @ w.T)], c
    ),
    "transposed": lambda c, i, w: lax.cond(
        i % 2 == 0, lambda c: jnp.tanh((w @ c.T).T), lambda c: c, c
    ),
    "in a jit": lambda c, i, w: jax.jit(
        lambda c: lax.cond(i % 2 == 0, lambda c: jnp.tanh(c @ w), lambda c: c, c)
    )(c),
    "under vmap": lambda c, i, w: jax.vmap(
        lambda r: lax.cond(i % 2 == 0, lambda r: jnp.tanh(r @ w), lambda r: r, r)
    )(c),
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", BRANCHES)
def test_no_copy_of_a_loops_constant_is_kept_for_each_trip(name: str):
    """In a branch JAX cannot see that the low copy is a constant of the loop around it."""
    fn = looped(BRANCHES[name])
    jaxpr = jax.make_jaxpr(jax.grad(pp.auto_mixed(fn), (0, 1)))(SQUARE, ROW)
    stacks = re.findall(rf"(?:bf16|u16)\[{TRIPS},{WIDTH},{WIDTH}\]", str(jaxpr))
    assert not stacks
    assert any(map(is_low, products(jaxpr)))


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("of", ["grad", "grad of jvp", "jvp of grad"])
def test_such_derivatives_are_near(name: str, of: str):
    fn, derivative = looped(BRANCHES[name]), DERIVATIVES[of]
    low = derivative(pp.auto_mixed(fn))
    assert_near(*jax.jit(lambda *args: (low(*args), derivative(fn)(*args)))(SQUARE, ROW), 0.03)


def test_what_a_trip_makes_is_kept_low():
    """That of a branch too: only what is there anyway is cast again."""

    def body(c: Any, i: Any, w: Any) -> Any:
        return lax.cond(i % 2 == 0, lambda c: jnp.tanh(jnp.sin(c) @ w), lambda c: c, c)

    jaxpr = str(jax.make_jaxpr(jax.grad(pp.auto_mixed(looped(body))))(SQUARE, ROW))
    assert re.search(rf"(?:bf16|u16)\[{STACK}\]", jaxpr)
