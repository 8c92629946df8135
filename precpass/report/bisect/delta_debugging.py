"""Delta debugging: a smallest set of groups with which a check passes, coarse groups first.

The set that is found is 1-minimal (Zeller and Hildebrandt, "Simplifying and Isolating
Failure-Inducing Input", IEEE Transactions on Software Engineering 28(2), 2002): without any one of
its members the check fails. Groups are refined level by level (Misherghi and Su, "HDD:
Hierarchical Delta Debugging", ICSE 2006). Their ddmin asks about a part and its complement in
turn, which takes many runs for two members far apart. Here each member is found by a binary search
over the prefixes of the remaining groups. As in ddmin, every claim about the result was tested, and
none assumes that the check is monotone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Found", "OutOfBudget", "shrink", "smallest"]

T = TypeVar("T")
Passes = Callable[[tuple[T, ...]], bool]


class OutOfBudget(Exception):
    """Raised by a check whose budget of runs is spent."""


class Found(NamedTuple, Generic[T]):
    """A set with which the check passes.

    Attributes:
        members: the groups, in the order in which they were given.
        minimal: whether the check fails without any one of them.
    """

    members: tuple[T, ...]
    minimal: bool


def smallest(root: T, parts: Callable[[T], Sequence[T]], passes: Passes[T]) -> Found[T]:
    """A smallest set of groups with which a check passes, as fine as the groups go.

    A group stays whole if the check does not pass with all of its parts in its place.

    Args:
        root: the group of everything; the check passes with it, and fails with no group.
        parts: gives the finer groups that make up a group; () for one without parts.
        passes: the check. It may raise `OutOfBudget`, and may be called again for a set that it
            was called for before.

    Examples:
        >>> halves = {"abcd": ("ab", "cd"), "ab": ("a", "b"), "cd": ("c", "d")}
        >>> smallest("abcd", lambda g: halves.get(g, ()), lambda kept: "c" in "".join(kept))
        Found(members=('c',), minimal=True)
    """
    kept: tuple[T, ...] = (root,)
    whole: list[T] = []
    try:
        while True:
            coarse = [group for group in kept if group not in whole and parts(group)]
            if not coarse:
                return Found(kept, True)
            finer = _with_parts(kept, coarse, parts)
            if not passes(finer):
                finer = kept
                for group in coarse:
                    trial = _with_parts(finer, [group], parts)
                    if passes(trial):
                        finer = trial
                    else:
                        whole.append(group)
            kept = finer
            for smaller in shrink(finer, passes):
                kept = smaller
    except OutOfBudget:
        return Found(kept, False)


def _with_parts(
    kept: Sequence[T], coarse: Sequence[T], parts: Callable[[T], Sequence[T]]
) -> tuple[T, ...]:
    return tuple(g for group in kept for g in (parts(group) if group in coarse else (group,)))


def shrink(items: Sequence[T], passes: Passes[T]) -> Iterator[tuple[T, ...]]:
    """Ever smaller sets with which a check passes; the last one is 1-minimal.

    To find one member among n takes about log2(n) runs, k members far apart about k log2(n / k)
    and a few more for each, and n members n + log2(n).

    Args:
        items: the check passes with all of them, and fails with none.
        passes: the check.

    Yields:
        Each set, in the order of `items`.

    Examples:
        >>> *_, last = shrink("abcdefgh", lambda kept: {"b", "g"} <= set(kept))
        >>> last
        ('b', 'g')
    """
    rest, needed = tuple(items), tuple[T, ...]()
    # Halves at first, because few members are expected; then the last member's distance.
    stride = len(rest)
    while rest:
        # whether what is needed suffices is asked for 1, 2, 4, ... members, so as not to ask often
        asks = len(needed).bit_count() == 1
        if asks and passes(needed):
            break
        # The check passes with the first `high` items and the needed ones, and fails with `low`.
        low, high = 0 if asks or not needed else -1, len(rest)
        while high - low > 1:
            at = max((low + high) // 2, high - stride)
            if passes((*rest[:at], *needed)):
                high, stride = at, 2 * stride
                yield (*rest[:high], *needed)
            else:
                low = at
        if high == 0:
            break
        stride = len(rest) - high + 1
        rest, needed = rest[: high - 1], (rest[high - 1], *needed)
        yield (*rest, *needed)
    # An early member may only have been needed beside members that were left out since.
    smaller: tuple[T, ...] | None = needed
    while smaller is not None:
        needed = smaller
        yield needed
        without = [needed[:i] + needed[i + 1 :] for i in range(len(needed))] if needed[1:] else []
        smaller = next((kept for kept in without if passes(kept)), None)
