"""Gradients in a program: whether the cotangent that a backward pass begins with is a plain one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from precpass.jaxpr.bodies import bodies
from precpass.jaxpr.reading import is_literal, open_jaxpr, precision_of, scope_of
from precpass.jaxpr.types import Eqn, Jaxpr
from precpass.policy.primitives import OpKind, op
from precpass.policy.scopes import is_backward

__all__ = ["takes_plain_gradient"]

_READ_SEEDS = ("mul", "div", "neg", "broadcast_in_dim", "convert_element_type", "reshape", "jit")

_SMALLEST_SCALE = 64
"""A smaller number is taken for the weight of a term of the loss (assumed)."""


def takes_plain_gradient(jaxpr: Jaxpr) -> bool:
    """Whether a program has a backward pass with products whose loss was not scaled.

    `jax.grad` begins with a cotangent of one, which stands in the program as a number. The backward
    pass of `loss * scale` multiplies it by the scale: a scalar product with a large number, or with
    a value. A loss that is multiplied by any other value counts as scaled too.
    """
    backward = list(_backward(jaxpr, False))
    has_products = any(op(eqn.primitive.name).kind is OpKind.COMPUTE for eqn in backward)
    return has_products and any(map(_reads_seed, backward)) and not any(map(_scales, backward))


def _backward(jaxpr: Jaxpr, inside: bool) -> Iterator[Eqn]:
    for eqn in open_jaxpr(jaxpr).eqns:
        is_inside = inside or is_backward(scope_of(eqn))
        if is_inside:
            yield eqn
        for body in bodies(eqn):
            yield from _backward(body.jaxpr, is_inside)


def _reads_seed(eqn: Eqn) -> bool:
    if eqn.primitive.name not in _READ_SEEDS:
        return False
    numbers = (v for v in eqn.invars if is_literal(v) and precision_of(v.aval) is not None)
    return any(number.val == 1 for number in numbers)


def _scales(eqn: Eqn) -> bool:
    (result, *_) = eqn.outvars or (None,)
    if eqn.primitive.name != "mul" or result is None or result.aval.shape:
        return False
    factors: list[Any] = [v.val for v in eqn.invars if is_literal(v)]
    is_by_value = len(factors) == 1 and factors[0] == 1
    return not factors or is_by_value or any(abs(x) >= _SMALLEST_SCALE for x in factors)
