"""A small transformer in flax nnx, and networks in equinox, flax linen and haiku."""

import contextlib
import functools
from collections.abc import Generator
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen, nnx

WIDTH, TOKENS = 32, jnp.zeros((2, 8), jnp.int32)


@contextlib.contextmanager
def promoting() -> Generator[None]:
    """The libraries mix integers and floats, and arrays of different ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(32, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, 32, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for i in range(len(self.blocks)):
            x = self.blocks[i](x)
        return self.head(x)


def loss(model: Transformer, tokens: Any) -> Any:
    return -jax.nn.log_softmax(model(tokens))[..., 0].mean()


@functools.cache
def nnx_model() -> Transformer:
    with promoting():
        return Transformer(nnx.Rngs(0))


class Feed(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: Any):
        keys = jax.random.split(key)
        self.up = eqx.nn.Linear(WIDTH, 2 * WIDTH, key=keys[0])
        self.down = eqx.nn.Linear(2 * WIDTH, WIDTH, key=keys[1])

    def __call__(self, x: Any) -> Any:
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))


class Network(eqx.Module):
    feeds: list[Feed]

    def __init__(self, key: Any):
        self.feeds = [Feed(k) for k in jax.random.split(key, 2)]

    def __call__(self, x: Any) -> Any:
        for i in range(len(self.feeds)):
            x = self.feeds[i](x)
        return x


def eqx_loss(network: Network, x: Any) -> Any:
    return jnp.square(network(x)).mean()


def eqx_model() -> Network:
    return Network(jax.random.key(0))


class LinenFeed(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        h = jax.nn.gelu(linen.Dense(2 * WIDTH, name="up")(x))
        return x + linen.Dense(WIDTH, name="down")(h)


class LinenNet(linen.Module):
    def setup(self):
        self.feeds = [LinenFeed() for _ in range(2)]

    def __call__(self, x: Any) -> Any:
        for feed in self.feeds:
            x = feed(x)
        return x


@functools.cache
def linen_parameters() -> Any:
    with promoting():
        return LinenNet().init(jax.random.key(0), jnp.ones((1, WIDTH)))


def linen_loss(parameters: Any, x: Any) -> Any:
    return jnp.square(LinenNet().apply(parameters, x)).mean()


class HaikuFeed(hk.Module):
    def __call__(self, x: Any) -> Any:
        h = jax.nn.gelu(hk.Linear(2 * WIDTH, name="up")(x))
        return x + hk.Linear(WIDTH, name="down")(h)


class HaikuNet(hk.Module):
    def __init__(self):
        super().__init__("net")
        self.feeds = [HaikuFeed("feed") for _ in range(2)]

    def __call__(self, x: Any) -> Any:
        for feed in self.feeds:
            x = feed(x)
        return x


HAIKU = hk.without_apply_rng(hk.transform(lambda x: HaikuNet()(x)))


@functools.cache
def haiku_parameters() -> Any:
    with promoting():
        return HAIKU.init(jax.random.key(0), jnp.ones((1, WIDTH)))


def haiku_loss(parameters: Any, x: Any) -> Any:
    return jnp.square(HAIKU.apply(parameters, x)).mean()
