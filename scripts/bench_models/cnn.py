"""A residual network with BatchNorm on handwritten digits."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from bench_models.model import BF16, F32, Model, Weights, classified, digit_batches, low


class Shape(NamedTuple):
    """Channels after the stem, which double once per stage of two blocks, and images."""

    channels: int
    stages: int
    batch: int


SHAPES = {
    "small": Shape(channels=4, stages=1, batch=4),
    "medium": Shape(channels=32, stages=2, batch=128),
    "target": Shape(channels=64, stages=3, batch=512),
    "large": Shape(channels=128, stages=3, batch=1024),
}
MOMENTUM = 0.9


def conv(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
    axes = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=axes)


def blocks(params: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Each block's name, its parameters and its stride: what has a shortcut changes the size."""
    for name, p in params["blocks"].items():
        yield name, p, 2 if "shortcut" in p else 1


# ---------------------------------------------------------------- plain


def batch_norm(x: jax.Array, p: Any, running: Any) -> tuple[jax.Array, Any]:
    """Normalised by the statistics of the batch; the running ones are for later inference."""
    mean = jnp.mean(x, axis=(0, 1, 2))
    variance = jnp.var(x, axis=(0, 1, 2))
    new = {"mean": mean, "variance": variance}
    running = jax.tree.map(lambda a, b: MOMENTUM * a + (1 - MOMENTUM) * b, running, new)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"], running


def forward(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
    """The logits, and the running statistics."""
    found: dict[str, Any] = {}
    x = conv(batch["images"].reshape(-1, 8, 8, 1), params["stem"])
    x, found["stem"] = batch_norm(x, params["stem_norm"], state["stem"])
    x = jax.nn.relu(x)
    for name, p, stride in blocks(params):
        y, first = batch_norm(conv(x, p["conv1"], stride), p["norm1"], state[name][0])
        y, second = batch_norm(conv(jax.nn.relu(y), p["conv2"]), p["norm2"], state[name][1])
        found[name] = (first, second)
        shortcut = conv(x, p["shortcut"], stride) if "shortcut" in p else x
        x = jax.nn.relu(y + shortcut)
    x = jnp.mean(x, axis=(1, 2))
    return x @ params["head"] + params["head_bias"], found


# ---------------------------------------------------------------- by hand


def hand_norm(x: jax.Array, p: Any, running: Any) -> tuple[jax.Array, Any]:
    """Statistics and normalisation in float32, with the float32 scale and bias."""
    y, running = batch_norm(x.astype(F32), p, running)
    return y.astype(BF16), running


def by_hand(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
    found: dict[str, Any] = {}
    weights = low(params)
    x = conv(batch["images"].reshape(-1, 8, 8, 1).astype(BF16), weights["stem"])
    x, found["stem"] = hand_norm(x, params["stem_norm"], state["stem"])
    x = jax.nn.relu(x)
    for name, p, stride in blocks(params):
        w = weights["blocks"][name]
        y, first = hand_norm(conv(x, w["conv1"], stride), p["norm1"], state[name][0])
        y, second = hand_norm(conv(jax.nn.relu(y), w["conv2"]), p["norm2"], state[name][1])
        found[name] = (first, second)
        shortcut = conv(x, w["shortcut"], stride) if "shortcut" in p else x
        x = jax.nn.relu(y + shortcut)
    x = jnp.mean(x.astype(F32), axis=(1, 2)).astype(BF16)
    return (x @ weights["head"]).astype(F32) + params["head_bias"], found


# ---------------------------------------------------------------- the model


def make(size: str) -> Model:
    shape, weights = SHAPES[size], Weights()

    def kernel(side: int, before: int, after: int) -> jax.Array:
        return weights(side, side, before, after, scale=(2 / (side * side * before)) ** 0.5)

    def norm(channels: int) -> dict[str, jax.Array]:
        return {"scale": jnp.ones(channels), "bias": jnp.zeros(channels)}

    def running(channels: int) -> dict[str, jax.Array]:
        return {"mean": jnp.zeros(channels), "variance": jnp.ones(channels)}

    channels = shape.channels
    params: dict[str, Any] = {
        "stem": kernel(3, 1, channels),
        "stem_norm": norm(channels),
        "blocks": {},
    }
    state: dict[str, Any] = {"stem": running(channels)}
    for stage in range(shape.stages):
        for block in range(2):
            before, name = channels, f"stage{stage}_block{block}"
            if stage and not block:
                channels *= 2
            params["blocks"][name] = {
                "conv1": kernel(3, before, channels),
                "norm1": norm(channels),
                "conv2": kernel(3, channels, channels),
                "norm2": norm(channels),
            }
            if before != channels:
                params["blocks"][name]["shortcut"] = kernel(1, before, channels)
            state[name] = (running(channels), running(channels))
    params |= {"head": weights(channels, 10), "head_bias": jnp.zeros(10)}
    return Model(
        name="cnn",
        params=params,
        state=state,
        batches=digit_batches(shape.batch),
        forward=forward,
        by_hand=by_hand,
        readout=classified,
        optimizer=optax.sgd(0.05, momentum=0.9),
    )
