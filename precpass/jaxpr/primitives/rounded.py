"""The primitive that stores a value in 16 bits while its derivative passes through float32.

`rounded(low, x)` is `low`, the value of `x` after rounding, in the dtype of `x`. Its
derivative is that of `x` itself: the cotangents of all its readers add up in the dtype of `x`,
and none of them passes through the 16 bits (`jaxpr.primitives.carrier` does the same for
products). In a program that is not differentiated only the rounding reads `x`. XLA then drops `x`
wherever it was stored, also from the carry of a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import jet
from jax.interpreters import ad, batching, mlir

from precpass.jaxpr.primitives.carrier import detach
from precpass.jaxpr.shardings import resharded_to, summed_up
from precpass.jaxpr.types import Aval

__all__ = [
    "WIDENS_STACKS",
    "bits",
    "in_place_of",
    "low_value",
    "recalled",
    "rounded_p",
]

WIDENS_STACKS = jax.__version_info__ < (0, 11)
"""Whether XLA:CPU stores a loop's stack of bfloat16 as float32 and converts the whole stack in
every trip, as it did before jax 0.11."""

rounded_p = jex.Primitive("precpass_rounded")
rounded_p.def_impl(lambda low, _x: low)
rounded_p.def_abstract_eval(lambda _low, x: x)
mlir.register_lowering(rounded_p, lambda _ctx, low, _x: [low])


def bits(low: Any) -> Any:
    """The 16 bits of a low value, through which no derivative passes."""
    return lax.bitcast_convert_type(summed_up(low), np.uint16)


def recalled(kept: Any, low: Any) -> Any:
    """The 16-bit value whose bits are `kept`, with the derivative of `low`."""
    return in_place_of(low, low_value(kept, jax.typeof(low)))


def low_value(kept: Any, aval: Aval) -> Any:
    """The value of type `aval` whose bits are `kept`; no derivative passes through it."""
    return detach(resharded_to(lax.bitcast_convert_type(kept, aval.dtype), aval))


def in_place_of(x: Any, same: Any) -> Any:
    """`same`, a value equal to `x` that exists anyway, with the derivative of `x`."""
    return rounded_p.bind(same, x)


def _jvp(primals: Any, tangents: Any) -> Any:
    return rounded_p.bind(*primals), tangents[1]


def _transpose(cotangent: Any, _low: Any, _x: Any) -> list[Any]:
    return [None, cotangent]


def _batch(operands: Sequence[Any], dims: Sequence[int | None]) -> Any:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    low, x = (
        lax.broadcast(operand, (size,)) if d is None else jnp.moveaxis(operand, d, 0)
        for operand, d in zip(operands, dims, strict=True)
    )
    return rounded_p.bind(low, x), 0


def _taylor(primals: Any, series: Any) -> Any:
    return rounded_p.bind(*primals), list(series[1])


ad.primitive_jvps[rounded_p] = _jvp
ad.primitive_transposes[rounded_p] = _transpose
batching.primitive_batchers[rounded_p] = _batch
jet.jet_rules[rounded_p] = _taylor
