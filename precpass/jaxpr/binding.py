"""Tracing, re-tracing and re-binding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import numpy as np
from jax.extend import source_info_util

from precpass.jaxpr.reading import consts_of, in_avals, open_jaxpr


def trace(fn: Callable[..., Any], *args: Any) -> Any:
    """The closed jaxpr of `fn` at arguments, avals or `ShapeDtypeStruct`s."""
    return jax.make_jaxpr(fn)(*args)


def trace_shaped(fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """`trace`, and the pytree of the results' shapes."""
    return jax.make_jaxpr(fn, return_shape=True)(*args)


def retrace(jaxpr: Any, fn: Callable[..., Any], avals: Sequence[Any] | None = None) -> Any:
    """`fn` traced at the operands of `jaxpr`, in the form (open or closed) that it had."""
    avals = in_avals(jaxpr) if avals is None else avals
    closed = jax.make_jaxpr(fn)(*avals)
    if hasattr(jaxpr, "consts"):
        return closed
    # on 0.10 the jaxpr of remat and shard_map is open
    if consts_of(closed):
        raise NotImplementedError("an open jaxpr cannot hold the constants of its rewrite")
    return open_jaxpr(closed)


def evaluate(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr at `args`."""
    return jax.core.eval_jaxpr(open_jaxpr(jaxpr), consts_of(jaxpr), *args)


@contextlib.contextmanager
def context_of(eqn: Any) -> Generator[None]:
    """The name stack, source line and configuration under which an equation was traced."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with (
        source_info_util.user_context(eqn.source_info.traceback, name_stack=stack),
        eqn.ctx.manager,
    ):
        yield


def bind(eqn: Any, args: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """An equation's primitive applied to other operands or params; always a list."""
    params = eqn.params if params is None else params
    out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


def bind_shard_map(eqn: Any, fn: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """`fn` mapped over shards as an equation of `shard_map` says.

    The public form is used because the primitive wants its specs as thunks, and
    because a body with collectives can only be traced with its axes bound.
    """
    params = eqn.params
    mapped = jax.shard_map(
        fn,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=set(params["newly_manual_axes"]),
    )
    return list(mapped(*args))


def convert(x: Any, dtype: Any, weak_type: bool = False) -> Any:
    """`x` as `dtype`, with the weak type that is asked for."""
    return jex.primitives.convert_element_type_p.bind(
        x, new_dtype=np.dtype(dtype), weak_type=weak_type, sharding=None
    )


def platform() -> str | None:
    """The platform that a trace will most likely run on: the default device's."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue] -- dynamic
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform
