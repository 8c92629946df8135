"""What a comparison comes to, in one sentence: which program to use, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["conclusion"]

_FASTER = 0.95
"""A ratio from here on is no gain, because times of one program differ by as much."""
_SMALLER = 0.9
_MUCH, _OWN = 3, 1e-2
"""An error is much larger from this ratio on, and the first program's own error is small."""
_WRONG = 0.5
"""A relative error from here on leaves no correct digit."""


def conclusion(rows: Sequence[Any], without_bfloat16: bool) -> str:
    """Which of a comparison's programs to use, and why; "" if there is nothing to choose.

    Args:
        rows: the `Row`s of the programs; the others are compared with the first.
        without_bfloat16: whether they ran on a processor without bfloat16 instructions.
    """
    first, *others = rows
    broken = [row for row in others if row.errors.nonfinite]
    wrong = [row for row in others if row not in broken and _is_wrong(first, row)]
    usable = [row for row in others if not (row.refused or row in broken or row in wrong)]
    said = _said_of(first, broken, wrong) + _of_integers([r for r in others if r not in broken])
    if not usable:
        return said.strip()
    timed = [row for row in usable if row.ratio is not None]
    if not timed:
        return _untimed(first, usable) + said
    best = min(timed, key=lambda row: row.ratio or 0.0)
    if best.ratio is not None and best.ratio < _FASTER:
        gains = f"takes {best.ratio:.2f} of the time of {first.name}{_memory(first, best)}"
        return f"Use {best.name}: it {gains}{_error(first, best)}.{_overlap(first, best)}" + said
    return _not_faster(first, best, timed, without_bfloat16) + said


def _not_faster(first: Any, best: Any, timed: Sequence[Any], without_bfloat16: bool) -> str:
    """What holds where no program is faster than the first."""
    low = [row for row in timed if row.counts.low > first.counts.low]
    if low and without_bfloat16:
        return (
            f"{low[0].name} is not faster here, because this CPU has no bfloat16 instructions: "
            '`compare(..., target="h100")` shows what a GPU makes of it.' + _holds(first, low[0])
        )
    audit = " `audit` shows what XLA runs in another precision than planned." if low else ""
    return f"Use {first.name}: no other program is faster here.{_holds(first, best)}{audit}"


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
    most = max(rows, key=lambda row: row.errors.differing or 0, default=None)
    if most is None or not most.errors.differing:
        return ""
    return f" {most.errors.differing} integers in the results of {most.name} are other ones."


def _overlap(first: Any, best: Any) -> str:
    """What to do if the times of two programs cannot be told apart."""
    if best.timing.quartiles[1] < first.timing.quartiles[0]:
        return ""
    return " But their times overlap: give more rounds on an idle machine."


def _is_wrong(first: Any, row: Any) -> bool:
    return (first.error or 0.0) < _OWN and (row.error or 0.0) >= _WRONG


def _untimed(first: Any, usable: Sequence[Any]) -> str:
    """What holds without times: how much runs in low precision, memory, and the error."""
    best = max(usable, key=lambda row: row.counts.low_flops)
    return f"Nothing was timed.{_holds(first, best)}"


def _holds(first: Any, row: Any) -> str:
    """What holds on any device."""
    if row.counts.low <= first.counts.low:
        return ""
    share = f"{row.name} runs {row.counts.low_flops:.0%} of its FLOPs in low precision"
    return f" {share}{_memory(first, row)}{_error(first, row)}."


def _memory(first: Any, row: Any) -> str:
    if row.memory is None or first.memory is None or not first.memory.temp:
        return ""
    ratio = row.memory.temp / first.memory.temp
    return f" and {ratio:.2f} of its temporary memory" if ratio < _SMALLER else ""


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
    worst, path = max(
        ((x.relative, path) for path, x in row.leaves if x.relative and own.get(path, 0.0) < _OWN),
        default=(0.0, ""),
    )
    return f"{text}, and of {worst:.0e} in {path}" if worst > _MUCH * error else text
