"""Which values may be held in a low format: those of whose readers none tells the difference.

What products make, or read low anyway, has lost its digits already. A position, a time and a state
that small steps add up to have not, and nobody would write them in 16 bits by hand.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from precpass import jaxpr as ir
from precpass.classes import Classes, ValueClass
from precpass.fact import Fact
from precpass.facts import Facts, guard
from precpass.graph import Graph, nbytes
from precpass.opkinds import OpKind, op
from precpass.precision import Precision
from precpass.readers import Readers

__all__ = ["Roundable"]

_LINE = 64
"""The bytes of a cache line."""

_SUMS = frozenset(("add", "sub", "add_any"))
_SCALES = frozenset(("mul", "div", "neg", "copy", "select_n", "convert_element_type"))
_COMPARES = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "le_to", "lt_to"))
_PICKS = frozenset(("argmax", "argmin", "sort", "top_k", "approx_top_k"))


class Roundable:
    """Judges the classes of a program's values.

    Args:
        graph: the program.
        classes: of its values.
        low: the format in question.
        facts: body -> its facts at each class of call sites.
        deciding: the bodies that compute the predicates of loops.
        permits: whether the policy lets what a row makes be low.
        readers: of the graph's values.
    """

    def __init__(
        self,
        graph: Graph,
        classes: Classes,
        low: Precision,
        facts: Mapping[int, Sequence[Facts]],
        deciding: set[int],
        permits: Callable[[int], bool],
        readers: Readers,
    ) -> None:
        self.graph = graph
        self.classes = classes
        self.low = low
        self.facts = facts
        self.deciding = deciding
        self.permits = permits
        self.readers = readers

    def may(self, found: ValueClass) -> bool:
        """Whether what reads a class may read what the low format leaves of it."""
        if found.is_input or found.is_output or not found.places or self._is_small(found):
            return False
        if found.wide and any(p.kind == "carry" for p in found.places):
            return False  # a state would be rounded anew in every trip
        kept = {p.kind for p in found.places} == {"kept"}
        if not (found.low or self._is_product(found)) and (kept or self._is_users(found)):
            return False  # XLA may compute again where it is read what is only kept
        if found.wide and not self._follows_products(found):
            return False
        is_read_low = bool(found.low) and not found.wide
        if self._is_sum(found) and self._is_added_to(found):
            return False
        return all(self._may_define(at, is_read_low) for at in found.defined) and all(
            body not in self.deciding and all(map(self._may_read, rows))
            for body, rows in (*found.wide.items(), *found.low.items())
        )

    # ------------------------------------------------------------ what it is

    def _is_small(self, found: ValueClass) -> bool:
        """Whether memory moves as much for a value in any format."""
        made = (nbytes(self.graph.eqns[row].outvars[k].aval) for row, k in found.defined)
        return max(made, default=0.0) < _LINE

    def _in_sampler(self, row: int) -> bool:
        return any(facts.sampler for facts in self.facts.get(int(self.graph.body[row]), ()))

    def _is_product(self, found: ValueClass) -> bool:
        eqns = [self.graph.eqns[row] for row, _ in found.defined]
        kinds = {op(eqn.primitive.name).kind for eqn in eqns if not ir.keeps_bits(eqn)}
        return kinds <= {OpKind.COMPUTE}

    def _is_users(self, found: ValueClass) -> bool:
        """Whether the user's program stacks it, and no derivative of it keeps it."""
        read = [(body, row) for body, rows in found.wide.items() for row in rows]
        return bool(read) and not any(self._is_backward(*at) for at in read)

    def _follows_products(self, found: ValueClass) -> bool:
        """Whether it has lost its digits already, as no position or time has."""
        outvars = (self.graph.eqns[row].outvars[k] for row, k in found.defined)
        return all(v in self._following for v in outvars)

    @functools.cached_property
    def _following(self) -> set[Any]:
        """What is computed of the result of a low product, however far behind it."""
        eqns = self.graph.eqns
        across = collections.defaultdict[Any, list[Sequence[Any]]](list)
        for row in self.graph.children:
            for before, behind in self._steps(row):
                if not ir.is_literal(before):
                    across[before].append(behind)
        entered = {id(eqns[row]) for row in self.graph.children}
        # a body of which JAX has left out what nobody reads has the variables of the whole one
        readers = collections.defaultdict[Any, list[Any]](list)
        for body in range(len(self.graph.bodies)):
            for v, of_body in self.readers.of(body).items():
                readers[v] += of_body
        # no call for each equation: every gradient is walked
        found, todo = set[Any](), [v for row in self.classes.reads_low for v in eqns[row].outvars]
        while todo:
            v = todo.pop()
            if v in found:
                continue
            found.add(v)
            for reader in readers.get(v, ()):
                if reader is not None and id(reader) not in entered:
                    todo += reader.outvars
            for behind in across.get(v, ()):
                todo += behind
        return found

    def _steps(self, row: int) -> Iterator[tuple[Any, Sequence[Any]]]:
        """Each value on one side of an equation's borders, and what it is on the other."""
        eqn = self.graph.eqns[row]
        for body, _ in self.graph.children[row]:
            opened = ir.open_jaxpr(body.jaxpr)
            yield from (
                (eqn.invars[i], [v]) for i, v in zip(body.operands, opened.invars, strict=True)
            )
            yield from (
                (v, [eqn.outvars[i]]) for v, i in zip(opened.outvars, body.results, strict=False)
            )
            yield from ((opened.outvars[o], [opened.invars[i]]) for i, o in body.carry)

    def _is_sum(self, found: ValueClass) -> bool:
        """Whether it is the sum of whole arrays, and not of one and a bias."""
        return any(self._adds_arrays(row) for row, _ in found.defined)

    def _adds_arrays(self, row: int) -> bool:
        eqn = self.graph.eqns[row]
        if eqn.primitive.name not in _SUMS:
            return False
        return not any(
            ir.is_literal(v) or v in self._spread or v.aval.shape != eqn.outvars[0].aval.shape
            for v in eqn.invars
        )

    @functools.cached_property
    def _spread(self) -> set[Any]:
        """What is repeated to the shape that it has."""
        named = (eqn for eqn in self.graph.eqns if eqn.primitive.name == "broadcast_in_dim")
        return {eqn.outvars[0] for eqn in named}

    def _is_added_to(self, found: ValueClass) -> bool:
        """Whether the forward pass adds to it, so that a small step would be lost."""
        return any(
            self._adds(body, self.graph.eqns[row])
            for body, rows in found.wide.items()
            for row in rows
            if not self._is_backward(body, row)
        )

    def _adds(self, body: int, reader: Any) -> bool:
        todo, seen = [reader], set[int]()
        while todo:
            eqn = todo.pop()
            if id(eqn) in seen or self.classes.is_backward(body, eqn):
                continue
            seen.add(id(eqn))
            if eqn.primitive.name in _SUMS:
                return True
            if eqn.primitive.name in _SCALES:
                readers = self.readers.of(body).get(eqn.outvars[0], ())
                todo += [reader for reader in readers if reader is not None]
        return False

    def _is_backward(self, body: int, row: int) -> bool:
        return self.classes.is_backward(body, self.graph.eqns[row])

    # ------------------------------------------------------------ who makes and reads it

    def _may_define(self, at: tuple[int, int], is_read_low: bool) -> bool:
        row, k = at
        eqn, body = self.graph.eqns[row], int(self.graph.body[row])
        if row in self.graph.children or self._in_sampler(row) or not self.permits(row):
            return False
        if ir.is_unreduced(eqn.outvars[k].aval):
            return False  # each device would round its term of a sum
        known = [facts.of(eqn.outvars[k]) for facts in self.facts.get(body, ())]
        return not any(
            fact.random
            or guard(_as_a_whole(fact), self.low)
            or not (is_read_low or self._fits(fact))
            for fact in known
        )

    def _fits(self, fact: Fact) -> bool:
        """Whether the low format has the range for it: float16 has not for all that float32 has."""
        if self.low.smallest_normal <= Precision.F32.smallest_normal:
            return True
        return max(abs(fact.lo), abs(fact.hi)) <= self.low.max

    def _may_read(self, row: int) -> bool:
        eqn = self.graph.eqns[row]
        table, name = op(eqn.primitive.name), eqn.primitive.name
        if row in self.graph.children or table.kind is OpKind.BOUNDARY or self._in_sampler(row):
            return False
        # their error is that of the operand times a large factor, of a difference times any
        if (table.wide or name == "sub") and table.kind is OpKind.ELEMENTWISE:
            return False
        if name == "convert_element_type":
            return ir.precision_of(eqn.outvars[0].aval) is not None
        # the sign survives a rounding; no other comparison does
        compares = name in _COMPARES and not any(map(_is_zero, eqn.invars))
        return not (compares or name in _PICKS)


def _as_a_whole(fact: Fact) -> Fact:
    """A fact in which a multiple of a constant is as large, and as small, as the constant."""
    sizes = [size for size in (fact.tiny, fact.magnitude) if size]
    return fact._replace(tiny=min(sizes, default=0.0), reaches=max(fact.reaches, fact.magnitude))


def _is_zero(atom: Any) -> bool:
    return ir.is_literal(atom) and not atom.val
