"""The form of a scaled product: operands of 8 bits, and scales that its result is multiplied by.

    out = dot(round8(x / s), round8(w / t)) * (s * t)

A scale is made of the largest magnitude of the values that share it. int8 has a scale for each row
of the left operand and each column of the right one, because its numbers are equally far apart:
one large value takes the digits of all that share its scale. float8's numbers have exponents of
their own, so it has one scale for a whole array, a power of two, by which nothing is rounded.

What is not finite makes its scale so, and thereby every result that the scale is a factor of.
Values that are all zero have the scale one.

The kernels of some devices multiply 8 bits only if the contracted dimensions of both operands are
the last ones in memory (`summed_last`). XLA would transpose the values of float8 in a kernel of its
own, where the backward pass reads another order than the forward pass. So each order is a copy that
is transposed before it is rounded. A barrier on the inverse of its scale keeps XLA from making one
copy of the other; both are results of one kernel. int8 is read in the forward pass alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from precpass import jaxpr as ir
from precpass.backends.cpu_kernels import runnable
from precpass.eight_bits.scales import SMALLEST, power_of_two_scale, result_dims, scale_for, spread
from precpass.jaxpr.dimension_numbers import Numbers, kept, summed_last, with_summed_last
from precpass.policy.precision import Precision

__all__ = [
    "Rounding",
    "as_bits",
    "from_bits",
    "roundings",
    "scaled_product",
]


def roundings(
    precision: Precision,
    numbers: Numbers,
    ndims: Sequence[int],
    *,
    is_last: bool,
    largest: Sequence[float | None] = (None, None),
) -> list[Rounding]:
    """How each operand of a dot is rounded.

    Args:
        precision: of the scaled product.
        numbers: the dot's dimension numbers.
        ndims: the rank of each operand.
        is_last: whether contracted dimensions are to be the last ones.
        largest: for each operand the largest magnitude that its scale is made for; None to take
            that of the operand itself.
    """
    return [
        Rounding(
            precision,
            tuple(summed) if precision.by_row else (),
            summed_last(ndim, summed, batch) if is_last else (),
            most,
        )
        for ndim, summed, batch, most in zip(ndims, *numbers, largest, strict=True)
    ]


def scaled_product(
    build: ir.Builder | ir.Direct,
    primitive: Any,
    items: Sequence[tuple[str, Any]],
    pairs: Sequence[Sequence[Any]],
    dtype: np.dtype[Any],
    aval: ir.Aval = None,
    *,
    is_last: bool = False,
) -> Any:
    """The product of two operands in 8 bits, times their scales.

    Args:
        build: where its equations are added.
        primitive: `dot_general`.
        items: the parameters of the dot, sorted by name.
        pairs: its operands in 8 bits, each with its scale.
        dtype: that of the result.
        aval: the aval of the result, in any dtype; a `Direct` needs none.
        is_last: whether the operands in 8 bits are in the order of `summed_last`.
    """
    (lhs, of_lhs), (rhs, of_rhs) = pairs
    numbers = dict(items)["dimension_numbers"]
    if is_last:
        numbers = with_summed_last(numbers, (lhs.aval.ndim, rhs.aval.ndim))
    # XLA takes int8 products with a float32 result for slow ones on every platform.
    is_int8 = lhs.aval.dtype == np.int8
    sums_in = np.dtype(np.int32 if is_int8 else np.float32)
    if dtype == Precision.BF16.dtype and not is_int8:
        # A product by powers of two rounds nothing, so the kernel may round before it.
        sums_in = dtype
    pair, params = runnable(build, numbers, [lhs, rhs]) if is_int8 else ([lhs, rhs], {})
    asked = {"preferred_element_type": sums_in, "precision": None}
    params = {**dict(items), "dimension_numbers": numbers, **params, **asked}
    sums = build.emit(primitive, pair, params, aval and ir.with_dtype(aval, sums_in))

    scaled = _Scaled(_hashable(numbers), dtype)
    scales = [_placed(build, of_lhs, sums, numbers, 0), _placed(build, of_rhs, sums, numbers, 1)]
    return build.call(lambda *xs: ir.scaling(scaled, *xs), [sums, *scales], scaled)[0]


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Rounds a floating array to 8 bits.

    Its results are the values of 8 bits and a float32 array that they are to be multiplied by: of
    the same rank, with size 1 in the dimensions `summed`, or a scalar.

    Attributes:
        precision: INT8 or F8E4M3.
        summed: the dimensions along which numbers share a scale: those that are contracted, or ()
            for all. A scale for a known magnitude is shared by all.
        order: the order of the dimensions of both results, for float8; () for that of the array.
        largest: the largest magnitude that the scale is made for. Larger numbers become the largest
            one of 8 bits. None to take the array's own, or those of its slices.
    """

    precision: Precision
    summed: tuple[int, ...]
    order: tuple[int, ...] = ()
    largest: float | None = None

    def __call__(self, *arrays: Any, platform: str) -> list[Any]:
        """The array in 8 bits and its scale, as `ir.Arithmetic` says."""
        (x,), on_cpu = arrays, platform == "cpu"
        if self.largest is not None:
            return self._by_known_scale(x, self.largest)
        wide = x if x.dtype == np.float32 else ir.convert(x, np.float32)
        largest = _largest(wide, self.summed, on_cpu)
        if self.precision is Precision.INT8:
            return _as_int8(wide, largest)
        scale = power_of_two_scale(largest, self.precision.max)
        inverse = np.float32(1.0) / scale
        if self.order:
            inverse = lax.optimization_barrier(inverse)
            moved = wide, inverse, scale
            wide, inverse, scale = (lax.transpose(a, self.order) if a.ndim else a for a in moved)
        return [(wide * inverse).astype(self.precision.dtype), scale]

    def _by_known_scale(self, x: Any, largest: float) -> list[Any]:
        """The array rounded by a scale that does not depend on it.

        XLA makes this a part of the kernel before, if a bfloat16 array is scaled in bfloat16 and
        not in float32. float8's scales allow it: multiplying by a power of two rounds nothing.
        """
        is_int8, most = self.precision is Precision.INT8, float(self.precision.max)
        scale = scale_for(largest, most, is_power=not is_int8)
        x = x.astype(np.float32) if is_int8 else x
        scaled = x * np.asarray(1.0 / scale, x.dtype)
        if is_int8:
            scaled = lax.round(scaled, lax.RoundingMethod.TO_NEAREST_EVEN)
        low = lax.clamp(np.asarray(-most, x.dtype), scaled, np.asarray(most, x.dtype))
        low = lax.transpose(low, self.order) if self.order else low
        return [low.astype(self.precision.dtype), jnp.asarray(scale, np.float32)]

    def avals(self, *operands: ir.Aval) -> list[ir.Aval]:
        """As `ir.Arithmetic` says."""
        (x,) = operands
        order = self.order or tuple(range(x.ndim))
        moved = ir.reordered(x, order) if self.order else x
        shape = [1 if d in self.summed else x.shape[d] for d in order]
        has_several = self.summed and self.largest is None
        return [
            moved.update(dtype=self.precision.dtype, weak_type=False),
            ir.with_sizes(moved, shape if has_several else (), np.dtype(np.float32)),
        ]

    def __str__(self) -> str:
        along = f" with a scale along {self.summed}" if self.summed else ""
        known = "" if self.largest is None else f" up to {self.largest:.3g}"
        return f"to {self.precision}{known}{along}{f' in order {self.order}' if self.order else ''}"


def as_bits(low: Any) -> Any:
    """E4M3 values as unsigned integers of the same bits; no derivative passes through them."""
    return low if low.dtype == np.uint8 else lax.bitcast_convert_type(low, np.uint8)


def from_bits(bits: Any) -> Any:
    """The E4M3 values of which these are the bits; such values themselves are taken, too."""
    if bits.dtype != np.uint8:
        return bits
    return ir.detach(lax.bitcast_convert_type(bits, Precision.F8E4M3.dtype))


@dataclasses.dataclass(frozen=True)
class _Scaled:
    """The product of operands in 8 bits, times the scales of both, in a dtype."""

    numbers: Numbers
    dtype: np.dtype[Any]

    def __call__(self, *arrays: Any, platform: str) -> list[Any]:
        del platform
        sums, lhs, rhs = arrays
        if not (lhs.ndim or rhs.ndim) and sums.dtype == self.dtype:
            # A power of two rounds nothing.
            return [sums * (lhs * rhs).astype(self.dtype)]
        wide = sums.astype(np.float32)
        if not (lhs.ndim or rhs.ndim):
            return [(wide * (lhs * rhs)).astype(self.dtype)]
        both = [
            spread(scale, wide, self.numbers, side) if scale.ndim else scale
            for side, scale in enumerate((lhs, rhs))
        ]
        # The scales first: one of them may be so large that the sums times it are not finite.
        return [(wide * (both[0] * both[1])).astype(self.dtype)]

    def avals(self, *operands: ir.Aval) -> list[ir.Aval]:
        sums, *_ = operands
        return [sums.update(dtype=self.dtype, weak_type=False)]

    def __str__(self) -> str:
        return "times both scales"


def _largest(x: Any, dims: tuple[int, ...], on_cpu: bool) -> Any:
    """The largest magnitudes along dimensions, or of all for (); NaN where there is one.

    XLA:CPU's kernel for the maximum of 64 and more elements leaves out NaN (jax 0.10.2, 0.12.0), so
    there a sum finds it.
    """
    every = dims or tuple(range(x.ndim))
    largest = jnp.max(jnp.abs(x), axis=every, keepdims=bool(dims), initial=np.float32(0))
    if not on_cpu:
        return largest
    zero_or_nan = jnp.sum(x * np.float32(0), axis=every, keepdims=bool(dims))
    return jnp.where(jnp.isinf(largest), largest, largest + zero_or_nan)


def _as_int8(wide: Any, largest: Any) -> list[Any]:
    most = np.float32(Precision.INT8.max)
    is_small = largest < np.float32(SMALLEST)
    inverse = jnp.where(is_small, np.float32(0.0), most / largest)
    # The largest magnitude becomes 127 times 1 and a few roundoffs, which is rounded to 127.
    whole = lax.round(wide * inverse, lax.RoundingMethod.TO_NEAREST_EVEN)
    return [whole.astype(np.int8), largest * np.float32(1.0 / most)]


def _placed(
    build: ir.Builder | ir.Direct, scale: Any, sums: Any, numbers: Numbers, side: int
) -> Any:
    """A scale whose dimensions are sharded as the dimensions of the product that they become."""
    ndim, summed, own_batch = scale.aval.ndim, numbers[0][side], numbers[1][side]
    if not ndim or sums.aval.sharding.mesh.empty:
        return scale
    its_dims = result_dims(ndim, sums.aval.ndim, numbers, side)
    dims: list[int | None] = [None] * ndim
    for own, its in zip((*own_batch, *kept(ndim, summed, own_batch)), its_dims, strict=True):
        dims[own] = its
    return build.call(lambda x: [ir.resharded_along(x, sums.aval, dims)], [scale])[0]


def _hashable(numbers: Numbers) -> Numbers:
    (lhs, rhs), (lhs_batch, rhs_batch) = numbers
    return (tuple(lhs), tuple(rhs)), (tuple(lhs_batch), tuple(rhs_batch))
