"""Where pieces of a loop's state are replaced, as the rows of a cache are by new ones.

The state and what it becomes have the same class already (`value_classes`), because a loop carries
them, or reads slices of one and stacks slices of the other. If the old state is rounded, rounding
the new pieces rounds the new state, so an equation that replaces pieces reads nothing in float32.
Where one trip replaces several pieces in turn, the values in between have no class yet.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.equations import pieces

__all__ = ["replacements"]


def replacements(
    eqns: Sequence[ir.Eqn],
    rows: range,
    moved: Mapping[int, ir.Atom],
    class_of: Callable[[ir.Atom], Any],
) -> list[tuple[int, Any]]:
    """The equations of a body that replace pieces of a state, each with the state's class.

    Args:
        eqns: of the program.
        rows: those of the body.
        moved: the rows that only move a value, each with the value.
        class_of: gives the class of a value of the body; None if it has none.
    """
    put_together = {row: of for row in rows if (of := pieces(eqns[row]))}
    if not put_together:
        return []
    steps = {row: put_together.get(row) or [moved[row]] for row in sorted({*put_together, *moved})}
    # For each value, the classes of the values that it is made of, and of those made of it.
    inside, around = collections.defaultdict[Any, set[Any]](set), dict[Any, set[Any]]()
    for row, operands in steps.items():
        for result in eqns[row].outvars:
            inside[result].update(*({class_of(v)} | inside[v] for v in _variables(operands)))
    for row, operands in reversed(steps.items()):
        for result in eqns[row].outvars:
            after = {class_of(result)} | around.get(result, set())
            for v in _variables(operands):
                around[v] = around.get(v, set()) | after
    found: list[tuple[int, Any]] = []
    for row in put_together:
        (result,) = eqns[row].outvars
        after = {class_of(result)} | around.get(result, set())
        found += [(row, of) for of in inside[result] & after if of is not None]
    return found


def _variables(operands: Sequence[ir.Atom]) -> list[Any]:
    return [v for v in operands if not ir.is_literal(v)]
