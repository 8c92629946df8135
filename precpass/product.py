"""The form of a lowered product: low operands, a wide result, a derivative through wide values.

    out = carrier(product(low(stop_gradient(x)), low(stop_gradient(w))), x, w)

JAX's transposition adds up cotangents in the dtype of whatever value was
shared: a cast that is shared before a fan-out makes a sum of 16384 ones come
out as 256. So the low copies are made of `stop_gradient`, and may be shared,
hoisted and stored at will, while `carrier`, a custom JVP that hands its first
operand through, takes the derivative with respect to the wide operands. Its
tangent is again a pair of low products, each with a cast of its own. Where
nothing is differentiated it disappears in lowering.

The product stays a plain equation, so that checkpoint policies such as
`dots_saveable` see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from precpass import jaxpr as ir
from precpass.precision import Precision

__all__ = ["linear_product", "low_copy", "lowered"]

Params = dict[str, Any]


def lowered(
    eqn: Any, low_operands: Sequence[Any], operands: Sequence[Any], dtype: np.dtype[Any]
) -> Any:
    """A bilinear equation evaluated in low precision.

    Args:
        eqn: a `dot_general`, `ragged_dot_general` or `conv_general_dilated` equation.
        low_operands: its two data operands in the low format, cast from
            `stop_gradient` copies.
        operands: all its operands as they were, wide.
        dtype: the dtype of the result. A dot whose result is wide is not rounded.

    Returns:
        The product, differentiable to any order in forward and reverse mode.
    """
    lhs, rhs, *rest = operands
    low = low_operands[0].dtype
    is_dot = eqn.primitive.name == "dot_general"
    if not _needs_barriers(low):
        out = _bind(eqn, low_operands, rest, eqn.params, dtype)
    else:
        form = _runnable(eqn, low_operands) if is_dot else (low_operands, eqn.params)
        if form is None:
            out = linear_product(eqn, low_operands, rest, dtype)
        else:
            out = lax.optimization_barrier(_bind(eqn, form[0], rest, form[1], dtype))
    tangent_of = (_dot_tangent if is_dot else _plain_tangent)(eqn, low, dtype)
    return _carrier(tangent_of)(out, lhs, rhs, *rest)


def linear_product(
    eqn: Any, low_operands: Sequence[Any], rest: Sequence[Any], dtype: np.dtype[Any]
) -> Any:
    """A bilinear equation in low precision that JAX can transpose as it stands.

    Its result is rounded: the transpose of (low, low) -> f32 would be a float32
    product. Each call must have casts of its own, so that cotangents add up wide.
    """
    out = _bind(eqn, low_operands, rest, eqn.params, low_operands[0].dtype)
    return lax.convert_element_type(out, dtype)


def _bind(
    eqn: Any, pair: Sequence[Any], rest: Sequence[Any], params: Params, dtype: np.dtype[Any]
) -> Any:
    low = pair[0].dtype
    # the kernels know no other wide result of a low pair than float32
    wide = np.dtype(np.float32) if eqn.primitive.name == "dot_general" else low
    result = low if dtype == low else wide
    given = {**eqn.params, **params, "preferred_element_type": result}
    (out,) = ir.bind(eqn, [*pair, *rest], given)
    return out if result == dtype else lax.convert_element_type(out, dtype)


def low_copy(x: Any, precision: Precision) -> Any:
    """A copy of a product's operand in a low format, which any number of products may share.

    No derivative passes through it.
    """
    x = lax.stop_gradient(x)
    low = x if x.dtype == precision.dtype else lax.convert_element_type(x, precision.dtype)
    return lax.optimization_barrier(low) if _needs_barriers(low.dtype) else low


def _needs_barriers(low: np.dtype[Any]) -> bool:
    """Whether XLA must be kept from folding transposes into a product.

    XLA:CPU folds them into (bf16, bf16) -> f32 products for which it then has no
    kernel (see `_runnable`). The kernels of the other platforms take every
    layout, and a barrier would cost the fusion behind the product.
    """
    known = ir.platform() in ("gpu", "cuda", "rocm", "tpu")
    return low == Precision.BF16.dtype and not known


def _runnable(eqn: Any, pair: Sequence[Any]) -> tuple[Sequence[Any], Params] | None:
    """The form of a (low, low) -> f32 dot that XLA:CPU has a kernel for.

    It has none (at run time: "Unsupported element type for DotThunk") where a
    transpose is folded into the product from before or behind, hence the barriers
    there, and where the left operand has its contracted dimensions before the kept
    ones while the right one is not laid out as (batch, contracted, kept): 12 of
    72 layouts, on jax 0.10.2 and 0.12.0. So the right one is transposed, behind
    a barrier through which nothing folds. Where it has that order already the
    transpose is kept all the same: it is free, and under `vmap` it brings the
    new dimension to the front. A right operand with several kept dimensions
    out of that order gets its transpose folded in even so: None, and the result
    is rounded to the low format, for which there is always a kernel.
    """
    lhs, rhs = pair
    (contracting, batch) = eqn.params["dimension_numbers"]
    kept = [d for d in range(lhs.ndim) if d not in contracting[0] and d not in batch[0]]
    if not kept or not contracting[0] or min(contracting[0]) > max(kept):
        return pair, eqn.params
    first = [*batch[1], *contracting[1]]
    order = [*first, *(d for d in range(rhs.ndim) if d not in first)]
    if order != list(range(rhs.ndim)) and rhs.ndim > len(first) + 1:
        return None
    rhs = lax.optimization_barrier(ir.transpose(rhs, order))
    n_batch = len(batch[1])
    leading = tuple(range(n_batch)), tuple(range(n_batch, len(first)))
    numbers = (tuple(contracting[0]), leading[1]), (tuple(batch[0]), leading[0])
    return (lhs, rhs), {"dimension_numbers": numbers}


Tangent = Callable[..., Any]


def _carrier(tangent_of: Tangent) -> Callable[..., Any]:
    def precpass_carrier(out: Any, lhs: Any, rhs: Any, *rest: Any) -> Any:
        del lhs, rhs, rest
        return out

    carrier = jax.custom_jvp(precpass_carrier)

    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        out, lhs, rhs, *rest = primals
        terms: list[Any] = []
        if not isinstance(tangents[1], SymbolicZero):
            terms.append(tangent_of(tangents[1], rhs, rest, 0))
        if not isinstance(tangents[2], SymbolicZero):
            terms.append(tangent_of(tangents[2], lhs, rest, 1))
        # the carrier again, not `out`: a second derivative must find the first one's way
        primal = carrier(out, lhs, rhs, *rest)
        if not terms:
            return primal, SymbolicZero(jax.typeof(out).to_tangent_aval())
        return primal, terms[0] if len(terms) == 1 else lax.add(*terms)

    carrier.defjvp(rule, symbolic_zeros=True)
    return carrier


def _plain_tangent(eqn: Any, low: np.dtype[Any], dtype: np.dtype[Any]) -> Tangent:
    def tangent_of(tangent: Any, other: Any, rest: Sequence[Any], side: int) -> Any:
        cast = lax.convert_element_type(tangent, low), lax.convert_element_type(other, low)
        return linear_product(eqn, cast if side == 0 else cast[::-1], rest, dtype)

    return tangent_of


def _dot_tangent(eqn: Any, low: np.dtype[Any], dtype: np.dtype[Any]) -> Tangent:
    (contracting, batch) = eqn.params["dimension_numbers"]

    def tangent_of(tangent: Any, other: Any, rest: Sequence[Any], side: int) -> Any:
        del rest
        tangent, numbers = _in_transposed_order(tangent, contracting, batch, side)
        cast = lax.convert_element_type(tangent, low), lax.convert_element_type(other, low)
        pair = cast if side == 0 else cast[::-1]
        out = _bind(eqn, pair, (), {"dimension_numbers": numbers}, low)
        return lax.convert_element_type(out, dtype)

    return tangent_of


def _in_transposed_order(
    x: Any, contracting: Sequence[Sequence[int]], batch: Sequence[Sequence[int]], side: int
) -> tuple[Any, Any]:
    """An operand's dimensions as (batch, kept, contracted), and the numbers of that product.

    It is the order in which JAX transposes a product without a permutation
    behind it, which XLA:CPU would fold into the slow form of the product
    (measured: 1131 against 310 ms for the gradient of a four-layer transformer).
    """
    own, others = contracting[side], contracting[1 - side]
    by_other = np.argsort(others)
    summed = [own[i] for i in by_other]
    kept = [d for d in range(x.ndim) if d not in own and d not in batch[side]]
    order = [*batch[side], *kept, *summed]
    n_batch = len(batch[side])
    new_sum = tuple(range(n_batch + len(kept), x.ndim))
    new = new_sum, tuple(range(n_batch))
    other = tuple(others[i] for i in by_other), tuple(batch[1 - side])
    pairs = (
        tuple(zip(new, other, strict=True)) if side == 0 else tuple(zip(other, new, strict=True))
    )
    if order != list(range(x.ndim)):
        x = lax.transpose(x, order)
    return x, pairs
