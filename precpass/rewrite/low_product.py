"""The form of a lowered product: 16-bit operands, a float32 result, and a float32 derivative.

    out = carrier(product(detach(low(x)), detach(low(w))), x, w)

JAX's transposition adds up the cotangents of a value that several equations read, in the dtype of
that value: if a cast is shared before a fan-out, a sum of 16384 ones comes out as 256. So the low
copies are detached from derivatives, and may then be shared, hoisted and stored at will. The
carrier (`jaxpr.primitives.carrier`) returns its first operand and takes the derivative with
respect to the float32 operands. Its tangent is a pair of products of this same form, and so is its
transpose. They read the low copies of the forward pass, which are the last operands of the carrier.
Casts of their own would be one more pass over each operand, and inside a checkpoint, which computes
them again, one in every trip of a backward loop. If nothing is differentiated, the carrier
disappears in lowering. The product stays a plain equation, which checkpoint policies such as
`dots_saveable` see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from precpass import jaxpr as ir
from precpass.backends.cpu_kernels import needs_barriers, runnable
from precpass.eight_bits.copies import quantized_copy
from precpass.eight_bits.scaled_product import as_bits, from_bits, roundings, scaled_product
from precpass.jaxpr.dimension_numbers import Numbers, batched, kept, transposed
from precpass.policy.float16 import warn_of_unscaled_gradient
from precpass.policy.precision import Precision

__all__ = ["Bilinear", "evaluated_with_carrier", "scaled_with_carrier"]


@dataclasses.dataclass(frozen=True)
class Bilinear(ir.Form):
    """A bilinear equation and the low format that it runs in.

    Attributes:
        primitive: `dot_general`, `ragged_dot_general` or `conv_general_dilated`.
        items: its parameters, sorted by name.
        low: the dtype of its operands.
        dtype: the dtype of its result.
        kept: the position of the operand whose 16 bits, as integers, are the carrier's last
            operand; None if there is no such operand.
        recast: for each operand, whether the backward pass casts it again
            (`ProductForm.recast_in_backward`).
        mapped: whether it stands under a vmap and is no single product there.
        copied: whether the carrier's last two operands are low copies of the product's operands.
            The derivative reads them instead of making its own.
        rounds: whether its kernel rounds its result to the low format (`ProductForm.low_result`).
        low_cotangents: as in `ProductForm`.
        rounded: for each operand, whether its 8 bits and their scale are among the carrier's
            operands, behind those that the equation itself reads. The product that makes the other
            operand's cotangent reads them.
        scaled: the format of a scaled product; its `low` format is that of what surrounds it.
        scaled_cotangents: for each operand the format of the scaled product of a cotangent and the
            other operand, which makes its cotangent; None for a product of 16 bits.
        wide_outer: as in `ProductForm`.
        summed_last: as in `ProductForm`.
        largest: as in `ProductForm`.
    """

    primitive: Any
    items: tuple[tuple[str, Any], ...]
    low: np.dtype[Any]
    dtype: np.dtype[Any]
    kept: int | None = None
    recast: tuple[bool, bool] = (False, False)
    mapped: bool = False
    copied: bool = False
    rounds: bool = False
    low_cotangents: tuple[bool, bool] = (False, False)
    rounded: tuple[bool, bool] = (False, False)
    scaled: Precision | None = None
    scaled_cotangents: tuple[Precision | None, Precision | None] = (None, None)
    wide_outer: bool = False
    summed_last: bool = False
    largest: tuple[float | None, float | None] = (None, None)

    def __str__(self) -> str:
        return f"{self.primitive.name} in {self.scaled or self.low.name}"

    @property
    def is_dot(self) -> bool:
        """Whether it is a `dot_general`."""
        return self.primitive.name == "dot_general"

    @property
    def is_ragged(self) -> bool:
        """Whether it is a `ragged_dot_general`."""
        return self.primitive.name == "ragged_dot_general"

    @property
    def numbers(self) -> Numbers:
        """The dimension numbers of a dot."""
        return dict(self.items)["dimension_numbers"]

    def with_numbers(self, numbers: Numbers, out_sharding: Any) -> Bilinear:
        """A dot with other dimension numbers and another sharding of its result."""
        items = {**dict(self.items), "dimension_numbers": numbers, "out_sharding": out_sharding}
        return dataclasses.replace(self, items=tuple(sorted(items.items())))

    @property
    def sums_in(self) -> np.dtype[Any]:
        """The `preferred_element_type` of the product of low operands.

        If the result is wider than the low format, it is float32, so that sums are not rounded;
        kernels have no other wide result for 16-bit operands.
        """
        if self.rounds:
            return self.low
        wide = self.dtype != self.low and self.low.itemsize < 4
        return np.dtype(np.float32) if wide else self.dtype

    def bare(self) -> Bilinear:
        """The form without the attributes that only hold for its present operands."""
        none, form = (False, False), dataclasses.replace(self, scaled=None, largest=(None, None))
        return dataclasses.replace(form, kept=None, recast=none, copied=False, rounded=none)

    def others(self, rest: Sequence[Any]) -> Sequence[Any]:
        """Those operands behind the first two that the equation itself reads."""
        return rest[: self._copies_from(rest) - 2 * sum(self.rounded)]

    def _copies_from(self, operands: Sequence[Any]) -> int:
        """The position of the low copies, which are the last operands but for kept bits."""
        return len(operands) - (self.kept is not None) - 2 * self.copied

    def _rounded_operand(self, rest: Sequence[Any], side: int) -> Sequence[Any] | None:
        """The 8 bits of an operand and their scale; None where there are none."""
        if not self.rounded[side]:
            return None
        both = rest[self._copies_from(rest) - 2 * sum(self.rounded) : self._copies_from(rest)]
        return both[:2] if side == 0 else both[-2:]

    def without_copies(self, operands: Sequence[Any]) -> tuple[Bilinear, Sequence[Any]]:
        """The form and its operands, without the low copies of the operands."""
        form, operands = self.without_rounded(operands)
        if not form.copied:
            return form, operands
        return dataclasses.replace(form, copied=False), operands[:-2]

    def without_rounded(self, operands: Sequence[Any]) -> tuple[Bilinear, Sequence[Any]]:
        """The form and its operands, without the operands' 8 bits and scales."""
        if not any(self.rounded):
            return self, operands
        end = self._copies_from(operands)
        kept = [*operands[: end - 2 * sum(self.rounded)], *operands[end:]]
        return dataclasses.replace(self, rounded=(False, False)), kept

    def tangent(self, tangent: Any, other: Any, rest: Sequence[Any], side: int) -> Any:
        """The low product with `tangent` in the place of operand `side`.

        Each operand has a cast of its own, so that its cotangents add up in float32.
        """
        wide = other.dtype != self.low and self._is_outer(other, side)
        if self.recast[1 - side] or wide:
            form, rest = self.bare(), self.others(rest)
            # A checkpoint saves only its operands.
            late = jax.checkpoint(
                lambda t, x: form._tangent(t, x, rest, side, wide=wide), prevent_cse=False
            )
            return late(tangent, other)
        return self._tangent(tangent, other, rest, side)

    def _tangent(
        self, tangent: Any, other: Any, rest: Sequence[Any], side: int, *, wide: bool = False
    ) -> Any:
        low = _as(self.low, other)
        if self.copied:
            low = ir.in_place_of(low, rest[-1 - side])
        if not self._keeps_sums(side, tangent):
            # JAX transposes only products whose result has the operands' dtype.
            pair = _ordered([_as(self.low, tangent), low], side)
            return _as(self.dtype, self._rounded(pair, rest))
        pinned = needs_barriers(self.low)
        # One value is saved for the backward pass, because product and carrier share the operand.
        low = ir.pin(low) if pinned and not (self.copied or wide) else low
        flat = pinned and tangent.ndim <= 2  # see `Layouts.out_of_order`
        pair = [ir.detach(_as(self.low, tangent), pinned=pinned, flat=flat), low]
        operands = [*_ordered([tangent, other if wide else low], side), *self.others(rest)]
        shared = self._rounded_operand(rest, 1 - side) if self.scaled_cotangents[side] else None
        if shared is not None:
            # `jax.checkpoint` passes the floats that it saves through `reduce_precision`, which
            # makes NaN of E4M3's largest numbers: IEEE's formats have infinities in their place.
            operands += [as_bits(shared[0]), shared[1]]
        keeps_bits = pinned and ir.WIDENS_STACKS and not wide
        if keeps_bits:
            operands.append(ir.bits(low))
        saved = 1 - side if keeps_bits else None
        # A tangent's product is not scaled: it is to be linear, and a largest magnitude is not.
        of_lhs, of_rhs = _ordered([False, shared is not None], side)
        form = dataclasses.replace(self.bare(), kept=saved, rounded=(of_lhs, of_rhs))
        return form.evaluated(_ordered(pair, side), operands)

    def cotangent(
        self, cotangent: Any, other: Any, rest: Sequence[Any], side: int, aval: ir.Aval
    ) -> Any:
        """The cotangent of operand `side`: a low product again, with a wide result and a carrier.

        What JAX's transposition makes of (low, low) -> f32 is a float32 product.
        """
        if not self._keeps_sums(side, cotangent):
            return None
        if self._is_outer(other, side) and cotangent.dtype != self.low:
            return self._outer(cotangent, other, side, aval)
        if self.low == Precision.F16.dtype:
            warn_of_unscaled_gradient()
        if self.kept == 1 - side and rest[-1].shape == other.shape:
            other = ir.recalled(rest[-1], other)
        if not self.is_dot:
            return self._as_jax_transposes(cotangent, other, rest, side, aval)
        ndims = [aval.ndim, other.ndim]
        dot = transposed(self.numbers, _ordered(ndims, side), side)
        # A sum over a sharded dimension leaves the result's sharding ambiguous, so it is given.
        like = self.with_numbers(dot.numbers, ir.sharding_before(aval, dot.order))
        # A cotangent may be the gradient that leaves the program, which is not rounded.
        rounds, never = self.low_cotangents[side], (False, False)
        scaled = self.scaled_cotangents[side]
        shared = self._rounded_operand(rest, 1 - side) if scaled else None
        shared = shared and [from_bits(shared[0]), shared[1]]
        form = dataclasses.replace(
            like.bare(),
            dtype=cotangent.dtype,
            rounds=rounds,
            low_cotangents=never,
            scaled=scaled,
            scaled_cotangents=(None, None),
        )
        out = form.lowered(
            _ordered([cotangent, other], dot.side), _ordered([None, shared], dot.side)
        )
        return _as(aval.dtype, out if dot.order is None else lax.transpose(out, dot.order))

    def _is_outer(self, other: Any, side: int) -> bool:
        """Whether the cotangent of operand `side` sums over one term and is made in float32."""
        if not (self.wide_outer and self.is_dot):
            return False
        summed, batch = self.numbers
        free = kept(other.ndim, summed[1 - side], batch[1 - side])
        return all(other.shape[d] == 1 for d in free)

    def _outer(self, cotangent: Any, other: Any, side: int, aval: ir.Aval) -> Any:
        """The cotangent of operand `side` as an outer product, as a preset leaves it."""
        dot = transposed(self.numbers, _ordered([aval.ndim, other.ndim], side), side)
        like = self.with_numbers(dot.numbers, ir.sharding_before(aval, dot.order))
        params = {**dict(like.items), "preferred_element_type": cotangent.dtype}
        pair = _ordered([cotangent, _as(cotangent.dtype, other)], dot.side)
        out = self.primitive.bind(*pair, **params)
        return _as(aval.dtype, out if dot.order is None else lax.transpose(out, dot.order))

    def _as_jax_transposes(
        self, cotangent: Any, other: Any, rest: Sequence[Any], side: int, aval: ir.Aval
    ) -> Any:
        low = aval.update(dtype=self.low)
        rounds = self.low_cotangents[side] if self.is_ragged else self.rounds

        def low_transpose(cotangent: Any, other: Any) -> Any:
            def product(x: Any) -> Any:
                return self._rounded(_ordered([x, other], side), rest)

            return jax.linear_transpose(product, low)(cotangent)

        def apply(eqn: ir.Eqn, operands: Sequence[Any]) -> Sequence[Any]:
            if eqn.primitive is not self.primitive:
                return ir.bind(eqn, operands)
            params = ir.sorted_params(eqn)
            form = Bilinear(eqn.primitive, params, self.low, cotangent.dtype, rounds=rounds)
            return [form.lowered(operands)]

        # Both are passed as they are, in 16 bits or float32: each product casts its own operands.
        given = [cotangent, other]
        jaxpr = ir.trace(low_transpose, *(jax.typeof(x).update(dtype=self.low) for x in given))
        return _as(aval.dtype, ir.one_by_one(jaxpr, given, apply)[0])

    def lowered(self, operands: Sequence[Any], rounded: Sequence[Any] = (None, None)) -> Any:
        """The product of two operands, each in 16 bits or float32, and of the operands behind.

        Args:
            operands: the operands of the equation; the derivative passes through the first two.
            rounded: as for `evaluated_with_carrier`.
        """
        pinned = needs_barriers(self.low)
        pair = [
            x if x.dtype == self.low else ir.detach(_as(self.low, x), pinned=pinned, flat=pinned)
            for x in operands[:2]
        ]
        return self.evaluated(pair, operands, rounded)

    def evaluated(
        self, pair: Sequence[Any], operands: Sequence[Any], rounded: Sequence[Any] = (None, None)
    ) -> Any:
        """The product of low operands, with the derivative that passes through `operands`."""
        build = ir.Direct(called=self.is_ragged)
        return evaluated_with_carrier(build, self, pair, operands, detached=True, rounded=rounded)

    def _rounded(self, pair: Sequence[Any], rest: Sequence[Any]) -> Any:
        """The product with a result in its operands' low dtype, which JAX can transpose."""
        params = {**dict(self.items), "preferred_element_type": self.low}
        return self.primitive.bind(*pair, *self.others(rest), **params)

    def batched(
        self, avals: Sequence[ir.Aval], dims: Sequence[int | None]
    ) -> tuple[Bilinear, int | None]:
        """The form under a vmap: a dot becomes a single dot with one more dimension."""
        if not self.is_dot or all(dim is None for dim in dims):
            return dataclasses.replace(self, mapped=True), None
        numbers, dim = batched(self.numbers, [aval.ndim for aval in avals], dims)
        out_sharding = dict(self.items)["out_sharding"]
        return self.with_numbers(
            numbers, ir.sharding_under_vmap(out_sharding, avals, dims, dim)
        ), dim

    def _keeps_sums(self, side: int, x: Any) -> bool:
        """Whether the derivative for an operand is made here, with sums in the result's dtype.

        Otherwise JAX transposes a product whose result has the operands' dtype.

        Args:
            side: the operand. For a convolution only the kernel's derivative (side 1) is made here,
                because it adds up over the batch, and so over devices that have a part of it each.
            x: the operand's tangent, or the product's cotangent.
        """
        if self.is_dot:
            return True
        # JAX has no rule for the sharding of a ragged product's result.
        by_type = self.is_ragged and ir.is_sharded_by_type(x)
        return not (self.mapped or by_type) and (self.is_ragged or side == 1)


def _as(dtype: np.dtype[Any], x: Any) -> Any:
    return x if x.dtype == dtype else ir.convert(x, dtype)


def _ordered(pair: Sequence[Any], side: int) -> list[Any]:
    """A pair, in the order that puts its first element at `side`."""
    return list(pair if side == 0 else pair[::-1])


def evaluated_with_carrier(
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
        ndims = [x.aval.ndim for x in operands[:2]]
        rounded_by = roundings(form.scaled, form.numbers, ndims, is_last=form.summed_last)
        pairs = [
            made or quantized_copy(build, x, rounding)
            for x, rounding, made in zip(operands[:2], rounded_by, rounded, strict=True)
        ]
        return scaled_with_carrier(build, form, pairs, operands)
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


def scaled_with_carrier(
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
    is_last = form.summed_last
    out = scaled_product(build, form.primitive, form.items, pairs, dtype, aval, is_last=is_last)
    if dtype != form.dtype:
        out = build.convert(out, form.dtype)
    return build.carry(form, build.detach(out), lhs, rhs, rest)
