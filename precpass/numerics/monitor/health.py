"""`Health`: a monitor's record of a program's numbers, as data, text and HTML."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from precpass.jaxpr import Place
from precpass.numerics.monitor.figures import MOST, NEVER, Figures, joined, none
from precpass.policy.scopes import clean_scope
from precpass.units import a_value, counted
from precpass.view.page import Cell, as_html, bar, facts, page, sheet, title
from precpass.view.text import Line, heading, plain

__all__ = ["Health", "Seen"]


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
        reads: the largest magnitude of its first floating operand, that of the others, the smallest
            of all, and the smallest of the operands' largest ones; None except in a calibration.
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
    reads: tuple[float, float, float, float] | None = None

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


@jax.tree_util.register_dataclass
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
    places: tuple[Place, ...] = dataclasses.field(metadata={"static": True})
    name: str = dataclasses.field(metadata={"static": True})

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
            raise TypeError(f"merged takes a Health, not {a_value(other)}")
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
            # The largest magnitudes are joined by the maximum, the others by the minimum.
            reads = np.asarray(reads).reshape(many, n, 4)
            ends = np.concatenate([reads[..., :2].max(0), reads[..., 2:].min(0)], 1)
            read = [tuple(row.tolist()) for row in ends.view(np.float32)]

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
        return _health_page(self.name, self._calls(), self.seen())

    def __str__(self) -> str:
        return repr(self) if self._is_traced() else self.summary()

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


# ---------------------------------------------------------------- the page

_BORN, _PASSED, _LOST, _FINE = "NaN or inf born", "passed on", "lost to zero", "fine"
_NEVER = "not reached"
_STYLES = {_BORN: "bad", _PASSED: "wide", _LOST: "cast", _FINE: "low", _NEVER: "none"}


def _health_page(name: str, calls: str, seen: Sequence[Seen]) -> str:
    """A health as HTML: a bar, and its equations, those that make NaNs and infinities first."""
    states = [_state(s) for s in seen]
    order = sorted(range(len(seen)), key=lambda i: (*_badness(seen[i], states[i]), i))
    counts = [(what, float(states.count(what)), style) for what, style in _STYLES.items()]
    shown: list[Line] = [[(calls, "")]]
    shown += [
        [(f"{counted(int(n), 'equation')}: {what}", style if style != "none" else "reason")]
        for what, n, style in counts
        if n and what is not _FINE
    ]
    heads = ["equation", "state", "NaNs", "infs", "not finite", "lost", "largest", "smallest"]
    rows = [_cells(i, seen[i], states[i]) for i in order]
    groups = {what: [states[i] == what for i in order] for what in _STYLES}
    body = bar(counts, f"of {counted(len(seen), 'equation')}") + facts(shown)
    return page(title(name) + body + sheet(heads, rows, texts=(0, 1), groups=groups))


def _state(seen: Seen) -> str:
    if not seen.runs:
        return _NEVER
    if seen.nans or seen.infinities:
        return _BORN
    return _PASSED if seen.nonfinite else _LOST if seen.lost else _FINE


def _badness(seen: Seen, state: str) -> tuple[int, int]:
    # In the order of the program the first birth is the cause of the others.
    return list(_STYLES).index(state), -seen.lost if state is _LOST else 0


def _cells(at: int, seen: Seen, state: str) -> list[Cell]:
    scope = clean_scope(seen.place.scope)
    inside = [*([scope] if scope else []), *seen.place.inside]
    where = f" in {', '.join(inside)}" if inside else ""
    line = [(seen.place.primitive, "frame"), (f"{where}  ", "reason"), *heading(seen.place.source)]
    counts = seen.nans, seen.infinities, seen.nonfinite, seen.lost
    ends = (seen.largest, bool(seen.largest)), (seen.smallest, 0 < seen.smallest < float("inf"))
    return [
        Cell(line, f"line {at:06d}"),
        Cell([(state, _STYLES[state] if state is not _NEVER else "reason")]),
        *(Cell([(str(n or ""), "bad")]) for n in counts),
        *(Cell(f"{x:.3g}" if known else "") for x, known in ends),
    ]
