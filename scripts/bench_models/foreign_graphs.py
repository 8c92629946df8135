"""A graph network of jraph and a neural ODE of diffrax, which nobody here wrote."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench_models.foreign import STEPS, cast_model
from bench_models.model import Model, Weights, adam

GRAPHS = {
    "small": (16, 48, 16),
    "medium": (512, 2048, 64),
    "target": (32768, 262144, 256),
    "large": (131072, 1048576, 256),
}
"""The nodes, the edges and the width of their features."""
SYSTEMS = {
    "small": (4, 8, 16),
    "medium": (64, 32, 128),
    "target": (4096, 64, 1024),
    "large": (16384, 128, 2048),
}
"""The systems, the size of their states, and the width of the network."""
ROUNDS, ODE_STEPS = 3, 16


def mean_square(outputs: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean((outputs - batch["wanted"]) ** 2)


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
    passes = forward, cast_model(forward)
    return Model("jraph", params, (), batches, *passes, mean_square, adam())


def neural_ode(size: str) -> Model:
    """diffrax's Tsit5 in fixed steps; by hand the network is cast, and the state is float32."""
    import diffrax

    systems, state_size, width = SYSTEMS[size]
    weights = Weights()
    params = [weights(state_size, width), weights(width, width), weights(width, state_size)]

    def solved(params: Any, start: jax.Array, dtype: Any) -> jax.Array:
        def field(_t: Any, y: jax.Array, params: Any) -> jax.Array:
            first, second, third = (p.astype(dtype) for p in params)
            h = jnp.tanh(jnp.tanh(y.astype(dtype) @ first) @ second)
            return (h @ third).astype(y.dtype)

        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Tsit5(),
            t0=0.0,
            t1=1.0,
            dt0=1 / ODE_STEPS,
            y0=start,
            args=params,
            max_steps=ODE_STEPS,
            throw=False,  # an error is thrown by a callback, which a target has no host for
        )
        assert solution.ys is not None
        return solution.ys[-1]

    def forward(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
        return solved(params, batch["start"], jnp.float32), state

    def by_hand(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
        return solved(params, batch["start"], jnp.bfloat16), state

    rng = np.random.default_rng(0)
    shape = (STEPS, systems, state_size)
    start, wanted = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2))
    batches = {"start": start, "wanted": wanted}
    return Model("neural-ode", params, (), batches, forward, by_hand, mean_square, adam())
