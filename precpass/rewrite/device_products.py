"""Products of float32 operands with the digits that they have on another device.

A CPU multiplies float32 operands in float32. An NVIDIA GPU multiplies them as TF32 by default, and
a TPU in one pass of bfloat16 (`Precision`). So that an error shows that, each operand is split into
numbers of as few bits as the device's units take, whose products are exact in float32, and as many
of these products are added up as the device adds up. Operands are rounded to nearest.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from precpass import jaxpr as ir
from precpass.plan import reasons
from precpass.plan.decisions import formats_of, multiply, unchanged_plan
from precpass.plan.plan import Decision, Plan
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind, op
from precpass.rewrite.env import Env
from precpass.rewrite.rewriter import Rewriter

__all__ = ["with_products_of"]


class _Passes(NamedTuple):
    """How a device multiplies float32 operands.

    Attributes:
        mantissa: the stored bits of a number's significand that its units take.
        products: how many of the products of their parts are added up.
    """

    mantissa: int
    products: int


_TF32, _ONE, _THREE, _SIX = _Passes(10, 1), _Passes(7, 1), _Passes(7, 3), _Passes(7, 6)
_OF_ALGORITHMS = {
    "BF16_BF16_F32": _ONE,
    "BF16_BF16_F32_X3": _THREE,
    "BF16_BF16_F32_X6": _SIX,
}
_PASSES = {
    "gpu": {"default": _TF32, "high": _TF32, "TF32_TF32_F32": _TF32, **_OF_ALGORITHMS},
    "tpu": {"default": _ONE, "high": _THREE, "highest": _SIX, **_OF_ALGORITHMS},
}
"""What the compilers for an H100 and for TPUs make of the precision that a product asks for (jax
0.10.2 and 0.12.0.1); of what is missing they make float32."""
_PAIRS = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))
"""The parts of the operands that are multiplied, by the size of their products: the first so many
are those of one, three and six passes (Henry, Tang and Heinecke, 2019)."""


def with_products_of(platform: str, jaxpr: ir.Jaxpr) -> Any:
    """A jaxpr whose products of float32 operands have the digits that they have on a platform.

    Args:
        platform: "cpu", "gpu" or "tpu"; for a CPU the jaxpr is returned as it is.
        jaxpr: closed. Its bodies are entered.
    """
    if platform not in _PASSES:
        return jaxpr

    def changed(eqn: ir.Eqn) -> Decision | None:
        if _passes(platform, eqn) is None:
            return None
        return multiply(Precision.F32, formats_of(eqn.outvars), reasons.OFF())

    return _OnDevice(platform).jaxpr(jaxpr, unchanged_plan(jaxpr, changed))


def _passes(platform: str, eqn: ir.Eqn) -> _Passes | None:
    """How an equation is multiplied; None if it is no product of float32 operands, or exact."""
    if op(eqn.primitive.name).kind is not OpKind.COMPUTE:
        return None
    if any(v.aval.dtype != np.float32 for v in eqn.invars[:2]):
        return None
    return _PASSES[platform].get(ir.asked_precision(eqn))


class _OnDevice(Rewriter):
    """A rewriter that replaces products by sums of products that a CPU has the digits for."""

    def __init__(self, platform: str) -> None:
        super().__init__(_no_rule, lambda _scope: None, contextlib.nullcontext)
        self._platform = platform

    def multiplied(self, env: Env, eqn: ir.Eqn, decision: Decision) -> Any:
        passes = _passes(self._platform, eqn)
        assert passes is not None

        def product(lhs: Any, rhs: Any, *rest: Any) -> list[Any]:
            params = {**dict(ir.sorted_params(eqn)), "precision": None}
            pairs = _PAIRS[: passes.products]
            parts = [_parts(x, passes) for x in (lhs, rhs)]
            # The smallest terms first: they would be lost beside the sum of the others.
            terms = [
                eqn.primitive.bind(parts[0][i], parts[1][j], *rest, **params)
                for i, j in reversed(pairs)
            ]
            return [sum(terms[1:], terms[0])]

        return env.build.call(product, [env.read(v) for v in eqn.invars])[0]


def _parts(x: Any, passes: _Passes) -> list[Any]:
    """Numbers of few bits that add up to `x`, the largest first, as many as the passes read."""
    parts: list[Any] = []
    for _ in range({1: 1, 3: 2, 6: 3}[passes.products]):
        part = lax.reduce_precision(x, 8, passes.mantissa)
        parts.append(part)
        # What is not finite is in the first part alone: an infinity less itself is NaN.
        rest = lax.sub(x, part)
        x = lax.select(lax.is_finite(x), rest, lax.full_like(x, 0))
    return parts


def _no_rule(*_args: Any) -> Plan:
    raise AssertionError("a plan that changes products alone asks for no rule's plan")
