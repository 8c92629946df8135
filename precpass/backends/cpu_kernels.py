"""The forms of products that XLA:CPU has kernels for.

A trace does not know the platforms that it will be lowered for, so every program has the forms
that run on all of them. The kernels of other platforms take every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from precpass import jaxpr as ir
from precpass.jaxpr.dimension_numbers import Numbers, kept
from precpass.policy.precision import Precision

__all__ = ["is_in_order", "needs_barriers", "runnable"]


def needs_barriers(low: np.dtype[Any]) -> bool:
    """Whether XLA:CPU must be kept from folding transposes into a product.

    It folds them into (bf16, bf16) -> f32 products for which it then has no
    kernel (see `runnable`). A trace does not know the platforms that it will be
    lowered for, so every program has the form that runs on all of them. The kernels
    of other platforms take every layout, and for these the barriers are lowered to
    nothing.
    """
    return low == Precision.BF16.dtype


def is_in_order(rank: int, numbers: Numbers) -> bool:
    """Whether a dot's left operand has its contracted dimensions behind its free ones."""
    contracting, batch = numbers
    free = kept(rank, contracting[0], batch[0])
    return not free or not contracting[0] or min(contracting[0]) > max(free)


def runnable(
    build: ir.Builder | ir.Direct, numbers: Numbers, pair: Sequence[Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The form of a (bf16, bf16) -> f32 dot that XLA:CPU has a kernel for.

    XLA:CPU fails at run time with "Unsupported element type for DotThunk" in two
    cases. One is a transpose that is folded into the product, from an operand or
    from the result; barriers prevent that. The other is some layouts of the right
    operand if the left one has its contracted dimensions before its free ones (12
    of 72 layouts tried, on jax 0.10.2 and 0.12.0). So the left operand is brought
    into the order (batch, free, contracted), behind a barrier. If it has that order
    already, nothing is done: `vmap` can only add free or batch dimensions to it.

    A matrix behind a mere barrier may still be transposed in memory, and its product
    then runs on widened operands (measured: 2.8 times the time), hence `flat`.
    """
    lhs, rhs = pair
    contracting, batch = numbers
    rank = lhs.aval.ndim
    free = kept(rank, contracting[0], batch[0])
    if is_in_order(rank, numbers):
        return pair, {}
    order = (*batch[0], *free, *contracting[0])
    lhs = build.detach(build.transpose(lhs, order), pinned=True, flat=True)
    n_batch = len(batch[0])
    summed = tuple(range(n_batch + len(free), rank))
    numbers = (summed, tuple(contracting[1])), (tuple(range(n_batch)), tuple(batch[1]))
    return (lhs, rhs), {"dimension_numbers": numbers}
