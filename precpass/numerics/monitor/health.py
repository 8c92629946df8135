"""`Health`: what a monitor saw of a program's numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from precpass.jaxpr import Place
from precpass.numerics.monitor.figures import MOST, NEVER, Figures, joined, none
from precpass.policy.scopes import clean_scope
from precpass.units import counted
from precpass.view.text import heading

__all__ = ["Health", "Seen"]


@dataclasses.dataclass(frozen=True)
class Seen:
    """What was seen of one equation, in all of its runs.

    Attributes:
        place: the equation: its `primitive`, `scope`, `source` line, `inside` of which loops
            and branches it runs.
        runs: how often it ran; 0 for one that was not reached.
        largest: the largest finite magnitude of its results, 0.0 where there is none.
        smallest: the smallest magnitude but zero, inf where there is none.
        nonfinite: results that are not finite.
        infinities: of these the infinities that were made of finite operands.
        nans: of these the NaNs that were made of operands without one; of an infinity too, as
            inf - inf is.
        lost: results that are zero and should not be: a product, a quotient, a power, an
            exponential or a cast that was too small for its format.
        first: the trip of the outermost loop in which the first infinity or NaN was made, 0
            outside of loops; None where none was.
        reads: the largest and the smallest magnitude of its operands, and the largest one of that
            operand in which it is smallest; None but of a calibration.
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
    def is_birth(self) -> bool:
        """Whether a NaN or an infinity was born here, and not only passed on."""
        return bool(self.nans or self.infinities)

    def __str__(self) -> str:
        where = "".join(text for text, _ in heading(self.place.source))
        scope = clean_scope(self.place.scope)
        parts = [where, f"in {scope}" if scope else ""]
        inside = ", ".join(self.place.inside)
        parts += [f"in {inside}" if inside else ""]
        parts += [f"first in trip {self.first}" if inside and self.first is not None else ""]
        return "  ".join(part for part in parts if part)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Health:
    """What a monitor saw: a pytree of small arrays, with a row for each equation.

    It can be carried through `lax.scan`, returned from `jax.vmap` and `jax.jit`, and saved. What
    reads it takes healths with more dimensions, of a batch or of the steps of a scan, together.

    Attributes:
        figures: int32 and uint32 arrays with a row per equation.
        calls: how many calls there were, an int32 scalar.
        looked: how many of them were looked at, an int32 scalar.
        places: the equations, in the order of the program.
        name: the function's name.
    """

    figures: Figures
    calls: Any
    looked: Any
    places: tuple[Place, ...]
    name: str

    def tree_flatten(self) -> tuple[Any, Any]:
        """As JAX asks for it."""
        return (self.figures, self.calls, self.looked), (self.places, self.name)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Health:
        """As JAX asks for it."""
        return cls(*children, *aux)

    @classmethod
    def empty(cls, like: Health) -> Health:
        """The health of no call, with the equations of another one."""
        figures = none(len(like.places), reads=like.figures.reads is not None)
        return cls(figures, jnp.int32(0), jnp.int32(0), like.places, like.name)

    def merged(self, other: Health) -> Health:
        """The health of the calls of both; under `jax.jit` too.

        Raises:
            TypeError: for what is no health.
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
        """All equations, in the order of the program."""
        largest, smallest, counts, first, reads = jax.device_get(tuple(self.figures))
        n = len(self.places)
        many = np.size(self.calls)
        largest = np.asarray(largest).reshape(many, n).max(0).view(np.float32)
        smallest = np.asarray(smallest).reshape(many, n).min(0).view(np.float32)
        counts = np.asarray(counts, np.int64).reshape(many, n, 5).sum(0)
        first = np.asarray(first).reshape(many, n).min(0)
        read: list[Any] = [None] * n
        if reads is not None:
            # a largest one is at most, the others are at least
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
        """The equations at which a NaN or an infinity was born, in the order of the program."""
        return tuple(seen for seen in self.seen() if seen.is_birth)

    def summary(self, limit: int = 10) -> str:
        """What went wrong, worst first: births of NaNs and infinities, then what was lost to zero.

        Args:
            limit: the most lines of each.
        """
        seen = self.seen()
        calls, looked = (int(np.sum(jax.device_get(x))) for x in (self.calls, self.looked))
        lines = [
            f"{self.name}: {counted(len(seen), 'equation')}, "
            f"{looked} of {counted(calls, 'call')} looked at"
        ]
        births = [s for s in seen if s.is_birth]
        lines += _listed(births, limit, "NaNs and infinities are born", _birth)
        passed = [s for s in seen if s.nonfinite and not s.is_birth]
        if passed and births:
            lines.append(f"passed on by {counted(len(passed), 'equation')}")
        elif passed:
            lines += _listed(passed[:1], limit, "not finite as it was given", _passed)
        lost = sorted((s for s in seen if s.lost), key=lambda s: -s.lost)
        lines += _listed(lost, limit, "lost to zero", lambda s: _values(s.lost))
        if not (births or passed or lost):
            lines.append("all values are finite, and none was lost to zero")
        lines += _extremes(seen)
        if unreached := sum(not s.runs for s in seen):
            lines.append(f"not reached: {counted(unreached, 'equation')}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(self)):
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


def _values(count: int) -> str:
    return f"{_number(count)} value{'' if count == 1 else 's'}"


def _number(count: int) -> str:
    return f"{count}" if count < int(MOST) else f"{int(MOST)} or more"


def _extremes(seen: tuple[Seen, ...]) -> list[str]:
    nonzero = [s for s in seen if s.largest > 0.0]
    if not nonzero:
        return []
    top, low = max(nonzero, key=lambda s: s.largest), min(nonzero, key=lambda s: s.smallest)
    return [
        f"{what} magnitude: {value:.3g} by {s.place.primitive}  {s}"
        for what, value, s in (("largest", top.largest, top), ("smallest", low.smallest, low))
    ]
