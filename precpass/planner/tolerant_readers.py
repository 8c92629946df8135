"""Which differences and comparisons of a product's result lose nothing if the result is rounded.

A difference loses the digits that its terms have in common, and a comparison may come out another
way, so a result that is read so keeps its float32 digits. But activation functions are full of
both, and these do not need the digits:

- zero that is subtracted takes no digits away, as in `jax.nn.softplus`;
- the exponential of a value less its maximum, or less a smooth maximum of it, is a factor whose
  relative error is the value's absolute error, as in a softmax and in `jnp.logaddexp`'s derivative;
- a normalisation (`planner.normalisations`) subtracts a value's mean;
- rounding keeps the order of values, so it changes a comparison with a number, as a clip has it,
  only for values within a unit roundoff of the number. The errors of the product's operands move
  such values too, unless the operands are exact. Then results are mostly whole numbers or have a
  few binary places, and are exact in bfloat16 as well up to a number that is not large. What is
  decided must be a choice between values, or a factor;
- JAX evaluates some functions in more equations than one to have every digit of float32. Such a
  function is as smooth as `exp`, and as exact of a rounded operand as of any.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.analysis.reach import Reach, hands_on
from precpass.analysis.uniform import Numbers
from precpass.planner.normalisations import Normalisations
from precpass.policy.primitives import op

__all__ = ["TolerantReaders"]

_EXACT_FUNCTIONS = frozenset(("exp_neg_sq",))
"""JAX's functions, by name, that split an operand in two to have every digit of the result.

`exp_neg_sq` is exp(-x^2), the derivative of erf and erfc since jax 0.12; `_split_square` in
`jax/_src/lax/erf.py` says why.
"""
_LARGE = 32
"""Multiples of 1/8 up to this one are exact in bfloat16, whose significand has 8 bits."""
_MOST = 64
"""So many values are looked at around a difference or a comparison."""


class _Decided(NamedTuple):
    """A value that a comparison decides: the condition, or a number that it chose."""

    body: int
    var: ir.Var
    is_number: bool


class TolerantReaders:
    """What the equations of a program that subtract or compare make of a rounded operand."""

    def __init__(self, graph: Graph, reach: Reach) -> None:
        self._graph = graph
        self._reach = reach
        self._numbers = Numbers(graph)
        self._normalisations = Normalisations(graph, reach, self._numbers)
        self._exact_functions = frozenset(
            child
            for row, children in graph.children.items()
            if ir.jax_function_name(graph.eqns[row]) in _EXACT_FUNCTIONS
            for _, child in children
        )
        self._compared: dict[int, bool] = {}

    def is_exact_function(self, body: int) -> bool:
        """Whether a body is that of one of JAX's functions that give every digit of float32."""
        return body in self._exact_functions

    def subtracts(self, body: int, eqn: ir.Eqn, var: ir.Var) -> bool:
        """Whether a difference needs no digits of its operand that 16 bits do not hold."""
        minuend, subtrahend = eqn.invars
        if minuend is not var:
            return False
        if self._numbers.of(body, subtrahend) == 0:
            return True
        readers = self._reach.direct(body, eqn.outvars[0])
        if all(r is not None and r.primitive.name in ("exp", "exp2") for r in readers):
            return self._has_maximum(body, subtrahend, self._chosen_from(body, var))
        return self._normalisations.subtracts_mean(body, eqn)

    def _chosen_from(self, body: int, value: ir.Atom) -> set[ir.Var]:
        """A value and what it was moved from, or chosen from beside numbers."""
        found = set[ir.Var]()
        while not ir.is_literal(value) and value not in found:
            found.add(value)
            maker = self._graph.maker(body, value)
            if maker is None:
                break
            operands = maker.invars[1:] if maker.primitive.name == "select_n" else maker.invars
            unknown = [v for v in operands if self._numbers.of(body, v) is None]
            if len(unknown) == 1 and hands_on(maker, unknown[0]):
                (value,) = unknown
        return found

    def _has_maximum(self, body: int, atom: ir.Atom, same: set[ir.Var]) -> bool:
        """Whether a value is the maximum over a dimension, or a `logaddexp`, of one of some values.

        Sums with such a maximum count, as in `max + log(sum(exp(x - max)))`.
        """
        todo, seen = [atom], set[ir.Var]()
        while todo and len(seen) < _MOST:
            value = todo.pop()
            maker = self._graph.maker(body, value)
            if maker is None or value in seen:
                continue
            seen.add(value)
            is_smooth = ir.jax_function_name(maker) == "logaddexp"
            if is_smooth or maker.primitive.name == "reduce_max":
                if any(not ir.is_literal(v) and v in same for v in maker.invars):
                    return True
            elif maker.primitive.name in ("add", "max", "select_n") or len(maker.invars) == 1:
                operands = (v for v in maker.invars if not ir.is_literal(v))
                is_sum = maker.primitive.name in ("add", "max")
                todo += [v for v in operands if is_sum or hands_on(maker, v)]
        return False

    def compares(self, body: int, eqn: ir.Eqn) -> bool:
        """Whether a comparison changes a choice at the most, and only of values near a number."""
        key = id(eqn)
        if key not in self._compared:
            self._compared[key] = op(eqn.primitive.name).compares and self._compares(body, eqn)
        return self._compared[key]

    def _compares(self, body: int, eqn: ir.Eqn) -> bool:
        left, right = eqn.invars
        numbers = [self._numbers.of(body, atom) for atom in (left, right)]
        known = [n for n in numbers if n is not None]
        tests_finite = left is right or any(not math.isfinite(n) for n in known)
        tests_equality = op(eqn.primitive.name).tests_equality
        is_of_maximum = tests_equality and (
            self._has_maximum(body, right, self._chosen_from(body, left))
            or self._has_maximum(body, left, self._chosen_from(body, right))
        )
        if not (tests_finite or is_of_maximum):
            if len(known) == 1:
                value = left if numbers[0] is None else right
                is_near = self._is_near(body, value, known[0])
            else:
                is_near = self._is_choice(body, left, right) or self._is_choice(body, right, left)
            if not is_near:
                return False
        # Rounding makes more values equal, but the derivative of a maximum only counts them.
        needs_numbers = tests_equality and not tests_finite
        start = _Decided(body, eqn.outvars[0], is_number=False)
        return self._only_chooses(start, needs_numbers=needs_numbers, may_count=is_of_maximum)

    def _is_near(self, body: int, value: ir.Atom, number: float) -> bool:
        """Whether the number that a value is compared with is small, for the product's result too.

        The comparison `p / 1000 > 0.5` is one of `p` with 500.
        """
        for _ in range(_MOST):
            if not abs(number) < _LARGE:
                return False
            maker = self._graph.maker(body, value)
            if maker is None:
                outside = None if ir.is_literal(value) else self._reach.before(body, value)
                if outside is None:
                    return True
                body, value = outside
                continue
            operands = maker.invars[1:] if maker.primitive.name == "select_n" else maker.invars
            unknown = [v for v in operands if self._numbers.of(body, v) is None]
            if len(unknown) != 1:
                return True
            known = [n for v in operands if (n := self._numbers.of(body, v)) is not None]
            (value,) = unknown
            number = _operand_for(maker, value, number, known[0] if known else 0.0)
        return False

    def _is_choice(self, body: int, value: ir.Atom, chosen: ir.Atom) -> bool:
        """Whether a value is another one's maximum or minimum with a number that is not large."""
        maker = self._graph.maker(body, chosen)
        if maker is None or maker.primitive.name not in ("max", "min"):
            return False
        others = [v for v in maker.invars if v is not value]
        number = self._numbers.of(body, others[0]) if len(others) == 1 else None
        return number is not None and self._is_near(body, value, number)

    def _only_chooses(self, condition: _Decided, *, needs_numbers: bool, may_count: bool) -> bool:
        """Whether a condition only chooses between arrays, or between numbers that are factors.

        Args:
            condition: the result of a comparison.
            needs_numbers: whether a choice between arrays is too much.
            may_count: whether its ones may be added up, to divide by their number.
        """
        todo, seen = [condition], set[_Decided]()
        while todo:
            decided = todo.pop()
            if decided in seen:
                continue
            seen.add(decided)
            here, value, is_number = decided
            for reader in self._reach.direct(here, value):
                if reader is None:
                    names = self._reach.outside(here, value)
                    following = None if names is None else [_Decided(*n, is_number) for n in names]
                elif may_count and reader.primitive.name in ("convert_element_type", "reduce_sum"):
                    is_float = ir.precision_of(reader.outvars[0].aval) is not None
                    following = _results(decided, reader, is_number=True) if is_float else None
                elif is_number:
                    following = self._after_number(decided, reader)
                else:
                    following = self._after_condition(decided, reader, needs_numbers)
                if following is None or len(seen) > _MOST:
                    return False
                todo += following
        return True

    def _after_condition(
        self, decided: _Decided, reader: ir.Eqn, needs_numbers: bool
    ) -> list[_Decided] | None:
        """What a reader of a condition decides; None if that is more than a choice."""
        body, condition, _ = decided
        name = reader.primitive.name
        if name == "select_n" and reader.invars[0] is condition:
            if ir.precision_of(reader.outvars[0].aval) is None:
                return None
            if all(self._numbers.of(body, v) is not None for v in reader.invars[1:]):
                return _results(decided, reader, is_number=True)
            return None if needs_numbers else []
        if name in ("and", "or", "not", "broadcast_in_dim", "reshape"):
            return _results(decided, reader, is_number=False)
        return self._inside(decided, reader)

    def _after_number(self, decided: _Decided, reader: ir.Eqn) -> list[_Decided] | None:
        """What a reader of a chosen number decides; None if the number is more than a factor."""
        body, number, _ = decided
        name = reader.primitive.name
        if name in ("mul", "div"):
            others = [v for v in reader.invars if v is not number]
            is_factor = any(self._numbers.of(body, v) is None for v in others)
            return [] if is_factor else _results(decided, reader, is_number=True)
        if name == "select_n" and reader.invars[0] is not number:
            unknown = [v for v in reader.invars[1:] if self._numbers.of(body, v) is None]
            is_number = all(v is number for v in unknown)
            return _results(decided, reader, is_number=True) if is_number else []
        if name in ("broadcast_in_dim", "reshape", "copy", "neg", "stop_gradient"):
            return _results(decided, reader, is_number=True)
        return self._inside(decided, reader)

    def _inside(self, decided: _Decided, reader: ir.Eqn) -> list[_Decided] | None:
        row = self._reach.row(decided.body, reader)
        names = self._reach.inside(row, decided.var)
        return [_Decided(*name, decided.is_number) for name in names] or None


def _results(decided: _Decided, reader: ir.Eqn, *, is_number: bool) -> list[_Decided]:
    return [_Decided(decided.body, var, is_number) for var in reader.outvars]


def _operand_for(eqn: ir.Eqn, value: ir.Var, number: float, operand: float) -> float:
    """What an operand of an equation must be for a result; the result itself if that is unknown.

    Args:
        eqn: an equation that reads one array; its other operand, if it has one, is a number.
        value: the array.
        number: the result.
        operand: the other operand; zero if there is none.
    """
    is_first = eqn.invars[0] is value
    match eqn.primitive.name:
        case "add" | "add_any":
            return number - operand
        case "sub":
            return number + operand if is_first else operand - number
        case "mul" if operand:
            return number / operand
        case "div" if is_first and operand:
            return number * operand
        case "neg":
            return -number
        case _:
            return number
