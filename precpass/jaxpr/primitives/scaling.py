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

__all__ = ["Arithmetic", "rounds_to_eight_bits", "scaling"]


class Arithmetic(Protocol):
    """A function of arrays, as the primitive's hashable parameter; its text is shown in jaxprs."""

    def __call__(self, *arrays: Any, on_cpu: bool) -> Sequence[Any]:
        """The results.

        Args:
            arrays: the operands.
            on_cpu: whether XLA:CPU compiles it.
        """
        ...

    def avals(self, *operands: Aval) -> Sequence[Aval]:
        """The avals of the results."""
        ...


def scaling(arithmetic: Arithmetic, *operands: Any) -> list[Any]:
    """The results of a function as one equation, whose derivative is zero."""
    return scaling_p.bind(*operands, arithmetic=arithmetic)


def rounds_to_eight_bits(eqn: Eqn) -> bool:
    """Whether an equation makes values of 8 bits, with their scale, from a product's operand."""
    return eqn.primitive is scaling_p and eqn.outvars[0].aval.dtype.itemsize == 1


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """The arithmetic under a vmap; its results have the new dimension first."""

    each: Arithmetic
    dims: tuple[int | None, ...]

    def __call__(self, *arrays: Any, on_cpu: bool) -> Sequence[Any]:
        return jax.vmap(functools.partial(self.each, on_cpu=on_cpu), in_axes=self.dims)(*arrays)

    def avals(self, *operands: Aval) -> Sequence[Aval]:
        return jax.make_jaxpr(functools.partial(self, on_cpu=True))(*operands).out_avals

    def __str__(self) -> str:
        return f"{self.each}, mapped"


scaling_p = jex.Primitive("precpass_scaling")
scaling_p.multiple_results = True
scaling_p.def_impl(lambda *xs, arithmetic: list(arithmetic(*xs, on_cpu=True)))
scaling_p.def_abstract_eval(lambda *avals, arithmetic: list(arithmetic.avals(*avals)))


def _lowering(*, on_cpu: bool) -> Any:
    def lowered(*xs: Any, arithmetic: Arithmetic) -> Any:
        return list(arithmetic(*xs, on_cpu=on_cpu))

    return mlir.lower_fun(lowered, multiple_results=True)


mlir.register_lowering(scaling_p, _lowering(on_cpu=True))
for _platform in ("gpu", "tpu"):
    mlir.register_lowering(scaling_p, _lowering(on_cpu=False), platform=_platform)


def _jvp(primals: Any, _tangents: Any, *, arithmetic: Arithmetic) -> Any:
    out = scaling(arithmetic, *primals)
    return out, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out]


def _batch(operands: Any, dims: Any, *, arithmetic: Arithmetic) -> Any:
    out = scaling(_Mapped(arithmetic, tuple(dims)), *operands)
    return out, [0] * len(out)


def _taylor(primals: Any, series: Any, *, arithmetic: Arithmetic) -> Any:
    out = scaling(arithmetic, *primals)
    return out, [[lax.full_like(x, 0)] * len(series[0]) for x in out]


ad.primitive_jvps[scaling_p] = _jvp
ad.primitive_transposes[scaling_p] = lambda _cotangents, *xs, **_params: [None] * len(xs)
batching.primitive_batchers[scaling_p] = _batch
jet.jet_rules[scaling_p] = _taylor
