"""The assignment of storage: which values are stored low, and where low copies cross borders.

A class is a set of values that must be stored alike (`value_classes`). There are two questions for
each class. Is it rounded where it is defined, and stored in 16 bits? It is, unless a veto is
against it (`vetoes`). If not, does a low copy of it cross borders beside it? It does where loops
would cast it more often than once. This module writes the answers into the plan.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.accumulation import LoopFeedback
from precpass.analysis.analysis import Analysis
from precpass.analysis.graph import BodyNode
from precpass.analysis.numbers import number_from_outside
from precpass.analysis.sizes import nbytes
from precpass.backends.backend import Backend
from precpass.backends.fused_readers import FusedReaders
from precpass.backends.fusions import computed_again, materialized_by_fusions, only_picks
from precpass.plan import reasons
from precpass.plan.borders import BorderCopies, BorderCopy
from precpass.plan.plan import Action, BackwardForm, Decision, Plan
from precpass.planner.planned_bodies import decisions_of
from precpass.planner.requests import PolicyRequests
from precpass.planner.storage.backward import backward_forms
from precpass.planner.storage.facts import StorageFacts
from precpass.planner.storage.value_classes import StorageClass, StorageClasses
from precpass.planner.storage.vetoes import why_not_stored
from precpass.policy.precision import Precision
from precpass.policy.primitives import COMPUTING
from precpass.units import counted, sized

__all__ = ["assign_storage"]


def assign_storage(
    plan: Plan,
    analysis: Analysis,
    requests: PolicyRequests,
    low: Precision,
    backend: Backend,
) -> Plan:
    """The plan with the storage of its values.

    Args:
        plan: of the program, with every value stored as it is computed.
        analysis: of the program.
        requests: what the policy asks of single equations.
        low: the 16-bit format.
        backend: the compiler that the plan is for.
    """
    assignment = _Assignment(plan, analysis, requests, low, backend)
    return assignment.with_reasons(assignment.with_storage())


_SAVED = "kept", "stacked"
"""The kinds of places in which a forward pass saves values, those of a loop in a stack."""


class _Assignment:
    """The storage of a planned program's values."""

    def __init__(
        self,
        plan: Plan,
        analysis: Analysis,
        requests: PolicyRequests,
        low: Precision,
        backend: Backend,
    ) -> None:
        self._plan = plan
        self.graph = analysis.graph
        self.analysis = analysis
        self.requests = requests
        self.low = low
        self._backend = backend
        self._writes = backend.has_low_results and low is Precision.BF16
        # Rows whose decision may change: products, and equations with bodies. Rows whose results
        # are rounded are added later.
        self._rows_of = [self._rows(node) for node in self.graph.bodies]
        self._decisions = decisions_of(self.graph, plan, self._rows_of)
        self.reads_low = {row for row, each in self._decisions.items() if self._lowers(each)}
        materialized: Collection[int] = ()
        self._pinned: Collection[int] = ()
        if self._writes:
            readers = FusedReaders(self.graph, self.reads_low, of_stacks=backend.splits_stacks)
            materialized = materialized_by_fusions(self.graph, readers, analysis.idioms, backend)
            self._pinned = computed_again(self.graph, backend)
        self.classes = StorageClasses(
            self.graph,
            self._crosses,
            self.reads_low,
            materialized=materialized,
            splits_stacks=self._writes and backend.splits_stacks,
        )
        self._why_not_stored = dict[int, str]()
        self._rounded, self._crossing = set[int](), set[int]()
        self._choose()
        self._changed_rows = set[int]()
        self._backward: Mapping[int, BackwardForm] = {}
        self._class_made_at = dict[tuple[int, int], StorageClass]()
        self._plans: dict[Any, Plan] = {}

    def with_storage(self) -> Plan:
        """The plan with the storage of its values; the same plan if nothing is gained."""
        for values in self.classes.by_root.values():
            if id(values) in self._rounded:
                made = set(values.defined) - self.classes.stacked_states
                self._class_made_at.update(dict.fromkeys(made, values))
        rounded = {row for row, _ in self._class_made_at}
        if self._writes:
            self._backward = backward_forms(self._facts, rounded)
        if not (self._rounded or self._crossing or self._backward or self._in_float8):
            return self._plan
        self._changed_rows = rounded | set(self._backward)
        return self._assigned(0, self._plan, BorderCopies())

    def with_reasons(self, plan: Plan) -> Plan:
        """The plan with why values that are saved for the backward pass stay in float32."""
        found: dict[str, float] = {}
        for values in self.classes.by_root.values():
            kept = max((p.nbytes for p in values.places if p.kind in _SAVED), default=0.0)
            if kept and id(values) not in self._rounded | self._crossing:
                why = self._why_not_stored[id(values)]
                found[why] = found.get(why, 0.0) + kept
        kept_wide = tuple(sorted(found.items(), key=lambda item: -item[1]))
        return dataclasses.replace(plan, kept_wide=kept_wide) if found else plan

    # ------------------------------------------------------------ what was planned

    def _rows(self, node: BodyNode) -> list[int]:
        """The rows of a body's products, and of its equations that have bodies."""
        children, eqns = self.graph.children, self.graph.eqns[node.start : node.stop]
        each = enumerate(eqns, node.start)
        return [row for row, eqn in each if eqn.primitive.name in COMPUTING or row in children]

    def _crosses(self, row: int) -> bool:
        """Whether values may cross the borders of an equation's bodies in 16 bits."""
        decisions, eqn = self._decisions.get(row, ()), self.graph.eqns[row]
        # No spec says on which shards the scale of a float8 copy is.
        is_sharded = eqn.primitive.name == "shard_map" and not self._in_float8
        return (
            bool(decisions)
            and (is_sharded or ir.takes_border_copies(eqn))
            and all(map(_is_plain, decisions))
            and not self.requests.is_fixed(row)
        )

    def _lowers(self, decisions: Sequence[Decision]) -> bool:
        return any(d.action is Action.LOWER and d.compute is self.low for d in decisions)

    def _accumulated(self) -> set[int]:
        """The classes that a loop adds to in every trip, and the classes of the sum's factors.

        Sets of classes hold their identities, because a class is mutable and has no hash.
        """
        added_to, todo = set[int](), list[tuple[int, LoopFeedback]]()
        for row, children in self.graph.children.items():
            for body, child in children:
                if not body.carry or not self._crosses(row):
                    continue
                feedback = self.analysis.additive.cyclic(body)
                invars = ir.open_jaxpr(body.jaxpr).invars
                carried = [v for v, fed in zip(invars, feedback, strict=False) if fed]
                added_to |= self._ids(child, carried)
                todo.append((child, feedback))
        seen = set[tuple[int, LoopFeedback]]()
        while todo:
            at = todo.pop()
            if at not in seen:
                seen.add(at)
                todo += self._accumulated_in(*at, added_to)
        return added_to

    def _accumulated_in(
        self, body: int, feedback: LoopFeedback, added_to: set[int]
    ) -> Iterator[tuple[int, LoopFeedback]]:
        """Adds the classes of a body to `added_to`; yields the bodies in it with their feedback."""
        node = self.graph.bodies[body]
        adding = self.analysis.additive.accumulating(node.jaxpr, feedback)
        for at, feedback_inside in adding.items():
            row = node.start + at
            eqn = self.graph.eqns[row]
            added_to |= self._ids(body, eqn.outvars)
            if eqn.primitive.name in ("mul", "div"):
                # a decay of 0.999 is 1 in bfloat16
                added_to |= self._ids(body, eqn.invars)
            children = self.graph.children.get(row, ())
            for (_, child), inside in zip(children, feedback_inside, strict=True):
                yield child, inside

    def _ids(self, body: int, atoms: Sequence[ir.Atom]) -> set[int]:
        return {id(of) for v in atoms if (of := self.classes.class_of(body, v)) is not None}

    # ------------------------------------------------------------ what is stored low

    @functools.cached_property
    def _facts(self) -> StorageFacts:
        of = self.analysis, self.classes, self.low, self.requests
        return StorageFacts(*of, self._backend)

    def _choose(self) -> None:
        """Finds the classes that are rounded, those that cross low, and why others may not be."""
        adding, only_replaces = self._accumulated(), self.classes.only_replaces
        for values in self.classes.by_root.values():
            why = why_not_stored(self._facts, values)
            if why is None and id(values) in adding and not only_replaces(values):
                why = "is added to in every trip of a loop"
            if why is None:
                self._rounded.add(id(values))
            else:
                self._why_not_stored[id(values)] = why
            if values.crossed and (why is None or self._is_cast_again(values)):
                self._crossing.add(id(values))

    def _is_cast_again(self, values: StorageClass) -> bool:
        """Whether loops would cast more of a class for products than is made of it.

        A 16-bit copy that crosses the borders saves these casts. Elsewhere such a copy would only
        stay in memory from its first reader to its last.
        """
        trips = self.graph.trips
        made = values.given_bytes + sum(
            nbytes(self.graph.eqns[row].outvars[k].aval) * trips[int(self.graph.body[row])]
            for row, k in values.defined
        )
        return any(size * trips[body] > made for body, size in values.low_read_bytes.items())

    # ------------------------------------------------------------ the plan

    def _assigned(self, body: int, plan: Plan, border_copies: BorderCopies) -> Plan:
        key = (body, id(plan), border_copies)
        if key not in self._plans:
            node, decisions = self.graph.bodies[body], list(plan.decisions)
            changing = self._changed_rows.intersection(range(node.start, node.stop))
            for row in changing.union(self._rows_of[body]):
                at = row - node.start
                decisions[at] = self._assigned_decision(row, body, decisions[at])
            self._plans[key] = dataclasses.replace(
                plan, decisions=tuple(decisions), border_copies=border_copies
            )
        return self._plans[key]

    def _assigned_decision(self, row: int, body: int, decision: Decision) -> Decision:
        if decision.inner:
            return self._with_rounding(row, self._entered_decision(row, body, decision))
        return self._with_backward(row, self._with_rounding(row, decision))

    def _with_backward(self, row: int, decision: Decision) -> Decision:
        """The decision for an equation whose derivative saves or makes low values, if it does."""
        if row not in self._backward or decision.action is not Action.KEEP:
            return decision
        why = decision.reason.plus(reasons.LOW_BACKWARD, self.low)
        return dataclasses.replace(decision, reason=why, backward=self._backward[row])

    def _with_rounding(self, row: int, decision: Decision) -> Decision:
        """The decision for an equation whose results are rounded, if any of its classes is."""
        defines = [self._class_made_at.get((row, k)) for k in range(len(decision.stored))]
        rounded = [values for values in defines if values is not None]
        if not rounded:
            return decision
        stored = tuple(None if values is None else self.low for values in defines)
        why = decision.reason.plus(reasons.STORED, self.low, self._what_is_saved(rounded[0]))
        # The pieces of a loop's state are rounded, and the loop's border keeps the rounding.
        is_materialized = any(row in values.materialized for values in rounded)
        is_materialized = is_materialized and row not in self.classes.put_together
        is_kept = is_materialized and decision.action is Action.KEEP
        if (is_kept and not only_picks(self.graph, row)) or decision.action is Action.ENTER:
            return dataclasses.replace(
                decision,
                stored=stored,
                reason=why,
                keeps_rounding=True,
                pins_rounding=row in self._pinned,
            )
        if is_kept:
            # What is selected has no other rounding.
            return dataclasses.replace(
                decision,
                action=Action.LOWER,
                compute=self.low,
                stored=stored,
                reason=why,
                clipped=self._facts.constants_beyond(row),
                numbers=tuple(self._numbers(row)),
            )
        return dataclasses.replace(decision, stored=stored, reason=why)

    def _numbers(self, row: int) -> Iterator[tuple[int, float]]:
        """The float32 operands of an equation that are one number, made outside of its body."""
        for at, atom in enumerate(self.graph.eqns[row].invars):
            if ir.precision_of(atom.aval) is Precision.F32:
                number = number_from_outside(self.graph, row, atom)
                if number is not None:
                    yield at, number

    def _entered_decision(self, row: int, body: int, decision: Decision) -> Decision:
        eqn, crosses = self.graph.eqns[row], self._crosses(row)
        inner: list[Plan] = []
        for (into, child), plan in zip(self.graph.children[row], decision.inner, strict=True):
            border_copies = BorderCopies()
            if crosses:
                operands = ir.open_jaxpr(into.jaxpr).invars
                results = [eqn.outvars[at] for at in into.results]
                border_copies = BorderCopies(
                    tuple(self._border_copies(child, operands)),
                    tuple(self._border_copies(body, results)),
                )
            inner.append(self._assigned(child, plan, border_copies))
        same = all(a is b for a, b in zip(inner, decision.inner, strict=True))
        return decision if same else dataclasses.replace(decision, inner=tuple(inner))

    def _border_copies(self, body: int, atoms: Sequence[ir.Atom]) -> Iterator[BorderCopy]:
        for position, atom in enumerate(atoms):
            values = self.classes.class_of(body, atom)
            if values is not None and self._is_of_float8(values):
                yield BorderCopy(position, Precision.F8E4M3, rounds=True)
            elif values is not None and id(values) in self._crossing:
                rounds, as_bits = id(values) in self._rounded, self._backend.border_bits
                yield BorderCopy(position, self.low, rounds, as_bits)

    def _is_of_float8(self, values: StorageClass) -> bool:
        """Whether only float8 products read a class, which then crosses borders in 8 bits.

        A stack has a scale for each slice. The bytes tell a stack of stacks, whose slices would
        have several. What a loop carries crosses as before.
        """
        reads = {row for rows in values.low_readers.values() for row in rows}
        if not reads or not reads <= self._in_float8 or values.wide_readers or values.is_output:
            return False
        places = [place for place in values.places if place.times]
        sizes = {place.nbytes / place.times for place in places}
        is_whole = len(sizes.union(values.low_read_bytes.values())) == 1
        return is_whole and all(place.kind != "carry" for place in places)

    @functools.cached_property
    def _in_float8(self) -> set[int]:
        """The rows of the products that are float8 in every plan of their body.

        Those with known scales round their operands themselves.
        """
        pairs, known = self._decisions.items(), (None, None)
        return {
            row
            for row, each in pairs
            if all(d.product.scaled is Precision.F8E4M3 for d in each)
            and all(d.product.largest == known for d in each)
        }

    def _what_is_saved(self, values: StorageClass) -> str:
        """The memory that storing a class in 16 bits saves, and what reads it, in words."""
        products = len({row for rows in values.low_readers.values() for row in rows})
        written = [p for p in values.places if p.kind != "sliced"]
        times = max(sum(p.times for p in written), 1.0)
        saved = f"{sized(sum(p.nbytes for p in written) / times / 2)} saved"
        read = f"read by {counted(products, 'product')}, " if products else ""
        return f"{read}{saved}{f' x {times:.0f} iterations' if times > 1 else ''}"


def _is_plain(decision: Decision) -> bool:
    """Whether values cross the borders of an equation's bodies in their own formats."""
    return not (
        decision.in_float64_span
        or decision.rules is not None
        or any(p.border for p in decision.inner)
    )
