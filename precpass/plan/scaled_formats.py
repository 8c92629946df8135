"""The formats of a scaled product's operands, and which values share a scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from precpass.policy.precision import Precision

__all__ = ["ScaledFormats", "scaled_formats"]


class ScaledFormats(NamedTuple):
    """The formats of a scaled product's operands.

    Attributes:
        lhs, rhs: the formats.
        by_row: whether float8 has a scale for each row or column. int8 always does.
    """

    lhs: Precision
    rhs: Precision
    by_row: bool = False

    def shared(self, summed: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """For each operand the dimensions along which it has one scale; () for all.

        Args:
            summed: the dimensions of each operand that the product sums over.
        """
        pairs = zip((self.lhs, self.rhs), summed, strict=True)
        return [tuple(dims) if self.by_row or p is Precision.INT8 else () for p, dims in pairs]

    def exchanged(self) -> ScaledFormats:
        """The formats of the product with exchanged operands."""
        return self._replace(lhs=self.rhs, rhs=self.lhs)


def scaled_formats(
    precision: Precision,
    cotangent_side: int | None = None,
    *,
    by_row: bool = False,
) -> ScaledFormats:
    """The formats of a product that is to multiply in a precision of 8 bits.

    Cotangents have the format itself. All else is E4M3 where they are E5M2, because kernels do not
    take two operands in E5M2.

    Args:
        precision: one with `is_scaled`.
        cotangent_side: the operand that is a cotangent, in a product of a backward pass.
        by_row: as in `ScaledFormats`.
    """
    other = Precision.F8E4M3 if precision is Precision.F8E5M2 else precision
    pair = [precision if side == cotangent_side else other for side in (0, 1)]
    return ScaledFormats(pair[0], pair[1], by_row)
