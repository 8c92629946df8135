"""The form of a lowered product: low operands, a wide result, a derivative through wide values.

    out = carrier(product(detach(low(x)), detach(low(w))), x, w)

JAX's transposition adds up cotangents in the dtype of whatever value was
shared: a cast that is shared before a fan-out makes a sum of 16384 ones come
out as 256. So the low copies are detached, and may be shared,
hoisted and stored at will, while the carrier (`jaxpr.carrier`), which hands its
first operand through, takes the derivative with respect to the wide operands.
Its tangent is again a pair of low products, each with a cast of its own. Where
nothing is differentiated it disappears in lowering.

The product stays a plain equation, so that checkpoint policies such as
`dots_saveable` see it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from precpass import jaxpr as ir
from precpass.precision import Precision

__all__ = ["Bilinear", "low_copy", "lowered"]

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Bilinear:
    """A bilinear equation and the low format that it runs in.

    Attributes:
        primitive: `dot_general`, `ragged_dot_general` or `conv_general_dilated`.
        items: its parameters, sorted by name.
        low: the dtype of its operands.
        dtype: the dtype of its result.
    """

    primitive: Any
    items: tuple[tuple[str, Any], ...]
    low: np.dtype[Any]
    dtype: np.dtype[Any]

    def __str__(self) -> str:
        return f"{self.primitive.name} in {self.low.name}"

    @property
    def is_dot(self) -> bool:
        """Whether it is a `dot_general`."""
        return self.primitive.name == "dot_general"

    def low_product(self, pair: Sequence[Any], rest: Sequence[Any], **params: Any) -> Any:
        """The product of low operands, with parameters changed, rounded to the low format."""
        given = {**dict(self.items), **params, "preferred_element_type": self.low}
        return ir.convert(self.primitive.bind(*pair, *rest, **given), self.dtype)

    @property
    def sums_in(self) -> np.dtype[Any]:
        """The dtype in which the product of low operands is asked for.

        It is that of the result, so that sums are not rounded to the low format; the
        kernels know no other wide result of a 16-bit pair than float32.
        """
        wide = self.dtype != self.low and self.low.itemsize < 4
        return np.dtype(np.float32) if wide else self.dtype

    def tangent(self, tangent: Any, other: Any, rest: Sequence[Any], side: int) -> Any:
        """The low product with `tangent` in the place of operand `side`.

        Its result is rounded: the transpose of (low, low) -> f32 would be a
        float32 product. Both operands get casts of their own, so that
        cotangents add up wide.
        """
        params: Params = {}
        if self.is_dot:
            contracting, batch = dict(self.items)["dimension_numbers"]
            tangent, numbers = _in_transposed_order(tangent, contracting, batch, side)
            params["dimension_numbers"] = numbers
        cast = [ir.convert(x, self.low) for x in (tangent, other)]
        return self.low_product(cast if side == 0 else cast[::-1], rest, **params)


def lowered(
    build: ir.Builder,
    eqn: Any,
    low_operands: Sequence[Any],
    operands: Sequence[Any],
    dtype: np.dtype[Any],
) -> Any:
    """A bilinear equation evaluated in low precision.

    Args:
        build: where its equations are added.
        eqn: a `dot_general`, `ragged_dot_general` or `conv_general_dilated` equation.
        low_operands: its two data operands in the low format, from `low_copy`.
        operands: all its operands as they were, wide.
        dtype: the dtype of the result. A dot whose result is wide is not rounded.

    Returns:
        The product, differentiable to any order in forward and reverse mode.
    """
    lhs, rhs, *rest = operands
    low = low_operands[0].aval.dtype
    form = Bilinear(eqn.primitive, ir.sorted_params(eqn), low, dtype)
    pinned, zeros = _needs_barriers(low), eqn.primitive.name == "ragged_dot_general"
    runs = pinned and form.is_dot
    pair, params = _runnable(build, eqn, low_operands) if runs else (low_operands, {})
    params = {**dict(form.items), **params, "preferred_element_type": form.sums_in}
    aval = eqn.outvars[0].aval.update(dtype=form.sums_in, weak_type=False)
    out = build.emit(eqn.primitive, [*pair, *rest], params, aval)
    if form.sums_in != dtype:
        out = build.convert(out, dtype)
    if pinned or zeros:
        out = build.detach(out, pinned=pinned, zeros=zeros)
    return build.carry(form, out, lhs, rhs, rest)


def low_copy(build: ir.Builder, x: Any, precision: Precision) -> Any:
    """A copy of a product's operand in a low format, which any number of products may share.

    No derivative passes through it.
    """
    low = x if x.aval.dtype == precision.dtype else build.convert(x, precision.dtype)
    return build.detach(low, pinned=_needs_barriers(precision.dtype))


def _needs_barriers(low: np.dtype[Any]) -> bool:
    """Whether XLA:CPU must be kept from folding transposes into a product.

    It folds them into (bf16, bf16) -> f32 products for which it then has no
    kernel (see `_runnable`). No trace knows the platforms that it will be lowered
    for, so every program has the form that runs on all; the kernels of the other
    platforms take every layout, and there the barriers are lowered to nothing.
    """
    return low == Precision.BF16.dtype


def _runnable(build: ir.Builder, eqn: Any, pair: Sequence[Any]) -> tuple[Sequence[Any], Params]:
    """The form of a (bf16, bf16) -> f32 dot that XLA:CPU has a kernel for.

    It has none (at run time: "Unsupported element type for DotThunk") where a
    transpose is folded into the product from before or behind, hence the barriers
    there, nor for some layouts of the right operand where the left one has its
    contracted dimensions before the kept ones (12 of 72 layouts tried, on jax
    0.10.2 and 0.12.0). So the left one is brought into the order (batch, kept,
    contracted), behind a barrier. Where it has that order already nothing is
    done: `vmap` can then only add kept or batch dimensions, which is harmless.

    XLA's layouts pass through a barrier: a matrix behind one may be the transposed
    matrix still, whose product runs on widened operands (measured: 2.8 times the
    time). A flat array has one layout only.
    """
    lhs, rhs = pair
    numbers = ir.summed_and_batch(eqn)
    assert numbers is not None
    contracting, batch = numbers
    rank = lhs.aval.ndim
    kept = [d for d in range(rank) if d not in contracting[0] and d not in batch[0]]
    if not kept or not contracting[0] or min(contracting[0]) > max(kept):
        return pair, {}
    order = [*batch[0], *kept, *contracting[0]]
    key = ("transpose", tuple(order))
    (lhs,) = build.call(lambda x: [lax.transpose(x, order)], [lhs], key)
    lhs = _pinned_flat(build, lhs)
    n_batch = len(batch[0])
    summed = tuple(range(n_batch + len(kept), rank))
    numbers = (summed, tuple(contracting[1])), (tuple(range(n_batch)), tuple(batch[1]))
    return (lhs, rhs), {"dimension_numbers": numbers}


def _pinned_flat(build: ir.Builder, x: Any) -> Any:
    """`x` behind a barrier, in the layout that it is written in."""
    shape = x.aval.shape
    if not x.aval.sharding.mesh.empty or not all(isinstance(size, int) for size in shape):
        return build.detach(x, pinned=True)
    (flat,) = build.call(lambda x: [lax.reshape(x, (math.prod(shape),))], [x], "flat")
    flat = build.detach(flat, pinned=True)
    (back,) = build.call(lambda x: [lax.reshape(x, shape)], [flat], ("back", shape))
    return back


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
