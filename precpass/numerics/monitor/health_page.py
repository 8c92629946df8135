"""A program's health as HTML: what goes wrong first, and the extremes of every equation."""

from __future__ import annotations

from collections.abc import Sequence

from precpass.numerics.monitor.seen import Seen
from precpass.policy.scopes import clean_scope
from precpass.units import counted
from precpass.view.sheet import Cell, Entry, bar, facts, sheet
from precpass.view.text import Line, heading, page, spans

__all__ = ["health_page"]

_BORN, _PASSED, _LOST, _FINE = "NaN or inf born", "passed on", "lost to zero", "fine"
_NEVER = "not reached"
_STYLES = {_BORN: "bad", _PASSED: "wide", _LOST: "cast", _FINE: "low", _NEVER: "none"}


def health_page(name: str, calls: str, seen: Sequence[Seen]) -> str:
    """A health as HTML: a bar, and its equations, those that make NaNs and infinities first.

    Args:
        name: the function's.
        calls: how many calls were looked at, in words.
        seen: its equations, in the order of the program.
    """
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
    entries = [_entry(i, seen[i], states[i]) for i in order]
    body = bar(counts, f"of {counted(len(seen), 'equation')}") + facts(shown)
    body += sheet(heads, entries, groups=list(_STYLES))
    return page(f'<div class="head">{spans([(name, "")])}</div>{body}')


def _state(seen: Seen) -> str:
    if not seen.runs:
        return _NEVER
    if seen.nans or seen.infinities:
        return _BORN
    return _PASSED if seen.nonfinite else _LOST if seen.lost else _FINE


def _badness(seen: Seen, state: str) -> tuple[int, int]:
    # In the order of the program the first birth is the cause of the others.
    return list(_STYLES).index(state), -seen.lost if state is _LOST else 0


def _entry(at: int, seen: Seen, state: str) -> Entry:
    scope = clean_scope(seen.place.scope)
    inside = [*([scope] if scope else []), *seen.place.inside]
    where = f" in {', '.join(inside)}" if inside else ""
    line = [(seen.place.primitive, "frame"), (f"{where}  ", "reason"), *heading(seen.place.source)]
    counts = seen.nans, seen.infinities, seen.nonfinite, seen.lost
    ends = (seen.largest, bool(seen.largest)), (seen.smallest, 0 < seen.smallest < float("inf"))
    cells = [
        Cell(line, f"{at:06d}"),
        Cell([(state, _STYLES[state] if state is not _NEVER else "reason")], state),
        *(Cell([(str(n or ""), "bad" if n else "")], float(n)) for n in counts),
        *(Cell([(f"{x:.3g}" if known else "", "")], x if known else None) for x, known in ends),
    ]
    return Entry(cells, frozenset([state]))
