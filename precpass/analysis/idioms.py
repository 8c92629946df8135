"""Differences and comparisons that lose nothing if a value that they read is rounded.

A difference loses the digits that its terms have in common, and a comparison may come out another
way. But activation functions are full of both, and these do not need the digits:

- the exponential of a value less its maximum, or less a smooth maximum of it, is a factor whose
  relative error is the value's absolute error, as in a softmax;
- a normalisation subtracts a value's mean and divides by a root of a sum of squares. The results of
  a model's layers deviate by as much as their means, and a program by hand normalises a bfloat16
  result as well. If a mean is subtracted for another reason, as from a kernel matrix, its digits
  are needed;
- a comparison that only chooses between values, or a factor: rounding keeps the order of values, so
  it changes the choice only for values within a unit roundoff of the number that they are compared
  with, and the errors of a product's operands move such values too;
- JAX evaluates some functions in more equations than one to have every digit of float32. Such a
  function is as smooth as `exp`, and as exact of a rounded operand as of any.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from precpass import jaxpr as ir
from precpass.analysis.equations import hands_on, moved_operand
from precpass.analysis.graph import BORDER, Graph
from precpass.analysis.numbers import Numbers
from precpass.policy.primitives import op

__all__ = ["ARRAYS", "COUNTS", "FACTORS", "OTHERS", "Idioms"]

ARRAYS, FACTORS, COUNTS, OTHERS = "arrays", "factors", "counts", "others"
"""What a condition decides: a choice between arrays; a number that something is multiplied by; the
same, where the numbers are added up first; and anything else."""
_EXACT_FUNCTIONS = frozenset(("exp_neg_sq",))
"""JAX's functions, by name, that split an operand in two to have every digit of the result.

`exp_neg_sq` is exp(-x^2), the derivative of erf and erfc since jax 0.12; `_split_square` in
`jax/_src/lax/erf.py` says why.
"""
_OF_CENTRED = frozenset(("mul", "div", "square", "integer_pow"))
"""What a normalisation and its derivative do with what is left of a value less its mean."""
_MOVES = frozenset(("broadcast_in_dim", "reshape", "copy", "neg", "stop_gradient"))
_SEARCH_LIMIT = 64
"""So many values are looked at around a difference or a comparison."""


class Idioms:
    """What the equations of a program belong to.

    Args:
        graph: the program.
        numbers: its values that are one number.
    """

    def __init__(self, graph: Graph, numbers: Numbers) -> None:
        self._graph = graph
        self._numbers = numbers
        self.exact_functions = frozenset(
            child
            for row, children in graph.children.items()
            if ir.jax_function_name(graph.eqns[row]) in _EXACT_FUNCTIONS
            for _, child in children
        )
        """The bodies of JAX's functions that give every digit of float32."""

    def keeps_digits(self, body: int, eqn: ir.Eqn) -> bool:
        """Whether a difference needs no digits of its first operand that 16 bits do not hold."""
        value, subtracted = eqn.invars
        if self._numbers.number_of(body, subtracted) == 0:
            return True
        is_shift = self.is_maximum(body, subtracted, of=value)
        return is_shift or self._is_of_normalisation(body, eqn)

    # ------------------------------------------------------------ maxima

    def is_shift_of_choice(self, body: int, eqn: ir.Eqn) -> bool:
        """Whether a difference is of a choice, and of a maximum of what was chosen from.

        The derivative of `logaddexp` has such differences. Rounding the choice alone would show.
        """
        value, maximum = eqn.invars
        is_of_source = self.is_maximum(body, maximum, of=value)
        return is_of_source and not self.is_maximum(body, maximum, of=value, chosen=False)

    def is_maximum(self, body: int, atom: ir.Atom, *, of: ir.Atom, chosen: bool = True) -> bool:
        """Whether a value is the maximum over a dimension, or a `logaddexp`, of another one.

        Sums with such a maximum count, as in `max + log(sum(exp(x - max)))`, and unless `chosen` is
        false a maximum of what the other one was chosen from beside numbers.
        """
        same = self._chosen_from(body, of, chosen=chosen)
        todo, seen = [atom], set[ir.Var]()
        while todo and len(seen) < _SEARCH_LIMIT:
            value = todo.pop()
            maker = self._graph.maker(body, value)
            if maker is None or value in seen:
                continue
            seen.add(value)
            name = maker.primitive.name
            if name == "reduce_max" or ir.jax_function_name(maker) == "logaddexp":
                if any(same & self._chosen_from(body, v) for v in maker.invars):
                    return True
            elif name in ("add", "max", "select_n") or len(maker.invars) == 1:
                operands = (v for v in maker.invars if not ir.is_literal(v))
                todo += [v for v in operands if name in ("add", "max") or hands_on(maker, v)]
        return False

    def _chosen_from(self, body: int, value: ir.Atom, *, chosen: bool = True) -> set[ir.Var]:
        """A value and what it was moved from, or if `chosen` chosen from beside numbers."""
        found = set[ir.Var]()
        while not ir.is_literal(value) and value not in found:
            found.add(value)
            maker = self._graph.maker(body, value)
            if maker is None or not (chosen or moved_operand(maker)):
                break
            operands = maker.invars[1:] if maker.primitive.name == "select_n" else maker.invars
            unknown = [v for v in operands if self._numbers.number_of(body, v) is None]
            if len(unknown) == 1 and hands_on(maker, unknown[0]):
                (value,) = unknown
        return found

    # ------------------------------------------------------------ normalisations

    def _is_of_normalisation(self, body: int, eqn: ir.Eqn) -> bool:
        """Whether an equation subtracts a value's mean, to divide by a root of a sum."""
        value, mean = eqn.invars
        if not self._is_mean(body, mean, self._unmoved(body, value)):
            return False
        (centred,) = eqn.outvars
        rows = [row for row in self._graph.readers(body).get(centred, ()) if row != BORDER]
        readers = [self._graph.eqns[row] for row in rows]
        if any(reader.primitive.name not in _OF_CENTRED for reader in readers):
            return False
        for reader in readers:
            if _is_square(reader):
                if self._is_divided_by_root(body, reader.outvars[0]):
                    return True
                continue
            is_factor = reader.primitive.name == "mul" or reader.invars[0] is centred
            others = [v for v in reader.invars if v is not centred] if is_factor else []
            if any(self._has_root_of_sum(body, v) for v in others):
                return True
        return False

    def _unmoved(self, body: int, value: ir.Atom) -> ir.Atom:
        """What a value was copied or reshaped from.

        A group normalisation adds up a value in another shape than the one that it normalises.
        """
        while maker := self._graph.maker(body, value):
            if not (ir.keeps_bits(maker) or maker.primitive.name == "reshape"):
                break
            value = maker.invars[0]
        return value

    def _is_mean(self, body: int, atom: ir.Atom, origin: ir.Atom) -> bool:
        """Whether a value is the mean of another one over some dimensions."""
        scale = 1.0
        while maker := self._graph.maker(body, atom):
            name = maker.primitive.name
            if name == "reduce_sum":
                sizes = ir.reduced_sizes(maker)
                is_whole = all(isinstance(n, int) for n in sizes)
                is_mean = is_whole and math.isclose(scale * math.prod(sizes), 1.0, rel_tol=1e-5)
                return is_mean and self._unmoved(body, maker.invars[0]) is origin
            if name in ("div", "mul"):
                known = [self._numbers.number_of(body, v) for v in maker.invars]
                at = 1 if known[0] is None else 0
                number = known[at]
                if not number or known[1 - at] is not None or (name == "div" and at == 0):
                    return False
                scale = scale / number if name == "div" else scale * number
                atom = maker.invars[1 - at]
            elif len(maker.invars) == 1 and hands_on(maker, maker.invars[0]):
                (atom,) = maker.invars
            else:
                return False
        return False

    def _has_root_of_sum(self, body: int, factor: ir.Atom) -> bool:
        """Whether a factor was made from a root and, before that, from a sum."""
        makers = [maker for v in self._made_from(body, factor) for maker in self._inside(v)]
        names = {maker.primitive.name for maker in makers}
        is_root = not names.isdisjoint(("sqrt", "rsqrt", "pow"))
        return is_root and "reduce_sum" in names

    def _made_from(self, body: int, atom: ir.Atom) -> Iterator[ir.Eqn]:
        """The equations of a body that made a value."""
        todo, seen = [atom], set[ir.Var]()
        while todo and len(seen) < _SEARCH_LIMIT:
            value = todo.pop()
            if ir.is_literal(value) or value in seen:
                continue
            seen.add(value)
            maker = self._graph.maker(body, value)
            if maker is not None:
                yield maker
                todo += maker.invars

    def _inside(self, eqn: ir.Eqn) -> Iterator[ir.Eqn]:
        yield eqn
        yield from ir.all_eqns_of(eqn)

    def _is_divided_by_root(self, body: int, square: ir.Var) -> bool:
        """Whether anything is divided by a root of a sum of a square."""
        todo, seen = [(body, square, "square")], set[tuple[int, ir.Var, str]]()
        while todo and len(seen) < _SEARCH_LIMIT:
            place = here, value, stage = todo.pop()
            if place in seen:
                continue
            seen.add(place)
            for row in self._graph.readers(here).get(value, ()):
                if row == BORDER:
                    names = self._graph.names_outside(here, value) or []
                elif row in self._graph.children:
                    names = self._graph.names_inside(row, value)
                else:
                    reader = self._graph.eqns[row]
                    reached = self._stage_after(here, reader, value, stage)
                    if reached == "divided":
                        return True
                    names = [(here, v) for v in reader.outvars] if reached else []
                    todo += [(*name, reached) for name in names]
                    continue
                todo += [(*name, stage) for name in names]
        return False

    def _stage_after(self, body: int, eqn: ir.Eqn, value: ir.Var, stage: str) -> str:
        """What an equation makes of a square, its sum, or the root of that; "" for another."""
        name = eqn.primitive.name
        if stage == "square":
            return "sum" if name == "reduce_sum" else ""
        exponent = self._numbers.number_of(body, eqn.invars[1]) if name == "pow" else None
        if name == "rsqrt" or exponent == -0.5:
            return "divided" if stage == "sum" else ""
        if name == "sqrt" or exponent == 0.5:
            return "root" if stage == "sum" else ""
        if name == "div" and eqn.invars[1] is value:
            is_number = self._numbers.number_of(body, eqn.invars[0]) is not None
            return "divided" if stage == "root" and not is_number else ""
        others = [v for v in eqn.invars if v is not value]
        is_scaled = name in ("add", "mul", "div") and not any(v.aval.shape for v in others)
        return stage if is_scaled or hands_on(eqn, value) else ""

    def is_complement(self, body: int, eqn: ir.Eqn) -> bool:
        """Whether an equation subtracts a bounded function's value from 1, as its derivative does.

        The difference has the absolute error of the value, and the derivative multiplies by it.
        """
        one, value = eqn.invars
        maker = self._graph.maker(body, value)
        if maker is None or not op(maker.primitive.name).is_bounded:
            return False
        rows = self._graph.readers(body).get(eqn.outvars[0], ())
        multiplies = all(row != BORDER and self._graph.primitives[row] == "mul" for row in rows)
        return multiplies and self._numbers.number_of(body, one) == 1

    # ------------------------------------------------------------ choices

    def decided_by(self, body: int, condition: ir.Var) -> frozenset[str]:
        """What a condition decides: some of `ARRAYS`, `FACTORS`, `COUNTS` and `OTHERS`."""
        found = set[str]()
        todo, seen = [(body, condition, "")], set[tuple[int, ir.Var, str]]()
        while todo:
            place = here, value, stage = todo.pop()
            if place in seen:
                continue
            seen.add(place)
            if len(seen) > _SEARCH_LIMIT:
                return frozenset((OTHERS,))
            for row in self._graph.readers(here).get(value, ()):
                if row == BORDER:
                    names = self._graph.names_outside(here, value)
                    todo += [(*name, stage) for name in names or ()]
                    found |= {OTHERS} if names is None else set()
                elif inside := self._graph.names_inside(row, value):
                    todo += [(*name, stage) for name in inside]
                else:
                    eqn = self._graph.eqns[row]
                    after = self._after_number if stage else self._after_condition
                    decided, reached = after(here, eqn, value, stage)
                    found |= {decided} if decided else set()
                    todo += [(here, v, reached) for v in eqn.outvars] if not decided else []
        return frozenset(found)

    def _after_condition(
        self, body: int, eqn: ir.Eqn, condition: ir.Var, stage: str
    ) -> tuple[str, str]:
        """What an equation lets a condition decide; or, if that is open, the stage behind it."""
        name = eqn.primitive.name
        is_float = ir.precision_of(eqn.outvars[0].aval) is not None
        if name == "select_n" and eqn.invars[0] is condition and is_float:
            is_number = all(self._numbers.number_of(body, v) is not None for v in eqn.invars[1:])
            return ("", FACTORS) if is_number else (ARRAYS, "")
        if name == "convert_element_type" and is_float:
            return "", FACTORS
        is_handed_on = name in ("and", "or", "not", "broadcast_in_dim", "reshape")
        return ("", stage) if is_handed_on else (OTHERS, "")

    def _after_number(self, body: int, eqn: ir.Eqn, number: ir.Var, stage: str) -> tuple[str, str]:
        """The same for a number that a condition chose."""
        name = eqn.primitive.name
        others = [v for v in eqn.invars if v is not number]
        if name in ("mul", "div"):
            is_factor = any(self._numbers.number_of(body, v) is None for v in others)
            return (stage, "") if is_factor else ("", stage)
        if name == "select_n" and eqn.invars[0] is not number:
            is_number = all(self._numbers.number_of(body, v) is not None for v in others[1:])
            return ("", stage) if is_number else (ARRAYS, "")
        if name == "reduce_sum":
            return "", COUNTS
        return ("", stage) if name in _MOVES else (OTHERS, "")


def _is_square(eqn: ir.Eqn) -> bool:
    name = eqn.primitive.name
    if name == "mul":
        return eqn.invars[0] is eqn.invars[1]
    return name in ("square", "integer_pow") and ir.exponent(eqn) == 2
