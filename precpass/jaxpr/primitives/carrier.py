"""The primitives that carry a lowered product's derivative past its low operands.

`carrier(out, lhs, rhs, *rest)` is `out`; its derivative is that of the product
of `lhs` and `rhs`. It is a primitive and not a `jax.custom_jvp`, because

- JAX's transposition of a custom JVP knows nothing of the product, so that one
  in a custom rule's tangents could not be transposed;
- jax 0.10 drops the rule of a custom JVP in the known part of a scan, so that a
  second derivative through one was silently zero.

`detach(x)` is `x` without a derivative: `stop_gradient` has no transpose, not
even the zero one that a product in a custom rule's tangents needs.

`pin(x)` is `x` with its derivative, behind the barrier of a detached value; a matrix is flat.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.experimental import jet
from jax.interpreters import ad, batching, mlir

from precpass.jaxpr.types import Aval, Eqn

__all__ = ["Form", "carrier_p", "carry", "detach", "detach_p", "is_detach", "pin"]


class Form(Protocol):
    """A bilinear product, as the carrier's hashable parameter."""

    def tangent(self, tangent: Any, other: Any, rest: Sequence[Any], side: int) -> Any:
        """The product with `tangent` in the place of operand `side` (0 or 1)."""
        ...

    def cotangent(
        self, cotangent: Any, other: Any, rest: Sequence[Any], side: int, aval: Aval
    ) -> Any:
        """The cotangent of operand `side`, whose type is `aval`, given the product's.

        None where JAX's transposition of `tangent` is to make it.
        """
        return None

    def without_copies(self, operands: Sequence[Any]) -> tuple[Form, Sequence[Any]]:
        """The form and its operands without the last two, if these are low copies of the first two.

        The copies are only right for these very operands.
        """
        return self, operands

    def without_rounded(self, operands: Sequence[Any]) -> tuple[Form, Sequence[Any]]:
        """The form and its operands without those that only hold for one example of a vmap."""
        return self, operands

    def batched(self, avals: Sequence[Aval], dims: Sequence[int | None]) -> tuple[Form, int | None]:
        """The product under a vmap, and the batch dimension of its result.

        The batch dimension is None if it is no single product then; the form is that of the
        product that is mapped.

        Args:
            avals: the types of its two operands, with the batch dimension.
            dims: the batch dimension of each; None for an operand without one.
        """
        return self, None


# For each vmap around it, innermost first: the batch dimensions of all operands and of the result.
Batched = tuple[tuple[tuple[int | None, ...], int], ...]

carrier_p = jex.Primitive("precpass_carrier")
carrier_p.def_impl(lambda out, *_operands, **_params: out)
carrier_p.def_abstract_eval(lambda out, *_operands, **_params: out)
mlir.register_lowering(carrier_p, lambda _ctx, out, *_operands, **_params: [out])


def carry(form: Form, out: Any, lhs: Any, rhs: Any, rest: Sequence[Any] = ()) -> Any:
    """`out` with the derivative of `form`'s product of `lhs` and `rhs`.

    Args:
        form: the product.
        out: its value, from which no derivative is taken.
        lhs: its first operand, in the precision in which cotangents add up.
        rhs: its second one.
        rest: operands without derivative: group sizes, the low copies of `lhs` and `rhs`.
    """
    return carrier_p.bind(out, lhs, rhs, *rest, form=form, batched=())


def is_detach(eqn: Eqn) -> bool:
    """Whether an equation detaches or pins a lowered product's operand."""
    return eqn.primitive in (detach_p, pin_p)


def _tangent(form: Form, batched: Batched, side: int, operands: Sequence[Any], tangent: Any) -> Any:
    other, rest = operands[1 - side], operands[2:]

    def product(tangent: Any, other: Any, *rest: Any) -> Any:
        return form.tangent(tangent, other, rest, side)

    for dims, out_dim in batched:
        axes = (dims[side], dims[1 - side], *dims[2 : len(operands)])
        if all(axis is None for axis in axes):
            continue
        product = jax.vmap(product, in_axes=axes, out_axes=out_dim)
    return product(tangent, other, *rest)


def _jvp(primals: Any, tangents: Any, *, form: Form, batched: Batched) -> Any:
    operands = primals[1:]
    # The primal is the carrier again and not `out`, so that it can be differentiated once more.
    primal = carrier_p.bind(*primals, form=form, batched=batched)
    terms = [
        _tangent(form, batched, side, operands, tangents[1 + side])
        for side in (0, 1)
        if not isinstance(tangents[1 + side], ad.Zero)
    ]
    if not terms:
        return primal, ad.Zero(jax.typeof(primals[0]).to_tangent_aval())
    return primal, terms[0] if len(terms) == 1 else lax.add(*terms)


def _transpose(cotangent: Any, *operands: Any, form: Form, batched: Batched) -> list[Any]:
    cotangents: list[Any] = [None] * len(operands)
    if isinstance(cotangent, ad.Zero):
        return cotangents
    side = 0 if ad.is_undefined_primal(operands[1]) else 1
    aval = operands[1 + side].aval
    other, rest = operands[2 - side], operands[3:]
    own_cotangent = None if batched else form.cotangent(cotangent, other, rest, side, aval)
    if own_cotangent is not None:
        cotangents[1 + side] = own_cotangent
        return cotangents

    form, wide_operands = form.without_copies(operands[1:])

    def product(tangent: Any) -> Any:
        return _tangent(form, batched, side, wide_operands, tangent)

    (cotangents[1 + side],) = jax.linear_transpose(product, aval)(cotangent)
    return cotangents


def _batch(
    operands: Sequence[Any], dims: Sequence[int | None], *, form: Form, batched: Batched
) -> Any:
    out, out_dim = operands[0], dims[0]
    _, dims = form.without_rounded(dims)
    form, operands = form.without_rounded(operands)
    if out_dim is None:
        sizes = (x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        out, out_dim = lax.broadcast(out, (next(sizes),)), 0
    if form.without_copies(operands[1:])[0] is not form:
        operands, dims = _alike(operands, dims)
    both = operands[1:3]
    dim = None
    if not batched:
        form, dim = form.batched(list(map(jax.typeof, both)), dims[1:3])
    if dim is not None:
        out = jnp.moveaxis(out, out_dim, dim)
        return carrier_p.bind(out, *operands[1:], form=form, batched=()), dim
    level = (tuple(dims[1:]), out_dim)
    new = carrier_p.bind(out, *operands[1:], form=form, batched=(*batched, level))
    return new, out_dim


def _alike(operands: Sequence[Any], dims: Sequence[int | None]) -> tuple[list[Any], list[Any]]:
    """The operands, with operands 1 and 2 batched along the same dimensions as their low copies."""
    operands, dims = list(operands), list(dims)
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    for i, copy in ((1, -2), (2, -1)):
        if dims[i] != dims[copy]:
            for at in (i, copy):
                x, dim = operands[at], dims[at]
                spread = lax.broadcast(x, (size,)) if dim is None else jnp.moveaxis(x, dim, 0)
                operands[at], dims[at] = spread, 0
    return operands, dims


def detach(
    x: Any,
    *,
    pinned: bool = False,
    flat: bool = False,
    zeros: bool = False,
    keeps_rounding: bool = False,
) -> Any:
    """`x`, through which no derivative passes in either mode.

    Args:
        x: an array.
        pinned: whether XLA:CPU is kept from moving operations across it, as by
            `lax.optimization_barrier`. That primitive is not used here, because jax 0.10
            makes its zero cotangent an array of zeros and transposes the product with it.
            For any other platform it is lowered to nothing; see `keeps_rounding` for TPUs.
        flat: whether it is also brought into row-major order in memory.
        zeros: whether its transpose is an array of zeros. `x` needs one if it is made by a
            `ragged_dot_general`, whose transpose in JAX takes no symbolic zero.
        keeps_rounding: whether XLA's compilers for GPUs and TPUs are kept from leaving out the cast
            that made `x`. On a CPU nothing is added. If `pinned` is true too, `x` is written to
            memory, every kernel reads it there and computes it no second time, and the partitioner
            sends it as it is.
    """
    return detach_p.bind(x, pinned=pinned, flat=flat, zeros=zeros, keeps_rounding=keeps_rounding)


def _rounding_kept(x: Any) -> Any:
    """`x` in a form in which XLA does not replace it by the value before it was rounded.

    XLA leaves out a cast to 16 bits that is followed by one to float32, because its flag
    `xla_allow_excess_precision` is on by default, and so a fusion would write float32. A choice
    between the value and NaN, where the value is NaN, changes nothing and stands between the two
    casts. An optimization barrier would part the fusion, and XLA simplifies a clamp to infinities
    (jax 0.12.0.1, H100 and A100).
    """
    return lax.select(lax.ne(x, x), lax.full_like(x, float("nan")), x)


def _lower_detach(ctx: Any, x: Any, *, pinned: bool, flat: bool, **_params: Any) -> Any:
    if not pinned:
        return [x]
    (aval,) = ctx.avals_in
    is_static = all(isinstance(size, int) for size in aval.shape)
    is_flat = flat and is_static and not _is_partitioned(ctx, aval)
    return (_lower_flat if is_flat else _lower_barrier)(ctx, x)


def _is_partitioned(ctx: Any, aval: Aval) -> bool:
    """Whether XLA may divide a value between devices; it would gather it to make it flat."""
    mesh = aval.sharding.mesh
    if not mesh.empty:
        return not mesh.are_all_axes_manual  # inside a shard_map the value is divided already
    # A type does not show `in_shardings` and sharding constraints.
    return getattr(ctx.module_context.axis_context, "num_devices", 1) > 1


def _in_order(x: Any) -> Any:
    # XLA carries a layout through a barrier, but a flat array has only one layout.
    return lax.reshape(lax.optimization_barrier(lax.reshape(x, (x.size,))), x.shape)


_lower_barrier = mlir.lower_fun(lambda x: lax.optimization_barrier(x), multiple_results=False)
_lower_flat = mlir.lower_fun(_in_order, multiple_results=False)
detach_p = jex.Primitive("precpass_detach")
detach_p.def_impl(lambda x, **_params: x)
detach_p.def_abstract_eval(lambda x, **_params: x)
mlir.register_lowering(detach_p, _lower_detach)
_lower_kept = mlir.lower_fun(_rounding_kept, multiple_results=False)


def _lower_detach_kept(ctx: Any, x: Any, *, pinned: bool, keeps_rounding: bool, **_: Any) -> Any:
    if not keeps_rounding:  # only XLA:CPU must be kept from moving operations
        return [x]
    return (_lower_barrier if pinned else _lower_kept)(ctx, x)


for _platform in ("gpu", "tpu"):
    mlir.register_lowering(detach_p, _lower_detach_kept, platform=_platform)


def pin(x: Any) -> Any:
    """`x` with its derivative; XLA:CPU moves no operation and no matrix's layout across it."""
    return pin_p.bind(x)


pin_p = jex.Primitive("precpass_pin")
pin_p.def_impl(lambda x: x)
pin_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(
    pin_p, lambda ctx, x: _lower_detach(ctx, x, pinned=True, flat=ctx.avals_in[0].ndim <= 2)
)


def _detach_jvp(primals: Any, _tangents: Any, **params: bool) -> Any:
    return detach(primals[0], **params), ad.Zero(jax.typeof(primals[0]).to_tangent_aval())


def _detach_transpose(_cotangent: Any, x: Any, *, zeros: bool, **_params: Any) -> list[Any]:
    return [ad.instantiate_zeros(ad.Zero(x.aval)) if zeros else None]


def _carrier_taylor(primals: Any, series: Any, *, form: Form, batched: Batched) -> Any:
    """The Taylor coefficients of a product: the convolution of its operands' coefficients."""
    plain, (lhs, rhs, *rest) = form.without_copies(primals[1:])
    coefficients = [[lhs, *series[1]], [rhs, *series[2]]]

    def term(i: int, j: int) -> Any:
        operands = [coefficients[0][i], coefficients[1][j], *rest]
        return _tangent(plain, batched, 0, operands, operands[0])

    orders = range(1, len(coefficients[0]))
    sums = [functools.reduce(lax.add, [term(i, k - i) for i in range(k + 1)]) for k in orders]
    return carrier_p.bind(*primals, form=form, batched=batched), sums


def _detach_taylor(primals: Any, series: Any, **params: bool) -> Any:
    return detach(primals[0], **params), [lax.full_like(x, 0) for x in series[0]]


for _platform in ("gpu", "tpu"):
    mlir.register_lowering(pin_p, lambda _ctx, x: [x], platform=_platform)
jet.jet_rules[pin_p] = lambda primals, series: (pin(primals[0]), series[0])
# Tangents and cotangents of `x` need no barrier, because they are no operand of the product.
ad.primitive_jvps[pin_p] = lambda primals, tangents: (pin(primals[0]), tangents[0])
ad.primitive_transposes[pin_p] = lambda cotangent, _x: [cotangent]
batching.primitive_batchers[pin_p] = lambda args, dims: (pin(args[0]), dims[0])
jet.jet_rules[carrier_p] = _carrier_taylor
jet.jet_rules[detach_p] = _detach_taylor
ad.primitive_jvps[detach_p] = _detach_jvp
ad.primitive_transposes[detach_p] = _detach_transpose
batching.primitive_batchers[detach_p] = lambda args, dims, **params: (
    detach(args[0], **params),
    dims[0],
)
ad.primitive_jvps[carrier_p] = _jvp
ad.primitive_transposes[carrier_p] = _transpose
batching.primitive_batchers[carrier_p] = _batch
