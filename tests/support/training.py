"""Whole training steps under a policy, and text to train on."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import precpass as pp
from tests.support.libraries import FAST, assert_float32, check_products


def assert_trains_alike(
    step: Callable[..., Any],
    state: Any,
    batches: Sequence[Any],
    *,
    policy: pp.types.PrecisionPolicy = pp.AutoMixedBf16,
    rtol: float = 0.02,
    falls: float = 0.8,
    least: int = 1,
) -> tuple[Any, Any]:
    """A whole training step under a policy learns what float32 learns.

    Every product of the step is low, its state keeps its tree and dtypes and is float32, it is
    traced once, and over the batches the losses fall and follow float32's.

    Args:
        step: `(state, batch) -> (state, loss)`.
        state: parameters, optimizer state and whatever else is handed on.
        batches: what to train on.
        policy: one with 16-bit products.
        rtol: how near each loss is to float32's.
        falls: the mean of the last five losses is below this part of the first one.
        least: the smallest number of low products.

    Returns:
        The last state, and that of float32.
    """
    traces: list[None] = []

    def counted(state: Any, batch: Any) -> Any:
        traces.append(None)
        return step(state, batch)

    mixed = pp.auto_mixed(counted, policy=policy, **FAST)
    check_products(mixed.trace(state, batches[0]).jaxpr, policy, least)
    last, losses = trained(mixed, state, batches)
    assert len(traces) == 1, f"traced {len(traces)} times"
    wanted_last, wanted = trained(jax.jit(step, **FAST), state, batches)
    assert np.mean(wanted[-5:]) < falls * wanted[0], f"float32 does not learn: {wanted}"
    np.testing.assert_allclose(losses, wanted, rtol=rtol)
    described = [
        [(np.shape(x), x.dtype) for x in jax.tree.leaves(tree)] for tree in (last, wanted_last)
    ]
    assert described[0] == described[1]
    assert_float32(last)
    return last, wanted_last


def trained(step: Callable[..., Any], state: Any, batches: Sequence[Any]) -> tuple[Any, Any]:
    losses: list[float] = []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(float(loss))
    return state, np.asarray(losses)


def text_batches(steps: int, rows: int, length: int) -> list[jax.Array]:
    """Windows of the source text of Python's `argparse` as characters below 128."""
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8) % 128
    rng = np.random.default_rng(0)
    starts = rng.integers(len(text) - length - 1, size=(steps, rows, 1))
    return [jnp.asarray(text[s + np.arange(length + 1)], jnp.int32) for s in starts]


def next_character_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The mean cross entropy of each next token, from the logits of all but the last."""
    return -jnp.mean(
        jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., 1:, None], axis=-1)
    )
