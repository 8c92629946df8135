"""Which equations read a value, also behind equations that hand it on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from precpass import jaxpr as ir
from precpass.analysis.equations import moved_operand
from precpass.analysis.graph import Graph
from precpass.analysis.uses import Uses
from precpass.policy.primitives import OpKind, op

__all__ = ["Reach", "Reader", "hands_on", "is_shift", "tells_apart"]

_SAME = frozenset(("neg", "abs", "copy", "clamp", "stop_gradient"))
"""Elementwise primitives whose results have the numbers of an operand, apart from selections."""
_OF_MAXIMUM = frozenset(
    (
        *("reduce_max", "max", "broadcast_in_dim", "reshape", "squeeze", "expand_dims"),
        *("stop_gradient", "copy", "select_n", "is_finite", "transpose"),
    )
)
"""Primitives between a value and its maximum, as the softmaxes of JAX subtract it."""
_MOST = 500
"""So many readers of one value are looked at; a value with more is treated as one that leaves."""


class Reader(NamedTuple):
    """An equation that reads a value under a name that the value has there.

    Attributes:
        body: the index of the equation's body.
        eqn: the equation; None if the value leaves the program, or is a loop's state.
        var: the operand.
    """

    body: int
    eqn: Any
    var: Any


class Reach:
    """The readers of a program's values, in and behind equations that hand a value on.

    Args:
        graph: the program.
        uses: its direct readers.
        stacks: whether a loop's stack is a name of the values that it stacks. Where it is not, they
            leave the program there.
    """

    def __init__(self, graph: Graph, uses: Uses, *, stacks: bool = False) -> None:
        self.graph = graph
        self._stacks = stacks
        self._uses = uses
        self._rows: dict[int, dict[int, int]] = {}

    def readers(
        self, body: int, var: ir.Var, hands_on: Callable[[ir.Eqn, ir.Var], bool]
    ) -> Iterator[Reader]:
        """Every equation that reads a value, an equation that hands it on included.

        Args:
            body: the index of the value's body.
            var: the value.
            hands_on: whether the results of an equation stand for its operand.
        """
        todo, seen = [(body, var)], set[tuple[int, ir.Var]]()
        while todo:
            body, var = todo.pop()
            if (body, var) in seen:
                continue
            seen.add((body, var))
            if len(seen) > _MOST:
                yield Reader(body, None, var)
                return
            for eqn in self._uses.of(body).get(var, ()):
                if eqn is None:
                    outside = self.outside(body, var)
                    if outside is None:
                        yield Reader(body, None, var)
                    else:
                        todo += outside
                elif (row := self.row(body, eqn)) in self.graph.children:
                    todo += self.inside(row, var)
                else:
                    yield Reader(body, eqn, var)
                    if hands_on(eqn, var):
                        todo += [(body, result) for result in eqn.outvars]

    def is_shift(self, reader: Reader) -> bool:
        """Whether a reader subtracts a value's own maximum from it, as a softmax does."""
        if reader.eqn.primitive.name != "sub":
            return False
        return is_shift(self.graph, reader.body, reader.eqn, reader.var)

    def row_of(self, reader: Reader) -> int:
        """The row of a reader's equation."""
        return self.row(reader.body, reader.eqn)

    def direct(self, body: int, var: ir.Var) -> list[Any]:
        """The equations of a body that read a value; None stands for the body's border."""
        return list(self._uses.of(body).get(var, ()))

    def before(self, body: int, var: ir.Var) -> tuple[int, Any] | None:
        """The name of a body's operand at its only caller; None for one of a loop's trips."""
        callers = self.graph.callers[body]
        invars = ir.open_jaxpr(self.graph.bodies[body].jaxpr).invars
        if len(callers) != 1 or var not in invars:
            return None
        ((row, inner),) = callers
        if inner.trips != 1 or inner.carry:
            return None
        atom = self.graph.eqns[row].invars[inner.operands[invars.index(var)]]
        return int(self.graph.body[row]), atom

    def row(self, body: int, eqn: ir.Eqn) -> int:
        """The row of an equation of a body."""
        if body not in self._rows:
            start = self.graph.bodies[body].start
            eqns = ir.open_jaxpr(self.graph.bodies[body].jaxpr).eqns
            self._rows[body] = {id(eqn): start + at for at, eqn in enumerate(eqns)}
        return self._rows[body][id(eqn)]

    def inside(self, row: int, var: ir.Var) -> list[tuple[int, ir.Var]]:
        """The names of an equation's operand in the bodies of the equation."""
        names: list[tuple[int, ir.Var]] = []
        for inner, child in self.graph.children.get(row, ()):
            entering = zip(ir.open_jaxpr(inner.jaxpr).invars, inner.operands, strict=False)
            names += [(child, v) for v, at in entering if self.graph.eqns[row].invars[at] is var]
        return names

    def outside(self, body: int, var: ir.Var) -> list[tuple[int, ir.Var]] | None:
        """The names of a body's result at its callers; None if it leaves the program.

        It is None too for a loop's state, and for what a loop stacks if `stacks` is false.
        """
        callers = self.graph.callers[body]
        outvars = ir.open_jaxpr(self.graph.bodies[body].jaxpr).outvars
        names: list[tuple[int, ir.Var]] = []
        for row, inner in callers:
            is_state = any(outvars[at] is var for _, at in inner.carry)
            is_in_loop = inner.trips != 1 or bool(inner.carry)
            if not inner.results or is_state or (is_in_loop and not self._stacks):
                return None
            results, here = self.graph.eqns[row].outvars, int(self.graph.body[row])
            leaving = zip(outvars, inner.results, strict=False)
            names += [(here, results[at]) for outvar, at in leaving if outvar is var]
        return names if callers else None


def hands_on(eqn: ir.Eqn, var: ir.Var) -> bool:
    """Whether the numbers of a value are in an equation's results: moved, repeated, or chosen.

    A boundary, such as another library's primitive, may return its operand as it is.
    """
    name = eqn.primitive.name
    row = op(name)
    if row.kind is OpKind.BOUNDARY:
        held = ir.precision_of(var.aval)
        return any(ir.precision_of(v.aval) is held for v in eqn.outvars)
    if moved_operand(eqn) is var or row.chooses or name in _SAME:
        return True
    data = range(len(eqn.invars)) if row.data is None else row.data
    return row.kind is OpKind.DATA_MOVEMENT and any(eqn.invars[i] is var for i in data)


def tells_apart(eqn: ir.Eqn) -> bool:
    """Whether close values of an operand give different results: an order, or whole numbers."""
    row = op(eqn.primitive.name)
    if eqn.primitive.name == "convert_element_type":
        return ir.precision_of(eqn.outvars[0].aval) is None
    # A comparison with zero only reads the sign, which survives rounding.
    with_zero = any(ir.is_literal(v) and not v.val for v in eqn.invars)
    return row.ranks or row.no_low_kernel or (row.compares and not with_zero)


def is_shift(graph: Graph, body: int, eqn: ir.Eqn, var: ir.Var) -> bool:
    """Whether a difference is that of a value and its own maximum, as in a softmax.

    Args:
        graph: the program.
        body: the index of the equation's body.
        eqn: an equation that subtracts.
        var: its operand.
    """
    (other,) = [v for v in eqn.invars if v is not var] or [var]
    is_maximum = False
    while other is not var and (maker := graph.maker(body, other)) is not None:
        is_maximum |= maker.primitive.name == "reduce_max"
        if maker.primitive.name not in _OF_MAXIMUM:
            return False
        other = next((v for v in maker.invars if not ir.is_literal(v)), maker.invars[0])
    return is_maximum and other is var
