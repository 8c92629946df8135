"""The primitive that gives a value a cotangent in 16 bits.

`low_cotangent(x)` is `x`, with its tangent; its cotangent is rounded, once, and every reader of the
cotangent reads the rounded value, so that it is stored in 16 bits. In a program that is not
differentiated it is nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core as jex
from jax import lax
from jax.experimental import jet
from jax.interpreters import ad, batching, mlir

from precpass.jaxpr.primitives.carrier import detach
from precpass.jaxpr.primitives.rounded import in_place_of

__all__ = ["low_cotangent_p"]

low_cotangent_p = jex.Primitive("precpass_low_cotangent")
low_cotangent_p.def_impl(lambda x, **_params: x)
low_cotangent_p.def_abstract_eval(lambda x, **_params: x)
mlir.register_lowering(low_cotangent_p, lambda _ctx, x, **_params: [x])


def _transpose(cotangent: Any, x: Any, *, dtype: Any) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    low = detach(lax.convert_element_type(cotangent, dtype), keeps_rounding=True)
    return [in_place_of(cotangent, lax.convert_element_type(low, x.aval.dtype))]


def _jvp(primals: Any, tangents: Any, *, dtype: Any) -> Any:
    primal, tangent = low_cotangent_p.bind(*primals, dtype=dtype), tangents[0]
    if isinstance(tangent, ad.Zero):
        return primal, ad.Zero(jax.typeof(primals[0]).to_tangent_aval())
    return primal, low_cotangent_p.bind(tangent, dtype=dtype)


ad.primitive_jvps[low_cotangent_p] = _jvp
ad.primitive_transposes[low_cotangent_p] = _transpose
batching.primitive_batchers[low_cotangent_p] = lambda args, dims, **params: (
    low_cotangent_p.bind(*args, **params),
    dims[0],
)
jet.jet_rules[low_cotangent_p] = lambda primals, series, **_params: (primals[0], series[0])
