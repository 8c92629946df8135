"""Equations that are decided alike: what layers repeat is judged once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from precpass import jaxpr as ir
from precpass.facts import Facts
from precpass.opkinds import OpKind, op
from precpass.precision import Precision
from precpass.readers import Readers
from precpass.rules import innermost_keep, is_fixed

__all__ = ["Likeness", "distinguished"]

Stored = Mapping[Any, Precision | None]

_KINDS = frozenset((OpKind.ELEMENTWISE, OpKind.DATA_MOVEMENT, OpKind.REDUCTION))


@functools.lru_cache(maxsize=65536)
def distinguished(scope: str) -> tuple[Precision | None, bool]:
    """What the planner itself tells of a scope; what rules can is more."""
    return innermost_keep(scope), is_fixed(scope)


class Likeness:
    """Tells equations of one body that are decided alike from others, under presets alone.

    Args:
        facts: of the body at one class of call sites.
        readers: of what it makes.
        scope_of: the whole name scope of one of its equations.
        decides: whether it computes a loop's predicate.
    """

    def __init__(
        self, facts: Facts, readers: Readers, scope_of: Callable[[Any], str], *, decides: bool
    ) -> None:
        self._facts = facts
        self._cast = readers.cast(facts.body)
        self._scope_of = scope_of
        self._here = (decides, facts.sampler)
        self._around: dict[int, Hashable] = {}

    def of(self, eqn: Any, stored: Stored, *, adds: bool) -> Hashable | None:
        """All that an equation's decision hangs on; None where it is its own.

        Args:
            eqn: the equation.
            stored: variable -> the format it is held in, where that is not its own.
            adds: whether a loop accumulates through it.
        """
        name, invars = eqn.primitive.name, eqn.invars
        if not _repeats(name) or eqn.effects or self._facts.unchecked:
            return None
        if ir.applies_function(eqn) or ir.user_order(eqn):
            return None
        if self._cast and not self._cast.isdisjoint(eqn.outvars):
            return None
        # no call of Python's for each value: every equation comes here
        fact_of, get, is_literal = self._facts.of, self._facts.values.get, ir.is_literal
        atoms = (*invars, *eqn.outvars)
        try:
            dtypes = tuple([v.aval.dtype for v in atoms])
        except AttributeError:  # a token
            return None
        known = tuple([fact_of(v) if is_literal(v) else get(v) for v in atoms])
        held = tuple([None if is_literal(v) else stored.get(v) for v in invars]) if stored else ()
        return name, len(invars), adds, self._told(eqn), dtypes, known, held

    def _told(self, eqn: Any) -> Hashable:
        # a name stack is one object for all that was bound below it
        key = id(eqn.source_info.name_stack)
        if key not in self._around:
            self._around[key] = (distinguished(self._scope_of(eqn)), *self._here)
        return self._around[key]


@functools.cache
def _repeats(name: str) -> bool:
    # the decision on a cast depends on what is around it, and so does that on what it reads
    return op(name).kind in _KINDS and name != "convert_element_type"
