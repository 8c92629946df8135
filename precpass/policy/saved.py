"""`SavedPrecisions`: those of a saved plan, by names of equations that outlive other edits."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

from precpass.policy.precision import Precision
from precpass.policy.scopes import clean_scope

__all__ = ["Names", "SavedPrecisions"]


class Names:
    """Names the equations of a program: scope, source function, primitive, and occurrence."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._places: dict[str, str] = {}

    def add(self, scope: str, function: str, primitive: str, place: str = "") -> tuple[str, int]:
        """The key of the next equation, and how many before it have the same one.

        Args:
            scope: its whole name stack.
            function: the user's function that it is made in; "" where JAX recorded none.
            primitive: its name.
            place: the file and line of the equation; "" where JAX recorded none.
        """
        key = f"{clean_scope(scope)}|{function}|{primitive}"
        self.counts[key] += 1
        self._places[key] = place
        return key, self.counts[key] - 1

    def placed(self, key: str) -> str:
        """A key in words, with the line of the last equation that has it, if there is one."""
        scope, function, primitive = key.rsplit("|", 2)
        place = self._places.get(key, "")
        words = (function and f"in {function}", place and f"at {place}", scope and f"under {scope}")
        return " ".join((primitive, *filter(None, words)))


@dataclasses.dataclass(frozen=True)
class SavedPrecisions:
    """The precisions of a saved plan.

    Attributes:
        name: of the program that it was saved from.
        entries: pairs of a key and the precisions of the equations that have it, in
            their order; None for one whose precision nothing decides.
        left_out: the rules of its policy that a file cannot hold, as they print.
        costs: what the compiled forms cost, when it was made; "" where none were compiled.
    """

    name: str
    entries: tuple[tuple[str, tuple[Precision | None, ...]], ...]
    left_out: tuple[str, ...] = ()
    costs: str = dataclasses.field(default="", compare=False)

    @functools.cached_property
    def _by_key(self) -> dict[str, tuple[Precision | None, ...]]:
        return dict(self.entries)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.name, self.entries, self.left_out))

    def __hash__(self) -> int:
        # a policy is part of what every call looks up
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def of(self, key: str, occurrence: int) -> Precision | None:
        """The precision of an equation; None where the plan does not have it."""
        saved = self._by_key.get(key, ())
        return saved[occurrence] if occurrence < len(saved) else None
