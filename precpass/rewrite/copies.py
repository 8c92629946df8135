"""Low copies of products' operands, which products may share and no derivative passes through."""

from __future__ import annotations

from typing import Any

from precpass import jaxpr as ir
from precpass.backends.cpu_kernels import needs_barriers
from precpass.policy.precision import Precision

__all__ = ["low_copy"]


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
