"""What delayed scaling records of each operand that is rounded to 8 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from precpass import jaxpr as ir
from precpass.policy.precision import Precision

__all__ = ["LARGEST", "LOST", "PRECISIONS", "LostValues", "room_above"]

PRECISIONS = {p.dtype: p for p in Precision if p.is_scaled}
"""The formats of 8 bits, by their dtypes."""


@dataclasses.dataclass(frozen=True)
class LostValues:
    """The share of one operand's values that a call lost by rounding them to 8 bits.

    Attributes:
        place: the format, the name scopes and the line of its matrix product, and the loops and
            branches around it, in words.
        saturated: the share of finite values beyond the largest number of the format, which became
            that number.
        flushed: the share of values that were not zero and became zero.
    """

    place: str
    saturated: float
    flushed: float

    def __str__(self) -> str:
        return f"{self.saturated:.2%} saturated, {self.flushed:.2%} flushed to zero: {self.place}"


def room_above(precision: Precision) -> float:
    """The relative distance beyond the largest number that is still rounded to it.

    It is half a unit in the last place: of 127 for int8, of a significand of 1.75 for float8.
    """
    return precision.unit_roundoff / (1 if precision is Precision.INT8 else 1.75)


class _Of8Bits:
    """An `ir.Look` at the equations that round to 8 bits."""

    def sees(self, eqn: ir.Eqn) -> bool:
        return ir.rounds_to_eight_bits(eqn)

    def in_trip(self, record: Any, trip: Any) -> Any:
        del trip
        return record


class _Largest(_Of8Bits):
    """Records the largest finite magnitudes of the values before they are rounded."""

    def record(self, ran: Sequence[ir.Ran]) -> Any:
        return jnp.stack([_largest(step.operands[0]) for step in ran])

    def none(self, places: int) -> Any:
        return lax.full((places,), 0, np.float32)

    def joined(self, one: Any, other: Any) -> Any:
        return lax.max(one, other)

    def over_shards(self, record: Any, axes: tuple[str, ...]) -> Any:
        return lax.pmax(record, axes)


class _Lost(_Of8Bits):
    """Counts the values that saturated, those that became zero, and all of them."""

    def record(self, ran: Sequence[ir.Ran]) -> Any:
        return jnp.stack([_lost(step.operands[0], *step.results) for step in ran])

    def none(self, places: int) -> Any:
        return lax.full((places, 3), 0, np.float32)

    def joined(self, one: Any, other: Any) -> Any:
        return lax.add(one, other)

    def over_shards(self, record: Any, axes: tuple[str, ...]) -> Any:
        return lax.psum(record, axes)


LARGEST, LOST = _Largest(), _Lost()


def _largest(x: Any) -> Any:
    sizes = jnp.where(jnp.isfinite(x), jnp.abs(x), np.zeros((), x.dtype)).astype(np.float32)
    return jnp.max(sizes, initial=np.float32(0))


def _lost(x: Any, low: Any, scale: Any) -> Any:
    precision = PRECISIONS[np.dtype(low.dtype)]
    most = np.float32(precision.max * (1.0 + room_above(precision))) * scale
    saturated = jnp.isfinite(x) & (jnp.abs(x).astype(np.float32) > most)
    flushed = (x != 0) & (low.astype(np.float32) == 0)
    counts = (jnp.sum(each, dtype=np.float32) for each in (saturated, flushed))
    return jnp.stack([*counts, jnp.float32(x.size)])
