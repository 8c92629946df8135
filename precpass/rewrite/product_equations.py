"""The equations of a lowered product: roundings of its operands, the product, and its carrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from precpass import jaxpr as ir
from precpass.rewrite.block_scaled import block_product
from precpass.rewrite.copies import quantized_copy
from precpass.rewrite.cpu_kernels import needs_barriers, runnable
from precpass.rewrite.scaled_product import scaled_product

if TYPE_CHECKING:
    from precpass.rewrite.low_product import Bilinear

__all__ = ["evaluated", "multiplied", "scaled"]


def evaluated(
    build: ir.Builder | ir.Direct,
    form: Bilinear,
    low_operands: Sequence[Any],
    operands: Sequence[Any],
    aval: ir.Aval = None,
    *,
    detached: bool = False,
    rounded: Sequence[Sequence[Any] | None] = (None, None),
) -> Any:
    """A product with its carrier.

    Args:
        build: where its equations are added.
        form: the product.
        low_operands: its two data operands in the low format.
        operands: all its operands; the derivative passes through the first two.
        aval: the aval of the low operands' product; a `Direct` needs none.
        detached: whether to detach the product from derivatives through the low operands.
        rounded: for each operand of a scaled product its rounded copy with the scales, if it is
            made already.
    """
    if form.scaled is not None:
        roundings = form.scaled.roundings(form.numbers)
        pairs = [
            made or quantized_copy(build, x, rounding)
            for x, rounding, made in zip(operands[:2], roundings, rounded, strict=True)
        ]
        return scaled(build, form, pairs, operands)
    return multiplied(build, form, low_operands, operands, aval, detached=detached)


def multiplied(
    build: ir.Builder | ir.Direct,
    form: Bilinear,
    low_operands: Sequence[Any],
    operands: Sequence[Any],
    aval: ir.Aval = None,
    *,
    detached: bool = False,
) -> Any:
    """A product of 16 bits with its carrier, as for `_evaluated`."""
    lhs, rhs, *rest = operands
    # JAX's transpose of a ragged dot takes no symbolic zero
    pinned, zeros = needs_barriers(form.low), form.is_ragged and not detached
    runs = pinned and form.is_dot
    pair, params = runnable(build, form.numbers, low_operands) if runs else (low_operands, {})
    sums_in = form.sums_in
    params = {**dict(form.items), **params, "preferred_element_type": sums_in}
    out = build.emit(form.primitive, [*pair, *form.others(rest)], params, aval)
    if sums_in != form.dtype:
        out = build.convert(out, form.dtype)
    if pinned or zeros or detached:
        out = build.detach(out, pinned=pinned, zeros=zeros)
    return build.carry(form, out, lhs, rhs, rest)


def scaled(
    build: ir.Builder | ir.Direct,
    form: Bilinear,
    pairs: Sequence[Sequence[Any]],
    operands: Sequence[Any],
    aval: ir.Aval = None,
) -> Any:
    """A scaled product with its carrier; `pairs` are its rounded operands, with their scales."""
    assert form.scaled is not None
    lhs, rhs, *rest = operands
    dtype = form.low if form.rounds else form.dtype
    if form.scaled.by_units:
        out = block_product(build, form.primitive, form.items, pairs, dtype, form.scaled.lhs)
    elif form.scaled.lhs.block:
        aval = aval and ir.with_dtype(aval, form.sums_in)
        return multiplied(build, form, [low for (low,) in pairs], operands, aval)
    else:
        out = scaled_product(build, form.primitive, form.items, pairs, dtype, aval)
    if dtype != form.dtype:
        out = build.convert(out, form.dtype)
    return build.carry(form, build.detach(out), lhs, rhs, rest)
