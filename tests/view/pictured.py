"""The programs of `test_snapshots.py`, whose lines stand in the snapshots: add new ones below."""

import jax
import jax.numpy as jnp
from jax import lax


def equations(x, w):
    return jnp.tanh(x @ w) @ w


def loop(x, w):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=7)[0]


def flow(x, w):
    """Every kind of body, one of them twice."""
    x = lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: jnp.tanh(x @ w), x)
    x = lax.while_loop(lambda x: x.sum() < 1, lambda x: jnp.sin(x @ w), x)
    for _ in range(2):
        x = loop(x, w)
    x = lax.scan(lambda c, _: (jnp.cos(c @ w), None), x, length=7)[0]
    return lax.switch(1, [lambda x: x, lambda x: x @ w, lambda x: x * 2], x).sum()


def layers(x, w, count=3):
    with jax.named_scope("body"):
        for i in range(count):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w) + x
    with jax.named_scope("head"):
        return jax.nn.softmax(lax.dot(x, w, precision="highest")).sum()


def unrolled(x, w):
    for _ in range(600):
        x = jnp.tanh(x @ w)
        x = x + 1
    return x


def stored(x, w):
    """A loop that saves values in 16 bits, which also cross its branches."""

    def step(c, _):
        h = jnp.tanh(c @ w)
        return lax.cond(c[0, 0] > 2, lambda h: h, lambda h: 2 * h, h) @ w + h @ w, None

    return lax.scan(step, x, length=3)[0].sum()


def unequal(x, big):
    """The more bytes, the stronger the colour."""
    return (jnp.sin(x) @ x).sum() + jnp.tanh(big)


def transformer(params, tokens):
    with jax.named_scope("embed"):
        x = params["table"][tokens]
    for i, block in enumerate(params["blocks"]):
        with jax.named_scope(f"block_{i}"):
            with jax.named_scope("attention"):
                q, k, v = (normalised(x) @ block[name] for name in "qkv")
                scores = jnp.where(jnp.tri(len(x), dtype=bool), q @ k.T / 4.0, -jnp.inf)
                x = x + jax.nn.softmax(scores) @ v
            with jax.named_scope("mlp"):
                x = x + jax.nn.gelu(normalised(x) @ block["up"]) @ block["down"]
    with jax.named_scope("head"):
        logits = normalised(x) @ params["table"].T
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], 1).mean()


def normalised(x):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


ODD = ["\u65e5\u672c \u00fc", "a\\N b", "ends\\", 'q"uote"', "&lt;&amp; <b>", "%s {x}|y", "tab\tx"]


def oddly_named(x, w):
    for name in (*ODD, "\x00\x01\x1b[31m", "\ud800", "x" * 500):
        with jax.named_scope(name):
            x = jnp.tanh(x @ w)
    return x


oddly_named.__name__ = 'two\nlines\\"'


def broken(x):
    """NaNs and numbers that vanish."""
    y = x / jnp.abs(x).sum()
    z = y.astype(jnp.float16) * jnp.float16(1e-7) * jnp.float16(1e-7)
    return jnp.exp(x).sum() + z.sum().astype(jnp.float32)
