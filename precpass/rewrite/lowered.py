"""A product of a program in the form of a lowered product (`precpass.rewrite.low_product`)."""

from __future__ import annotations

from typing import Any

from precpass import jaxpr as ir
from precpass.eight_bits.scaled_product import roundings
from precpass.jaxpr.dimension_numbers import kept
from precpass.plan.plan import ProductForm
from precpass.policy.precision import Precision
from precpass.rewrite.env import Env
from precpass.rewrite.low_product import Bilinear, evaluated_with_carrier, scaled_with_carrier

__all__ = ["lowered"]


def lowered(env: Env, eqn: ir.Eqn, low: Precision, form: ProductForm) -> Any:
    """A bilinear equation evaluated in low precision.

    Args:
        env: the values that it reads.
        eqn: a `dot_general`, `ragged_dot_general` or `conv_general_dilated` equation.
        low: the format of its operands, or of what surrounds a scaled product.
        form: how it is evaluated.

    Returns:
        The product, differentiable to any order in forward and reverse mode.
    """
    if form.exchanged:
        eqn, form = ir.exchanged(eqn), form.with_sides_exchanged()
    eqn = env.without_transposes(eqn, low)
    operands = [env.read(v) for v in eqn.invars]
    low_operands = [env.low_copy(v, low) for v in eqn.invars[:2]]
    (of_lhs, of_rhs), scaled = form.scaled_cotangents, form.scaled
    bilinear = Bilinear(
        eqn.primitive,
        ir.sorted_params(eqn),
        low_operands[0].aval.dtype,
        eqn.outvars[0].aval.dtype,
        recast=form.recast_in_backward,
        copied=True,
        rounds=form.low_result,
        low_cotangents=form.low_cotangents,
        # An operand's 8 bits make the other one's cotangent.
        rounded=(of_rhs, of_lhs) if scaled else (False, False),
        scaled=scaled,
        scaled_cotangents=(scaled if of_lhs else None, scaled if of_rhs else None),
        wide_outer=form.wide_outer,
        summed_last=form.summed_last,
        largest=form.largest,
    )
    if scaled is not None:
        pairs, saved = _quantized(env, eqn, bilinear)
        every = [*operands, *saved, *low_operands]
        return scaled_with_carrier(env.build, bilinear, pairs, every, eqn.outvars[0].aval)
    aval = ir.with_dtype(eqn.outvars[0].aval, bilinear.sums_in)
    every = [*operands, *low_operands]
    return evaluated_with_carrier(env.build, bilinear, low_operands, every, aval)


def _quantized(env: Env, eqn: ir.Eqn, form: Bilinear) -> tuple[list[Any], list[Any]]:
    """The operands in 8 bits with their scales, and these as products for cotangents read them."""
    assert form.scaled is not None
    numbers, ndims = form.numbers, [v.aval.ndim for v in eqn.invars]
    lhs, rhs = (kept(*dims) for dims in zip(ndims, *numbers, strict=True))
    behind = (lhs, rhs), numbers[1]
    forward, backward = (
        roundings(form.scaled, each, ndims, is_last=form.summed_last, largest=largest)
        for each, largest in ((numbers, form.largest), (behind, (None, None)))
    )
    copies = [env.quantized_copy(v, r) for v, r in zip(eqn.invars, forward, strict=True)]
    readers = zip(eqn.invars, backward, form.rounded, strict=True)
    return copies, [x for v, r, is_read in readers if is_read for x in env.quantized_copy(v, r)]
