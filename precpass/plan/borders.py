"""In which formats values cross the borders of bodies."""

from __future__ import annotations

from typing import NamedTuple

from precpass.policy.precision import Precision

__all__ = ["NO_BORDER_COPIES", "Border", "BorderCopies", "BorderCopy", "across"]

Border = tuple[tuple[Precision, Precision], ...]
"""Pairs (a value's own format, the format in which it crosses a jaxpr's border)."""


class BorderCopy(NamedTuple):
    """A border copy: a low copy of a value that crosses a body's border beside the value.

    A copy in float8 consists of two arrays, its values and their scale.

    Attributes:
        position: the value's, among the body's operands or among its results.
        precision: the copy's.
        rounds: whether every reader inside reads the rounded value.
        as_bits: whether unsigned integers carry its 16 bits (`Backend.border_bits`).
        is_stack: whether it is, outside of a loop's body, the stack of which the body has slices.
    """

    position: int
    precision: Precision
    rounds: bool
    as_bits: bool = True
    is_stack: bool = False

    @property
    def arrays(self) -> int:
        """How many arrays it consists of."""
        return 2 if self.precision.is_scaled else 1


class BorderCopies(NamedTuple):
    """The border copies of a body, in ascending positions.

    Attributes:
        operands: the copies of its operands.
        results: the copies of its results.
    """

    operands: tuple[BorderCopy, ...] = ()
    results: tuple[BorderCopy, ...] = ()


NO_BORDER_COPIES = BorderCopies()


def across(border: Border, native: Precision | None) -> Precision | None:
    """The format in which a value of format `native` crosses a border."""
    return next((wide for narrow, wide in border if narrow is native), native)
