"""What the tests of calling share: counting traces, and classes that cross in various ways."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import precpass as pp

X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 8)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).standard_normal((8, 8)), jnp.float32)


def counted(fn: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """`fn`, and a list that grows whenever its body runs: once for each trace."""
    runs: list[int] = []

    @functools.wraps(fn)
    def counting(*args: Any, **kwargs: Any) -> Any:
        runs.append(len(runs))
        return fn(*args, **kwargs)

    return counting, runs


def traces(fn: Callable[..., Any], calls: Callable[[Any], Iterator[Any]], wrap: Any) -> list[int]:
    """After each of the calls that `calls` makes: how often `fn` was traced so far."""
    counting, runs = counted(fn)
    return [len(runs) for _ in calls(wrap(counting))]


def as_jit_traces(fn: Any, calls: Any, **options: Any) -> list[int]:
    """The number of traces after each call, the same under `jax.jit` and `auto_mixed`."""
    wanted = traces(fn, calls, lambda f: jax.jit(f, **options))
    got = traces(fn, calls, lambda f: pp.auto_mixed(f, **options))
    assert got == wanted, f"{got} traces after each call; jax.jit: {wanted}"
    return got


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A pytree with a static field."""

    w: Any
    power: int = dataclasses.field(default=1, metadata={"static": True})

    def __call__(self, x: Any) -> Any:
        for _ in range(self.power):
            x = x @ self.w
        return x
