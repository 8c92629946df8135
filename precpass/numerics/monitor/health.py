"""`Health`: a monitor's record of a program's numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from precpass.jaxpr import Place
from precpass.numerics.monitor.figures import MOST, NEVER, Figures, joined, none
from precpass.numerics.monitor.health_page import health_page
from precpass.numerics.monitor.seen import Seen
from precpass.units import counted
from precpass.view.text import as_html, page, plain

__all__ = ["Health", "Seen"]


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Health:
    """The record of `monitor`: a pytree of small arrays with a row for each equation.

    You can carry it through `lax.scan`, return it from `jax.vmap` and `jax.jit`, and save it. Its
    methods join additional dimensions, of a batch or of the steps of a scan.

    Attributes:
        figures: int32 and uint32 arrays with a row per equation.
        calls: the number of calls, an int32 scalar.
        looked: the number of calls that were recorded, an int32 scalar.
        places: the equations, in the order of the program.
        name: the function's name.
    """

    figures: Figures
    calls: Any
    looked: Any
    places: tuple[Place, ...]
    name: str

    def tree_flatten(self) -> tuple[Any, Any]:
        """As JAX requires it."""
        return (self.figures, self.calls, self.looked), (self.places, self.name)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Health:
        """As JAX requires it."""
        return cls(*children, *aux)

    @classmethod
    def empty(cls, like: Health) -> Health:
        """Return the health of no call, with the equations of another health."""
        figures = none(len(like.places), reads=like.figures.reads is not None)
        return cls(figures, jnp.int32(0), jnp.int32(0), like.places, like.name)

    def merged(self, other: Health) -> Health:
        """Return the health of the calls of both; also under `jax.jit`.

        Raises:
            TypeError: for an argument that is not a `Health`.
            ValueError: for the health of another program. Batches may have other shapes.
        """
        if not isinstance(other, Health):  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
            raise TypeError(f"merged takes a Health, not a {type(other).__name__}")
        if self.places != other.places or (self.figures.reads is None) != (
            other.figures.reads is None
        ):
            sizes = (f"{h.name} ({counted(len(h.places), 'equation')})" for h in (self, other))
            raise ValueError(
                f"the healths are of different programs, {' and '.join(sizes)}: merge those of one "
                "function under one policy"
            )
        figures = joined(self.figures, other.figures)
        calls, looked = self.calls + other.calls, self.looked + other.looked
        return dataclasses.replace(self, figures=figures, calls=calls, looked=looked)

    def seen(self) -> tuple[Seen, ...]:
        """Return the records of all equations, in the order of the program."""
        largest, smallest, counts, first, reads = jax.device_get(tuple(self.figures))
        n = len(self.places)
        many = np.size(self.calls)
        largest = np.asarray(largest).reshape(many, n).max(0).view(np.float32)
        smallest = np.asarray(smallest).reshape(many, n).min(0).view(np.float32)
        counts = np.asarray(counts, np.int64).reshape(many, n, 5).sum(0)
        first = np.asarray(first).reshape(many, n).min(0)
        read: list[Any] = [None] * n
        if reads is not None:
            # A largest magnitude is joined by the maximum, the others by the minimum.
            reads = np.asarray(reads).reshape(many, n, 3)
            ends = [reads[..., 0].max(0), reads[..., 1].min(0), reads[..., 2].min(0)]
            read = [tuple(row.tolist()) for row in np.stack(ends, 1).view(np.float32)]

        def row(i: int, place: Place) -> Seen:
            runs, nonfinite, infinities, nans, lost = counts[i].tolist()
            trip = None if first[i] == NEVER else int(first[i])
            ends = float(largest[i]), float(smallest[i])
            return Seen(place, runs, *ends, nonfinite, infinities, nans, lost, trip, read[i])

        return tuple(row(i, place) for i, place in enumerate(self.places))

    def born(self) -> tuple[Seen, ...]:
        """Return the equations that produced a NaN or an infinity, in the order of the program."""
        return tuple(seen for seen in self.seen() if seen.is_birth)

    def summary(self, limit: int = 10) -> str:
        """Return what went wrong: first new NaNs and infinities, then results lost to zero.

        Args:
            limit: the largest number of lines for each.
        """
        seen = self.seen()
        lines = [f"{self.name}: {counted(len(seen), 'equation')}, {self._calls()}"]
        births = [s for s in seen if s.is_birth]
        lines += _listed(births, limit, "NaNs and infinities first appear", _birth)
        passed = [s for s in seen if s.nonfinite and not s.is_birth]
        if passed and births:
            lines.append(f"passed on by {counted(len(passed), 'equation')}")
        elif passed:
            lines += _listed(passed[:1], limit, "not finite as it was given", _passed)
        lost = sorted((s for s in seen if s.lost), key=lambda s: -s.lost)
        lines += _listed(lost, limit, "lost to zero", _lost)
        if not (births or passed or lost):
            lines.append("all values are finite, and none was lost to zero")
        lines += _extremes(seen)
        if unreached := sum(not s.runs for s in seen):
            lines.append(f"not reached: {counted(unreached, 'equation')}")
        return plain([(line, "")] for line in lines)

    def _calls(self) -> str:
        calls, looked = (int(np.sum(jax.device_get(x))) for x in (self.calls, self.looked))
        return f"{looked} of {counted(calls, 'call')} looked at"

    def _is_traced(self) -> bool:
        return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(self))

    def _repr_html_(self) -> str:
        if self._is_traced():
            return page(as_html([[(repr(self), "")]]))
        return health_page(self.name, self._calls(), self.seen())

    def __repr__(self) -> str:
        if self._is_traced():
            return f"<Health of {self.name}: {counted(len(self.places), 'equation')}, traced>"
        seen = self.seen()
        births, lost = sum(s.is_birth for s in seen), sum(bool(s.lost) for s in seen)
        return (
            f"<Health of {self.name}: {counted(len(seen), 'equation')}; NaNs or infinities are "
            f"born at {births}, values are lost to zero at {lost}>"
        )


def _listed(seen: Any, limit: int, heading: str, figure: Any) -> list[str]:
    if not seen:
        return []
    lines = [f"  {figure(s)} by {s.place.primitive}  {s}" for s in seen[:limit]]
    more = [f"  and {counted(len(seen) - limit, 'equation')} more"] if len(seen) > limit else []
    return [f"{heading}:", *lines, *more]


def _birth(seen: Seen) -> str:
    parts = [(seen.nans, "NaN"), (seen.infinities, "inf")]
    return ", ".join(f"{_number(count)} {what}" for count, what in parts if count)


def _passed(seen: Seen) -> str:
    return _values(seen.nonfinite)


def _lost(seen: Seen) -> str:
    return f"{_values(seen.lost)} ({100 * seen.lost_share:.3g} %)"


def _values(count: int) -> str:
    return f"{_number(count)} value{'' if count == 1 else 's'}"


def _number(count: int) -> str:
    return f"{count}" if count < int(MOST) else f"{int(MOST)} or more"


def _extremes(seen: tuple[Seen, ...]) -> list[str]:
    nonzero = [s for s in seen if s.largest > 0.0]
    # What a loss scale computes has no line of the user's, and tells them nothing.
    nonzero = [s for s in nonzero if s.place.source.file] or nonzero
    if not nonzero:
        return []
    top, low = max(nonzero, key=lambda s: s.largest), min(nonzero, key=lambda s: s.smallest)
    return [
        f"{what} magnitude: {value:.3g} by {s.place.primitive}  {s}"
        for what, value, s in (("largest", top.largest, top), ("smallest", low.smallest, low))
    ]
