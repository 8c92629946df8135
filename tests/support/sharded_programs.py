"""Training programs over a mesh of devices, as the field writes them.

Each is a loss of parameters and data, with the sharding of both. They take any even number of
devices, also devices that are only compiled for.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

P = PartitionSpec
LAYERS = 3


@dataclasses.dataclass(frozen=True)
class Sharded:
    """A loss over a mesh.

    Attributes:
        mesh: the devices.
        loss: of parameters and data.
        params: shape and partition of each parameter, by name.
        data: shape and partition of the data.
        memory: the kind of memory that the parameters are in.
    """

    mesh: Any
    loss: Callable[..., Any]
    params: dict[str, tuple[tuple[int, ...], Any]]
    data: tuple[tuple[int, ...], Any]
    memory: str | None = None

    def arguments(self, make: Callable[..., Any]) -> tuple[Any, Any]:
        """Parameters and data, each made of a seed, a shape and a sharding."""
        params = {
            name: make(seed, shape, NamedSharding(self.mesh, spec, memory_kind=self.memory))
            for seed, (name, (shape, spec)) in enumerate(self.params.items(), 1)
        }
        return params, make(0, self.data[0], NamedSharding(self.mesh, self.data[1]))

    def in_force(self) -> Any:
        """The context in which the program is traced: explicit axes need their mesh set."""
        is_explicit = AxisType.Explicit in self.mesh.axis_types
        return jax.set_mesh(self.mesh) if is_explicit else nullcontext()


def value(seed: int, shape: tuple[int, ...], sharding: Any) -> jax.Array:
    """Normal numbers, of parameters with a variance of one over their rows, on the devices."""
    numbers = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return jax.device_put(numbers / np.sqrt(shape[-2] if seed else 1).astype(np.float32), sharding)


def abstract(_: int, shape: tuple[int, ...], sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def meshed(devices: Sequence[Any], *axes: str, kind: AxisType = AxisType.Auto) -> Mesh:
    """One axis over all devices, or two, the first of two devices."""
    sizes = (len(devices),) if len(axes) == 1 else (2, len(devices) // 2)
    return Mesh(np.asarray(devices).reshape(sizes), axes, axis_types=(kind,) * len(axes))


def normalised(x: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


def block(w: Any, v: Any, x: Any) -> Any:
    return x + jax.nn.gelu(normalised(x) @ w) @ v


def stack(width: int, up: Any, down: Any) -> dict[str, Any]:
    """The weights of `LAYERS` blocks, stacked."""
    wide = 2 * width
    return {"w": ((LAYERS, width, wide), up), "v": ((LAYERS, wide, width), down)}


def blocks(params: Any, x: Any, weight: Callable[[Any], Any] = lambda w: w) -> Any:
    """A scan over blocks that are computed again in the backward pass."""

    @jax.checkpoint
    def layer(x: Any, layer: Any) -> Any:
        return block(weight(layer["w"]), weight(layer["v"]), x), None

    return jnp.square(lax.scan(layer, x, params)[0]).mean()


# ---------------------------------------------------------------- partitioned by the compiler


def data_parallel(devices: Sequence[Any], width: int) -> Sharded:
    mesh = meshed(devices, "data")
    return Sharded(mesh, blocks, stack(width, P(), P()), ((32, width), P("data")))


def fsdp_arguments(devices: Sequence[Any], width: int) -> Sharded:
    mesh = meshed(devices, "data")
    params = stack(width, P(None, "data"), P(None, "data"))
    return Sharded(mesh, blocks, params, ((32, width), P("data")))


def fsdp_constraint(devices: Sequence[Any], width: int) -> Sharded:
    """Each layer's weights are gathered where they are read, without a loop."""
    mesh = meshed(devices, "data")

    def loss(params: Any, x: Any) -> Any:
        def whole(w: Any) -> Any:
            return lax.with_sharding_constraint(w, NamedSharding(mesh, P()))

        for i in range(LAYERS):
            x = block(whole(params["w"][i]), whole(params["v"][i]), x)
        return jnp.square(x).mean()

    params = stack(width, P(None, "data"), P(None, "data"))
    return Sharded(mesh, loss, params, ((32, width), P("data")))


def fsdp_reshard(devices: Sequence[Any], width: int) -> Sharded:
    mesh = meshed(devices, "data", kind=AxisType.Explicit)

    def loss(params: Any, x: Any) -> Any:
        return blocks(params, x, lambda w: jax.sharding.reshard(w, P()))

    params = stack(width, P(None, "data"), P(None, "data"))
    return Sharded(mesh, loss, params, ((32, width), P("data")))


def tensor_parallel(devices: Sequence[Any], width: int) -> Sharded:
    mesh = meshed(devices, "data", "model")

    def loss(params: Any, x: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any, layer: Any) -> Any:
            h = normalised(x) @ layer["w"]
            h = lax.with_sharding_constraint(h, NamedSharding(mesh, P("data", "model")))
            out = jax.nn.gelu(h) @ layer["v"]
            return x + lax.with_sharding_constraint(out, NamedSharding(mesh, P("data"))), None

        return jnp.square(lax.scan(layer, x, params)[0]).mean()

    params = stack(width, P(None, None, "model"), P(None, "model"))
    return Sharded(mesh, loss, params, ((32, width), P("data")))


def tensor_parallel_explicit(devices: Sequence[Any], width: int) -> Sharded:
    mesh = meshed(devices, "data", "model", kind=AxisType.Explicit)

    def loss(params: Any, x: Any) -> Any:
        def layer(x: Any, layer: Any) -> Any:
            h = jax.nn.gelu(normalised(x) @ layer["w"])
            return x + jnp.dot(h, layer["v"], out_sharding=P("data", None)), None

        return jnp.square(lax.scan(layer, x, params)[0]).mean()

    params = stack(width, P(None, None, "model"), P(None, "model"))
    return Sharded(mesh, loss, params, ((32, width), P("data", None)))


def sequence_parallel(devices: Sequence[Any], width: int) -> Sharded:
    """Between the products a sequence is sharded over the devices that share their weights."""
    mesh = meshed(devices, "data", "model")

    def placed(x: Any, *axes: Any) -> Any:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))

    def loss(params: Any, x: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any, layer: Any) -> Any:
            whole = placed(normalised(x), "data", None, None)
            h = placed(whole @ layer["w"], "data", None, "model")
            out = placed(jax.nn.gelu(h) @ layer["v"], "data", "model", None)
            return x + out, None

        return jnp.square(lax.scan(layer, x, params)[0]).mean()

    params = stack(width, P(None, None, "model"), P(None, "model"))
    return Sharded(mesh, loss, params, ((4, 16, width), P("data", "model")))


def fsdp_tensor(devices: Sequence[Any], width: int) -> Sharded:
    mesh = meshed(devices, "data", "model")
    params = stack(width, P(None, "data", "model"), P(None, "model", "data"))
    return Sharded(mesh, blocks, params, ((32, width), P("data")))


def offloaded(devices: Sequence[Any], width: int) -> Sharded:
    """Parameters are in the host's memory, and a layer's are fetched where they are read."""
    mesh = meshed(devices, "data")

    def loss(params: Any, x: Any) -> Any:
        def fetched(w: Any) -> Any:
            return jax.device_put(w, NamedSharding(mesh, P("data"), memory_kind="device"))

        for i in range(LAYERS):
            x = block(fetched(params[f"w{i}"]), fetched(params[f"v{i}"]), x)
        return jnp.square(x).mean()

    shapes = {"w": (width, 2 * width), "v": (2 * width, width)}
    params = {
        f"{name}{i}": (shape, P("data")) for i in range(LAYERS) for name, shape in shapes.items()
    }
    return Sharded(mesh, loss, params, ((32, width), P("data")), memory="pinned_host")


# ---------------------------------------------------------------- partitioned by hand


def fsdp_shard_map(devices: Sequence[Any], width: int) -> Sharded:
    mesh = meshed(devices, "data")

    def on_shards(params: Any, x: Any) -> Any:
        def whole(w: Any) -> Any:
            return lax.all_gather(w, "data", axis=0, tiled=True)

        return lax.pmean(blocks(params, x, whole), "data")

    params = stack(width, P(None, "data"), P(None, "data"))
    specs = {name: spec for name, (_, spec) in params.items()}, P("data")
    loss = jax.shard_map(on_shards, mesh=mesh, in_specs=specs, out_specs=P())
    return Sharded(mesh, loss, params, ((32, width), P("data")))


def tensor_parallel_shard_map(devices: Sequence[Any], width: int) -> Sharded:
    mesh = meshed(devices, "data", "model")

    def on_shards(params: Any, x: Any) -> Any:
        def layer(x: Any, layer: Any) -> Any:
            part = jax.nn.gelu(normalised(x) @ layer["w"]) @ layer["v"]
            return x + lax.psum(part, "model"), None

        return lax.pmean(jnp.square(lax.scan(layer, x, params)[0]).mean(), "data")

    params = stack(width, P(None, None, "model"), P(None, "model"))
    specs = {name: spec for name, (_, spec) in params.items()}, P("data")
    loss = jax.shard_map(on_shards, mesh=mesh, in_specs=specs, out_specs=P())
    return Sharded(mesh, loss, params, ((32, width), P("data")))


def shifted(x: Any, axis: str) -> Any:
    """What the device before had; the first has that of the last."""
    size = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)])


def pipeline(devices: Sequence[Any], width: int) -> Sharded:
    """A layer on each device; batches go from one to the next, one in each trip."""
    mesh, stages, batches = meshed(devices, "stage"), len(devices), 4

    def on_shards(params: Any, xs: Any) -> Any:
        w, v = params["w"][0], params["v"][0]
        stage = lax.axis_index("stage")
        padded = jnp.concatenate([xs, jnp.zeros((stages - 1, *xs.shape[1:]))])

        def trip(state: Any, x: Any) -> Any:
            out = block(w, v, jnp.where(stage == 0, x, state))
            return shifted(out, "stage"), out

        start = lax.pcast(jnp.zeros(xs.shape[1:]), "stage", to="varying")
        outs = lax.scan(trip, start, padded)[1][-batches:]
        last = jnp.where(stage == stages - 1, jnp.square(outs).mean(), 0.0)
        return lax.psum(last, "stage")

    split = P("stage")
    params = {
        "w": ((stages, width, 2 * width), split),
        "v": ((stages, 2 * width, width), split),
    }
    specs = {"w": split, "v": split}, P()
    loss = jax.shard_map(on_shards, mesh=mesh, in_specs=specs, out_specs=P())
    return Sharded(mesh, loss, params, ((batches, width, width), P()))


def experts(devices: Sequence[Any], width: int) -> Sharded:
    """Tokens go to the device of their expert and back, by a fixed capacity."""
    mesh, number = meshed(devices, "expert"), len(devices)

    def on_shards(params: Any, x: Any) -> Any:
        w, v = params["w"][0], params["v"][0]
        gate = jax.nn.softmax(x @ params["router"], axis=-1)
        chosen = lax.top_k(gate.T, 2)[1]  # of each expert its tokens
        sent = lax.all_to_all(x[chosen], "expert", 0, 0, tiled=True)
        done = jax.nn.gelu(sent.reshape(-1, sent.shape[-1]) @ w) @ v
        back = lax.all_to_all(done.reshape(sent.shape), "expert", 0, 0, tiled=True)
        weights = jnp.take_along_axis(gate.T, chosen, 1)[..., None]
        out = x.at[chosen].add(back * weights)
        return lax.pmean(jnp.square(out).mean(), "expert")

    split = P("expert")
    params = {
        "w": ((number, width, 2 * width), split),
        "v": ((number, 2 * width, width), split),
        "router": ((width, number), P()),
    }
    specs = {"w": split, "v": split, "router": P()}, split
    loss = jax.shard_map(on_shards, mesh=mesh, in_specs=specs, out_specs=P())
    return Sharded(mesh, loss, params, ((8 * number, width), split))


def ragged_experts(devices: Sequence[Any], width: int) -> Sharded:
    """Each device sends a row more to the next expert than to the one before."""
    mesh, number = meshed(devices, "expert"), len(devices)

    def on_shards(params: Any, x: Any) -> Any:
        w, v = params["w"][0], params["v"][0]
        me = lax.axis_index("expert")
        sizes = 1 + jnp.arange(number, dtype=jnp.int32) % 2
        starts = jnp.cumsum(sizes) - sizes
        mine = sizes[me]
        room = jnp.zeros((2 * number, width)) + 0 * x[:1, :1]
        there = me.astype(jnp.int32) * sizes
        received = jnp.full((number,), mine, jnp.int32)
        sent = lax.ragged_all_to_all(x, room, starts, sizes, there, received, axis_name="expert")
        done = jax.nn.gelu(sent @ w) @ v
        origin = jnp.arange(number, dtype=jnp.int32) * mine
        back = jnp.full((number,), starts[me], jnp.int32)
        out = lax.ragged_all_to_all(
            done, jnp.zeros_like(x), origin, received, back, sizes, axis_name="expert"
        )
        return lax.pmean(jnp.square(x + out).mean(), "expert")

    split = P("expert")
    params = {
        "w": ((number, width, 2 * width), split),
        "v": ((number, 2 * width, width), split),
    }
    specs = {"w": split, "v": split}, split
    loss = jax.shard_map(on_shards, mesh=mesh, in_specs=specs, out_specs=P())
    return Sharded(mesh, loss, params, ((2 * number * number, width), split))


def ring_attention(devices: Sequence[Any], width: int) -> Sharded:
    """Keys and values go around, and a softmax is kept up with."""
    mesh = meshed(devices, "seq")

    def on_shards(params: Any, x: Any) -> Any:
        q, k, v = (x @ params[name] for name in "qkv")

        def trip(carry: Any, _: Any) -> Any:
            out, total, top, k, v = carry
            scores = q @ k.T / np.sqrt(width).astype(np.float32)
            new = jnp.maximum(top, scores.max(-1))
            weights, shrink = jnp.exp(scores - new[:, None]), jnp.exp(top - new)
            out = out * shrink[:, None] + weights @ v
            total = total * shrink + weights.sum(-1)
            return (out, total, new, shifted(k, "seq"), shifted(v, "seq")), None

        start = jnp.zeros_like(q), 0 * q[:, 0], 0 * q[:, 0] - 1e30, k, v
        out, total, *_ = lax.scan(trip, start, None, length=lax.axis_size("seq"))[0]
        y = x + (out / total[:, None]) @ params["o"]
        return lax.pmean(jnp.square(y).mean(), "seq")

    params = {name: ((width, width), P()) for name in "qkvo"}
    specs = dict.fromkeys("qkvo", P()), P("seq")
    loss = jax.shard_map(on_shards, mesh=mesh, in_specs=specs, out_specs=P())
    return Sharded(mesh, loss, params, ((width * len(devices), width), P("seq")))


PROGRAMS = {
    made.__name__: made
    for made in (
        data_parallel,
        fsdp_arguments,
        fsdp_constraint,
        fsdp_reshard,
        fsdp_shard_map,
        tensor_parallel,
        tensor_parallel_explicit,
        tensor_parallel_shard_map,
        sequence_parallel,
        fsdp_tensor,
        offloaded,
        pipeline,
        experts,
        ragged_experts,
        ring_attention,
    )
}
