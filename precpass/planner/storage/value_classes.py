"""Classes of values that must be stored alike.

A value has two names where it crosses the border of a body, and where an equation only moves it.
What a loop carries, stacks or reads slices of, what a branch or a call gets and returns, and what
of it is only moved, is stored in one format. A class is such a set of values, with everything
that its storage costs depend on: where it is defined, stacked and saved, and who reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.equations import chosen_operand, moved_operand
from precpass.analysis.graph import Graph
from precpass.analysis.sizes import NOMINAL_SIZE, nbytes
from precpass.policy.precision import Precision
from precpass.policy.primitives import op
from precpass.policy.scopes import is_backward

__all__ = ["Place", "StorageClass", "StorageClasses"]

Key = tuple[int, Any]
"""A variable, and before it the index of its body."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where values of a class are held as they are in memory: a loop's stack or carry.

    Attributes:
        nbytes: of all values that are held there in one run, at their own width.
        times: how many values that are.
        kind: "stacked" and "sliced" by a loop, its "carry", or "kept" by the forward pass for
            the backward pass.
    """

    nbytes: float
    times: float
    kind: str


@dataclasses.dataclass
class StorageClass:
    """Values that are stored alike.

    Attributes:
        defined: the rows that make one of them, and which of their results it is.
        given: of those that no row makes, the bytes in one run: arguments, constants, literals.
        low: body -> the rows there that read one on 16 bits.
        read: body -> the bytes of what is read there on 16 bits, as it is.
        wide: body -> the rows there that read one as it is.
        places: where they are held.
        crossed: the rows of the equations whose borders they cross.
        is_input: whether an argument of the program is one of them, or of a call whose border
            is as it is.
        is_output: whether a result is one of them.
    """

    defined: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    given: float = 0.0
    low: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    read: dict[int, float] = dataclasses.field(default_factory=dict)
    wide: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    places: list[Place] = dataclasses.field(default_factory=list)
    crossed: set[int] = dataclasses.field(default_factory=set)
    is_input: bool = False
    is_output: bool = False


class StorageClasses:
    """The classes of a graph's values that cross a border or are kept for a backward pass.

    Args:
        graph: the program.
        crosses: whether values may cross the borders of a row's bodies on 16 bits.
        reads_low: the rows that read their first two operands on 16 bits.
    """

    def __init__(
        self, graph: Graph, crosses: Callable[[int], bool], reads_low: Collection[int]
    ) -> None:
        self.graph = graph
        self.reads_low = reads_low
        self._parents: dict[Key, Key] = {}
        self._crossed = {row for row in graph.children if crosses(row)}
        for row in sorted(self._crossed):
            self._link(row)
        kept = set[Key]()
        for body in range(len(graph.bodies)):
            kept |= self._kept(body)
        self._moved: dict[int, Any] = {}
        for body in range(len(graph.bodies)):
            moved = self._movements(body)
            self._moved |= moved
            self._follow(body, moved)
            self._choose(body, moved)
        self.found: dict[Key, StorageClass] = {}
        self._of: list[dict[Any, StorageClass]] = [{} for _ in graph.bodies]
        for body, atom in self._parents:
            root = self._root((body, atom))
            self._of[body][atom] = self.found.setdefault(root, StorageClass())
        for body in range(len(graph.bodies)):
            if self._of[body]:
                self._collect(body, kept)
        self._close()

    def of(self, body: int, atom: ir.Atom) -> StorageClass | None:
        """The class of a value."""
        return None if ir.is_literal(atom) else self._of[body].get(atom)

    # ------------------------------------------------------------ which values are alike

    def _root(self, key: Key) -> Key:
        parent = self._parents[key]
        while parent != key:
            above = self._parents[parent]
            self._parents[key] = above
            key, parent = parent, above
        return key

    def _join(self, a: Key, b: Key) -> None:
        for key in (a, b):
            self._parents.setdefault(key, key)
        self._parents[self._root(a)] = self._root(b)

    def _link(self, row: int) -> None:
        """Joins what is one value on the two sides of a border, or of two trips."""
        eqn, around = self.graph.eqns[row], int(self.graph.body[row])
        for body, child in self.graph.children[row]:
            opened = ir.open_jaxpr(body.jaxpr)
            pairs = [
                (eqn.invars[at], v) for v, at in zip(opened.invars, body.operands, strict=True)
            ]
            pairs += [(eqn.outvars[at], v) for v, at in _leaving(body, opened)]
            for outside, inside in pairs:
                self._join_atoms((around, outside), (child, inside))
            # of branches that are handed a literal nothing outside is in common
            first, at_first = self.graph.children[row][0]
            own = dict(zip(body.operands, opened.invars, strict=True))
            for at, v in zip(first.operands, ir.open_jaxpr(first.jaxpr).invars, strict=True):
                if at in own:
                    self._join_atoms((child, own[at]), (at_first, v))
            for invar, outvar in body.carry:
                self._join_atoms((child, opened.outvars[outvar]), (child, opened.invars[invar]))

    def _join_atoms(self, a: Key, b: Key) -> None:
        keys = [key for key in (a, b) if not ir.is_literal(key[1]) and _is_wide(key[1])]
        if keys:
            self._join(keys[0], keys[-1])

    def _kept(self, body: int) -> set[Key]:
        """The values that the forward pass makes in a body and the backward pass reads there."""
        node = self.graph.bodies[body]
        made, read, is_literal = set[Any](), set[Any](), ir.is_literal
        backward: dict[int, bool] = {}
        # no call for each value: every equation of every gradient is looked at, here and below
        for eqn in self.graph.eqns[node.start : node.stop]:
            stack = id(eqn.source_info.name_stack)
            if stack not in backward:
                backward[stack] = self.is_backward(body, eqn)
            if backward[stack]:
                read.update([v for v in eqn.invars if not is_literal(v)])
            else:
                made.update(eqn.outvars)
        kept = {(body, v) for v in made & read if _is_wide(v)}
        for key in kept:
            self._join(key, key)
        return kept

    def is_backward(self, body: int, eqn: ir.Eqn) -> bool:
        """Whether an equation of a body belongs to a backward pass."""
        return is_backward(self.graph.scope_in(body, eqn))

    def _movements(self, body: int) -> dict[int, Any]:
        """The rows of a body that only move a value, and the value."""
        node, eqns = self.graph.bodies[body], self.graph.eqns
        each = ((row, moved_operand(eqns[row])) for row in range(node.start, node.stop))
        return {row: moved for row, moved in each if moved is not None}

    def _follow(self, body: int, moved: dict[int, Any]) -> None:
        """Joins a value and what it is where it was moved to."""
        for row, atom in moved.items():
            if (body, atom) in self._parents:
                for v in self.graph.eqns[row].outvars:
                    self._join((body, atom), (body, v))

    def _choose(self, body: int, moved: dict[int, Any]) -> None:
        """Joins a value and the part of it that is chosen at run time.

        Not a part that is of a class itself: what the forward pass keeps of it is rounded where
        it is chosen, however often.
        """
        node = self.graph.bodies[body]
        rows = range(node.start, node.stop)
        eqns = self.graph.eqns
        choose = [row for row in rows if op(eqns[row].primitive.name).takes_a_part]
        wholes = {row: chosen_operand(eqns[row]) for row in choose}
        wholes = {row: v for row, v in wholes.items() if (body, v) in self._parents}
        if not wholes:
            return
        taken = set[Any]()
        for row, atom in reversed(moved.items()):
            if any((body, v) in self._parents or v in taken for v in eqns[row].outvars):
                taken.add(atom)
        for row, whole in wholes.items():
            (part,) = eqns[row].outvars
            if (body, part) not in self._parents and part not in taken:
                self._moved[row] = whole
                self._join((body, whole), (body, part))
        self._follow(body, moved)

    # ------------------------------------------------------------ what is known of each

    def _classes(self, body: int, atoms: Sequence[ir.Atom]) -> list[tuple[int, StorageClass]]:
        own = self._of[body]
        return [(i, own[v]) for i, v in enumerate(atoms) if not ir.is_literal(v) and v in own]

    def _collect(self, body: int, kept: set[Key]) -> None:
        graph, node, own = self.graph, self.graph.bodies[body], self._of[body]
        opened, is_literal = ir.open_jaxpr(node.jaxpr), ir.is_literal
        if body == 0:
            for i, found in self._classes(0, (*opened.constvars, *opened.invars)):
                found.is_input = True
                found.given += nbytes((*opened.constvars, *opened.invars)[i].aval)
            for _, found in self._classes(0, opened.outvars):
                found.is_output = True
        for row in range(node.start, node.stop):
            eqn = graph.eqns[row]
            if row in self._crossed:
                self._cross(row, body)
                continue
            reads = [
                (i, own[v]) for i, v in enumerate(eqn.invars) if not is_literal(v) and v in own
            ]
            makes = [(k, own[v]) for k, v in enumerate(eqn.outvars) if v in own]
            moved = self._moved.get(row) if reads and makes else None
            if reads and moved is None:
                self._note_readers(row, body, reads)
            for k, found in makes:
                if moved is None or own.get(moved) is not found:
                    found.defined.append((row, k))
                if (body, eqn.outvars[k]) in kept:
                    size = nbytes(eqn.outvars[k].aval) * node.calls
                    found.places.append(Place(size, node.calls, "kept"))

    def _note_readers(self, row: int, body: int, reads: list[tuple[int, StorageClass]]) -> None:
        low, eqn = row in self.reads_low, self.graph.eqns[row]
        for i, found in reads:
            readers = found.low if low and i < 2 else found.wide
            readers.setdefault(body, []).append(row)
            if low and i < 2:
                size = nbytes(eqn.invars[i].aval)
                found.read[body] = max(found.read.get(body, 0.0), size)

    def _close(self) -> None:
        """Marks what crosses a border of a body as it is, whoever else calls that body."""
        for row, children in self.graph.children.items():
            for body, child in children if row not in self._crossed else ():
                opened = ir.open_jaxpr(body.jaxpr)
                for _, found in self._classes(child, opened.invars):
                    found.is_input = True
                for _, found in self._classes(child, opened.outvars):
                    found.is_output = True

    def _cross(self, row: int, body: int) -> None:
        """Notes the crossing of an equation's borders, and what its loop holds in memory."""
        eqn, calls = self.graph.eqns[row], self.graph.bodies[body].calls
        atoms = (*eqn.invars, *eqn.outvars)
        for _, found in self._classes(body, atoms):
            found.crossed.add(row)
        for inner, child in self.graph.children[row]:
            opened = ir.open_jaxpr(inner.jaxpr)
            for i, found in self._classes(child, opened.invars):
                if ir.is_literal(eqn.invars[inner.operands[i]]):
                    found.given += nbytes(opened.invars[i].aval) * calls
            for invar, _ in inner.carry:
                for _, found in self._classes(child, [opened.invars[invar]]):
                    trips = self.graph.bodies[child].calls
                    size = nbytes(opened.invars[invar].aval) * trips
                    found.places.append(Place(size, trips, "carry"))
        if (rows := ir.loop_rows(eqn)) is not None:
            first_in, first_out = rows
            for i, found in self._classes(body, eqn.invars):
                if i >= first_in:
                    found.places.append(_rows(eqn.invars[i], calls, "sliced"))
            for k, found in self._classes(body, eqn.outvars):
                if k >= first_out:
                    found.places.append(_rows(eqn.outvars[k], calls, "stacked"))


def _rows(atom: ir.Atom, calls: float, kind: str) -> Place:
    """The values that a loop stacks, or reads slices of."""
    length, *_ = atom.aval.shape
    times = length if isinstance(length, int) else NOMINAL_SIZE
    return Place(nbytes(atom.aval) * calls, times * calls, kind)


def _leaving(body: ir.Body, opened: ir.Jaxpr) -> Iterator[tuple[Any, int]]:
    return zip(opened.outvars, body.results, strict=False)


def _is_wide(atom: ir.Atom) -> bool:
    return ir.precision_of(atom.aval) is Precision.F32
