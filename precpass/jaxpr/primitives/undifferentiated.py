"""The primitive through which no derivative is taken: asking for one is an error with advice."""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

__all__ = ["undifferentiated"]


def undifferentiated(x: Any, advice: str) -> Any:
    """`x`; a derivative that is taken through it is a `TypeError` with this text."""
    return (
        _barred_p.bind(x, advice=advice) if jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact) else x
    )


_barred_p = jex.Primitive("precpass_undifferentiated")
_barred_p.def_impl(lambda x, **_params: x)
_barred_p.def_abstract_eval(lambda x, **_params: x)
mlir.register_lowering(_barred_p, lambda _ctx, x, **_params: [x])
batching.primitive_batchers[_barred_p] = lambda args, dims, **params: (
    _barred_p.bind(*args, **params),
    dims[0],
)


def _refuse(_primals: Any, _tangents: Any, *, advice: str) -> Any:
    raise TypeError(advice)


ad.primitive_jvps[_barred_p] = _refuse
