"""The form of a micro-scaled product: each block of a row has a scale of its own, inside the sum.

    out[m, n] = sum over blocks b of s[m, b] t[n, b] dot(x[m, b] / s[m, b], w[b, n] / t[n, b])

Blocks lie along the last summed dimension that each device has in whole blocks
(`ir.block_position`). A device with units for them (NVIDIA Blackwell) is given the rounded values
and their scales, by `jax.nn.scaled_matmul`. For all others the rounded values are multiplied by
their scales first, and the product of the results is one in bfloat16, which holds them exactly. So
it has the digits of the format everywhere.

mxfp8 (OCP Microscaling Formats Specification 1.0, 2023) has elements in E4M3 and powers of two as
scales. A scale is rounded up, so that no element saturates (Mishra et al., "Recipes for
Pre-training LLMs with MXFP8", 2025). nvfp4 has elements in E2M1, scales in E4M3, and one float32
scale for the whole array that brings those into E4M3's range (NVIDIA, "Pretraining Large Language
Models with NVFP4", 2025); here that one is a power of two, by which nothing is rounded.

What is not finite makes its block's scale NaN, and thereby the results of its row or column.
Blocks that are all zero stay so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from precpass import jaxpr as ir
from precpass.policy.precision import Precision
from precpass.rewrite.cpu_kernels import runnable
from precpass.rewrite.dot_numbers import Numbers, batched, kept
from precpass.rewrite.scales import power_of_two_scale, spread

__all__ = ["BlockRounding", "block_product", "in_blocks"]

_BF16 = Precision.BF16.dtype
_MOST = np.float32(Precision.BF16.max)
_SCALES = {
    Precision.MXFP8: np.dtype(ml_dtypes.float8_e8m0fnu),
    Precision.NVFP4: Precision.F8E4M3.dtype,
}
"""The dtypes of the blocks' scales."""


@dataclasses.dataclass(frozen=True)
class BlockRounding:
    """Rounds an array to a micro-scaled format.

    Attributes:
        precision: the format.
        summed: the one dimension along which its blocks lie, whose size is a multiple of theirs.
        by_units: whether the results are values and scales in the format's own dtypes. Otherwise
            there is one result, their products in bfloat16.
    """

    precision: Precision
    summed: tuple[int, ...]
    by_units: bool

    def __call__(self, *arrays: Any, platform: str) -> list[Any]:
        """The rounded array, as `ir.Arithmetic` says."""
        del platform
        (x,), (dim,) = arrays, self.summed
        quotients, scales, whole = in_blocks(x, self.precision, dim)
        if not self.by_units:
            # Casts would not do: XLA leaves out a cast to a narrow format before one back.
            values = _nearest(quotients, self.precision) * (scales * whole)
            return [lax.reshape(_as_bfloat16(values), x.shape)]
        values = lax.reshape(quotients.astype(self.precision.dtype), x.shape)
        of_blocks = lax.squeeze(scales, [dim + 1]).astype(_SCALES[self.precision])
        results = [values, of_blocks]
        if self.precision is Precision.NVFP4:
            results.append(lax.reshape(whole, (1,) * x.ndim))
        return results

    def avals(self, *operands: ir.Aval) -> list[ir.Aval]:
        """As `ir.Arithmetic` says."""
        (x,), (dim,) = operands, self.summed
        if not self.by_units:
            return [x.update(dtype=_BF16, weak_type=False)]
        shape = list(x.shape)
        shape[dim] //= self.precision.block
        results = [
            x.update(dtype=self.precision.dtype, weak_type=False),
            ir.with_sizes(x, shape, _SCALES[self.precision]),
        ]
        if self.precision is Precision.NVFP4:
            results.append(ir.with_sizes(x, (1,) * x.ndim, np.dtype(np.float32)))
        return results

    def __str__(self) -> str:
        where = "" if self.by_units else ", in bf16"
        return f"to {self.precision} with a scale for each block along {self.summed[0]}{where}"


def in_blocks(x: Any, precision: Precision, dim: int) -> tuple[Any, Any, Any]:
    """The scales of an array in a micro-scaled format, and its quotients by them.

    With quotients that are rounded to the format, it is `quotients * scales * whole`.

    Args:
        x: a floating array.
        precision: MXFP8 or NVFP4.
        dim: the dimension along which the blocks lie; its size is a multiple of theirs.

    Returns:
        The quotients, within the format's range, with `dim` split into blocks and what is in them;
        the scales of the blocks, of the same rank; and the scale of the whole array, a scalar. All
        are float32.
    """
    wide = x if x.dtype == np.float32 else ir.convert(x, np.float32)
    blocks = lax.reshape(wide, _split(x.shape, dim, precision.block))
    largest = _largest(blocks, dim + 1)
    is_finite, most, whole = jnp.isfinite(largest), np.float32(precision.max), jnp.float32(1.0)
    if precision is Precision.MXFP8:
        scales = divisor = power_of_two_scale(largest, most)
    else:
        known = jnp.max(jnp.where(is_finite, largest, np.float32(0)))
        whole = power_of_two_scale(known, most * np.float32(Precision.F8E4M3.max))
        scales = _nearest(largest / most * (np.float32(1.0) / whole), Precision.F8E4M3)
        divisor = jnp.where(scales > 0, scales * whole, np.float32(np.inf))
    quotients = jnp.clip(blocks / divisor, -most, most)
    scales = jnp.where(is_finite, scales, np.float32(np.nan))
    return quotients, scales, whole


def _largest(x: Any, dim: int) -> Any:
    """The largest magnitudes along a dimension, which they keep; not finite where one is not.

    The bits of magnitudes are in the order of these, with infinity and NaN behind all others. So
    one maximum finds both, and no compiler leaves out a NaN.
    """
    bits = lax.bitcast_convert_type(jnp.abs(x), np.uint32)
    if bits.shape[dim] > 16:
        # XLA's GPU compiler (jax 0.12.0.1) writes a float32 transpose of the operand of a maximum
        # over 32 elements, which of six layers is 0.3 of all bytes, and none over 16.
        halves = jnp.split(bits, 2, dim)
        bits = jnp.maximum(*halves)
    return lax.bitcast_convert_type(jnp.max(bits, axis=dim, keepdims=True), np.float32)


def _split(shape: Sequence[int], dim: int, block: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] // block, block, *shape[dim + 1 :])


def _nearest(x: Any, precision: Precision) -> Any:
    """The nearest numbers of a format to float32 numbers within its range, as float32."""
    digits = round(-np.log2(precision.unit_roundoff))
    step = np.float32(precision.smallest_normal * 2.0 ** (1 - digits))
    normal = lax.reduce_precision(x, 8, digits - 1)
    subnormal = lax.round(x * (1 / step), lax.RoundingMethod.TO_NEAREST_EVEN) * step
    return jnp.where(jnp.abs(x) < np.float32(precision.smallest_normal), subnormal, normal)


def block_product(
    build: ir.Builder | ir.Direct,
    primitive: Any,
    items: Sequence[tuple[str, Any]],
    sides: Sequence[Sequence[Any]],
    dtype: np.dtype[Any],
    precision: Precision,
) -> Any:
    """The product of two operands in a micro-scaled format, which the device's units multiply.

    Args:
        build: where its equations are added.
        primitive: `dot_general`.
        items: the parameters of the dot, sorted by name.
        sides: for each operand its values, their scales, and that of the whole array if it has one.
        dtype: that of the result.
        precision: the format.
    """
    sums_in = dtype if dtype == _BF16 else np.dtype(np.float32)
    product = _BlockProduct(str(precision), primitive, tuple(items), sums_in)

    def multiplied(*arrays: Any) -> list[Any]:
        return [ir.block_product(product, *arrays, calls=_units())]

    operands = [x for pair in zip(*sides, strict=True) for x in pair]
    out = build.call(multiplied, operands, product)[0]
    return out if sums_in == dtype else build.convert(out, dtype)


@functools.cache
def _units() -> Any:
    """A jaxpr with the primitive of `jax.nn.scaled_matmul`, for `ir.block_product`'s `calls`."""
    values = jax.ShapeDtypeStruct((1, 32, 32), Precision.MXFP8.dtype)
    scales = jax.ShapeDtypeStruct((1, 32, 1), _SCALES[Precision.MXFP8])
    return jax.make_jaxpr(jax.nn.scaled_matmul)(values, values, scales, scales)


@dataclasses.dataclass(frozen=True)
class _BlockProduct:
    """The product of values with scales of blocks.

    Attributes:
        format: the name of the format.
        primitive: `dot_general`.
        items: its parameters.
        dtype: that of the result, float32 or bfloat16.
    """

    format: str
    primitive: Any
    items: tuple[tuple[str, Any], ...]
    dtype: np.dtype[Any]

    @property
    def numbers(self) -> Numbers:
        """The dimension numbers."""
        return dict(self.items)["dimension_numbers"]

    def under_vmap(
        self, avals: Sequence[ir.Aval], dims: Sequence[int | None]
    ) -> tuple[_BlockProduct, int]:
        """As `ir.BlockArithmetic` says. An array and its scales are mapped along one dimension."""
        pair = avals[:2], dims[:2]
        numbers, dim = batched(self.numbers, [aval.ndim for aval in pair[0]], pair[1])
        out_sharding = ir.sharding_under_vmap(dict(self.items)["out_sharding"], *pair, dim)
        changes = {"dimension_numbers": numbers, "out_sharding": out_sharding}
        items = tuple(sorted({**dict(self.items), **changes}.items()))
        return dataclasses.replace(self, items=items), dim

    def __call__(self, *arrays: Any, platform: str) -> list[Any]:
        sides = arrays[::2], arrays[1::2]
        if platform != "cuda":
            pair, params = [_in_bfloat16(*side) for side in sides], dict[str, Any]()
            if platform == "cpu":
                pair, params = runnable(ir.Direct(), self.numbers, list(map(_pinned, pair)))
            return [_pinned(self._dot(*pair, **params))]
        (lhs, of_lhs), (rhs, of_rhs) = (
            [self._rows(side, x, _block_dim(*pair[:2])) for x in pair[:2]]
            for side, pair in enumerate(sides)
        )
        flat = jax.nn.scaled_matmul(lhs, rhs, of_lhs, of_rhs, preferred_element_type=self.dtype)
        out = lax.reshape(flat, self._shape(sides[0][0], sides[1][0]))
        if self.format == str(Precision.NVFP4):
            # Both are powers of two, so that nothing is rounded. The smaller one comes first, so
            # that nothing overflows.
            both = [spread(side[2], out, self.numbers, at) for at, side in enumerate(sides)]
            out = out.astype(np.float32) * jnp.minimum(*both) * jnp.maximum(*both)
        return [out.astype(self.dtype)]

    def avals(self, *operands: ir.Aval) -> list[ir.Aval]:
        pair = [x.update(dtype=_BF16) for x in operands[:2]]
        return jax.make_jaxpr(self._dot)(*pair).out_avals

    def _dot(self, lhs: Any, rhs: Any, **changes: Any) -> Any:
        params = {**dict(self.items), "preferred_element_type": self.dtype, "precision": None}
        return self.primitive.bind(lhs, rhs, **params | changes)

    def _shape(self, lhs: Any, rhs: Any) -> tuple[int, ...]:
        pair = [jax.ShapeDtypeStruct(x.shape, _BF16) for x in (lhs, rhs)]
        return jax.eval_shape(self._dot, *pair).shape

    def _rows(self, side: int, x: Any, block_dim: int) -> Any:
        """An operand or its scales as `[batch, rows, summed]`, the blocks' dimension last."""
        others = [d for d in self.numbers[0][side] if d != block_dim]
        summed, batch = [*others, block_dim], self.numbers[1][side]
        free = kept(x.ndim, summed, batch)
        ordered = lax.transpose(x, [*batch, *free, *summed])
        sizes = [math.prod(x.shape[d] for d in dims) for dims in (batch, free, summed)]
        return lax.reshape(ordered, sizes)

    def __str__(self) -> str:
        return f"{self.primitive.name} of blocks"


def _in_bfloat16(values: Any, scales: Any, *whole: Any) -> Any:
    """Values times their scales, which bfloat16 holds exactly."""
    dim = _block_dim(values, scales)
    split = _split(values.shape, dim, values.shape[dim] // scales.shape[dim])
    each = lax.expand_dims(scales.astype(np.float32), [dim + 1])
    wide = lax.reshape(values.astype(np.float32), split) * each
    merged = lax.reshape(wide, values.shape)
    return _as_bfloat16(merged * whole[0] if whole else merged)


def _as_bfloat16(wide: Any) -> Any:
    """Values times their scales, as bfloat16, which holds them exactly but for one case.

    Float32 numbers near the largest are rounded up to 2^128, which becomes bfloat16's largest.
    """
    return jnp.clip(wide, -_MOST, _MOST).astype(_BF16)


def _pinned(x: Any) -> Any:
    """A product's operand or result as XLA:CPU needs it (`runnable`)."""
    return ir.detach(x, pinned=True, flat=x.ndim <= 2)


def _block_dim(values: Any, scales: Any) -> int:
    """The dimension along which the blocks lie: of all, only that one has fewer scales."""
    return next(d for d in range(values.ndim) if values.shape[d] != scales.shape[d])
