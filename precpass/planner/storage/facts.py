"""What the vetoes of storage ask of a program (`planner.storage.vetoes`)."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.analysis import Analysis
from precpass.analysis.graph import BORDER
from precpass.analysis.liveness import dead
from precpass.backends.backend import Backend
from precpass.planner.requests import PolicyRequests
from precpass.planner.storage.value_classes import StorageClasses
from precpass.policy.precision import Precision

__all__ = ["StorageFacts"]


class StorageFacts:
    """What the vetoes ask of a program.

    Args:
        analysis: of the program.
        classes: of its values.
        low: the 16-bit format.
        requests: what the policy asks of single equations.
        backend: the compiler that the plan is for.
    """

    def __init__(
        self,
        analysis: Analysis,
        classes: StorageClasses,
        low: Precision,
        requests: PolicyRequests,
        backend: Backend,
    ) -> None:
        self.graph = analysis.graph
        self.analysis = analysis
        self.classes = classes
        self.low = low
        self.requests = requests
        self.backend = backend

    def in_sampler(self, row: int) -> bool:
        """Whether an equation belongs to one of JAX's samplers."""
        body = int(self.graph.body[row])
        return any(facts.sampler for facts in self.analysis.facts_of.get(body, ()))

    def constants_beyond(self, row: int) -> tuple[int, ...]:
        """The operands of a selection that are finite constants and would round to infinity.

        Masks are filled with float32's lowest number, for which bfloat16's will do as well. There
        is none if another operand, which is no constant, may hold such numbers too.
        """
        found: list[int] = []
        facts_of_body = self.analysis.facts_of.get(int(self.graph.body[row]), ())
        for at, operand in enumerate(self.graph.eqns[row].invars):
            each = [facts.range_of(operand) for facts in facts_of_body]
            if ir.precision_of(operand.aval) is not Precision.F32 or not any(
                self.low.max < max(abs(known.lo), abs(known.hi)) < math.inf
                or self.low.max < known.likely_max
                for known in each
            ):
                continue
            if not all(known.constant for known in each):
                return ()
            found.append(at)
        return tuple(found)

    def is_backward(self, body: int, row: int) -> bool:
        """Whether an equation of a body belongs to a backward pass."""
        return self.classes.is_backward(body, self.graph.eqns[row])

    @functools.cached_property
    def dead(self) -> Sequence[bool]:
        """For each equation, whether nothing depends on it; XLA leaves it out."""
        return dead(self.graph).tolist()

    @functools.cached_property
    def following_products(self) -> set[Any]:
        """Every value that is computed from the result of a lowered product, at any distance."""
        eqns = self.graph.eqns
        across = collections.defaultdict[Any, list[Sequence[Any]]](list)
        for row in self.graph.children:
            for before, behind in self._steps(row):
                if not ir.is_literal(before):
                    across[before].append(behind)
        # A body from which JAX has dropped unread results shares its variables with the whole body,
        # so readers are collected over all bodies.
        readers = collections.defaultdict[Any, list[int]](list)
        for body in range(len(self.graph.bodies)):
            for v, of_body in self.graph.readers(body).items():
                readers[v] += of_body
        # This loop visits the equations of every gradient: it makes no Python call for each.
        following = set[Any]()
        todo = [v for row in self.classes.reads_low for v in eqns[row].outvars]
        while todo:
            v = todo.pop()
            if v in following:
                continue
            following.add(v)
            for reader in readers.get(v, ()):
                if reader != BORDER and reader not in self.graph.children:
                    todo += eqns[reader].outvars
            for behind in across.get(v, ()):
                todo += behind
        return following

    def _steps(self, row: int) -> Iterator[tuple[Any, Sequence[Any]]]:
        """Each value on one side of an equation's borders, and its names on the other side."""
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

    @functools.cached_property
    def spread(self) -> set[Any]:
        """The results of `broadcast_in_dim`."""
        named = (eqn for eqn in self.graph.eqns if eqn.primitive.name == "broadcast_in_dim")
        return {eqn.outvars[0] for eqn in named}

    def digits_read(self, results: Iterable[tuple[int, int]]) -> int:
        """How results of equations are read where rounding would show, as bits of `Digits`."""
        each = (
            self.analysis.digits.digits_of(
                int(self.graph.body[row]), self.graph.eqns[row].outvars[k]
            )
            for row, k in results
        )
        return functools.reduce(int.__or__, each, 0)
