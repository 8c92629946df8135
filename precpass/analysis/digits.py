"""Which values are read where it would show that they were rounded to 16 bits once more.

A lowered product is off by the rounding of its operands, and the errors of the terms average out.
If its result is rounded as well, most readers lose nothing: a network's next layer reads it in 16
bits anyway. These do: what the result leaves the program to, what it is subtracted from or compared
with, and what ranks it. Each reader's question is handed back to the operands of the equations that
made the value (`analysis.backward`). `analysis.idioms` has the differences and comparisons that
lose nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from precpass import jaxpr as ir
from precpass.analysis.backward import BackwardWalk, BodyAsks
from precpass.analysis.equations import hands_on, moved_operand, negates, scales, tells_apart
from precpass.analysis.graph import Graph
from precpass.analysis.idioms import ARRAYS, COUNTS, FACTORS, Idioms
from precpass.analysis.numbers import Numbers
from precpass.policy.primitives import ROWS, OpKind, named, op

__all__ = ["Digits", "DigitsRead", "left_with"]

_FAR = 32
"""Multiples of 1/8 up to this one are exact in bfloat16, whose significand has 8 bits. So results
of exact operands, which are mostly whole numbers or have few binary places, still compare with a
smaller number as in float32."""


class Digits:
    """How a value is read where it would show that it was rounded: bits of an integer."""

    LEAVING = 1
    """The program returns it, perhaps moved, scaled by a number, or as a term of a cotangent."""
    STATE = 2
    """A loop carries it to its next iteration, perhaps moved or scaled by a number."""
    STACKED = 4
    """A loop stacks it, perhaps moved or scaled by a number."""
    CHOSEN = 8
    """It leaves, or is stacked, behind a choice between it and other values."""
    SUBTRACTED = 16
    COMPARED = 32
    NEAR = 64
    """It is compared with a number, or with its own maximum, and results near that change a choice
    at the most. The rounding must be the same on both sides."""
    RANKED = 128
    MAGNIFIED = 256
    """A function such as `exp` makes a larger error of its error."""
    FACTOR = 512
    """It is a factor of what is subtracted, compared or magnified."""
    TERM = 1024
    """It is a term of what is subtracted."""
    ANY_LEAVING = LEAVING | STATE | STACKED


class _Asked(NamedTuple):
    """What is asked of a value.

    Attributes:
        level: how it is read, as `Digits`.
        number: the largest number that it is compared with, scaled as the value is.
    """

    level: int
    number: float = 0.0


def left_with(eqn: ir.Eqn, v: ir.Atom, level: int) -> int:
    """How an operand leaves the program because a result leaves it as `level` says."""
    name, leaves = eqn.primitive.name, level & Digits.ANY_LEAVING
    if moved_operand(eqn) is v or name in _SUMS or (scales(eqn) and name != "select_n"):
        return leaves
    return leaves & Digits.LEAVING if name in _KEEPS_TERMS else 0


_SUMS = frozenset(("psum", "psum_invariant", "reduce_scatter"))
# The gradient of a weight of which parts are read is put together from parts, or adds them up.
_KEEPS_TERMS = frozenset(("add_any", "pad", "concatenate", "broadcast_in_dim", "device_put"))
_NOTHING, _SUBTRACTED = _Asked(0), _Asked(Digits.SUBTRACTED)
_COMPARED, _RANKED = _Asked(Digits.COMPARED), _Asked(Digits.RANKED)
_MAGNIFIED, _TERM, _LEAVING = (_Asked(n) for n in (Digits.MAGNIFIED, Digits.TERM, Digits.LEAVING))
_IN_FUNCTION = Digits.SUBTRACTED | Digits.COMPARED | Digits.MAGNIFIED | Digits.FACTOR
_MAGNIFYING = frozenset(
    name for name, row in ROWS.items() if row.full_precision and row.kind is OpKind.ELEMENTWISE
)
_ASKING = frozenset(
    (*named("compares"), *named("ranks"), *named("no_low_kernel"), *_MAGNIFYING)
    + ("sub", "mul", "neg", "convert_element_type", "scan", "while")
)


class DigitsRead(BackwardWalk[_Asked]):
    """How the values of a program are read.

    Args:
        graph: the program.
        numbers: its values that are one number.
        idioms: what its differences and comparisons belong to.
    """

    def __init__(self, graph: Graph, numbers: Numbers, idioms: Idioms) -> None:
        super().__init__(graph, _ASKING, _NOTHING)
        self._numbers = numbers
        self._idioms = idioms
        self._live: dict[int, set[int]] = {}
        results = ir.open_jaxpr(graph.root.jaxpr).outvars
        self.body(0, tuple(_LEAVING if ir.is_inexact(v.aval) else _NOTHING for v in results))
        self._of: dict[tuple[int, Any], _Asked] = {}
        for at, asks in self.found():
            for v, asked in asks.of.items():
                self._of[at, v] = self.joined(self._of.get((at, v), _NOTHING), asked)

    def digits_of(self, body: int, var: ir.Var) -> int:
        """How a value is read, at any of its body's call sites, as bits of `Digits`."""
        asked = self._of.get((body, var), _NOTHING)
        is_far = asked.level & Digits.NEAR and asked.number >= _FAR
        return asked.level | (Digits.COMPARED if is_far else 0)

    def joined(self, one: _Asked, other: _Asked) -> _Asked:
        """What two readers ask."""
        return _Asked(one.level | other.level, max(one.number, other.number))

    def asks(self, row: int) -> bool:
        """Whether an equation asks something though nothing is asked of its results."""
        eqn, name = self.graph.eqns[row], self.graph.primitives[row]
        if name == "mul":
            return negates(eqn)
        return name != "convert_element_type" or tells_apart(eqn)

    def of_result(self, body: ir.Body, result: int, asked: _Asked) -> _Asked:
        """A loop's state leaves the trip."""
        if any(result == out for _, out in body.carry):
            return _Asked(asked.level & ~Digits.LEAVING | Digits.STATE, asked.number)
        is_in_loop = body.carry or body.trips != 1
        return self.joined(asked, _Asked(Digits.STACKED)) if is_in_loop else asked

    def operands(self, row: int, eqn: ir.Eqn, asked: _Asked, here: BodyAsks[_Asked]) -> Any:
        """What an equation asks of its operands."""
        body = int(self.graph.body[row])
        if row not in self._live_rows(body) or body in self._idioms.exact_functions:
            return ()
        own = self._own(row, body, eqn)
        pairs = zip(eqn.invars, own, strict=True)
        return [
            self.joined(asks, self._handed_on(body, eqn, asked, v))
            if ir.is_inexact(v.aval)
            else _NOTHING
            for v, asks in pairs
        ]

    def _live_rows(self, body: int) -> set[int]:
        """The rows of a body on which its results depend, or that have effects.

        JAX leaves equations behind that nothing reads, such as a derivative of a softmax's maximum.
        """
        if body not in self._live:
            node = self.graph.bodies[body]
            live, read = set[int](), set[ir.Var]()
            read.update(v for v in ir.open_jaxpr(node.jaxpr).outvars if not ir.is_literal(v))
            for row in range(node.stop - 1, node.start - 1, -1):
                eqn = self.graph.eqns[row]
                if eqn.effects or not read.isdisjoint(eqn.outvars):
                    live.add(row)
                    read.update([v for v in eqn.invars if not ir.is_literal(v)])
            self._live[body] = live
        return self._live[body]

    # ------------------------------------------------------------ what an equation asks by itself

    def _own(self, row: int, body: int, eqn: ir.Eqn) -> Sequence[_Asked]:
        name, table, count = eqn.primitive.name, op(eqn.primitive.name), len(eqn.invars)
        if name == "sub":
            asked = _NOTHING if self._idioms.keeps_digits(body, eqn) else _SUBTRACTED
            if self._idioms.is_shift_of_choice(body, eqn):
                asked = _TERM
            is_complement = self._idioms.is_complement(body, eqn)
            return [asked, _NOTHING if is_complement else _SUBTRACTED]
        if table.compares:
            return [self._compared(body, eqn)] * count
        if table.ranks:
            return [_RANKED] * count
        if tells_apart(eqn):
            return [_COMPARED] * count
        if negates(eqn) and self._is_added(body, eqn.outvars[0]):
            return [_SUBTRACTED] * count
        if name in _MAGNIFYING and not scales(eqn):
            return [_MAGNIFIED] * count
        return [_NOTHING] * count

    def _is_added(self, body: int, var: ir.Var) -> bool:
        """Whether a value is added to another one, as it is or moved."""
        for row in self.graph.readers(body).get(var, ()):
            if row >= 0:
                reader = self.graph.eqns[row]
                if reader.primitive.name == "add":
                    return True
                if moved_operand(reader) is var and self._is_added(body, reader.outvars[0]):
                    return True
        return False

    def _compared(self, body: int, eqn: ir.Eqn) -> _Asked:
        """What a comparison asks of the values that it compares."""
        left, right = eqn.invars
        numbers = [self._numbers.number_of(body, v) for v in eqn.invars]
        known = [n for n in numbers if n is not None]
        tests_equality = op(eqn.primitive.name).tests_equality
        # A comparison with zero only reads the sign, which survives rounding.
        if left is right or any(n == 0 or not math.isfinite(n) for n in known):
            return _NOTHING
        pairs = (left, right), (right, left)
        is_of_maximum = tests_equality and any(
            self._idioms.is_maximum(body, a, of=b) for a, b in pairs
        )
        number = known[0] if len(known) == 1 else self._choice(body, left, right)
        if number is None and not is_of_maximum:
            return _COMPARED
        # Rounding makes more values equal, but the derivative of a maximum only counts them.
        may_be = {FACTORS} if tests_equality else {FACTORS, ARRAYS}
        may_be |= {COUNTS} if is_of_maximum else set()
        if not self._idioms.decided_by(body, eqn.outvars[0]) <= may_be:
            return _COMPARED
        return _Asked(Digits.NEAR, 0.0 if is_of_maximum or number is None else abs(number))

    def _choice(self, body: int, left: ir.Atom, right: ir.Atom) -> float | None:
        """The number with which one value is the maximum or minimum of the other one."""
        for value, chosen in ((left, right), (right, left)):
            maker = self.graph.maker(body, chosen)
            if maker is not None and maker.primitive.name in ("max", "min"):
                others = [v for v in maker.invars if v is not value]
                if len(others) == 1:
                    return self._numbers.number_of(body, others[0])
        return None

    # ------------------------------------------------------------ what is handed back

    def _handed_on(self, body: int, eqn: ir.Eqn, asked: _Asked, v: ir.Atom) -> _Asked:
        """What is asked of an operand because something is asked of the results."""
        if not asked.level or ir.is_literal(v):
            return _NOTHING
        name, level, number = eqn.primitive.name, asked.level & ~Digits.NEAR, asked.number
        leaves = left_with(eqn, v, level)
        if moved_operand(eqn) is v or (scales(eqn) and name != "select_n"):
            kept = level
        elif hands_on(eqn, v):
            chosen = level & Digits.ANY_LEAVING & ~leaves
            kept = level & ~chosen | (Digits.CHOSEN if chosen else 0)
        elif name in ("mul", "square", "integer_pow"):
            kept = level & (Digits.COMPARED | Digits.RANKED)
            kept |= Digits.FACTOR if level & _IN_FUNCTION else 0
        elif name in ("add", "add_any"):
            kept = level & (Digits.COMPARED | Digits.RANKED)
            kept |= Digits.TERM if level & (Digits.SUBTRACTED | Digits.TERM) else 0
        else:
            kept = level & Digits.RANKED if op(name).kind is OpKind.ELEMENTWISE else 0
        if asked.level & Digits.NEAR and (inside := self._number_inside(body, eqn, v, number)):
            kept, number = kept | Digits.NEAR, inside
        return _Asked(kept | leaves, number)

    def _number_inside(self, body: int, eqn: ir.Eqn, v: ir.Atom, number: float) -> float:
        """The number with which an operand is compared if the result is with one; 0 for none.

        The comparison `p / 1000 > 0.5` is one of `p` with 500.
        """
        operands = eqn.invars[1:] if eqn.primitive.name == "select_n" else eqn.invars
        others = [self._numbers.number_of(body, other) for other in operands if other is not v]
        known = [abs(n) for n in others if n is not None]
        if len(known) < len(others) or len(eqn.outvars) > 1:
            return 0.0
        other = known[0] if known else 0.0
        match eqn.primitive.name:
            case "add" | "add_any" | "sub":
                return number + other
            case "mul" if other:
                return number / other
            case "div" if other and eqn.invars[0] is v:
                return number * other
            case _:
                return number
