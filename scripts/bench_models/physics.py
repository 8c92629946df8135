"""Identifying a linear system: small matrices in a batch, integrated in a while loop.

`dX/dt = A X` with `A = sum_i theta_i B_i`, and the parameters theta sought that lead to the states
which were observed. They are few, and a while loop has no reverse mode: the gradient is forward.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench_models.model import BF16, F32, Loss, Model, adam


class Shape(NamedTuple):
    """Systems, the rows and columns of each state, and the time steps of one integration."""

    systems: int
    side: int
    steps: int


SHAPES = {
    "small": Shape(systems=3, side=4, steps=4),
    "medium": Shape(systems=128, side=32, steps=40),
    "target": Shape(systems=4096, side=64, steps=50),
    "large": Shape(systems=4096, side=64, steps=200),
}
TERMS, HORIZON = 4, 1.0
THETA = np.asarray([1.0, -0.5, 0.3, 0.8], np.float32)


def integrated(
    derivative: Callable[[jax.Array], jax.Array], x: jax.Array, dt: jax.Array
) -> jax.Array:
    """The state at the horizon, by the classical Runge-Kutta method."""

    def step(carry: Any) -> Any:
        t, x = carry
        k1 = derivative(x)
        k2 = derivative(x + 0.5 * dt * k1)
        k3 = derivative(x + 0.5 * dt * k2)
        k4 = derivative(x + dt * k3)
        return t + dt, (x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)).astype(x.dtype)

    return lax.while_loop(lambda carry: carry[0] < HORIZON - 0.5 * dt, step, (0.0 * dt, x))[1]


def forward(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
    """The states at the horizon."""
    a = jnp.einsum("i,ibnm->bnm", params["theta"], batch["terms"])
    return integrated(lambda x: a @ x, batch["start"], batch["dt"]), state


def by_hand(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
    """The matrices cast once; the state, which accumulates, in float32."""
    a = jnp.einsum("i,ibnm->bnm", params["theta"], batch["terms"]).astype(BF16)

    def derivative(x: jax.Array) -> jax.Array:
        return jnp.matmul(a, x.astype(BF16), preferred_element_type=F32)

    return integrated(derivative, batch["start"], batch["dt"]), state


def readout(outputs: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean((outputs.astype(F32) - batch["observed"]) ** 2)


def forward_mode(loss: Loss) -> Callable[..., Any]:
    """`((loss, state), gradient)` from one tangent for each parameter."""

    def both(params: Any, state: Any, batch: Any) -> Any:
        value, state = loss(params, state, batch)
        return value, (value, state)

    def value_and_gradient(params: Any, state: Any, batch: Any) -> Any:
        gradient, aux = jax.jacfwd(both, has_aux=True)(params, state, batch)
        return aux, gradient

    return value_and_gradient


def make(size: str) -> Model:
    shape, rng = SHAPES[size], np.random.default_rng(0)
    square = (shape.systems, shape.side, shape.side)
    batch = {
        "terms": jnp.asarray(rng.standard_normal((TERMS, *square)) / shape.side**0.5, F32),
        "start": jnp.asarray(rng.standard_normal(square), F32),
        "dt": jnp.asarray(HORIZON / shape.steps, F32),
    }
    batch["observed"] = jax.jit(forward)({"theta": jnp.asarray(THETA)}, (), batch)[0]
    return Model(
        name="physics",
        params={"theta": jnp.full((TERMS,), 0.5)},
        state=(),
        batches=jax.tree.map(lambda x: x[None], batch),
        forward=forward,
        by_hand=by_hand,
        readout=readout,
        optimizer=adam(),
        differentiate=forward_mode,
    )
