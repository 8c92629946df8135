"""A decoder transformer on bytes of source text, its layers scanned or unrolled."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from demo_model import BYTES, Shape, batches, standard_library
from jax import lax

from bench_models.model import BF16, F32, Model, Weights, cross_entropy, low

SHAPES = {
    "small": Shape(layers=2, width=32, heads=2, length=16, batch=2),
    "medium": Shape(layers=4, width=384, heads=6, length=256, batch=2),
    "target": Shape(layers=4, width=1024, heads=16, length=1024, batch=8),
    "large": Shape(layers=12, width=2048, heads=16, length=1024, batch=8),
}
STEPS = 32

# ---------------------------------------------------------------- plain


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred**2, axis=-1, keepdims=True)
    return centred * lax.rsqrt(variance + 1e-6) * scale + bias


def layer(x: jax.Array, p: dict[str, jax.Array], heads: int) -> jax.Array:
    """One pre-norm transformer layer: causal attention, then a gelu MLP."""
    batch, length, width = x.shape
    h = layer_norm(x, p["scale1"], p["bias1"])
    q, k, v = jnp.split((h @ p["qkv"]).reshape(batch, length, heads, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
    causal = jnp.tril(jnp.ones((length, length), dtype=bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    x = x + mixed.reshape(batch, length, width) @ p["out"]
    h = layer_norm(x, p["scale2"], p["bias2"])
    return x + jax.nn.gelu(h @ p["up"]) @ p["down"]


def forward(params: Any, state: Any, tokens: jax.Array, heads: int) -> tuple[jax.Array, Any]:
    """The logits of each byte after the first."""
    x = params["embedding"][tokens[:, :-1]] + params["positions"]
    x = through(partial(layer, heads=heads), x, params["layers"])
    x = layer_norm(x, params["scale"], params["bias"])
    return x @ params["embedding"].T, state


def through(layer: Callable[..., jax.Array], x: jax.Array, layers: Any) -> jax.Array:
    """All layers, rematerialised: a list of them in turn, stacked ones in a scan."""
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    layer = jax.checkpoint(layer, policy=policy)
    if isinstance(layers, list):
        for p in layers:
            x = layer(x, p)
        return x
    return lax.scan(lambda x, p: (layer(x, p), None), x, layers)[0]


# ---------------------------------------------------------------- by hand


def hand_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """The norm in float32 between bfloat16 activations."""
    return layer_norm(x.astype(F32), scale.astype(F32), bias.astype(F32)).astype(BF16)


def hand_layer(x: jax.Array, p: dict[str, jax.Array], heads: int) -> jax.Array:
    """Products from bfloat16 to bfloat16, so that those of the backward pass are low too."""
    batch, length, width = x.shape
    h = hand_norm(x, p["scale1"], p["bias1"])
    q, k, v = jnp.split((h @ p["qkv"]).reshape(batch, length, heads, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(F32) / (width // heads) ** 0.5
    causal = jnp.tril(jnp.ones((length, length), dtype=bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1).astype(BF16)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    x = x + mixed.reshape(batch, length, width) @ p["out"]
    h = hand_norm(x, p["scale2"], p["bias2"])
    return x + jax.nn.gelu(h @ p["up"]) @ p["down"]


def by_hand(params: Any, state: Any, tokens: jax.Array, heads: int) -> tuple[jax.Array, Any]:
    p = low(params)
    x = p["embedding"][tokens[:, :-1]] + p["positions"]
    x = through(partial(hand_layer, heads=heads), x, p["layers"])
    x = hand_norm(x, p["scale"], p["bias"])
    return (x @ p["embedding"].T).astype(F32), state


# ---------------------------------------------------------------- the models


def parameters(shape: Shape, stacked: bool) -> dict[str, Any]:
    weights, width = Weights(), shape.width
    ones, zeros = jnp.ones(width), jnp.zeros(width)

    def make_layer() -> dict[str, jax.Array]:
        return {
            "scale1": ones,
            "bias1": zeros,
            "qkv": weights(width, 3 * width),
            "out": weights(width, width),
            "scale2": ones,
            "bias2": zeros,
            "up": weights(width, 4 * width),
            "down": weights(4 * width, width),
        }

    layers = [make_layer() for _ in range(shape.layers)]
    return {
        "embedding": weights(BYTES, width, scale=0.02),
        "positions": weights(shape.length, width, scale=0.02),
        "layers": jax.tree.map(lambda *xs: jnp.stack(xs), *layers) if stacked else layers,
        "scale": ones,
        "bias": zeros,
    }


def make(name: str, shape: Shape, stacked: bool) -> Model:
    return Model(
        name=name,
        params=parameters(shape, stacked),
        state=(),
        batches=jnp.asarray(batches(standard_library(), shape, STEPS)),
        forward=partial(forward, heads=shape.heads),
        by_hand=partial(by_hand, heads=shape.heads),
        readout=lambda logits, tokens: cross_entropy(logits, tokens[:, 1:]),
        optimizer=optax.adamw(1e-3, weight_decay=0.01),
    )


def scanned(size: str) -> Model:
    return make("transformer", SHAPES[size], stacked=True)


def unrolled(size: str) -> Model:
    return make("unrolled", SHAPES[size], stacked=False)
