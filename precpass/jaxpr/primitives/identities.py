"""Which equations of the pass return an operand."""

from __future__ import annotations

from typing import Any

from precpass.jaxpr.primitives.carrier import carrier_p, detach_p
from precpass.jaxpr.primitives.low_cotangent import low_cotangent_p
from precpass.jaxpr.primitives.low_derivative import low_derivative_p
from precpass.jaxpr.primitives.rounded import rounded_p
from precpass.jaxpr.types import Eqn

__all__ = ["is_identity_of_first_operand", "is_rounded", "wide_operand"]

_IDENTITIES = frozenset((rounded_p, carrier_p, detach_p, low_derivative_p, low_cotangent_p))


def is_identity_of_first_operand(eqn: Eqn) -> bool:
    """Whether an equation's result is its first operand; the others only serve derivatives."""
    return eqn.primitive in _IDENTITIES


def wide_operand(eqn: Eqn) -> Any:
    """The operand that replaces an equation's result in a program in which nothing is low."""
    return eqn.invars[1 if is_rounded(eqn) else 0]


def is_rounded(eqn: Eqn) -> bool:
    """Whether an equation's result is a value that was stored in 16 bits."""
    return eqn.primitive is rounded_p
