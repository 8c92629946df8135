"""Sums between devices that are sent in 16 bits and added up in float32.

Each device adds up a part. `summed_in_parts` has the form of a `psum` or `reduce_scatter`, and so
has the transpose of `gathered_in_parts`, which is an `all_gather`.
"""

from __future__ import annotations

import math
from typing import Any

from jax import lax

from precpass.jaxpr.binding import convert
from precpass.jaxpr.types import Eqn

__all__ = ["gathered_in_parts", "part_dim", "summed_in_parts"]


def part_dim(eqn: Eqn) -> int | None:
    """The dimension along which devices may divide the terms of a sum; None if they may not."""
    params, (operand, *others) = eqn.params, eqn.invars
    if params.get("axis_index_groups") is not None or others:
        return None
    match eqn.primitive.name:
        case "reduce_scatter":
            return params["scatter_dimension"]
        case "all_gather":
            return params["all_gather_dimension"]
        case "psum" | "psum_invariant":
            size = _devices(eqn)
            parts = (d for d, n in enumerate(operand.aval.shape) if n and size and n % size == 0)
            return next(parts, None)
        case _:
            return None


def summed_in_parts(eqn: Eqn, x: Any, dim: int, low: Any) -> Any:
    """A sum to which each device adds up its part along a dimension, of all devices' terms."""
    params, wide, is_whole = eqn.params, x.dtype, "axes" in eqn.params
    axes = params["axes"] if is_whole else params["axis_name"]
    if is_whole or params["tiled"]:
        size = _devices(eqn) if is_whole else params["axis_size"]
        x = lax.reshape(x, (*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :]))
    parts = lax.all_to_all(convert(x, low), axes, dim, 0)
    part = lax.reduce_sum(convert(parts, wide), axes=(0,))
    if not is_whole:
        return part
    to = "invarying" if eqn.primitive.name == "psum_invariant" else "varying"
    return convert(lax.all_gather(convert(part, low), axes, axis=dim, tiled=True, to=to), wide)


def gathered_in_parts(eqn: Eqn, x: Any, low: Any) -> Any:
    """A gather as an exchange of equal parts in 16 bits, whose transpose adds up in float32."""
    params, (result,) = eqn.params, eqn.outvars
    dim, each = params["all_gather_dimension"], lax.broadcast(x, (params["axis_size"],))
    parts = convert(lax.all_to_all(convert(each, low), params["axis_name"], 0, dim), x.dtype)
    return lax.reshape(parts, result.aval.shape) if params["tiled"] else parts


def _devices(eqn: Eqn) -> int | None:
    """The number of devices that a `psum` is over; None if types do not say it."""
    sizes, axes = eqn.invars[0].aval.sharding.mesh.shape, eqn.params["axes"]
    return math.prod(sizes[axis] for axis in axes) if set(axes) <= set(sizes) else None
