"""Dots, and transposes of their operands and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from precpass.jaxpr.binding import trace
from precpass.jaxpr.reading import has_algorithm, out_avals
from precpass.jaxpr.shardings import permuted
from precpass.jaxpr.types import Aval, Eqn, Jaxpr
from precpass.policy.precision import Precision

__all__ = [
    "dot_numbers",
    "exchanged",
    "exchanged_order",
    "multiplied_in",
    "permutation",
    "reordered",
    "transpose_p",
    "transposes",
    "with_operand",
]

transpose_p, _dot_p = jex.primitives.transpose_p, jex.primitives.dot_general_p


def dot_numbers(eqn: Eqn) -> Any:
    """The dimension numbers of a `dot_general`; None for any other equation."""
    return eqn.params["dimension_numbers"] if eqn.primitive is _dot_p else None


def permutation(eqn: Eqn) -> tuple[int, ...] | None:
    """The permutation of a transpose; None for any other equation."""
    return eqn.params["permutation"] if eqn.primitive is transpose_p else None


def transposes(jaxpr: Jaxpr) -> dict[Any, Any]:
    """The transposes of an open jaxpr, by their results."""
    # Every body is searched, so this makes no call for each equation.
    return {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive is transpose_p}


_RESHAPES = frozenset(("reshape", "squeeze"))


def moves_whole(eqn: Eqn) -> bool:
    """Whether an equation is a transpose or a reshape, which move all elements of one operand."""
    if eqn.primitive is transpose_p:
        return True
    return eqn.primitive.name in _RESHAPES and len(eqn.invars) == 1


def reordered(aval: Aval, order: Sequence[int]) -> Any:
    """An aval with its dimensions in another order."""
    shape = tuple(aval.shape[i] for i in order)
    if aval.sharding.mesh.empty:
        return aval.update(shape=shape)
    return aval.update(shape=shape, sharding=permuted(aval.sharding, order))


def exchanged_order(eqn: Eqn) -> tuple[int, ...] | None:
    """The order that exchanging a dot's operands gives the dimensions of its result.

    None for any other equation, for a dot of mixed dtypes, and for one whose precision the user
    set differently for its operands (one `jax.lax.Precision` for both survives the exchange).
    """
    if eqn.primitive is not _dot_p:
        return None
    precision, preferred = eqn.params["precision"], eqn.params["preferred_element_type"]
    dtypes = {v.aval.dtype for v in eqn.invars} | ({np.dtype(preferred)} if preferred else set())
    pair = set(precision) if isinstance(precision, tuple) else {precision}
    if len(dtypes) > 1 or len(pair) > 1 or has_algorithm(eqn):
        return None
    (summed, _), (batch, _) = eqn.params["dimension_numbers"]
    first = len(batch)
    second, last = eqn.invars[0].aval.ndim - len(summed), eqn.outvars[0].aval.ndim
    return (*range(first), *range(second, last), *range(first, second))


def exchanged(eqn: Eqn) -> Any:
    """A dot with its operands exchanged, whose result is a new variable."""
    lhs, rhs = eqn.invars
    summed, batch = eqn.params["dimension_numbers"]
    params = {**eqn.params, "dimension_numbers": (summed[::-1], batch[::-1])}
    aval, order = eqn.outvars[0].aval, exchanged_order(eqn)
    assert order is not None
    if params["out_sharding"] is not None:
        params["out_sharding"] = permuted(params["out_sharding"], order)
    if aval.sharding.mesh.empty:
        aval = reordered(aval, order)
    else:
        # The sharding of the result's dimensions changes with their order.
        with eqn.ctx.manager:  # the equation's mesh; `jax.sharding.auto_axes` changes it
            traced = trace(lambda *xs: eqn.primitive.bind(*xs, **params), rhs.aval, lhs.aval)
        (aval,) = out_avals(traced)
    return eqn.replace(invars=[rhs, lhs], outvars=[jex.Var(aval)], params=params)


_HIGH = (jax.lax.Precision.HIGH,) * 2  # for both operands
_HIGHEST = (jax.lax.Precision.HIGHEST,) * 2
_DOTS = {
    # XLA reads HIGH as TF32 on an NVIDIA GPU, and as three passes of bfloat16 on a TPU. The preset
    # TF32_TF32_F32 is refused by the compilers for CPUs and TPUs (seen on jax 0.10.2 and 0.12.0).
    Precision.TF32: _HIGH,
    Precision.BF16X3: jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    Precision.BF16X6: jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
    Precision.F32_EXACT: _HIGHEST,
}


def multiplied_in(eqn: Eqn, precision: Precision) -> dict[str, Any]:
    """The parameters of a product that is multiplied in a precision of products alone.

    Every platform accepts them, so one exported program runs on all, each with at least the digits
    that are asked for. The compilers know dot algorithms for `dot_general` only; for other products
    an algorithm would be left out without a word, and HIGH is TF32 on a GPU.
    """
    of_others = _HIGH if precision is Precision.TF32 else _HIGHEST
    is_dot = eqn.primitive is _dot_p
    return {**eqn.params, "precision": _DOTS[precision] if is_dot else of_others}


def with_operand(eqn: Eqn, side: int, operand: Any, numbers: Any) -> Any:
    """A dot with another operand at `side`, and with dimension numbers for it."""
    invars = [operand if i == side else v for i, v in enumerate(eqn.invars)]
    return eqn.replace(invars=invars, params={**eqn.params, "dimension_numbers": numbers})
