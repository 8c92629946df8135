"""Which differences and comparisons of a product's result lose nothing if the result is rounded.

A difference loses the digits that its terms have in common, and a comparison may come out another
way, so a result that is read so keeps its float32 digits. But activation functions are full of
both, and these do not need the digits:

- zero that is subtracted takes no digits away, as in `jax.nn.softplus`;
- the exponential of a value less a function of that value is a factor whose relative error is the
  value's absolute error, as it is in a softmax. The derivative of `jnp.logaddexp` is one;
- a normalisation divides what is left of a value less its mean by its standard deviation, so what
  the layers of models add to such a value is small to begin with;
- rounding keeps the order of values, so it changes a comparison with a number, as a clip has it,
  only for values within a unit roundoff of the number. The errors of the product's operands move
  such values too, unless the operands are exact. Then results are mostly whole numbers, and those
  are exact up to 256. So only numbers below 256 count, and what is decided must be a choice;
- JAX evaluates some functions in more equations than one to have every digit of float32. Such a
  function is as smooth as `exp`, and as exact of a rounded operand as of any.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.analysis.reach import Reach, hands_on
from precpass.analysis.uniform import number_of
from precpass.policy.primitives import op

__all__ = ["TolerantReaders"]

_EXACT_FUNCTIONS = frozenset(("exp_neg_sq",))
"""JAX's functions, by name, that split an operand in two to have every digit of the result.

`exp_neg_sq` is exp(-x^2), the derivative of erf and erfc since jax 0.12; `_split_square` in
`jax/_src/lax/erf.py` says why.
"""
_WHOLE_NUMBERS = 256
"""All whole numbers up to this one are exact in bfloat16."""
_MOST = 64
"""So many values are looked at for what one was made of."""


class TolerantReaders:
    """What the equations of a program that subtract or compare make of a rounded operand."""

    def __init__(self, graph: Graph, reach: Reach) -> None:
        self._graph = graph
        self._reach = reach
        self._exact_functions = frozenset(
            child
            for row, children in graph.children.items()
            if ir.jax_function_name(graph.eqns[row]) in _EXACT_FUNCTIONS
            for _, child in children
        )

    def is_exact_function(self, body: int) -> bool:
        """Whether a body is that of one of JAX's functions that give every digit of float32."""
        return body in self._exact_functions

    def subtracts(self, body: int, eqn: ir.Eqn, var: ir.Var) -> bool:
        """Whether a difference needs no digits of its operand that 16 bits do not hold."""
        minuend, subtrahend = eqn.invars
        if minuend is var and (
            number_of(self._graph, body, subtrahend) == 0 or self._is_normalised(body, eqn)
        ):
            return True
        readers = self._reach.direct(body, eqn.outvars[0])
        if not all(r is not None and r.primitive.name in ("exp", "exp2") for r in readers):
            return False
        other = subtrahend if minuend is var else minuend
        same = self._made_of(body, var, hands_on)
        return not same.isdisjoint(self._made_of(body, other, _any))

    def _is_normalised(self, body: int, eqn: ir.Eqn) -> bool:
        """Whether an equation subtracts a value's mean, to divide by its standard deviation."""
        value, mean = eqn.invars
        if not self._is_mean(body, mean, value):
            return False
        (centred,) = eqn.outvars
        readers = [r for r in self._reach.direct(body, centred) if r is not None]
        scalings = [r for r in readers if r.primitive.name in ("mul", "div")]
        factors = [v for r in scalings for v in r.invars if v is not centred]
        if any(self._is_deviation(body, factor, value) for factor in factors):
            return True
        squares = [r for r in readers if all(v is centred for v in r.invars)]
        squares = [r for r in squares if r.primitive.name in ("square", "integer_pow", "mul")]
        return any(self._divides(body, v) for r in squares for v in r.outvars)

    def _is_mean(self, body: int, atom: ir.Atom, value: ir.Var) -> bool:
        """Whether a value is another one's sum over some dimensions, times a number."""
        same = self._made_of(body, value, hands_on)
        while not ir.is_literal(atom) and (maker := self._reach.makers(body).get(atom)):
            if maker.primitive.name == "reduce_sum":
                return maker.invars[0] in same
            if not hands_on(maker, maker.invars[0]) and maker.primitive.name not in ("div", "mul"):
                return False
            atom, *others = [v for v in maker.invars if number_of(self._graph, body, v) is None]
            if others:
                return False
        return False

    def _is_deviation(self, body: int, atom: ir.Atom, value: ir.Var) -> bool:
        """Whether a value was made of another one by a square root."""
        made_of = self._made_of(body, atom, _any)
        if made_of.isdisjoint(self._made_of(body, value, hands_on)):
            return False
        makers = self._reach.makers(body)
        eqns = [makers[v] for v in made_of if v in makers]
        inside = [e for eqn in eqns for e in ir.all_eqns_of(eqn)]
        return any(e.primitive.name in ("rsqrt", "sqrt") for e in (*eqns, *inside))

    def _divides(self, body: int, square: ir.Var) -> bool:
        """Whether a value is divided by, or its root, once its elements are added up."""
        todo, seen = [(body, square)], set[tuple[int, ir.Var]]()
        while todo and len(seen) < _MOST:
            here, value = todo.pop()
            if (here, value) in seen:
                continue
            seen.add((here, value))
            for reader in self._reach.direct(here, value):
                if reader is None:
                    todo += self._reach.outside(here, value) or ()
                    continue
                name = reader.primitive.name
                is_divisor = name == "div" and reader.invars[1] is value
                if name == "rsqrt" or (
                    is_divisor and number_of(self._graph, here, reader.invars[0]) is None
                ):
                    return True
                todo += self._reach.inside(self._reach.row(here, reader), value)
                others = [v for v in reader.invars if v is not value]
                is_scaled = name in ("add", "mul", "div") and not any(v.aval.shape for v in others)
                if is_scaled or name in ("reduce_sum", "sqrt") or hands_on(reader, value):
                    todo += [(here, v) for v in reader.outvars]
        return False

    def compares(self, body: int, eqn: ir.Eqn) -> bool:
        """Whether a comparison changes a choice at the most, and only of values near a number."""
        traits = op(eqn.primitive.name)
        if not traits.compares:
            return False
        left, right = eqn.invars
        numbers = [number_of(self._graph, body, atom) for atom in (left, right)]
        known = [n for n in numbers if n is not None]
        tests_finite = left is right or any(not math.isfinite(n) for n in known)
        is_near = any(abs(n) < _WHOLE_NUMBERS for n in known) or self._is_choice(body, left, right)
        if not (tests_finite or is_near):
            return False
        # Rounding makes many values equal, but the derivative of a maximum only counts them.
        of_numbers = traits.tests_equality and not tests_finite
        return self._only_chooses(body, eqn.outvars[0], of_numbers)

    def _made_of(
        self, body: int, atom: ir.Atom, follows: Callable[[ir.Eqn, ir.Var], bool]
    ) -> set[ir.Var]:
        """A value and the values of its body that it was made of, by some kinds of equations."""
        todo, seen = [atom], set[ir.Var]()
        while todo and len(seen) < _MOST:
            value = todo.pop()
            if ir.is_literal(value) or value in seen:
                continue
            seen.add(value)
            maker = self._reach.makers(body).get(value)
            if maker is not None:
                operands = (v for v in maker.invars if not ir.is_literal(v))
                todo += [v for v in operands if follows(maker, v)]
        return seen

    def _is_choice(self, body: int, left: ir.Atom, right: ir.Atom) -> bool:
        """Whether one of two values is the other's maximum or minimum with a number near zero."""
        for value, chosen in ((left, right), (right, left)):
            maker = None if ir.is_literal(chosen) else self._reach.makers(body).get(chosen)
            if maker is None or maker.primitive.name not in ("max", "min"):
                continue
            others = [v for v in maker.invars if v is not value]
            numbers = [number_of(self._graph, body, v) for v in others]
            if len(others) == 1 and all(n is not None and abs(n) < _WHOLE_NUMBERS for n in numbers):
                return True
        return False

    def _only_chooses(self, body: int, condition: ir.Var, of_numbers: bool) -> bool:
        """Whether a condition does nothing but choose, if need be only one of some numbers."""
        todo, seen = [(body, condition)], set[tuple[int, ir.Var]]()
        while todo:
            here, value = todo.pop()
            if (here, value) in seen:
                continue
            seen.add((here, value))
            for reader in self._reach.direct(here, value):
                names: list[tuple[int, ir.Var]] | None
                if reader is None:
                    names = self._reach.outside(here, value)
                elif self._chooses(here, reader, value, of_numbers):
                    names = []
                elif reader.primitive.name in ("and", "or", "not", "broadcast_in_dim", "reshape"):
                    names = [(here, v) for v in reader.outvars]
                else:
                    names = self._reach.inside(self._reach.row(here, reader), value) or None
                if names is None or len(seen) > _MOST:
                    return False
                todo += names
        return True

    def _chooses(self, body: int, eqn: ir.Eqn, condition: ir.Var, of_numbers: bool) -> bool:
        if eqn.primitive.name != "select_n" or eqn.invars[0] is not condition:
            return False
        is_float = ir.precision_of(eqn.outvars[0].aval) is not None
        cases = eqn.invars[1:]
        return is_float and not (
            of_numbers and any(number_of(self._graph, body, v) is None for v in cases)
        )


def _any(_eqn: ir.Eqn, _var: ir.Var) -> bool:
    return True
