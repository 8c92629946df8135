"""Which products of a program are multiplied in 8 bits, if a policy alone asks for that.

A product gains by 8 bits if it has much work for each element that is rounded, and loses digits
that matter in a model's first and last layer, in attention and in routers. So a policy with
`scaled` changes the products with weights that are large, and the products that differentiate
them. A weight is a value that the program is given and only moves or casts.

A rule, a keep region and a saved plan are not asked: they name the products themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.planner.same_values import SameValues
from precpass.planner.scaled_sizes import against_sizes, has_scaled_form, sizes_of
from precpass.policy.precision import Precision
from precpass.policy.scopes import is_backward

__all__ = ["EligibleProducts"]

_OTHER = "it repeats or differentiates no product that does"


class EligibleProducts:
    """The products of a program that a policy's `scaled` changes, with the reason for the others.

    Args:
        graph: the program.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._values = SameValues(graph)

    def against(self, body: int, eqn: ir.Eqn) -> str:
        """Why a dot is not multiplied in 8 bits, in words; "" if it is.

        Args:
            body: the index of the equation's body.
            eqn: a dot of known sizes.
        """
        if reason := against_sizes(eqn):
            return reason
        classes = self._values.of_operands(body, eqn)
        if not self._is_first_time(body, eqn):
            return "" if self._repeats_or_differentiates(eqn, classes) else _OTHER
        given = [c for c in classes if c in self._values.weights]
        if len(given) != 1:
            return "both its operands are given" if given else "neither of its operands is a weight"
        return "" if (body, id(eqn)) in self._forward else "no other product follows"

    def _repeats_or_differentiates(self, eqn: ir.Eqn, classes: tuple[int, int]) -> bool:
        """Whether a product of a backward pass is one for a forward product that is eligible.

        It shares an operand with it, or with what a checkpoint computes again of it. If it shares
        one with a product that is not eligible too, it belongs to the one that has its sizes. A
        checkpoint may also compute an operand again that no product reads there, because the
        product's result is kept or not needed. Then the sizes tell, unless there are products of
        both kinds.
        """
        sizes = sizes_of(eqn)
        if self._operands & set(classes):
            # What a loop carries may be read behind it too, by a last product that is not eligible.
            is_other = sizes in self._other_sizes and sizes not in self._sizes
            return not (is_other and self._operands_of_others & set(classes))
        if self._of_forward_dots & set(classes):
            return False
        is_ambiguous = sizes in self._repeated_sizes and sizes in self._other_sizes
        return sizes in self._sizes and not is_ambiguous

    def _is_first_time(self, body: int, eqn: ir.Eqn) -> bool:
        scope = self.graph.scope_in(body, eqn)
        return not is_backward(scope) and not _is_repeated(scope)

    def _body_of(self, row: int) -> int:
        return int(self.graph.body[row])

    def are_given(self, body: int, eqn: ir.Eqn) -> tuple[bool, bool]:
        """For each operand of a product, whether it is given and not computed, as a weight is."""
        lhs, rhs = self._values.of_operands(body, eqn)
        return lhs in self._values.weights, rhs in self._values.weights

    def is_weight_gradient(self, body: int, eqn: ir.Eqn) -> bool:
        """Whether a product of a backward pass makes the gradient of a weight.

        It multiplies a cotangent by what forward products multiply weights by: by a computed value,
        by a given one that only given ones are multiplied by (the input of a first layer), or by
        what a checkpoint computes again for no other product.
        """
        known = [c for c in self._values.of_operands(body, eqn) if c in self._partners]
        return not known or any(
            self._partners[c] & self._values.weights
            if c not in self._values.weights
            else self._partners[c] <= self._values.weights
            for c in known
        )

    @functools.cached_property
    def _partners(self) -> dict[int, set[int]]:
        """For each class that a dot of the forward pass reads, those it is multiplied by there."""
        found: dict[int, set[int]] = {}
        for one, other in self._pairs([*self._forward_dots, *self._repeated_dots]):
            found.setdefault(one, set()).add(other)
            found.setdefault(other, set()).add(one)
        return found

    def is_forward(self, body: int, eqn: ir.Eqn) -> bool:
        """Whether an equation computes a value, also a second time for the backward pass."""
        scope = self.graph.scope_in(body, eqn)
        return not is_backward(scope) or _is_repeated(scope)

    @functools.cached_property
    def _forward(self) -> dict[tuple[int, int], tuple[int, tuple[int, int]]]:
        """The eligible forward products' rows and the classes of their operands.

        The keys are their bodies and identities: several bodies may have one equation in common.
        """
        found = dict(self._candidates())
        holds = self._holding(self._forward_dots)
        return {
            name: (row, classes)
            for name, (row, classes) in found.items()
            if self._is_followed(row, self.graph.eqns[row].outvars, holds, set())
        }

    @functools.cached_property
    def _dots(self) -> list[int]:
        """The rows of all dots."""
        return [i for i, eqn in enumerate(self.graph.eqns) if ir.dot_numbers(eqn) is not None]

    @functools.cached_property
    def _forward_dots(self) -> list[int]:
        """The rows of all forward dots."""
        eqns = self.graph.eqns
        return [row for row in self._dots if self._is_first_time(self._body_of(row), eqns[row])]

    @functools.cached_property
    def _repeated_dots(self) -> list[int]:
        """The rows of the dots that a checkpoint computes again."""
        eqns, scope_in = self.graph.eqns, self.graph.scope_in
        return [row for row in self._dots if _is_repeated(scope_in(self._body_of(row), eqns[row]))]

    def _pairs(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """The classes of the operands of dots."""
        return [self._values.of_operands(self._body_of(row), self.graph.eqns[row]) for row in rows]

    @functools.cached_property
    def _of_forward_dots(self) -> set[int]:
        """The classes of the operands of all dots that compute a value, also a second time."""
        pairs = self._pairs([*self._forward_dots, *self._repeated_dots])
        return {c for pair in pairs for c in pair}

    @functools.cached_property
    def _operands(self) -> set[int]:
        """The classes of the operands of the eligible products, and of their repetitions."""
        found = {c for _, pair in self._forward.values() for c in pair}
        again = self._pairs(self._repeated_dots)
        return found.union(*(pair for pair in again if found.intersection(pair)))

    @functools.cached_property
    def _others(self) -> list[int]:
        """The rows of the forward products that are not eligible."""
        names = ((row, self._body_of(row), id(self.graph.eqns[row])) for row in self._forward_dots)
        return [row for row, *name in names if tuple(name) not in self._forward]

    @functools.cached_property
    def _operands_of_others(self) -> set[int]:
        """The classes of the operands of the forward products that are not eligible."""
        return {c for pair in self._pairs(self._others) for c in pair}

    @functools.cached_property
    def _sizes(self) -> set[tuple[float, ...]]:
        """The sizes of the forward products that are eligible."""
        return {sizes_of(self.graph.eqns[row]) for row, _ in self._forward.values()}

    @functools.cached_property
    def _other_sizes(self) -> set[tuple[float, ...]]:
        """The sizes of the forward products that are not eligible."""
        return {sizes_of(self.graph.eqns[row]) for row in self._others}

    @functools.cached_property
    def _repeated_sizes(self) -> set[tuple[float, ...]]:
        """The sizes of the products that checkpoints compute again."""
        return {sizes_of(self.graph.eqns[row]) for row in self._repeated_dots}

    def _candidates(self) -> Iterator[tuple[tuple[int, int], tuple[int, tuple[int, int]]]]:
        for row in self._forward_dots:
            eqn, body = self.graph.eqns[row], self._body_of(row)
            if not has_scaled_form(eqn, Precision.F8E4M3) or against_sizes(eqn):
                continue
            classes = self._values.of_operands(body, eqn)
            if len([c for c in classes if c in self._values.weights]) == 1:
                yield (body, id(eqn)), (row, classes)

    def _holding(self, rows: Sequence[int]) -> set[int]:
        """The given rows, and those of the equations that have one of them in a body."""
        holding, todo = set[int](), list(rows)
        while todo:
            row = todo.pop()
            if row not in holding:
                holding.add(row)
                todo += [caller for caller, _ in self.graph.callers[self._body_of(row)]]
        return holding

    def _is_followed(
        self, row: int, values: Sequence[Any], holding: set[int], seen: set[tuple[int, Any]]
    ) -> bool:
        """Whether an equation behind a row reads what some values lead to, and holds a product.

        Args:
            row: of the equation that makes the values.
            values: variables of one body.
            holding: the rows that are or hold products.
            seen: results of bodies that were looked at.
        """
        body = self._body_of(row)
        return self._is_followed_in(body, row + 1, set(values), holding, seen)

    def _is_followed_in(
        self,
        body: int,
        start: int,
        reached: set[Any],
        holding: set[int],
        seen: set[tuple[int, Any]],
    ) -> bool:
        node = self.graph.bodies[body]
        for row in range(start, node.stop):
            eqn = self.graph.eqns[row]
            if any(not ir.is_literal(v) and v in reached for v in eqn.invars):
                if row in holding:
                    return True
                reached.update(eqn.outvars)
        results = ir.open_jaxpr(node.jaxpr).outvars
        for at, v in enumerate(results):
            if ir.is_literal(v) or v not in reached or (body, at) in seen:
                continue
            seen.add((body, at))
            for caller, of_caller in self.graph.callers[body]:
                if self._leaves_for(caller, of_caller, body, at, holding, seen):
                    return True
        return False

    def _leaves_for(
        self,
        caller: int,
        of_caller: ir.Body,
        body: int,
        at: int,
        holding: set[int],
        seen: set[tuple[int, Any]],
    ) -> bool:
        """Whether a product follows a body's result, in the next trip or behind the caller."""
        operands = ir.open_jaxpr(self.graph.bodies[body].jaxpr).invars
        again = {operands[i] for i, o in of_caller.carry if o == at}
        start = self.graph.bodies[body].start
        if again and self._is_followed_in(body, start, again, holding, seen):
            return True
        if at >= len(of_caller.results):
            return False
        out = self.graph.eqns[caller].outvars[of_caller.results[at]]
        return self._is_followed(caller, [out], holding, seen)


def _is_repeated(scope: str) -> bool:
    """Whether a checkpoint computes an equation again, for the backward pass."""
    return "rematted_computation" in scope
