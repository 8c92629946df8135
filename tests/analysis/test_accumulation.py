"""Which equations of a loop's body add to what the loop carries, also inside of calls."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from precpass import jaxpr as ir
from precpass.analysis.accumulation import Additive

X = jnp.ones(4)


def adding(step: Callable[[Any, jax.Array], Any], states: Any) -> list[str]:
    """The primitives of a loop that add to what it carries, those in calls in its body included."""
    (loop,) = jax.make_jaxpr(lambda s, x: lax.scan(step, s, x))(states, X[None]).eqns
    (body,) = ir.bodies(loop)
    additive, found = Additive(), list[str]()
    todo = [(body.jaxpr, additive.cyclic(body))]
    while todo:
        jaxpr, feedback = todo.pop()
        for at, inside in additive.accumulating(jaxpr, feedback).items():
            eqn = ir.open_jaxpr(jaxpr).eqns[at]
            inner = ir.bodies(eqn)
            found += [] if inner else [eqn.primitive.name]
            todo += zip((b.jaxpr for b in inner), inside, strict=True)
    return sorted(found)


@pytest.mark.parametrize("call", [jax.jit, jax.checkpoint])
def test_what_a_call_hands_to_no_state_adds_to_nothing(call: Callable[..., Any]):
    def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        # The product is computed from the state, but only stacked.
        return call(lambda s, x: (s + x, x * jnp.sum(s)))(state, x)

    assert adding(step, X) == ["add"]


@pytest.mark.parametrize("call", [jax.jit, jax.checkpoint])
def test_states_that_add_up_through_each_other_in_calls_are_found(call: Callable[..., Any]):
    def step(states: tuple[jax.Array, ...], x: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        return call(lambda a, b: (b, 0.9 * a + x))(*states), None

    assert adding(step, (X, X)) == ["add", "mul"]


def test_a_loop_in_a_loop_may_add_to_all_that_it_carries():
    def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return lax.fori_loop(0, 3, lambda _, s: 0.9 * s + x, state), None

    assert {"add", "mul"} <= set(adding(step, X))
