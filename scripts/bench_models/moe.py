"""A mixture of experts on handwritten digits: each digit goes to one expert, by `ragged_dot`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from bench_models.model import BF16, F32, Model, Weights, adam, classified, digit_batches, low


class Shape(NamedTuple):
    """Layers, the residual stream's width, that of the experts, their number, and images."""

    layers: int
    width: int
    hidden: int
    experts: int
    batch: int


SHAPES = {
    "small": Shape(layers=1, width=16, hidden=32, experts=4, batch=8),
    "medium": Shape(layers=2, width=256, hidden=512, experts=8, batch=512),
    "target": Shape(layers=2, width=1024, hidden=4096, experts=8, batch=8192),
    "large": Shape(layers=8, width=1024, hidden=4096, experts=16, batch=8192),
}


def routed(gates: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The order that puts tokens of one expert together, its sizes, and the chosen gates."""
    chosen = jnp.argmax(gates, axis=-1)
    sizes = jnp.bincount(chosen, length=gates.shape[-1]).astype(jnp.int32)
    return jnp.argsort(chosen), sizes, jnp.max(gates, axis=-1, keepdims=True)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def forward(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
    """The logits of each digit."""
    x = batch["images"] @ params["embedding"]
    for p in params["layers"]:
        h = rms_norm(x, p["scale"])
        order, sizes, gate = routed(jax.nn.softmax(h @ p["router"], axis=-1))
        hidden = jax.nn.relu(lax.ragged_dot(h[order], p["up"], sizes))
        y = lax.ragged_dot(hidden, p["down"], sizes)
        x = x + gate * y[jnp.argsort(order)]
    return x @ params["head"], state


def by_hand(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
    """The router wholly in float32: a rounded gate may choose another expert."""
    weights = low(params)
    x = batch["images"].astype(BF16) @ weights["embedding"]
    for p, w in zip(params["layers"], weights["layers"], strict=True):
        h = rms_norm(x.astype(F32), p["scale"])
        order, sizes, gate = routed(jax.nn.softmax(h @ p["router"], axis=-1))
        hidden = jax.nn.relu(lax.ragged_dot(h.astype(BF16)[order], w["up"], sizes))
        y = lax.ragged_dot(hidden, w["down"], sizes)
        x = x + gate.astype(BF16) * y[jnp.argsort(order)]
    return (x @ weights["head"]).astype(F32), state


def make(size: str) -> Model:
    shape, weights = SHAPES[size], Weights()

    def layer() -> dict[str, jax.Array]:
        return {
            "scale": jnp.ones(shape.width),
            "router": weights(shape.width, shape.experts),
            "up": weights(shape.experts, shape.width, shape.hidden),
            "down": weights(shape.experts, shape.hidden, shape.width),
        }

    params = {
        "embedding": weights(64, shape.width),
        "layers": [layer() for _ in range(shape.layers)],
        "head": weights(shape.width, 10),
    }
    return Model(
        name="moe",
        params=params,
        state=(),
        batches=digit_batches(shape.batch),
        forward=forward,
        by_hand=by_hand,
        readout=classified,
        optimizer=adam(),
    )
