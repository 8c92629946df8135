"""An LSTM on bytes of source text, scanned over time."""

from typing import Any

import jax
import jax.numpy as jnp
from demo_model import BYTES, Shape, batches, standard_library
from jax import lax

from bench_models.model import BF16, F32, Model, Weights, adam, cross_entropy, low

SHAPES = {
    "small": Shape(width=16, length=8, batch=2),
    "medium": Shape(width=256, length=64, batch=32),
    "target": Shape(width=1024, length=64, batch=128),
    "large": Shape(width=1024, length=256, batch=256),
}


def forward(params: Any, state: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
    """The logits of each byte after the first."""

    def cell(carry: Any, x: jax.Array) -> Any:
        h, c = carry
        gates = x @ params["wx"] + h @ params["wh"] + params["bias"]
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    xs = params["embedding"][tokens[:, :-1]].swapaxes(0, 1)
    zeros = jnp.zeros((len(tokens), params["wh"].shape[0]))
    _, hs = lax.scan(cell, (zeros, zeros), xs)
    return hs @ params["head"], state


def by_hand(params: Any, state: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
    """The cell's state and its gates in float32; what products read in bfloat16."""
    p = low(params)

    def cell(carry: Any, x: jax.Array) -> Any:
        h, c = carry
        gates = (x @ p["wx"]).astype(F32) + (h @ p["wh"]).astype(F32) + params["bias"]
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = (jax.nn.sigmoid(o) * jnp.tanh(c)).astype(BF16)
        return (h, c), h

    xs = p["embedding"][tokens[:, :-1]].swapaxes(0, 1)
    zeros = jnp.zeros((len(tokens), p["wh"].shape[0]))
    _, hs = lax.scan(cell, (zeros.astype(BF16), zeros), xs)
    return (hs @ p["head"]).astype(F32), state


def make(size: str) -> Model:
    shape, weights = SHAPES[size], Weights()
    width = shape.width
    params = {
        "embedding": weights(BYTES, width, scale=1.0),
        "wx": weights(width, 4 * width),
        "wh": weights(width, 4 * width),
        "bias": jnp.zeros(4 * width),
        "head": weights(width, BYTES),
    }
    return Model(
        name="lstm",
        params=params,
        state=(),
        batches=jnp.asarray(batches(standard_library(), shape, 32)),
        forward=forward,
        by_hand=by_hand,
        readout=lambda logits, tokens: cross_entropy(logits, tokens[:, 1:].T),
        optimizer=adam(),
    )
