"""A multilayer perceptron that sees one handwritten digit at a time."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from bench_models.model import BF16, F32, Model, Weights, adam, classified, digit_batches, low

WIDTHS = {
    "small": (64, 32, 10),
    "medium": (64, 1024, 1024, 1024, 10),
    "target": (64, 4096, 4096, 4096, 10),
    "large": (64, 8192, 8192, 8192, 10),
}


def forward(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
    """The logits."""
    x = batch["images"]
    for p in params[:-1]:
        x = jax.nn.relu(x @ p["w"] + p["b"])
    return x @ params[-1]["w"] + params[-1]["b"], state


def by_hand(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
    x = batch["images"].astype(BF16)
    *hidden, last = low(params)
    for p in hidden:
        x = jax.nn.relu(x @ p["w"] + p["b"])
    return (x @ last["w"]).astype(F32) + params[-1]["b"], state


def make(size: str) -> Model:
    widths, weights = WIDTHS[size], Weights()
    params = [
        {"w": weights(before, after), "b": jnp.zeros(after)} for before, after in pairwise(widths)
    ]
    return Model(
        name="mlp",
        params=params,
        state=(),
        batches=digit_batches(1),
        forward=forward,
        by_hand=by_hand,
        readout=classified,
        optimizer=adam(),
    )
