"""A product of a program in the form of a lowered product (`precpass.rewrite.low_product`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from precpass import jaxpr as ir
from precpass.policy.precision import Precision
from precpass.rewrite.low_product import Bilinear, evaluated_with_carrier, scaled_with_carrier

__all__ = ["lowered"]


def lowered(
    build: ir.Builder,
    eqn: ir.Eqn,
    low_operands: Sequence[Any],
    operands: Sequence[Any],
    dtype: np.dtype[Any],
    recast: tuple[bool, bool] = (False, False),
    *,
    low_result: bool = False,
    low_cotangents: tuple[bool, bool] = (False, False),
    scaled: Precision | None = None,
    scaled_cotangents: tuple[Precision | None, Precision | None] = (None, None),
    wide_outer: bool = False,
    summed_last: bool = False,
    quantized_operands: Sequence[Sequence[Any]] = (),
    quantized_for_cotangents: Sequence[Sequence[Any]] = (),
) -> Any:
    """A bilinear equation evaluated in low precision.

    Args:
        build: where its equations are added.
        eqn: a `dot_general`, `ragged_dot_general` or `conv_general_dilated` equation.
        low_operands: its two data operands in the low format, from `low_copy`.
        operands: all its operands in the original dtypes.
        dtype: the dtype of the result. A dot with a float32 result is not rounded.
        recast: as in `Bilinear`.
        low_result: whether the kernel rounds the result to the low format.
        low_cotangents: as in `ProductForm`.
        scaled: the format of a scaled product.
        scaled_cotangents: as in `Bilinear`.
        wide_outer: as in `ProductForm`.
        summed_last: as in `ProductForm`.
        quantized_operands: the two operands of a scaled product, each in 8 bits with its scale.
        quantized_for_cotangents: the same, as the product for the other operand's cotangent reads
            it; () where no such product is scaled.

    Returns:
        The product, differentiable to any order in forward and reverse mode.
    """
    form = Bilinear(
        eqn.primitive,
        ir.sorted_params(eqn),
        low_operands[0].aval.dtype,
        dtype,
        recast=recast,
        copied=True,
        rounds=low_result,
        low_cotangents=low_cotangents,
        scaled=scaled,
        scaled_cotangents=scaled_cotangents,
        wide_outer=wide_outer,
        summed_last=summed_last,
    )
    if scaled is not None:
        of_lhs, of_rhs = map(bool, quantized_for_cotangents)
        form = dataclasses.replace(form, rounded=(of_lhs, of_rhs))
        shared = [x for pair in quantized_for_cotangents for x in pair]
        every = [*operands, *shared, *low_operands]
        return scaled_with_carrier(build, form, quantized_operands, every, eqn.outvars[0].aval)
    aval = ir.with_dtype(eqn.outvars[0].aval, form.sums_in)
    return evaluated_with_carrier(build, form, low_operands, [*operands, *low_operands], aval)
