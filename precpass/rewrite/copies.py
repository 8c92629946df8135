"""Low copies of products' operands, which products may share and no derivative passes through."""

from __future__ import annotations

from typing import Any

import numpy as np

from precpass import jaxpr as ir
from precpass.backends.cpu_kernels import needs_barriers
from precpass.policy.precision import Precision
from precpass.rewrite.scaled_product import Rounding

__all__ = ["low_copy", "quantized_copy"]


def low_copy(build: ir.Builder, x: Any, precision: Precision, *, flat: bool = False) -> Any:
    """A copy of a product's operand in a low format, which any number of products may share.

    No derivative passes through it.

    Args:
        build: where its equations are added.
        x: the operand.
        precision: the format.
        flat: whether it is brought into row-major order in memory, which XLA does not do for a
            transpose.
    """
    low = x if x.aval.dtype == precision.dtype else build.convert(x, precision.dtype)
    pinned = needs_barriers(precision.dtype)
    return build.detach(low, pinned=pinned, flat=pinned and flat)


def quantized_copy(build: ir.Builder | ir.Direct, x: Any, rounding: Rounding) -> list[Any]:
    """A rounded operand of scaled products, and its scale; no derivative passes through them.

    Args:
        build: where its equations are added.
        x: the operand.
        rounding: how it is rounded.
    """
    low, scale = build.call(lambda x: ir.scaling(rounding, x), [x], rounding)
    # XLA:CPU is kept from folding a transpose into a product of int8, which then takes 3.4 to 5.4
    # times as long as float32's.
    pinned, is_matrix = low.aval.dtype == np.int8, len(low.aval.shape) <= 2
    return [build.detach(low, pinned=pinned, flat=pinned and is_matrix), scale]
