"""The primitive for the arithmetic around a scaled product, through which no derivative passes.

`jax.linear_transpose`, and the tangents of a custom rule, make JAX transpose every equation that
depends on the transposed operand. Maxima and roundings have no transpose, and a product of two such
values has none either, even if their cotangents are zero. So this arithmetic is one primitive, and
its transpose is zero.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.extend.core as jex
from jax import lax
from jax.experimental import jet
from jax.interpreters import ad, batching, mlir

from precpass.jaxpr.types import Aval, Eqn

__all__ = ["Arithmetic", "rounds_operand", "scaling"]


class Arithmetic(Protocol):
    """A function of arrays, as the primitive's hashable parameter; its text is shown in jaxprs."""

    def __call__(self, *arrays: Any, platform: str) -> Sequence[Any]:
        """The results.

        Args:
            arrays: the operands.
            platform: JAX's name of the platform that it is lowered for: "cpu", "cuda", "rocm" or
                "tpu".
        """
        ...

    def avals(self, *operands: Aval) -> Sequence[Aval]:
        """The avals of the results."""
        ...


def scaling(arithmetic: Arithmetic, *operands: Any) -> list[Any]:
    """The results of a function as one equation, whose derivative is zero."""
    return scaling_p.bind(*operands, arithmetic=arithmetic)


def rounds_operand(eqn: Eqn) -> bool:
    """Whether an equation rounds an operand of a scaled product to 8 bits, with a scale."""
    return eqn.primitive is scaling_p and len(eqn.invars) == 1


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """The arithmetic under a vmap; its results have the new dimension first."""

    each: Arithmetic
    dims: tuple[int | None, ...]

    def __call__(self, *arrays: Any, platform: str) -> Sequence[Any]:
        each = functools.partial(self.each, platform=platform)
        return jax.vmap(each, in_axes=self.dims)(*arrays)

    def avals(self, *operands: Aval) -> Sequence[Aval]:
        return jax.make_jaxpr(functools.partial(self, platform="cpu"))(*operands).out_avals

    def __str__(self) -> str:
        return f"{self.each}, mapped"


def _without_derivative() -> Any:
    """The primitive, which evaluates its parameter `arithmetic`; its derivative is zero."""
    primitive = jex.Primitive("precpass_scaling")
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(_results, platform="cpu"))
    primitive.def_abstract_eval(lambda *avals, arithmetic: list(arithmetic.avals(*avals)))
    mlir.register_lowering(primitive, _lowering("cpu"))
    for platform in ("cuda", "rocm", "tpu"):
        mlir.register_lowering(primitive, _lowering(platform), platform=platform)

    def jvp(primals: Any, _tangents: Any, **params: Any) -> Any:
        out = primitive.bind(*primals, **params)
        return out, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out]

    def taylor(primals: Any, series: Any, **params: Any) -> Any:
        out = primitive.bind(*primals, **params)
        return out, [[lax.full_like(x, 0)] * len(series[0]) for x in out]

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = lambda _cotangents, *xs, **_params: [None] * len(xs)
    jet.jet_rules[primitive] = taylor
    return primitive


def _results(*xs: Any, arithmetic: Arithmetic, platform: str) -> list[Any]:
    return list(arithmetic(*xs, platform=platform))


def _lowering(platform: str) -> Any:
    return mlir.lower_fun(functools.partial(_results, platform=platform), multiple_results=True)


def _batch(operands: Any, dims: Any, *, arithmetic: Arithmetic) -> Any:
    out = scaling(_Mapped(arithmetic, tuple(dims)), *operands)
    return out, [0] * len(out)


scaling_p = _without_derivative()
batching.primitive_batchers[scaling_p] = _batch
