"""The primitive that gives an elementwise equation a derivative whose factors are saved in 16 bits.

`low_derivative(out, *operands)` is `out`, the value of an elementwise function of the operands,
such as tanh or a product. JAX saves for the backward pass what a function's derivative reads: of
tanh its result, and one minus the square of that, both in float32. Here the derivative in each
operand is one factor for each element, which is computed in float32, rounded once and saved. Its
own derivative, for a second one of the function, passes through 16 bits. In a program that is not
differentiated nothing reads the operands, so that the equation costs nothing.

It is a primitive and not a `jax.custom_jvp` for the reasons in `jaxpr.primitives.carrier`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import jet
from jax.interpreters import ad, batching, mlir

from precpass.jaxpr.types import Eqn

__all__ = ["Function", "function_of", "low_derivative_p", "rounded_factor"]


_OF_VALUE: dict[str, Callable[[Any], Any]] = {
    "exp": lambda out: out,
    "tanh": lambda out: lax.sub(lax.full_like(out, 1), lax.square(out)),
    "logistic": lambda out: lax.mul(out, lax.sub(lax.full_like(out, 1), out)),
}
"""Derivatives by the function's value. If that is stored in 16 bits, nothing else reads the value
before it was rounded, and so XLA does not write that."""

_BOUNDED = frozenset(("tanh", "logistic", "erf", "erfc", "sin", "cos", "atan", "asinh"))
"""The functions whose derivatives are bounded."""


class Function(NamedTuple):
    """An elementwise primitive, as a hashable parameter.

    Attributes:
        primitive: the primitive.
        params: its parameters.
        low: the dtype of 16 bits in which the factors of derivatives are saved.
        rounds: for each operand, whether the factor of the derivative in it is saved so.
        is_rounded: whether the function's value has been rounded to that dtype already.
    """

    primitive: Any
    params: tuple[tuple[str, Any], ...]
    low: Any
    rounds: tuple[bool, ...]
    is_rounded: bool

    def factor(self, at: int, out: Any, operands: Sequence[Any]) -> Any:
        """The derivative in one of its operands, where its value is `out`."""
        if (of_value := _OF_VALUE.get(self.primitive.name)) is not None:
            return of_value(out)
        if self.primitive.name == "mul":
            return operands[1 - at]

        def along(x: Any) -> Any:
            varied = [*operands[:at], x, *operands[at + 1 :]]
            return self.primitive.bind(*varied, **dict(self.params))

        return jax.jvp(along, (operands[at],), (lax.full_like(operands[at], 1),))[1]

    def tangent(self, at: int, tangent: Any, out: Any, operands: Sequence[Any]) -> Any:
        """The tangent of its value for the tangent of one of its operands."""
        factor = self.factor(at, out, operands)
        if not self.rounds[at]:
            return lax.mul(tangent, factor)
        if self.is_rounded and self.primitive.name == "exp":
            return times_factor_p.bind(tangent, lax.convert_element_type(factor, self.low))
        low = rounded_factor(factor, self.low, is_bounded=self.primitive.name in _BOUNDED)
        return times_factor_p.bind(tangent, low)


def rounded_factor(factor: Any, dtype: Any, *, is_bounded: bool) -> Any:
    """A factor in 16 bits; a finite one beyond their largest number is that number.

    Without the selection XLA would leave the rounding out, because it drops a cast to 16 bits that
    is followed by one to float32. A bounded factor is never beyond, so its selection only stands
    between the two casts, which takes less arithmetic.
    """
    low = lax.convert_element_type(factor, dtype)
    if is_bounded:
        return lax.select(lax.ne(low, low), lax.full_like(low, np.nan), low)
    largest = jnp.finfo(dtype).max.astype(dtype)
    is_beyond = lax.bitwise_and(lax.is_finite(factor), lax.bitwise_not(lax.is_finite(low)))
    return lax.select(is_beyond, lax.mul(lax.sign(low), lax.full_like(low, largest)), low)


def function_of(eqn: Eqn, low: Any, rounds: Sequence[bool], *, is_rounded: bool) -> Function | None:
    """The function that an equation applies; None if its parameters have no hash."""
    params = tuple(sorted(eqn.params.items()))
    function = Function(eqn.primitive, params, low, tuple(rounds), is_rounded)
    try:
        hash(function)
    except TypeError:
        return None
    return function


low_derivative_p = jex.Primitive("precpass_low_derivative")
low_derivative_p.def_impl(lambda out, *_operands, **_params: out)
low_derivative_p.def_abstract_eval(lambda out, *_operands, **_params: out)
mlir.register_lowering(low_derivative_p, lambda _ctx, out, *_operands, **_params: [out])

# `times_factor(t, low)` is `t * low`. A product would have JAX save `low` after it is widened.
times_factor_p = jex.Primitive("precpass_times_factor")


def _times(t: Any, low: Any) -> Any:
    return lax.mul(t, lax.convert_element_type(low, t.dtype))


times_factor_p.def_impl(_times)
times_factor_p.def_abstract_eval(lambda t, _low: t)
mlir.register_lowering(times_factor_p, mlir.lower_fun(_times, multiple_results=False))


def _jvp(primals: Any, tangents: Any, *, function: Function) -> Any:
    primal = low_derivative_p.bind(*primals, function=function)
    out, *operands = primals
    terms = [
        function.tangent(at, tangent, out, operands)
        for at, tangent in enumerate(tangents[1:])
        if not isinstance(tangent, ad.Zero)
    ]
    return primal, _sum(terms, out)


def _sum(terms: Sequence[Any], like: Any) -> Any:
    if not terms:
        return ad.Zero(jax.typeof(like).to_tangent_aval())
    return terms[0] if len(terms) == 1 else lax.add(*terms)


def _times_factor_jvp(primals: Any, tangents: Any) -> Any:
    t, low = primals
    terms: list[Any] = []
    if not isinstance(tangents[0], ad.Zero):
        terms.append(times_factor_p.bind(tangents[0], low))
    if not isinstance(tangents[1], ad.Zero):
        terms.append(_times(t, tangents[1]))
    return times_factor_p.bind(*primals), _sum(terms, t)


def _times_factor_transpose(cotangent: Any, _t: Any, low: Any) -> list[Any]:
    is_zero = isinstance(cotangent, ad.Zero)
    return [cotangent if is_zero else times_factor_p.bind(cotangent, low), None]


def _batched(primitive: Any) -> Any:
    def rule(operands: Sequence[Any], dims: Sequence[int | None], **params: Any) -> Any:
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        alike = [
            lax.broadcast(x, (size,)) if d is None else jnp.moveaxis(x, d, 0)
            for x, d in zip(operands, dims, strict=True)
        ]
        return primitive.bind(*alike, **params), 0

    return rule


def _taylor(primals: Any, series: Any, *, function: Function) -> Any:
    bind = functools.partial(function.primitive.bind, **dict(function.params))
    _, terms = jet.jet(bind, tuple(primals[1:]), tuple(series[1:]), factorial_scaled=False)
    return low_derivative_p.bind(*primals, function=function), terms


def _times_factor_taylor(primals: Any, series: Any) -> Any:
    _, terms = jet.jet(_times, tuple(primals), tuple(series), factorial_scaled=False)
    return times_factor_p.bind(*primals), terms


ad.primitive_jvps[low_derivative_p] = _jvp
ad.primitive_jvps[times_factor_p] = _times_factor_jvp
ad.primitive_transposes[times_factor_p] = _times_factor_transpose
for _primitive in (low_derivative_p, times_factor_p):
    batching.primitive_batchers[_primitive] = _batched(_primitive)
jet.jet_rules[low_derivative_p] = _taylor
jet.jet_rules[times_factor_p] = _times_factor_taylor
