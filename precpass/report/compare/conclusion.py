"""What a comparison comes to, in one sentence: which program to use, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["conclusion"]

_FASTER = 0.95
"""A ratio from here on is not a gain: times of one program differ by as much."""
_SMALLER = 0.9
_MUCH, _OWN = 3, 1e-2
"""An error is much larger from this ratio on, and the first program's own error is small."""
_LARGE, _WRONG = 0.1, 0.5
"""Relative errors from which on a result has one correct digit, and none."""


def conclusion(rows: Sequence[Any], without_bfloat16: bool) -> str:
    """Which of a comparison's programs to use, and why; "" if there is nothing to choose.

    Args:
        rows: the `Row`s of the programs; the others are compared with the first.
        without_bfloat16: whether they ran on a processor without bfloat16 instructions.
    """
    first, *others = rows
    broken = [row for row in others if row.errors and row.errors.nonfinite]
    finite = [row for row in others if row not in broken]
    is_right = (first.error or 0.0) < _OWN
    wrong = [row for row in finite if is_right and (row.error or 0.0) >= _WRONG]
    said = _said_of(first, broken, wrong) + _of_integers(finite)
    if not is_right and (first.error or 0.0) >= _WRONG:
        said += f" {first.name} has no correct digit: use `keep('f64')`."
    usable = [row for row in finite if row not in wrong and not row.refused]
    return ((_of_usable(first, usable, without_bfloat16) if usable else "") + said).strip()


def _of_usable(first: Any, usable: Sequence[Any], without_bfloat16: bool) -> str:
    """Which of the programs with usable results to take."""
    timed = [row for row in usable if row.ratio is not None]
    if not timed:
        return _untimed(first, usable)
    best = min(timed, key=lambda row: row.ratio)
    if best.ratio >= _FASTER and without_bfloat16:
        return _not_faster(first, best, timed, without_bfloat16)
    takes = f"takes {best.ratio:.2f} of the time of {first.name}"
    low, high = best.timing.ratios(first.timing).quartiles
    if low <= 1 <= high:
        return (
            f"It is not certain which is faster: {best.name} {takes}, with quartiles of {low:.2f} "
            f"and {high:.2f}. Use more rounds, such as rounds=50.{_holds(first, best)}{_AUDIT}"
        )
    if best.ratio >= _FASTER:
        return _not_faster(first, best, timed, without_bfloat16)
    return f"Use {best.name}: it {takes}{_memory(first, best)}{_error(first, best)}."


def _not_faster(first: Any, best: Any, timed: Sequence[Any], without_bfloat16: bool) -> str:
    """What holds where no program is faster than the first."""
    low = [row for row in timed if row.counts.low > first.counts.low]
    if low and without_bfloat16:
        return (
            f"{low[0].name} is not faster here, because this CPU has no bfloat16 instructions: "
            '`compare(..., target="h100")` shows what a GPU makes of it.' + _holds(first, low[0])
        )
    held = _holds(first, best) + (_AUDIT if low else "")
    return f"Use {first.name}: no other program is faster here.{held}"


_AUDIT = " `audit` shows what XLA runs in another precision than planned."


def _said_of(first: Any, broken: Sequence[Any], wrong: Sequence[Any]) -> str:
    """Why programs are not to be used, each sentence after a space."""
    said = ""
    if broken:
        said += f" {', '.join(row.name for row in broken)} has values that are not finite."
    if wrong:
        said += (
            f" {', '.join(row.name for row in wrong)} has no correct digit{_error(first, wrong[0])}"
            ": `bisect` names the lines that must stay in float32."
        )
    return said


def _of_integers(rows: Sequence[Any]) -> str:
    """How many integers of results differ from the reference."""
    counted = [(row.errors.differing, row.name) for row in rows if row.errors]
    differing, name = max(counted, default=(0, ""))
    return f" {differing} integers in the results of {name} are other ones." if differing else ""


def _untimed(first: Any, usable: Sequence[Any]) -> str:
    """What holds without times: an estimate, memory, and the error."""
    for by, cost in _ESTIMATES.items():
        own, costs = cost(first), [(cost(row), row) for row in usable]
        if not own or not all(c for c, _ in costs):
            continue
        least, best = min(costs, key=lambda pair: pair[0])
        takes = f"{least / own:.2f} of the time of {first.name}"
        if least < _FASTER * own:
            gains = f"takes {takes}{_memory(first, best)}{_error(first, best)}"
            return f"Use {best.name}: by {by} it {gains}. Nothing was timed."
        return f"No gain is expected: by {by}, {best.name} takes {takes}.{_holds(first, best)}"
    best = max(usable, key=lambda row: row.counts.low_flops)
    return f"Nothing was timed.{_holds(first, best)}"


def _cycles(row: Any) -> float:
    traffic = row.traffic
    return 0 if traffic is None or traffic.without_cycles else traffic.cycles or 0


_ESTIMATES: dict[str, Callable[[Any], float]] = {
    "the compiler's estimate": _cycles,
    "the device's published peaks": lambda row: row.roofline or 0,
}
"""The costs of a program that was not timed, the more reliable first; 0 where there is none."""


def _holds(first: Any, row: Any) -> str:
    """What holds on any device."""
    if row.counts.low <= first.counts.low:
        return ""
    share = f"{row.name} runs {row.counts.low_flops:.0%} of its FLOPs in low precision"
    memory = _memory(first, row, verb="takes ", whose=f"{first.name}'s")
    return f" {share}{memory}{_error(first, row)}."


def _memory(first: Any, row: Any, verb: str = "", whose: str = "its") -> str:
    if row.memory is None or first.memory is None or not first.memory.temp:
        return ""
    ratio = row.memory.temp / first.memory.temp
    return f" and {verb}{ratio:.2f} of {whose} temporary memory" if ratio < _SMALLER else ""


def _error(first: Any, row: Any) -> str:
    """The error of all results, and of the worst one if that is much larger.

    The error of a large result hides those of small ones, such as gradients beside parameters. A
    result that the first program does not compute either, such as a sum that is zero, does not
    count.
    """
    error = row.error
    if error is None:
        return ""
    text = f", with a relative error of {error:.0e}"
    own = {path: errors.relative or 0.0 for path, errors in first.leaves}
    each = [(x.relative, path) for path, x in row.leaves if x.relative]
    worst, path = max((x for x in each if own.get(x[1], 0.0) < _WRONG), default=(0.0, ""))
    if worst <= _MUCH * max(error, own.get(path, 0.0)):
        return text
    find = ", for which `bisect` names the lines" if worst >= _LARGE else ""
    return f"{text}, and of {worst:.0e} in {path}{find}"
