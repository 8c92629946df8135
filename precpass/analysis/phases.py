"""Phases: what is left of a value after whole periods were taken off it.

They are written as `x - jnp.floor(x)`, `x - box * jnp.round(x / box)`, `jnp.modf(x)[0]`, or
`jnp.ceil(x) - x`, by any rounding, and perhaps of a shifted or scaled value. A rounded product is
off by more than a period if its value is large.

The error of a quantisation looks alike. It is subtracted from its value again, or it is the
rounded value less the value and is added to it, as straight-through rounding does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.analysis.numbers import Numbers
from precpass.policy.primitives import op

__all__ = ["Phases"]


class _Part(NamedTuple):
    """A value on the way from a rounded value back to what was rounded.

    Attributes:
        body: the index of its body.
        atom: its name there.
        is_whole: whether the way has passed a rounding.
        calls: the rows of the calls that the way has entered, innermost last.
    """

    body: int
    atom: ir.Atom
    is_whole: bool = False
    calls: tuple[int, ...] = ()


_HAND_ON_PERIODS = frozenset(("mul", "div", "stop_gradient", "convert_element_type", "select_n"))
"""Primitives whose results are whole periods if an operand is."""


def _rounds(eqn: ir.Eqn) -> bool:
    """Whether an equation rounds to whole numbers, or casts to or from an integer."""
    if eqn.primitive.name == "convert_element_type":
        return ir.is_integer(eqn.invars[0].aval) != ir.is_integer(eqn.outvars[0].aval)
    return op(eqn.primitive.name).rounds_to_integers


def _moves(eqn: ir.Eqn) -> bool:
    """Whether an equation hands its operand on, or casts it between floating formats."""
    return eqn.primitive.name in ("stop_gradient", "copy") or ir.is_plain_cast(eqn)


class Phases:
    """The subtractions of a program that make phases.

    Args:
        graph: the program.
        numbers: its values that are one number.
    """

    def __init__(self, graph: Graph, numbers: Numbers) -> None:
        self._graph = graph
        self._numbers = numbers
        self._straight_through = set[int]()

    def has(self, row: int) -> bool:
        """Whether a subtraction takes the whole periods off a value.

        A backward walk asks this of later subtractions first, so an error that is subtracted again
        is known by then.
        """
        if row in self._straight_through:
            return False
        body, eqn = int(self._graph.body[row]), self._graph.eqns[row]
        left, right = eqn.invars
        if self._is_whole_part(body, right, of=left):
            return True
        return self._is_whole_part(body, left, of=right) and not self._is_added_to(
            body, eqn.outvars[0], self._unshifted(body, right)
        )

    def _is_whole_part(self, body: int, atom: ir.Atom, *, of: ir.Atom) -> bool:
        """Whether a value is another one, rounded to whole periods."""
        value, todo, seen = self._unshifted(body, of), [_Part(body, atom)], set[Any]()
        while todo:
            part = todo.pop()
            if part.is_whole and not part.calls and self._unshifted(body, part.atom) is value:
                return True
            at = self._graph.row_of_maker(part.body, part.atom)
            if at is None:
                todo += self._outside(part)
                continue
            if (part.atom, part.is_whole) in seen:
                continue
            seen.add((part.atom, part.is_whole))
            eqn = self._graph.eqns[at]
            is_error = eqn.primitive.name == "sub" and not part.calls
            if is_error and self._unshifted(body, eqn.invars[0]) is value:
                self._straight_through.add(at)
            if inside := self._graph.name_in_call(at, part.atom):
                todo.append(_Part(*inside, part.is_whole, (*part.calls, at)))
            is_whole = part.is_whole or _rounds(eqn)
            if is_whole > part.is_whole or eqn.primitive.name in _HAND_ON_PERIODS:
                todo += [part._replace(atom=v, is_whole=is_whole) for v in eqn.invars]
        return False

    def _outside(self, part: _Part) -> list[_Part]:
        """An operand of a body as its call has it."""
        if not part.calls:
            return []
        outside = self._graph.outside(part.body, part.atom, part.calls[-1])
        assert outside is not None
        return [_Part(outside.body, outside.atom, part.is_whole, part.calls[:-1])]

    def _unshifted(self, body: int, atom: ir.Atom) -> ir.Atom:
        """A value before numbers were added to it and multiplied with it."""
        while (maker := self._graph.maker(body, atom)) is not None:
            others = [v for v in maker.invars if self._numbers.number_of(body, v) is None]
            is_shifted = maker.primitive.name in ("add", "sub", "mul", "div", "neg")
            if len(others) != 1 or not (is_shifted or _moves(maker)):
                break
            (atom,) = others
        return atom

    def _is_added_to(self, body: int, var: ir.Var, value: ir.Atom) -> bool:
        """Whether a variable, moved or cast, is added to a value or to a shifted form of it."""
        for row in self._graph.readers(body).get(var, ()):
            if row < 0:
                continue
            eqn = self._graph.eqns[row]
            if eqn.primitive.name == "add":
                is_added = any(self._unshifted(body, v) is value for v in eqn.invars)
            else:
                is_added = _moves(eqn) and self._is_added_to(body, eqn.outvars[0], value)
            if is_added:
                return True
        return False
