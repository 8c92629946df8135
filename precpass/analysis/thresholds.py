"""Which comparisons of a program are with a tolerance."""

from __future__ import annotations

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.analysis.numbers import Numbers
from precpass.policy.primitives import OpKind, op

__all__ = ["Thresholds", "moves"]

_OF_LOOPS, _OF_RESULTS = 0.1, 2**-8
"""A threshold from here on is no tolerance: of a loop, and of another comparison. Errors of 16 bits
do not keep a residual above the first; the second is an error of bfloat16."""


_FUNCTIONS = frozenset(("sqrt", "rsqrt", "cbrt", "exp", "exp2", "pow", "log"))
"""Functions by which programs write tolerances, such as the root of a machine epsilon."""


def moves(name: str) -> bool:
    """Whether a primitive only moves or casts its operands."""
    return op(name).kind is OpKind.DATA_MOVEMENT or name in ("convert_element_type", "copy")


class Thresholds:
    """The thresholds of a program's comparisons.

    Args:
        graph: the program.
        numbers: its values that are one number.
    """

    def __init__(self, graph: Graph, numbers: Numbers) -> None:
        self.graph = graph
        self._numbers = numbers

    def has_tolerance(self, row: int, *, in_loop: bool) -> bool:
        """Whether a comparison is with a tolerance, or of zero with a difference from one.

        Args:
            row: the comparison's equation.
            in_loop: whether it decides if a loop goes on. A tolerance may be given to a loop, or
                be 1: libraries divide an error by its tolerance.
        """
        body, operands = int(self.graph.body[row]), self.graph.eqns[row].invars
        numbers = [self._numbers.number_of(body, v) for v in operands]
        if (in_loop and 1 in numbers) or any(
            self._is_tolerance(body, v, in_loop) for v in operands
        ):
            return True
        makers = filter(None, (self.graph.maker(body, v) for v in operands if 0 in numbers))
        parts = (v for maker in makers if maker.primitive.name == "sub" for v in maker.invars)
        return any(self._is_tolerance(body, v, in_loop) for v in parts)

    def _is_tolerance(self, body: int, atom: ir.Atom, in_loop: bool) -> bool:
        """Whether a number is small, a multiple of a small one, or given to a loop."""
        number = self._numbers.number_of(body, atom)
        if number is not None:
            return 0 < abs(number) < (_OF_LOOPS if in_loop else _OF_RESULTS)
        row = self.graph.row_of_maker(body, atom)
        if row is None:
            return in_loop and self._is_given(body, atom)
        maker = self.graph.eqns[row]
        name = maker.primitive.name
        if inside := self.graph.name_in_call(row, atom):
            return self._is_tolerance(*inside, in_loop)
        if in_loop and name in _FUNCTIONS:
            (operand, *_) = maker.invars
            return self._is_tolerance(body, operand, in_loop) or self._is_given(body, operand)
        if name in ("mul", "max", "min", "square", "integer_pow", "select_n"):
            values = maker.invars[name == "select_n" :]
            return any(self._is_tolerance(body, v, in_loop) for v in values)
        if name == "add":
            return all(self._is_tolerance(body, v, in_loop) for v in maker.invars)
        return moves(name) and self._is_tolerance(body, maker.invars[0], in_loop)

    def _is_given(self, body: int, atom: ir.Atom) -> bool:
        """Whether an operand of a loop is the same in each of its trips."""
        loops = [of for of in self.graph.callers[body] if of[1].decides or of[1].carry]
        invars = ir.open_jaxpr(self.graph.bodies[body].jaxpr).invars
        if not loops or atom not in invars:
            return False
        (row, loop), at = loops[0], invars.index(atom)
        if at < loop.constants:
            return True
        trip, _ = self.graph.children[row][-1]  # of a while: its condition stands before its body
        opened = ir.open_jaxpr(trip.jaxpr)
        carried = at - loop.constants
        return opened.outvars[carried] is opened.invars[trip.constants + carried]
