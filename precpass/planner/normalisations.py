"""Which differences of a value and its mean belong to a normalisation by its standard deviation.

If the mean is much larger than the deviation, the difference has fewer digits than the value. In a
normalisation that is tolerated, because the results of a model's layers deviate by as much as their
means, and because a program by hand normalises a bfloat16 result as well. If a mean is subtracted
for any other reason, as from a kernel matrix, its digits are needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.analysis.reach import Reach, hands_on
from precpass.analysis.uniform import Numbers

__all__ = ["Normalisations"]

_READERS = frozenset(("mul", "div", "square", "integer_pow"))
"""What a normalisation and its derivative do with what is left of a value less its mean."""
_MOST = 64
"""So many values are looked at between a mean, a variance, and a root of the variance."""

_Dimensions = tuple[tuple[Any, ...], tuple[int, ...]]
"""The shape of an array, and the axes over which it is added up."""


class Normalisations:
    """The normalisations of one program, as flax, haiku, equinox and `jnp.var` write them."""

    def __init__(self, graph: Graph, reach: Reach, numbers: Numbers) -> None:
        self._graph = graph
        self._reach = reach
        self._numbers = numbers

    def subtracts_mean(self, body: int, eqn: ir.Eqn) -> bool:
        """Whether an equation subtracts a value's mean, to divide by its standard deviation."""
        value, mean = eqn.invars
        origin = self._origin(body, value)
        over = self._dimensions_of_mean(body, mean, origin)
        readers = [r for r in self._reach.direct(body, eqn.outvars[0]) if r is not None]
        if over is None or any(r.primitive.name not in _READERS for r in readers):
            return False
        (centred,) = eqn.outvars
        for reader in readers:
            if _is_square(reader):
                if self._is_divided_by_root(body, reader.outvars[0], over):
                    return True
            elif reader.primitive.name == "mul" or reader.invars[0] is centred:
                factors = [v for v in reader.invars if v is not centred]
                if any(self._is_deviation(body, v, over, origin) for v in factors):
                    return True
        return False

    def _maker(self, body: int, atom: ir.Atom) -> ir.Eqn | None:
        return self._graph.maker(body, atom)

    def _origin(self, body: int, value: ir.Atom) -> ir.Atom:
        """What a value was copied or reshaped from.

        A group normalisation adds up a value in another shape than the one that it normalises.
        """
        while maker := self._maker(body, value):
            if not (ir.keeps_bits(maker) or maker.primitive.name == "reshape"):
                break
            value = maker.invars[0]
        return value

    def _reads(self, body: int, eqn: ir.Eqn, origin: ir.Atom) -> bool:
        """Whether the first operand of an equation is a value, perhaps copied or reshaped."""
        return self._origin(body, eqn.invars[0]) is origin

    def _dimensions_of_mean(self, body: int, atom: ir.Atom, origin: ir.Atom) -> _Dimensions | None:
        """The dimensions over which a value is the mean of another one; None if it is none."""
        scale = 1.0
        while maker := self._maker(body, atom):
            name = maker.primitive.name
            if name == "reduce_sum":
                sizes = ir.reduced_sizes(maker)
                is_whole = all(isinstance(n, int) for n in sizes)
                is_mean = is_whole and math.isclose(scale * math.prod(sizes), 1.0, rel_tol=1e-5)
                return _reduced(maker) if is_mean and self._reads(body, maker, origin) else None
            if name in ("div", "mul"):
                known = [self._numbers.of(body, v) for v in maker.invars]
                at = 1 if known[0] is None else 0
                number = known[at]
                if not number or known[1 - at] is not None or (name == "div" and at == 0):
                    return None
                scale = scale / number if name == "div" else scale * number
                atom = maker.invars[1 - at]
            elif len(maker.invars) == 1 and hands_on(maker, maker.invars[0]):
                (atom,) = maker.invars
            else:
                return None
        return None

    def _root(self, body: int, eqn: ir.Eqn) -> str | None:
        """The root that an equation takes, "sqrt" or "rsqrt"; None if it takes none."""
        name = eqn.primitive.name
        if name == "pow":
            exponent = self._numbers.of(body, eqn.invars[1])
            return {0.5: "sqrt", -0.5: "rsqrt"}.get(exponent) if exponent is not None else None
        return name if name in ("sqrt", "rsqrt") else None

    def _makers_of(self, body: int, atom: ir.Atom, origin: ir.Atom) -> Iterator[ir.Eqn]:
        """The equations of a body that made a value, back to those that read the origin."""
        todo, seen = [atom], set[ir.Var]()
        while todo and len(seen) < _MOST:
            value = todo.pop()
            if ir.is_literal(value) or value in seen or self._origin(body, value) is origin:
                continue
            seen.add(value)
            maker = self._maker(body, value)
            if maker is not None:
                yield maker
                todo += maker.invars

    def _is_deviation(self, body: int, factor: ir.Atom, over: _Dimensions, origin: ir.Atom) -> bool:
        """Whether a factor was made from the root of a value's variance over some dimensions."""
        for maker in self._makers_of(body, factor, origin):
            if self._root(body, maker) is not None:
                if self._is_variance(body, maker.invars[0], over, origin):
                    return True
            elif self._is_call_of(body, maker, over, origin, ("sqrt", "rsqrt")):
                return True
        return False

    def _is_variance(self, body: int, atom: ir.Atom, over: _Dimensions, origin: ir.Atom) -> bool:
        makers = tuple(self._makers_of(body, atom, origin))
        subtracts = any(maker.primitive.name == "sub" for maker in makers)
        for maker in makers:
            if self._is_call_of(body, maker, over, origin, ("sub",)):
                return True
            if maker.primitive.name != "reduce_sum" or _reduced(maker) != over:
                continue
            squaring = self._maker(body, maker.invars[0])
            if squaring is None or not _is_square(squaring):
                continue
            centring = self._maker(body, squaring.invars[0])
            is_centred = centring is not None and centring.primitive.name == "sub"
            # the mean of the squares less the square of the mean is a variance too
            is_of_value = subtracts and self._reads(body, squaring, origin)
            if is_of_value or (is_centred and self._reads(body, centring, origin)):
                return True
        return False

    def _is_call_of(
        self,
        body: int,
        eqn: ir.Eqn,
        over: _Dimensions,
        origin: ir.Atom,
        names: tuple[str, ...],
    ) -> bool:
        """Whether an equation calls a function of a value, such as `jnp.var`.

        The function squares, adds up over some dimensions, and has an equation of one of the names.
        """
        if not eqn.invars or not self._reads(body, eqn, origin):
            return False
        inside = list(ir.all_eqns_of(eqn))
        sums = any(e.primitive.name == "reduce_sum" and _reduced(e) == over for e in inside)
        has_names = any(e.primitive.name in names for e in inside)
        return sums and has_names and any(map(_is_square, inside))

    def _is_divided_by_root(self, body: int, square: ir.Var, over: _Dimensions) -> bool:
        """Whether anything is divided by the root of a square that was summed over dimensions."""
        todo, seen = [(body, square, "square")], set[tuple[int, ir.Var, str]]()
        while todo and len(seen) < _MOST:
            place = here, value, stage = todo.pop()
            if place in seen:
                continue
            seen.add(place)
            for reader in self._reach.direct(here, value):
                names: list[tuple[int, ir.Var]] = []
                if reader is None:
                    names = self._reach.outside(here, value) or []
                elif self._is_division(here, reader, value, stage):
                    return True
                elif (row := self._reach.row(here, reader)) in self._graph.children:
                    names = self._reach.inside(row, value)
                elif (reached := self._stage_after(here, reader, value, over, stage)) is not None:
                    todo += [(here, v, reached) for v in reader.outvars]
                todo += [(*name, stage) for name in names]
        return False

    def _is_division(self, body: int, eqn: ir.Eqn, value: ir.Var, stage: str) -> bool:
        if self._root(body, eqn) == "rsqrt":
            return stage == "sum"
        is_divisor = eqn.primitive.name == "div" and eqn.invars[1] is value
        return is_divisor and stage == "root" and self._numbers.of(body, eqn.invars[0]) is None

    def _stage_after(
        self, body: int, eqn: ir.Eqn, value: ir.Var, over: _Dimensions, stage: str
    ) -> str | None:
        """What the result of an equation is: the square, its sum, the root; None for another."""
        name = eqn.primitive.name
        if stage == "square":
            is_sum = name == "reduce_sum" and _reduced(eqn) == over
            return "sum" if is_sum else None
        if self._root(body, eqn) == "sqrt":
            return "root" if stage == "sum" else None
        others = [v for v in eqn.invars if v is not value]
        is_scaled = name in ("add", "mul", "div") and not any(v.aval.shape for v in others)
        is_divisor = name == "div" and eqn.invars[0] is not value
        return stage if (is_scaled and not is_divisor) or hands_on(eqn, value) else None


def _reduced(eqn: ir.Eqn) -> _Dimensions:
    """The dimensions over which a `reduce_sum` adds up.

    The axes alone would take a mean over groups for one over the whole of another shape.
    """
    return eqn.invars[0].aval.shape, ir.reduced_axes(eqn)


def _is_square(eqn: ir.Eqn) -> bool:
    name = eqn.primitive.name
    if name == "mul":
        return eqn.invars[0] is eqn.invars[1]
    return name in ("square", "integer_pow") and ir.exponent(eqn) == 2
