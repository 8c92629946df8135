"""A decoder of flax and a graph network of jraph, whose code nobody here wrote.

By hand the decoder has flax's own `dtype` option. jraph has none, so its parameters and features
are cast, as its documentation advises.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench_models.model import BF16, F32, Model, Weights, adam, cross_entropy, low

TOKENS = {
    "small": (2, 16, 32, 2),
    "medium": (2, 128, 256, 4),
    "target": (8, 1024, 1024, 16),
}
"""The sequences of a batch, their length, the width and the heads."""
GRAPHS = {
    "small": (16, 48, 16),
    "medium": (512, 2048, 64),
    "target": (32768, 262144, 256),
}
"""The nodes, the edges and the width of their features."""
LAYERS, BYTES, STEPS, ROUNDS = 4, 256, 4, 3


def token_batches(size: str) -> jax.Array:
    count, length, *_ = TOKENS[size]
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(BYTES, size=(STEPS, count, length + 1)), jnp.int32)


def of_tokens(outputs: jax.Array, tokens: jax.Array) -> jax.Array:
    return cross_entropy(outputs, tokens[:, 1:])


def flax_decoder(size: str) -> Model:
    """A decoder of flax's layers; by hand by their `dtype=bfloat16`."""
    from flax import linen as nn

    _, length, width, heads = TOKENS[size]

    class Decoder(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = nn.Embed(BYTES, width, dtype=self.dtype)(tokens)
            mask = nn.make_causal_mask(tokens)
            for _ in range(LAYERS):
                h = nn.LayerNorm(dtype=self.dtype)(x)
                x = x + nn.MultiHeadDotProductAttention(heads, dtype=self.dtype)(h, mask=mask)
                h = nn.Dense(4 * width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
                x = x + nn.Dense(width, dtype=self.dtype)(nn.gelu(h))
            x = nn.LayerNorm(dtype=self.dtype)(x)
            return nn.Dense(BYTES, dtype=self.dtype)(x).astype(F32)

    def forward(dtype: Any, params: Any, state: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        return Decoder(dtype).apply(params, tokens[:, :-1]), state

    params = jax.jit(Decoder(F32).init)(jax.random.key(0), jnp.zeros((1, length), jnp.int32))
    passes = partial(forward, F32), partial(forward, BF16)
    return Model("flax-decoder", params, (), token_batches(size), *passes, of_tokens, adam())


def graph_network(size: str) -> Model:
    """Three rounds of jraph's `GraphNetwork`; by hand parameters and features are cast."""
    import jraph

    nodes, edges, width = GRAPHS[size]
    weights = Weights()
    params = [
        {
            "edge": (weights(3 * width, width), weights(width, width)),
            "node": (weights(3 * width, width), weights(width, width)),
        }
        for _ in range(ROUNDS)
    ]

    def mlp(p: Any, *features: jax.Array) -> jax.Array:
        first, second = p
        return jax.nn.relu(jnp.concatenate(features, axis=-1) @ first) @ second

    def forward(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
        graph = jraph.GraphsTuple(
            nodes=batch["nodes"],
            edges=batch["edges"],
            senders=batch["senders"],
            receivers=batch["receivers"],
            globals=None,
            n_node=jnp.asarray([nodes]),
            n_edge=jnp.asarray([edges]),
        )
        for p in params:
            step = jraph.GraphNetwork(
                lambda edge, sent, received, _, p=p: mlp(p["edge"], edge, sent, received),
                lambda node, sent, received, _, p=p: node + mlp(p["node"], node, sent, received),
            )
            graph = step(graph)
        return graph.nodes, state

    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> jax.Array:
        numbers = rng.standard_normal((1, *shape), np.float32)
        return jnp.asarray(np.broadcast_to(numbers, (STEPS, *shape)))

    def ends() -> jax.Array:
        return jnp.asarray(rng.integers(nodes, size=(STEPS, edges)), jnp.int32)

    batches = {
        "nodes": drawn(nodes, width),
        "edges": drawn(edges, width),
        "senders": ends(),
        "receivers": ends(),
        "wanted": drawn(nodes, width),
    }

    def by_hand(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        outputs, state = forward(low(params), state, low(batch))
        return outputs.astype(F32), state

    def mean_square(outputs: jax.Array, batch: Any) -> jax.Array:
        return jnp.mean((outputs - batch["wanted"]) ** 2)

    return Model("jraph", params, (), batches, forward, by_hand, mean_square, adam())
