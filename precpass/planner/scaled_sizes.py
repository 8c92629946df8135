"""Which dots have a scaled form at all, and which are large enough to gain by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.sizes import element_count
from precpass.policy.precision import Precision

__all__ = [
    "LEAST_WORK",
    "TILE",
    "against_sizes",
    "has_scaled_form",
    "sizes_of",
]

TILE = 16
"""The dimensions of a product in 8 bits are multiples of this, as cublasLt demands of float8
operands in bytes (NVIDIA, cuBLAS documentation, "cublasLtMatmul": 16-byte alignment)."""
LEAST_WORK = 2**24
"""The multiplications of the smallest product that is multiplied in 8 bits: 256 x 256 x 256. A
smaller one spends more time on rounding its operands than it saves (CPU with AMX, jax 0.10.2)."""
_LARGEST_SUM = 2**31 // 127**2
"""So many products of two numbers of magnitude 127 have a sum in int32."""


def has_scaled_form(eqn: ir.Eqn, precision: Precision) -> bool:
    """Whether an equation can be evaluated as a scaled product.

    It is a dot without an empty dimension, and an int32 can hold its sums, whose number is known.
    """
    numbers = ir.dot_numbers(eqn)
    if numbers is None or any(size == 0 for v in eqn.invars for size in _known(v.aval.shape)):
        return False
    summed = [eqn.invars[0].aval.shape[d] for d in numbers[0][0]]
    if len(_known(summed)) < len(summed):
        return False
    return precision is not Precision.INT8 or math.prod(summed) <= _LARGEST_SUM


def _known(sizes: Sequence[Any]) -> list[int]:
    """The sizes that are no symbolic dimensions, as an exported program may have."""
    return [size for size in sizes if isinstance(size, int)]


def sizes_of(eqn: ir.Eqn) -> tuple[float, ...]:
    """The numbers of rows, of columns and of contracted elements of a dot, in ascending order."""
    (summed, _), _ = ir.dot_numbers(eqn)
    sides = [v.aval.shape for v in eqn.invars]
    inner = element_count(tuple(sides[0][d] for d in summed))
    return tuple(sorted((inner, *(element_count(shape) / inner for shape in sides))))


def against_sizes(eqn: ir.Eqn) -> str:
    """Why a dot's sizes do not suit a product of 8 bits, in words; "" if they do."""
    _, (batch, _) = ir.dot_numbers(eqn)
    if batch:
        return "it has batch dimensions"
    sizes = sizes_of(eqn)
    for size in sizes:
        if size % TILE:
            return f"{int(size)} is not a multiple of {TILE}"
    if math.prod(sizes) < LEAST_WORK:
        return f"it is smaller than {LEAST_WORK} multiplications"
    return ""
