"""JAX's own primitive harnesses as programs with arguments, a sample of them, and derivatives.

A harness is one use of one primitive, with arguments, as JAX tests itself; their list
depends on x64 at import. What is checked of them stands in harness_checks.py.
"""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.jaxprs import LOW

# ---------------------------------------------------------------- harnesses


@functools.cache
def harnesses() -> list[Any]:
    """Those that JAX implements on CPU, for x64 as it is at the first call."""
    from jax._src.internal_test_util import test_harnesses

    return [h for h in test_harnesses.all_harnesses if h.filter("cpu")]


def short_id(harness: Any) -> str:
    """A name for reports: the full ones have several hundred letters."""
    return f"{harness.group_name}-{zlib.crc32(harness.fullname.encode()):08x}"


@functools.cache
def _by_id() -> dict[str, Any]:
    return {short_id(h): h for h in harnesses()}


def harness(name: str) -> Any:
    """The one with a short id."""
    return _by_id()[name]


def program(harness: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A harness as a function and its arguments, the same in every run."""
    seed = zlib.adler32(harness.fullname.encode())
    args = tuple(harness.dyn_args_maker(np.random.RandomState(seed)))
    return lambda *xs: harness.dyn_fun(*xs), args


def sample() -> dict[str, list[Any]]:
    """Of every group a float32 harness and one of a 16-bit or integer type, where they exist.

    Which ones depends on their names alone.
    """
    groups: dict[str, list[Any]] = {}
    for h in sorted(harnesses(), key=lambda h: zlib.crc32(h.fullname.encode())):
        groups.setdefault(h.group_name, []).append(h)
    return {name: _chosen(groups[name]) for name in sorted(groups)}


def _chosen(group: list[Any]) -> list[Any]:
    def first(wanted: Callable[[np.dtype[Any]], bool]) -> list[Any]:
        return [h for h in group if h.dtype is not None and wanted(np.dtype(h.dtype))][:1]

    wide = first(lambda d: d == np.float32)
    low = first(lambda d: d in LOW)
    integer = first(lambda d: d.kind in "iub")
    found = wide + (low or integer)
    return (found + [h for h in group if h not in found])[: max(2, len(found))]


# ---------------------------------------------------------------- programs


def derivative(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The pullback of a program's floating results to its floating arguments, or the tangents.

    Returns:
        (function, its arguments, a function that takes the derivative of another form of
        the program); None where the plain program has neither.
    """
    leaves = jax.tree.leaves(args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = jax.tree.leaves(jax.eval_shape(fn, *args))
    at = [i for i, x in enumerate(leaves) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
    out = [i for i, x in enumerate(results) if jnp.issubdtype(x.dtype, jnp.inexact)]
    if not at or not out:
        return None
    random = np.random.RandomState(len(leaves))

    def direction(like: Any) -> Any:
        return np.asarray(random.standard_normal(np.shape(like))).astype(jnp.result_type(like))

    for mode, towards in (
        (_pullback, [direction(results[i]) for i in out]),
        (_pushforward, [direction(leaves[i]) for i in at]),
    ):
        take = _taker(mode, at, out)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                jax.eval_shape(take(fn), towards, *args)
            except Exception:
                continue
        return take(fn), (towards, *args), take
    return None


def _taker(mode: Callable[..., Any], at: list[int], out: list[int]) -> Callable[..., Any]:
    def take(fn: Callable[..., Any]) -> Callable[..., Any]:
        def derived(towards: list[Any], *args: Any) -> Any:
            leaves, tree = jax.tree.flatten(args)

            def on_floats(*xs: Any) -> list[Any]:
                filled = list(leaves)
                for i, x in zip(at, xs, strict=True):
                    filled[i] = x
                results = jax.tree.leaves(fn(*jax.tree.unflatten(tree, filled)))
                return [results[i] for i in out]

            return mode(on_floats, [jnp.asarray(leaves[i]) for i in at], towards)

        return derived

    return take


def _pullback(fn: Callable[..., Any], primals: list[Any], cotangents: list[Any]) -> Any:
    return jax.vjp(fn, *primals)[1](cotangents)


def _pushforward(fn: Callable[..., Any], primals: list[Any], tangents: list[Any]) -> Any:
    return jax.jvp(fn, tuple(primals), tuple(tangents))[1]
