"""Classes of values that must be stored alike.

A value has two names where it crosses the border of a body, and where an equation only moves it.
What a loop carries, stacks or reads slices of, what a branch or a call takes and returns, and
every value that is only moved from one of these, is stored in one format. A class is such a set of
values, with everything that the costs of storing it depend on: the equations that define, stack
and save it, and those that read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.equations import (
    chosen_operand,
    is_wide,
    moved_operand,
    repeated_operand,
)
from precpass.analysis.graph import Graph
from precpass.analysis.sizes import NOMINAL_SIZE, nbytes
from precpass.planner.storage.replacements import replacements
from precpass.policy.primitives import op
from precpass.policy.scopes import is_backward

__all__ = ["Buffer", "StorageClass", "StorageClasses"]

Key = tuple[int, Any]
"""A variable, and before it the index of its body."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A buffer in which values of a class are stored in memory: a loop's stack or carry.

    Attributes:
        nbytes: the bytes of all values that are stored there in one run, in float32.
        times: how many values these are.
        kind: "stacked" and "sliced" by a loop, its "carry", "kept" by the forward pass for the
            backward pass, or "materialized" by a fusion, for all equations that read it.
    """

    nbytes: float
    times: float
    kind: str


@dataclasses.dataclass
class StorageClass:
    """Values that are stored alike.

    Attributes:
        defined: the rows that make one of them, and which of their results it is.
        given_bytes: the bytes in one run of those that no row makes: arguments, constants and
            literals.
        low_readers: body -> the rows there that read one of them in 16 bits.
        low_read_bytes: body -> the float32 bytes of the largest of them that is read there in
            16 bits.
        wide_readers: body -> the rows there that read one of them in float32.
        places: the stacks and carries that hold them in memory.
        crossed: the rows of the equations whose borders they cross.
        is_input: whether one of them is an argument of the program, or of a call whose operands
            keep their dtypes.
        is_output: whether one of them is a result of the program or of such a call.
        materialized: the rows whose results a fusion writes (`materialized_by_fusions`).
    """

    defined: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    given_bytes: float = 0.0
    low_readers: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    low_read_bytes: dict[int, float] = dataclasses.field(default_factory=dict)
    wide_readers: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    places: list[Buffer] = dataclasses.field(default_factory=list)
    crossed: set[int] = dataclasses.field(default_factory=set)
    is_input: bool = False
    is_output: bool = False
    materialized: set[int] = dataclasses.field(default_factory=set)


class StorageClasses:
    """The classes of a graph's values that cross a border or are kept for a backward pass.

    Args:
        graph: the program.
        crosses: whether values may cross the borders of a row's bodies on 16 bits.
        reads_low: the rows that read their first two operands on 16 bits.
        materialized: the rows whose results a fusion writes, so that each result becomes a class.
        splits_stacks: whether a loop may stack its state in another format than it keeps it in.

    Attributes:
        put_together: the rows that replace pieces of a loop's state. Their results are of the
            state's class.
        stacked_states: the rows of loops, each with the position of a result that stacks a state as
            each trip begins with it. With `splits_stacks` such a stack is a class of its own, which
            the loop makes: the state may keep digits that no reader of the stack needs.
    """

    def __init__(
        self,
        graph: Graph,
        crosses: Callable[[int], bool],
        reads_low: Collection[int],
        *,
        materialized: Collection[int] = (),
        splits_stacks: bool = False,
    ) -> None:
        self.graph = graph
        self.reads_low = reads_low
        self._parents: dict[Key, Key] = {}
        self._materialized = materialized
        for row in materialized:
            key = int(graph.body[row]), graph.eqns[row].outvars[0]
            self._join(key, key)
        self.crossed = {row for row in graph.children if crosses(row)}
        self.stacked_states = set[tuple[int, int]]()
        for row in self.crossed if splits_stacks else ():
            for k in _stacked_states(graph, row):
                self.stacked_states.add((row, k))
                key = int(graph.body[row]), graph.eqns[row].outvars[k]
                self._join(key, key)
        for row in sorted(self.crossed):
            self._link(row)
        kept = set[Key]().union(*map(self._kept, range(len(graph.bodies))))
        self._moved: dict[int, Any] = {}
        self.put_together, self._states = set[int](), list[Key]()
        for body in range(len(graph.bodies)):
            moved = self._movements(body)
            self._moved |= moved
            self._follow(body, moved)
            self._put_together(body, moved)
            self._choose(body, moved)
        self.by_root: dict[Key, StorageClass] = {}
        self._of: list[dict[Any, StorageClass]] = [{} for _ in graph.bodies]
        for body, atom in self._parents:
            root = self._root((body, atom))
            self._of[body][atom] = self.by_root.setdefault(root, StorageClass())
        for body in range(len(graph.bodies)):
            if self._of[body]:
                self._collect(body, kept)
        self._close()

    def class_of(self, body: int, atom: ir.Atom) -> StorageClass | None:
        """The class of a value."""
        return None if ir.is_literal(atom) else self._of[body].get(atom)

    def only_replaces(self, values: StorageClass) -> bool:
        """Whether loops only replace pieces of a state; an addition would read it in float32."""
        is_replaced = any(row in self.put_together for row, _ in values.defined)
        return is_replaced and not values.wide_readers

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
        """Joins the two names of one value: inside and outside of a border, or in two trips."""
        eqn, around = self.graph.eqns[row], int(self.graph.body[row])
        for body, child in self.graph.children[row]:
            opened = ir.open_jaxpr(body.jaxpr)
            pairs = [
                (eqn.invars[at], v) for v, at in zip(opened.invars, body.operands, strict=True)
            ]
            pairs += [
                (eqn.outvars[at], v)
                for v, at in _leaving(body, opened)
                if (row, at) not in self.stacked_states
            ]
            for outside, inside in pairs:
                self._join_atoms((around, outside), (child, inside))
            # Branches that are passed a literal have no common value outside: join their operands.
            first, at_first = self.graph.children[row][0]
            inside_of = dict(zip(body.operands, opened.invars, strict=True))
            for at, v in zip(first.operands, ir.open_jaxpr(first.jaxpr).invars, strict=True):
                if at in inside_of:
                    self._join_atoms((child, inside_of[at]), (at_first, v))
            for invar, outvar in body.carry:
                self._join_atoms((child, opened.outvars[outvar]), (child, opened.invars[invar]))

    def _join_atoms(self, a: Key, b: Key) -> None:
        keys = [key for key in (a, b) if not ir.is_literal(key[1]) and is_wide(key[1])]
        if keys:
            self._join(keys[0], keys[-1])

    def _kept(self, body: int) -> set[Key]:
        """The values that the forward pass makes in a body and the backward pass reads there."""
        node = self.graph.bodies[body]
        forward, read, is_literal = set[Any](), set[Any](), ir.is_literal
        backward: dict[int, bool] = {}
        # This loop visits every equation of every gradient, so it makes no Python call for each
        # value; nor does `_collect`.
        for eqn in self.graph.eqns[node.start : node.stop]:
            stack = id(eqn.source_info.name_stack)
            if stack not in backward:
                backward[stack] = self.is_backward(body, eqn)
            if backward[stack]:
                read.update([v for v in eqn.invars if not is_literal(v)])
            else:
                forward.update(eqn.outvars)
        kept = {(body, v) for v in forward & read if is_wide(v)}
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
        """Joins each value of a class and the results of the equations that only move it."""
        for row, atom in moved.items():
            if (body, atom) in self._parents:
                for v in self.graph.eqns[row].outvars:
                    self._join((body, atom), (body, v))

    def _put_together(self, body: int, moved: dict[int, Any]) -> None:
        """Joins a state, what it becomes where pieces of it are replaced, and what repeats it."""

        def class_of(v: ir.Atom) -> Key | None:
            return self._root((body, v)) if (body, v) in self._parents else None

        eqns, node = self.graph.eqns, self.graph.bodies[body]
        rows = range(node.start, node.stop)
        for row, root in replacements(eqns, rows, moved, class_of):
            self.put_together.add(row)
            self._join(root, (body, eqns[row].outvars[0]))
            self._states.append(root)
        # An attention with fewer keys than queries repeats its cache for the product.
        states = {self._root(key) for key in self._states}
        for row in rows if states else ():
            source = moved.get(row, repeated_operand(eqns[row]))
            if source is not None and class_of(source) in states:
                self._moved[row] = source
                for v in eqns[row].outvars:
                    self._join((body, v), (body, source))

    def _choose(self, body: int, moved: dict[int, Any]) -> None:
        """Joins a value and the part of it that is chosen at run time.

        A part that has a class already is left alone: the forward pass saves it for the backward
        pass, so it is rounded where it is chosen, however often.
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
        class_of = self._of[body]
        return [
            (i, class_of[v]) for i, v in enumerate(atoms) if not ir.is_literal(v) and v in class_of
        ]

    def _collect(self, body: int, kept: set[Key]) -> None:
        graph, node, class_of = self.graph, self.graph.bodies[body], self._of[body]
        opened, is_literal = ir.open_jaxpr(node.jaxpr), ir.is_literal
        if body == 0:
            for i, values in self._classes(0, (*opened.constvars, *opened.invars)):
                values.is_input = True
                values.given_bytes += nbytes((*opened.constvars, *opened.invars)[i].aval)
            for _, values in self._classes(0, opened.outvars):
                values.is_output = True
        for row in range(node.start, node.stop):
            eqn = graph.eqns[row]
            if row in self.crossed:
                self._cross(row, body)
                continue
            reads = [
                (i, class_of[v])
                for i, v in enumerate(eqn.invars)
                if not is_literal(v) and v in class_of
            ]
            makes = [(k, class_of[v]) for k, v in enumerate(eqn.outvars) if v in class_of]
            moved = self._moved.get(row) if reads and makes else None
            if reads and moved is None:
                self._note_readers(row, body, reads)
            for k, values in makes:
                if moved is None or class_of.get(moved) is not values:
                    values.defined.append((row, k))
                if (body, eqn.outvars[k]) in kept:
                    size = nbytes(eqn.outvars[k].aval) * node.calls
                    values.places.append(Buffer(size, node.calls, "kept"))
            if row in self._materialized:
                values = class_of[eqn.outvars[0]]
                size = nbytes(eqn.outvars[0].aval) * node.calls
                values.places.append(Buffer(size, node.calls, "materialized"))
                values.materialized.add(row)

    def _note_readers(self, row: int, body: int, reads: list[tuple[int, StorageClass]]) -> None:
        low, eqn = row in self.reads_low, self.graph.eqns[row]
        replaced = self.class_of(body, eqn.outvars[0]) if row in self.put_together else None
        for i, values in reads:
            if values is replaced:
                continue
            readers = values.low_readers if low and i < 2 else values.wide_readers
            readers.setdefault(body, []).append(row)
            if low and i < 2:
                size = nbytes(eqn.invars[i].aval)
                values.low_read_bytes[body] = max(values.low_read_bytes.get(body, 0.0), size)

    def _close(self) -> None:
        """Marks the operands and results of bodies whose border keeps its dtypes.

        Another equation may call the same body and let values cross in 16 bits; the body is
        rewritten once, so its border keeps its dtypes for both.
        """
        for row, children in self.graph.children.items():
            for body, child in children if row not in self.crossed else ():
                opened = ir.open_jaxpr(body.jaxpr)
                for _, values in self._classes(child, opened.invars):
                    values.is_input = True
                for _, values in self._classes(child, opened.outvars):
                    values.is_output = True

    def _cross(self, row: int, body: int) -> None:
        """Notes which classes cross an equation's borders, and what its loop stores in memory."""
        eqn, calls = self.graph.eqns[row], self.graph.bodies[body].calls
        atoms = (*eqn.invars, *eqn.outvars)
        for _, values in self._classes(body, atoms):
            values.crossed.add(row)
        for inner, child in self.graph.children[row]:
            opened = ir.open_jaxpr(inner.jaxpr)
            for i, values in self._classes(child, opened.invars):
                if ir.is_literal(eqn.invars[inner.operands[i]]):
                    values.given_bytes += nbytes(opened.invars[i].aval) * calls
            for invar, _ in inner.carry:
                for _, values in self._classes(child, [opened.invars[invar]]):
                    trips = self.graph.bodies[child].calls
                    size = nbytes(opened.invars[invar].aval) * trips
                    values.places.append(Buffer(size, trips, "carry"))
        if (rows := ir.loop_rows(eqn)) is not None:
            first_in, first_out = rows
            for i, values in self._classes(body, eqn.invars):
                if i >= first_in:
                    values.places.append(_rows(eqn.invars[i], calls, "sliced"))
            for k, values in self._classes(body, eqn.outvars):
                if (row, k) in self.stacked_states:
                    values.defined.append((row, k))
                if k >= first_out:
                    values.places.append(_rows(eqn.outvars[k], calls, "stacked"))


def _rows(atom: ir.Atom, calls: float, kind: str) -> Buffer:
    """The values that a loop stacks, or reads slices of."""
    length, *_ = atom.aval.shape
    times = length if isinstance(length, int) else NOMINAL_SIZE
    return Buffer(nbytes(atom.aval) * calls, times * calls, kind)


def _stacked_states(graph: Graph, row: int) -> Iterator[int]:
    """The positions of a loop's results that stack a state as each trip begins with it."""
    eqn = graph.eqns[row]
    if (rows := ir.loop_rows(eqn)) is None:
        return
    for body, _ in graph.children[row]:
        opened = ir.open_jaxpr(body.jaxpr)
        states = {opened.invars[at] for at, _ in body.carry}
        for v, at in _leaving(body, opened):
            if at >= rows[1] and v in states and is_wide(v):
                yield at


def _leaving(body: ir.Body, opened: ir.Jaxpr) -> Iterator[tuple[Any, int]]:
    return zip(opened.outvars, body.results, strict=False)
