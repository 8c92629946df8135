"""Properties of a single equation that no policy changes."""

from __future__ import annotations

from typing import Any

import numpy as np

from precpass import jaxpr as ir
from precpass.analysis.sizes import nbytes
from precpass.policy.precision import Precision
from precpass.policy.primitives import BOUNDARY, COMPUTING, OpKind, op
from precpass.units import counted


def contracts(eqn: ir.Eqn) -> bool:
    """Whether a product contracts a dimension; an outer or elementwise product does not."""
    if eqn.primitive.name != "dot_general":
        return True
    numbers = ir.summed_and_batch(eqn)
    return numbers is not None and len(numbers[0][0]) > 0


def is_matrix_product(eqn: ir.Eqn) -> bool:
    """Whether a product is more than elementwise work and perhaps a reduction.

    It sums over more than one term, and uses an element of an operand in more than one sum. An
    outer product does not do the first, and `einsum("bd,bd->b")` not the second.
    """
    if eqn.primitive.name != "dot_general":
        return True
    if not contracts(eqn):
        return False
    summed, batch = ir.summed_and_batch(eqn) or ((), ())
    shapes = [v.aval.shape for v in eqn.invars[:2]]
    is_sum = any(shapes[0][d] != 1 for d in summed[0])
    return is_sum and any(
        size != 1 and d not in of_sum and d not in of_batch
        for shape, of_sum, of_batch in zip(shapes, summed, batch, strict=True)
        for d, size in enumerate(shape)
    )


def float_vars(eqn: ir.Eqn) -> list[Any]:
    """The floating operands."""
    return [v for v in eqn.invars if ir.precision_of(v.aval)]


def is_wide(atom: ir.Atom) -> bool:
    """Whether a value is float32."""
    return ir.precision_of(atom.aval) is Precision.F32


def moved_operand(eqn: ir.Eqn) -> Any:
    """The operand that an equation only moves, each element at most once; None if there is none."""
    if len(eqn.invars) != 1:
        return None
    row = op(eqn.primitive.name)
    moves = row.kind is OpKind.DATA_MOVEMENT and not spreads(eqn) and row.data is None
    (moved,) = eqn.invars
    if not (moves or ir.keeps_bits(eqn)) or ir.is_unreduced(moved.aval):
        return None
    return moved if is_wide(moved) and not ir.is_literal(moved) else None


def gathered_operand(eqn: ir.Eqn) -> Any:
    """The operand whose rows a gather repeats; None for any other equation.

    If its rows are cast to 16 bits before the gather, the result is the same as if they were cast
    after it. So it is None as well if JAX fills in a number for rows that do not exist, unless that
    is zero or NaN: any other number may have digits that 16 bits do not hold.
    """
    is_gather = eqn.primitive.name == "gather" and ir.fill_of(eqn) in (None, 0)
    return eqn.invars[0] if is_gather and grows(eqn) else None


def spreads(eqn: ir.Eqn) -> bool:
    """Whether one element of an operand reaches many results, whose cotangents are added up.

    A reshard to a type that is reduced over axes does so too: each device has a cotangent.
    """
    is_reshard = eqn.primitive.name == "reshard"
    return op(eqn.primitive.name).spreads or (is_reshard and ir.is_reduced(eqn.outvars[0].aval))


def chosen_operand(eqn: ir.Eqn) -> Any:
    """The operand of which an equation takes a part chosen at run time; None for any other."""
    if not op(eqn.primitive.name).takes_a_part:
        return None
    whole = eqn.invars[0]
    return whole if is_wide(whole) and not ir.is_literal(whole) else None


_PUT_TOGETHER = frozenset(("dynamic_update_slice", "scatter", "concatenate", "select_n"))
"""Primitives whose result has elements of several operands."""


def pieces(eqn: ir.Eqn) -> list[Any]:
    """The float32 operands that an equation puts its result together from; none of any other.

    Each element of the result is one of theirs, as where a row of a cache is replaced, or its rows
    are put into the order of a beam search.
    """
    if eqn.primitive.name == "gather" and ir.fill_of(eqn) in (None, 0) and is_wide(eqn.invars[0]):
        return eqn.invars[:1]
    if eqn.primitive.name not in _PUT_TOGETHER or ir.applies_function(eqn):
        return []
    return [v for v in eqn.invars if is_wide(v)]


def hands_on_layout(eqn: ir.Eqn) -> bool:
    """Whether XLA gives an equation's result the layout of its operand."""
    kind = op(eqn.primitive.name).kind
    return kind in (OpKind.ELEMENTWISE, OpKind.DATA_MOVEMENT) or ir.keeps_bits(eqn)


def grows(eqn: ir.Eqn) -> bool:
    """Whether an equation only repeats its operand's elements, so that a cast belongs before it.

    A cast before an `all_gather`, or a reshard that gathers, halves the bytes between devices. A
    `sharding_constraint` gathers too, or sends nothing: only the partitioner knows.
    """
    if not op(eqn.primitive.name).repeats:
        return False
    (before, *_), (after, *_) = eqn.invars, eqn.outvars
    if ir.is_literal(before) or not is_wide(before):
        return False
    is_gather = eqn.primitive.name == "gather"
    if len(eqn.invars) != 1 + is_gather or ir.is_unreduced(before.aval):
        return False
    if eqn.primitive.name == "sharding_constraint":
        return True
    here, there = (nbytes(v.aval) / ir.shards(v.aval) for v in (before, after))
    # XLA fuses a cast that follows a gather with it. A cast before it is a kernel of its own, which
    # pays if there are much fewer elements to cast.
    return there >= 2 * here if is_gather else there > here


def hands_on(eqn: ir.Eqn, var: ir.Var) -> bool:
    """Whether the numbers of a value are in an equation's results: moved, repeated, or chosen.

    A boundary, such as another library's primitive, may return its operand as it is.
    """
    name = eqn.primitive.name
    row = op(name)
    if row.kind is OpKind.BOUNDARY:
        held = ir.precision_of(var.aval)
        return any(ir.precision_of(v.aval) is held for v in eqn.outvars)
    if moved_operand(eqn) is var or row.chooses or name in _SAME:
        return True
    data = range(len(eqn.invars)) if row.data is None else row.data
    return row.kind is OpKind.DATA_MOVEMENT and any(eqn.invars[i] is var for i in data)


_SAME = frozenset(("neg", "abs", "copy", "clamp", "stop_gradient"))
"""Elementwise primitives whose results have the numbers of an operand, apart from selections."""


def scales(eqn: ir.Eqn) -> bool:
    """Whether an equation multiplies its only operand by a number."""
    is_scaling = op(eqn.primitive.name).scales
    return is_scaling and sum(not ir.is_literal(v) for v in eqn.invars) == 1


def negates(eqn: ir.Eqn) -> bool:
    """Whether an equation multiplies its operand by a negative number."""
    name = eqn.primitive.name
    if name not in ("mul", "div"):
        return name == "neg"
    return any(bool(np.all(v.val < 0)) for v in eqn.invars if ir.is_literal(v))


def tells_apart(eqn: ir.Eqn) -> bool:
    """Whether close values of an operand give different results: an order, or whole numbers."""
    row = op(eqn.primitive.name)
    if eqn.primitive.name == "convert_element_type":
        return ir.precision_of(eqn.outvars[0].aval) is None
    # A comparison with zero only reads the sign, which survives rounding.
    with_zero = any(ir.is_literal(v) and not v.val for v in eqn.invars)
    return row.ranks or row.no_low_kernel or (row.compares and not with_zero)


def handed_on_operand(eqn: ir.Eqn) -> Any:
    """The operand that an equation moves, or takes a part of; None if there is none."""
    moved = moved_operand(eqn)
    return chosen_operand(eqn) if moved is None else moved


def repeated_operand(eqn: ir.Eqn) -> Any:
    """The operand that an equation repeats; None for a gather, and for any other equation."""
    return eqn.invars[0] if grows(eqn) and len(eqn.invars) == 1 else None


def has_low(eqn: ir.Eqn) -> bool:
    """Whether an equation's bodies contain 16-bit values."""
    inside = (a for body in ir.bodies(eqn) for a in ir.all_avals(body.jaxpr))
    return any(p.is_low for a in inside if (p := ir.precision_of(a)))


def unentered(eqn: ir.Eqn, lowered: dict[Any, ir.Contents]) -> str | None:
    """The products in an equation that is not entered, in words; None if it contains none.

    Those of operands in 16 bits or fewer do not count: there is nothing to lower.

    Args:
        eqn: the equation.
        lowered: a cache of what equations contain, by their keys.
    """
    inner_eqns = [e for j in ir.hidden_jaxprs(eqn) for e in ir.all_held_eqns(j)]
    found = [e for e in inner_eqns if e.primitive.name in COMPUTING]
    products = sum(_has_wide_operand(e) for e in found)
    name = eqn.primitive.name
    is_unknown = ir.why_opaque(eqn) is None and name not in BOUNDARY
    shows_none = is_unknown or op(name).hides_products
    if not found and shows_none and any(getattr(v.aval, "ndim", 0) for v in float_vars(eqn)):
        products, python = _contents(eqn, lowered)
        if python:
            return "calls Python: products there keep their precision"
    if not products:
        return None
    keep = "it keeps its" if products == 1 else "they keep their"
    return f"contains {counted(products, 'product')}: {keep} precision"


def _has_wide_operand(eqn: ir.Eqn) -> bool:
    held = (ir.precision_of(v.aval) for v in eqn.invars[:2])
    return any(p is not None and not (p.is_low or p.is_scaled) for p in held)


def _contents(eqn: ir.Eqn, lowered: dict[Any, ir.Contents]) -> ir.Contents:
    key = eqn.primitive, tuple(v.aval for v in eqn.invars), ir.sorted_params(eqn)
    try:
        hash(key)
    except TypeError:
        return ir.contents_of(eqn)
    if key not in lowered:
        lowered[key] = ir.contents_of(eqn)
    return lowered[key]
