"""Products of two types, such as float32 activations and bfloat16 weights, with their casts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from precpass.jaxpr.binding import bind, convert, one_by_one, retrace
from precpass.jaxpr.bodies import all_eqns, bodies, with_bodies
from precpass.jaxpr.reading import precision_of
from precpass.jaxpr.types import Eqn, Jaxpr
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind, op

__all__ = ["with_promoted_operands"]


def with_promoted_operands(jaxpr: Jaxpr) -> Any:
    """A jaxpr in which products of float32 and 16-bit operands cast the latter to float32.

    The hardware does the same with such a product. As an equation of its own the cast can be
    dropped again, where the product runs low. Nothing else changes, and no value changes its type.

    Args:
        jaxpr: open or closed; it is returned as it is if it has no such product.
    """
    if not any(map(_is_mixed, all_eqns(jaxpr))):
        return jaxpr

    def apply(eqn: Eqn, operands: Sequence[Any]) -> Sequence[Any]:
        if _is_mixed(eqn):
            wide = Precision.F32.dtype
            operands = [convert(x, wide) if x.dtype != wide else x for x in operands]
            return bind(eqn, operands)
        found = bodies(eqn)
        if not any(_is_mixed(inner) for body in found for inner in all_eqns(body.jaxpr)):
            return bind(eqn, operands)
        new = [with_promoted_operands(body.jaxpr) for body in found]
        return bind(eqn, operands, with_bodies(eqn, found, new))

    return retrace(jaxpr, lambda *args: one_by_one(jaxpr, args, apply))


def _is_mixed(eqn: Eqn) -> bool:
    if op(eqn.primitive.name).kind is not OpKind.COMPUTE or len(eqn.invars) != 2:
        return False
    formats = {precision_of(v.aval) for v in eqn.invars}
    is_wide = precision_of(eqn.outvars[0].aval) is Precision.F32
    return is_wide and formats in _MIXED


_MIXED = ({Precision.F32, Precision.BF16}, {Precision.F32, Precision.F16})
