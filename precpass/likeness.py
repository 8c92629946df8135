"""Equations that are decided alike: what layers repeat is judged once."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from typing import Any

from precpass import jaxpr as ir
from precpass.facts import ANY, Facts
from precpass.opkinds import OpKind, op
from precpass.precision import Precision
from precpass.readers import Readers
from precpass.rules import innermost_keep, is_fixed

__all__ = ["distinguished", "likeness"]

Stored = Mapping[Any, Precision | None]

_KINDS = frozenset((OpKind.ELEMENTWISE, OpKind.DATA_MOVEMENT, OpKind.REDUCTION))


@functools.lru_cache(maxsize=65536)
def distinguished(scope: str) -> tuple[Precision | None, bool]:
    """What the planner itself tells of a scope; what rules can is more."""
    return innermost_keep(scope), is_fixed(scope)


def likeness(
    eqn: Any,
    scope: str,
    facts: Facts,
    readers: Readers,
    stored: Stored,
    *,
    adds: bool,
    decides: bool,
) -> Hashable | None:
    """All that an equation's decision hangs on, under presets alone; None where it is its own.

    Args:
        eqn: the equation, of the facts' body.
        scope: its whole name scope.
        facts: of the body around it.
        readers: of what that makes.
        stored: variable -> the format it is held in, where that is not its own.
        adds: whether a loop accumulates through it.
        decides: whether it computes a loop's predicate.
    """
    name = eqn.primitive.name
    if not _repeats(name) or eqn.effects:
        return None
    if facts.unchecked or ir.applies_function(eqn) or ir.user_order(eqn):
        return None
    if not readers.cast(facts.body).isdisjoint(eqn.outvars):
        return None
    atoms = (*eqn.invars, *eqn.outvars)
    dtypes = tuple([getattr(v.aval, "dtype", None) for v in atoms])
    # hashing nothing is quicker than hashing that nothing is known
    known = tuple([None if (fact := facts.of(v)) is ANY else fact for v in atoms])
    held = [None if ir.is_literal(v) else stored.get(v) for v in eqn.invars] if stored else []
    around = (distinguished(scope), adds, decides, facts.sampler)
    return (name, len(eqn.invars), around, dtypes, known, tuple(held))


@functools.cache
def _repeats(name: str) -> bool:
    # the decision on a cast depends on what is around it, and so does that on what it reads
    return op(name).kind in _KINDS and name != "convert_element_type"
