"""Sums between devices whose terms are sent in 16 bits, and added up in float32 by one device."""

from __future__ import annotations

import math
from typing import Any

from jax import lax

from precpass.jaxpr.binding import convert
from precpass.jaxpr.types import Eqn

__all__ = ["in_parts", "part_dim"]


def part_dim(eqn: Eqn) -> int | None:
    """The dimension along which devices may divide the terms of a sum; None if they may not."""
    params, shape = eqn.params, eqn.invars[0].aval.shape
    if params.get("axis_index_groups") is not None or len(eqn.invars) > 1:
        return None
    if eqn.primitive.name in ("psum", "psum_invariant"):
        size = _size(eqn)
        return next((d for d, n in enumerate(shape) if n and size and n % size == 0), None)
    return params.get("scatter_dimension", params.get("all_gather_dimension"))


def in_parts(eqn: Eqn, x: Any, dim: int, low: Any) -> Any:
    """A sum to which each device adds up its part along a dimension, of all devices' terms.

    For an `all_gather` the result is a gather, whose transpose is such a sum.
    """
    params, wide, is_whole = eqn.params, x.dtype, "axes" in eqn.params
    axes = params["axes"] if is_whole else params["axis_name"]
    size: Any = _size(eqn) if is_whole else params["axis_size"]
    if eqn.primitive.name == "all_gather":
        shape = (*x.shape[:dim], size, *x.shape[dim:])
        each = lax.broadcast_in_dim(x, shape, [d for d in range(len(shape)) if d != dim])
        parts = convert(lax.all_to_all(convert(each, low), axes, dim, dim), wide)
        return lax.reshape(parts, eqn.outvars[0].aval.shape) if params["tiled"] else parts
    if is_whole or params["tiled"]:
        x = lax.reshape(x, (*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :]))
    # JAX's transpose of an exchange that also moves a dimension fails (jax 0.10.2 and 0.12.0.1).
    parts = lax.all_to_all(convert(x, low), axes, dim, dim)
    part = lax.reduce_sum(convert(parts, wide), axes=(dim,))
    if not is_whole:
        return part
    to = "invarying" if eqn.primitive.name == "psum_invariant" else "varying"
    return convert(lax.all_gather(convert(part, low), axes, axis=dim, tiled=True, to=to), wide)


def _size(eqn: Eqn) -> int | None:
    """The number of devices that a `psum` is over; None if types do not say it."""
    sizes, axes = eqn.invars[0].aval.sharding.mesh.shape, eqn.params["axes"]
    return math.prod(sizes[axis] for axis in axes) if set(axes) <= set(sizes) else None
