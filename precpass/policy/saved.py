"""`Lock`: the precisions of a saved plan, by names of equations that outlive unrelated edits."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator

from precpass.policy.precision import Precision
from precpass.policy.scopes import clean_scope
from precpass.units import are, counted

__all__ = ["Lock", "Names"]

_SOME = 3


class Names:
    """Names the equations of a program: scope, source function, primitive, and occurrence."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, scope: str, function: str, primitive: str) -> tuple[str, int]:
        """The key of the next equation, and how many before it have the same one.

        Args:
            scope: its whole name stack.
            function: the user's function that it is made in; "" where JAX recorded none.
            primitive: its name.
        """
        key = f"{clean_scope(scope)}|{function}|{primitive}"
        self.counts[key] += 1
        return key, self.counts[key] - 1


@dataclasses.dataclass(frozen=True)
class Lock:
    """The precisions of a saved plan.

    Attributes:
        name: of the program that it was saved from.
        entries: pairs of a key and the precisions of the equations that have it, in
            their order; None for one whose precision nothing decides.
        left_out: the rules of its policy that a file cannot hold, as they print.
        costs: where what products cost was from, when it was made; "" where nothing was asked.
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
        found = self._by_key.get(key, ())
        return found[occurrence] if occurrence < len(found) else None

    def rules_left_out(self) -> Iterator[str]:
        """That rules are missing in the file, in words; nothing where none is."""
        if self.left_out:
            yield (
                f"the saved plan of {self.name} is without {', '.join(self.left_out)}, whose "
                "predicate a file cannot hold: equations that are new, and those of custom rules, "
                "do not follow it; add it by Plan.load(path).with_rules(...)"
            )

    def complaints(self, found: Counter[str], name: str, policy: str) -> Iterator[str]:
        """What a program and the saved plan do not share, in words.

        Args:
            found: how many equations of the program have each key.
            name: of what the program belongs to.
            policy: what plans the equations that the lock does not have.

        Raises:
            ValueError: where they share nothing.
        """
        saved = Counter({key: len(precisions) for key, precisions in self.entries})
        if saved and not found & saved:
            raise ValueError(
                f"this plan was saved from another program ({self.name}): none of its "
                f"{counted(saved.total(), 'equation')} is in {name}; save the plan of {name} anew"
            )
        gone, new = saved - found, found - saved
        if gone:
            n = gone.total()
            yield (
                f"{counted(n, 'equation')} of the saved plan of {self.name} {are(n)} no longer "
                f"there ({_some(gone)})"
            )
        if new:
            n = new.total()
            yield (
                f"{counted(n, 'equation')} {are(n)} not in the saved plan of {self.name} and "
                f"{'follows' if n == 1 else 'follow'} {policy} ({_some(new)})"
            )
        shifted = Counter({key: n for key, n in found.items() if 0 != saved[key] != n})
        if shifted:
            yield (
                f"the saved plan of {self.name} counts the equations of a primitive in a function, "
                f"and their number is another one ({_some(shifted)}): their precisions may have "
                "shifted; save the plan anew"
            )


def _some(keys: Counter[str]) -> str:
    shown = ", ".join(list(keys)[:_SOME])
    return f"{shown}, ..." if len(keys) > _SOME else shown
