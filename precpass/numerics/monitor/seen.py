"""The record of `monitor` for one equation."""

from __future__ import annotations

import dataclasses
import math

from precpass.jaxpr import Place
from precpass.policy.scopes import clean_scope
from precpass.view.text import heading

__all__ = ["Seen"]


@dataclasses.dataclass(frozen=True)
class Seen:
    """The record of one equation, over all of its runs.

    Attributes:
        place: the equation: its `primitive`, `scope`, `source` line, and the loops and branches
            that it is `inside`.
        runs: how often it ran; 0 for an equation that was not reached.
        largest: the largest finite magnitude of its results; 0.0 if there is none.
        smallest: the smallest nonzero magnitude of its results; inf if there is none.
        nonfinite: the number of results that are not finite.
        infinities: the number of infinities that it produced from finite operands.
        nans: the number of NaNs that it produced from operands without one; inf - inf counts.
        lost: the number of results that are zero and should not be: products, quotients, powers,
            exponentials and casts that were too small for their format.
        first: the trip of the outermost loop in which it produced the first infinity or NaN; 0
            outside loops, None if there was none.
        reads: the largest and the smallest magnitude of its operands, and the smallest of the
            operands' largest magnitudes; None except in a calibration.
    """

    place: Place
    runs: int
    largest: float
    smallest: float
    nonfinite: int
    infinities: int
    nans: int
    lost: int
    first: int | None
    reads: tuple[float, float, float] | None = None

    @property
    def lost_share(self) -> float:
        """The share of all results that were lost; 0.0 if the equation did not run."""
        results = self.runs * math.prod(self.place.shape)
        return self.lost / results if results else 0.0

    @property
    def is_birth(self) -> bool:
        """Whether the equation produced a NaN or an infinity, and did not only pass one on."""
        return bool(self.nans or self.infinities)

    def __str__(self) -> str:
        where = "".join(text for text, _ in heading(self.place.source))
        scope = clean_scope(self.place.scope)
        parts = [where, f"in {scope}" if scope else ""]
        inside = ", ".join(self.place.inside)
        parts += [f"in {inside}" if inside else ""]
        parts += [f"first in trip {self.first}" if inside and self.first is not None else ""]
        return "  ".join(part for part in parts if part)
