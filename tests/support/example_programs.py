"""Example programs with arguments of every kind."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.support.values import normal


@dataclasses.dataclass(frozen=True)
class Program:
    """A function and arguments for it.

    Attributes:
        name: the test's id.
        fn: the function, in plain float32 unless it is about another type.
        args: a function that makes the arguments; called under x64 where that is set.
        x64: whether it runs with x64 enabled.
    """

    name: str
    fn: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]
    x64: bool = False

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Configuration under which the program is traced and run."""
        with jax.enable_x64(True) if self.x64 else contextlib.nullcontext():
            yield


def mlp(params: Any, batch: Any) -> Any:
    """A two-layer network's mean squared error and its activations, as a dict."""
    x, y = batch
    h = jnp.tanh(x @ params["w1"] + params["b1"][None])
    out = h @ params["w2"]
    return {"loss": jnp.mean((out - y) ** 2), "aux": (out, [h])}


def mlp_args(rows: int = 8, width: int = 16) -> tuple[Any, Any]:
    """Parameters and a batch for `mlp`."""
    params = {
        "w1": jnp.asarray(normal(0, width, width)) * 0.2,
        "b1": jnp.asarray(normal(1, width)) * 0.1,
        "w2": jnp.asarray(normal(2, width, 4)) * 0.2,
    }
    return params, (jnp.asarray(normal(3, rows, width)), jnp.asarray(normal(4, rows, 4)))


def mlp_loss(params: Any, batch: Any) -> Any:
    """`mlp`'s loss alone."""
    return mlp(params, batch)["loss"]


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention with the mask that most code uses."""
    scores = jnp.einsum("qd,kd->qk", q, k) / np.float32(np.sqrt(q.shape[-1]))
    causal = jnp.tril(jnp.ones(scores.shape, bool))
    return jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(jnp.float32).min)) @ v


def _weak(x: Any) -> Any:
    scale = lax.full_like(jnp.asarray(2.0), 3.0)  # weakly typed
    return x @ x, jnp.asarray(1.5), jnp.sum(x) * 1.0, scale, jnp.where(x[0, 0] > 0, 1.0, 2.0)


def _integers(x: Any, ids: Any) -> Any:
    one_hot = jax.nn.one_hot(ids, x.shape[0])
    return one_hot @ x, ids * 2, jnp.argmax(x, axis=1), x[ids], ids > 1, (ids @ ids)


def _keys(key: Any, x: Any) -> Any:
    key, other = jax.random.split(key)
    return key, x @ jax.random.normal(other, x.shape), jax.random.bits(other, (3,))


def _complex(x: Any, z: Any) -> Any:
    return x @ x, z @ z, jnp.fft.fft(x.astype(jnp.complex64)), jnp.real(z) @ x, jnp.abs(z)


def _float64(x: Any, d: Any) -> Any:
    return x @ x, d @ d, d * 2, d.astype(jnp.float32) @ x, x.astype(jnp.float64) @ d


def _loop(x: Any, w: Any) -> Any:
    def body(carry: Any, row: Any) -> Any:
        h, n = carry
        h = jnp.tanh(row + h @ w)
        return (h, n + 1), h

    (h, n), hs = lax.scan(body, (jnp.zeros(w.shape[0]), 0), x)
    return lax.cond(n > 3, lambda h: h @ w, lambda h: h, h), n, hs


def _matrix() -> Any:
    return jnp.asarray(normal(0, 4, 4))


PROGRAMS = (
    Program("pytrees", mlp, mlp_args),
    Program("gradient", jax.value_and_grad(mlp_loss), mlp_args),
    Program("attention", attention, lambda: tuple(jnp.asarray(normal(s, 6, 8)) for s in range(3))),
    Program("weak types", _weak, lambda: (_matrix(),)),
    Program("python scalars", lambda x, n: (x @ x * n, n, n + 1), lambda: (_matrix(), 2.0)),
    Program("integers", _integers, lambda: (_matrix(), jnp.arange(3))),
    Program(
        "booleans",
        lambda x, m: (jnp.where(m, x @ x, 0.0), ~m, m & (x > 0), jnp.any(m)),
        lambda: (_matrix(), _matrix() > 0),
    ),
    Program("keys", _keys, lambda: (jax.random.key(0), _matrix())),
    Program("complex", _complex, lambda: (_matrix(), _matrix().astype(jnp.complex64) * 1j)),
    Program("float64", _float64, lambda: (_matrix(), jnp.asarray(_matrix(), jnp.float64)), True),
    Program(
        "empty arrays",
        lambda x, e: (x @ e, e @ e.T, jnp.sum(e), e),
        lambda: (_matrix(), jnp.zeros((4, 0))),
    ),
    Program(
        "scalars", lambda a, b: (a * b + 1, jnp.dot(a, b)), lambda: (jnp.float32(2), jnp.float32(3))
    ),
    Program("loops", _loop, lambda: (jnp.asarray(normal(1, 5, 4)), _matrix())),
    Program(
        "bfloat16",
        lambda x: (x @ x, x.sum(), x.astype(jnp.float32)),
        lambda: (_matrix().astype(jnp.bfloat16),),
    ),
    Program("float16", lambda x: {"y": x @ x, "n": None}, lambda: (_matrix().astype(jnp.float16),)),
    Program("nothing out", lambda x: ((), {"a": x @ x}), lambda: (_matrix(),)),
)
