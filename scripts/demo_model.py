"""A byte-level transformer language model and its training step, written in plain float32.

Nothing here knows of mixed precision: the model is what a flax nnx user writes first.
"""

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

BYTES = 256


@dataclass(frozen=True)
class Shape:
    """The sizes of the model and of one batch."""

    layers: int = 4
    width: int = 384
    heads: int = 6
    length: int = 256
    batch: int = 4


class Block(nnx.Module):
    """One pre-norm transformer layer: causal attention, then a gelu MLP."""

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs) -> None:
        width = shape.width
        self.heads = shape.heads
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.attention_out = nnx.Linear(width, width, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def attention(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        q, k, v = jnp.split(self.qkv(x).reshape(batch, length, self.heads, -1), 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width // self.heads)
        causal = jnp.tril(jnp.ones((length, length), dtype=bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return self.attention_out(mixed.reshape(batch, length, width))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    """Learned positions, a rematerialised scan over the layers, the embedding tied to the head."""

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.normal(0.02)
        self.embedding = nnx.Param(normal(rngs.params(), (BYTES, shape.width)))
        self.positions = nnx.Param(normal(rngs.params(), (shape.length, shape.width)))

        @nnx.split_rngs(splits=shape.layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(shape, rngs=rngs)

        self.blocks = stack(rngs)
        self.norm = nnx.LayerNorm(shape.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        graphdef, stacked = nnx.split(self.blocks)

        @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        def layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
            # Nothing in float32, but without it the jmp row does not trace: scan refuses a
            # carry that goes in as bfloat16 and, promoted by np.sqrt, comes out as float32.
            return nnx.merge(graphdef, params)(x).astype(x.dtype), None

        x = self.embedding[tokens] + self.positions[: tokens.shape[1]]
        x, _ = jax.lax.scan(layer, x, stacked)
        return self.norm(x) @ self.embedding[...].T


def cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The mean negative log-likelihood of each byte after the first, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@dataclass(frozen=True)
class Task:
    """What every row of the demo shares: the first state, the losses and the step."""

    params: Any
    opt_state: Any
    logits: Callable[[Any, jax.Array], jax.Array]
    loss: Callable[[Any, jax.Array], jax.Array]
    train_step: Callable[..., Any]
    with_gradient: Callable[..., Callable[..., Any]]


def make_task(shape: Shape) -> Task:
    """Split the module once, so that the step is a pure function of arrays."""
    graphdef, params = nnx.split(Transformer(shape, rngs=nnx.Rngs(0)))
    optimizer = optax.adamw(optax.linear_schedule(0.0, 1e-3, 10), weight_decay=0.01)

    def logits(params: Any, tokens: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params)(tokens[:, :-1])

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return cross_entropy(logits(params, tokens), tokens)

    def with_gradient(loss_and_gradient: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(params: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, Any]:
            value, gradient = loss_and_gradient(params, tokens)
            updates, opt_state = optimizer.update(gradient, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        return train_step

    train_step = with_gradient(jax.value_and_grad(loss))
    return Task(params, optimizer.init(params), logits, loss, train_step, with_gradient)


def standard_library() -> np.ndarray:
    """The source of Python's own top-level modules, in the order of their names, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)


def batches(text: np.ndarray, shape: Shape, steps: int) -> np.ndarray:
    """Random windows of the text, the same for every row: `[steps, batch, length + 1]`."""
    starts = np.random.default_rng(0).integers(
        len(text) - shape.length - 1, size=(steps, shape.batch, 1)
    )
    return text[starts + np.arange(shape.length + 1)].astype(np.int32)
