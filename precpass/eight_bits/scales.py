"""Scales of scaled products: powers of two, and how a product's elements meet them."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from precpass.jaxpr.dimension_numbers import Numbers, kept

__all__ = ["SMALLEST", "power_of_two_scale", "result_dims", "scale_for", "spread"]

SMALLEST = 2.0**-100
"""The smallest scale. Its inverse is finite, and what a smaller one would keep becomes zero."""


def power_of_two_scale(largest: Any, most: Any) -> Any:
    """The smallest power of two that brings magnitudes within a format's largest number.

    Args:
        largest: the largest magnitudes, float32 of any shape.
        most: the format's largest number.

    Returns:
        For each of them a power of two that is at least 2^-100; 1 for zero, NaN for NaN.
    """
    share = largest * (np.float32(1.0) / np.float32(most))
    near = lax.reduce_precision(share, 8, 0)
    scale = jnp.where(near < share, near * np.float32(2.0), near)
    scale = jnp.where(scale > 0, jnp.maximum(scale, np.float32(SMALLEST)), np.float32(1.0))
    # A comparison with NaN is false, and the scale of NaN is NaN.
    return jnp.where(jnp.isnan(share), share, scale)


def scale_for(largest: float, most: float, *, is_power: bool) -> float:
    """The scale of numbers up to a magnitude that is known, at least 2^-60.

    Args:
        largest: the magnitude.
        most: the format's largest number.
        is_power: whether the scale is to be a power of two.
    """
    share = max(largest / most, 2.0**-60)  # of which the square is a number, too
    mantissa, exponent = math.frexp(share)
    return math.ldexp(1.0, exponent - (mantissa == 0.5)) if is_power else share


def spread(scale: Any, like: Any, numbers: Numbers, side: int) -> Any:
    """The scale of one side of a dot, for each element of the product.

    Args:
        scale: of the operand's rank, with size 1 in the contracted dimensions.
        like: an array of the product's shape.
        numbers: the dot's dimension numbers.
        side: the operand.
    """
    dims = result_dims(scale.ndim, like.ndim, numbers, side)
    summed, own_batch = numbers[0][side], numbers[1][side]
    order = [*own_batch, *kept(scale.ndim, summed, own_batch), *summed]
    ordered = lax.transpose(scale, order)
    flat = lax.reshape(ordered, ordered.shape[: len(dims)])
    return lax.broadcast_in_dim(flat, like.shape, dims)


def result_dims(ndim: int, result_ndim: int, numbers: Numbers, side: int) -> tuple[int, ...]:
    """The dimensions of a product that an operand's batch and free dimensions become, in order."""
    batch = len(numbers[1][0])
    free = ndim - len(numbers[0][side]) - batch
    first = batch if side == 0 else result_ndim - free
    return (*range(batch), *range(first, first + free))
