"""A unified diff, in linear time, of two texts most of whose lines are unique."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

__all__ = ["unified"]

_CONTEXT = 3

_Run = tuple[int, int, int, int]
"""(i1, i2, j1, j2): the lines `a[i1:i2]` are replaced by `b[j1:j2]`."""


def unified(a: Sequence[str], b: Sequence[str], heads: tuple[str, str]) -> Iterator[str]:
    """The lines of a unified diff, as `git diff` writes them; none for equal texts.

    Equal lines that each text has once are matched (Cohen's patience diff). An equation
    of a printed jaxpr is unique by the name of its result. `difflib` takes time quadratic
    in the lines that only one text has.

    Args:
        a: the lines of the first text.
        b: those of the second one.
        heads: the names of the texts.
    """
    runs = list(_runs(a, b))
    if not runs:
        return
    yield f"--- {heads[0]}"
    yield f"+++ {heads[1]}"
    for hunk in _hunks(runs):
        yield from _lines(a, b, hunk)


def _runs(a: Sequence[str], b: Sequence[str]) -> Iterator[_Run]:
    """The runs in which the texts differ, in order."""
    at = {line: j for j, line in enumerate(b)}
    once = [{line for line, n in Counter(text).items() if n == 1} for text in (a, b)]
    i = j = 0
    for here, line in enumerate(a):
        there = at.get(line, -1)
        if there < j or line not in once[0] or line not in once[1]:
            continue
        yield from _trimmed(a, b, (i, here, j, there))
        i, j = here + 1, there + 1
    yield from _trimmed(a, b, (i, len(a), j, len(b)))


def _trimmed(a: Sequence[str], b: Sequence[str], run: _Run) -> Iterator[_Run]:
    """A run without the equal lines at its ends."""
    i1, i2, j1, j2 = run
    while i1 < i2 and j1 < j2 and a[i1] == b[j1]:
        i1, j1 = i1 + 1, j1 + 1
    while i1 < i2 and j1 < j2 and a[i2 - 1] == b[j2 - 1]:
        i2, j2 = i2 - 1, j2 - 1
    if i1 < i2 or j1 < j2:
        yield i1, i2, j1, j2


def _hunks(runs: Sequence[_Run]) -> Iterator[list[_Run]]:
    """Groups of runs whose lines of context meet or overlap."""
    hunk = [runs[0]]
    for run in runs[1:]:
        if run[0] - hunk[-1][1] <= 2 * _CONTEXT:
            hunk.append(run)
        else:
            yield hunk
            hunk = [run]
    yield hunk


def _lines(a: Sequence[str], b: Sequence[str], hunk: Sequence[_Run]) -> Iterator[str]:
    before = min(_CONTEXT, hunk[0][0], hunk[0][2])
    after = min(_CONTEXT, len(a) - hunk[-1][1])
    i, j = hunk[0][0] - before, hunk[0][2] - before
    old, new = hunk[-1][1] + after - i, hunk[-1][3] + after - j
    yield f"@@ -{_range(i, old)} +{_range(j, new)} @@"
    for i1, i2, j1, j2 in hunk:
        yield from (f" {line}" for line in a[i:i1])
        yield from (f"-{line}" for line in a[i1:i2])
        yield from (f"+{line}" for line in b[j1:j2])
        i = i2
    yield from (f" {line}" for line in a[i : i + after])


def _range(start: int, length: int) -> str:
    # an empty range names the line before it
    return f"{start + 1 if length else start},{length}"
