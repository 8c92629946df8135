"""Which differences of a value and its mean belong to a normalisation by its standard deviation.

If the mean is much larger than the deviation, the difference has fewer digits than the value. In a
normalisation that is tolerated, because the results of a model's layers deviate by as much as their
means, and because a program by hand normalises a bfloat16 result as well. If a mean is subtracted
for any other reason, as from a kernel matrix, its digits are needed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.analysis.reach import Reach, hands_on
from precpass.analysis.uniform import Numbers

__all__ = ["Normalisations"]

_READERS = frozenset(("mul", "div", "square", "integer_pow"))
"""What a normalisation and its derivative do with what is left of a value less its mean."""
_MOST = 64
"""So many values are looked at between a mean, a variance, and a root of the variance."""


class Normalisations:
    """The normalisations of one program, as flax, haiku, equinox and `jnp.var` write them."""

    def __init__(self, graph: Graph, reach: Reach, numbers: Numbers) -> None:
        self._graph = graph
        self._reach = reach
        self._numbers = numbers

    def subtracts_mean(self, body: int, eqn: ir.Eqn) -> bool:
        """Whether an equation subtracts a value's mean, to divide by its standard deviation."""
        value, mean = eqn.invars
        same = self._same(body, value)
        axes = self._axes_of_mean(body, mean, same)
        readers = [r for r in self._reach.direct(body, eqn.outvars[0]) if r is not None]
        if axes is None or any(r.primitive.name not in _READERS for r in readers):
            return False
        (centred,) = eqn.outvars
        for reader in readers:
            if _is_square(reader):
                if self._is_divided_by_root(body, reader.outvars[0], axes):
                    return True
            elif reader.primitive.name == "mul" or reader.invars[0] is centred:
                factors = [v for v in reader.invars if v is not centred]
                if any(self._is_deviation(body, v, axes, same) for v in factors):
                    return True
        return False

    def _maker(self, body: int, atom: ir.Atom) -> ir.Eqn | None:
        return None if ir.is_literal(atom) else self._reach.makers(body).get(atom)

    def _same(self, body: int, value: ir.Atom) -> set[ir.Var]:
        """A value and what it was cast or copied from."""
        same = set[ir.Var]()
        while not ir.is_literal(value) and value not in same:
            same.add(value)
            maker = self._reach.makers(body).get(value)
            if maker is not None and ir.keeps_bits(maker):
                value = maker.invars[0]
        return same

    def _axes_of_mean(
        self, body: int, atom: ir.Atom, same: Collection[ir.Var]
    ) -> tuple[int, ...] | None:
        """The dimensions over which a value is the mean of another one; None if it is none."""
        scale = 1.0
        while maker := self._maker(body, atom):
            name = maker.primitive.name
            if name == "reduce_sum":
                sizes = ir.reduced_sizes(maker)
                is_whole = all(isinstance(n, int) for n in sizes)
                is_mean = is_whole and math.isclose(scale * math.prod(sizes), 1.0, rel_tol=1e-5)
                return ir.reduced_axes(maker) if is_mean and _reads(maker, same) else None
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

    def _makers_of(self, body: int, atom: ir.Atom, same: Collection[ir.Var]) -> Iterator[ir.Eqn]:
        """The equations of a body that made a value, without those that made some other values."""
        todo, seen = [atom], set[ir.Var]()
        while todo and len(seen) < _MOST:
            value = todo.pop()
            if ir.is_literal(value) or value in seen or value in same:
                continue
            seen.add(value)
            maker = self._reach.makers(body).get(value)
            if maker is not None:
                yield maker
                todo += maker.invars

    def _is_deviation(
        self, body: int, factor: ir.Atom, axes: tuple[int, ...], same: Collection[ir.Var]
    ) -> bool:
        """Whether a factor was made from the root of a value's variance over some dimensions."""
        for maker in self._makers_of(body, factor, same):
            if maker.primitive.name in ("sqrt", "rsqrt"):
                if self._is_variance(body, maker.invars[0], axes, same):
                    return True
            elif self._is_call_of(maker, axes, same, ("sqrt", "rsqrt")):
                return True
        return False

    def _is_variance(
        self, body: int, atom: ir.Atom, axes: tuple[int, ...], same: Collection[ir.Var]
    ) -> bool:
        makers = tuple(self._makers_of(body, atom, same))
        subtracts = any(maker.primitive.name == "sub" for maker in makers)
        for maker in makers:
            if self._is_call_of(maker, axes, same, ("sub",)):
                return True
            if maker.primitive.name != "reduce_sum" or ir.reduced_axes(maker) != axes:
                continue
            squaring = self._maker(body, maker.invars[0])
            if squaring is None or not _is_square(squaring):
                continue
            centring = self._maker(body, squaring.invars[0])
            is_centred = centring is not None and centring.primitive.name == "sub"
            # the mean of the squares less the square of the mean is a variance too
            if (subtracts and _reads(squaring, same)) or (is_centred and _reads(centring, same)):
                return True
        return False

    def _is_call_of(
        self, eqn: ir.Eqn, axes: tuple[int, ...], same: Collection[ir.Var], names: tuple[str, ...]
    ) -> bool:
        """Whether an equation calls a function of a value, such as `jnp.var`.

        The function squares, adds up over some dimensions, and has an equation of one of the names.
        """
        if not eqn.invars or not _reads(eqn, same):
            return False
        inside = list(ir.all_eqns_of(eqn))
        sums = any(e.primitive.name == "reduce_sum" and ir.reduced_axes(e) == axes for e in inside)
        has_names = any(e.primitive.name in names for e in inside)
        return sums and has_names and any(map(_is_square, inside))

    def _is_divided_by_root(self, body: int, square: ir.Var, axes: tuple[int, ...]) -> bool:
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
                elif (reached := self._stage_after(reader, value, axes, stage)) is not None:
                    todo += [(here, v, reached) for v in reader.outvars]
                todo += [(*name, stage) for name in names]
        return False

    def _is_division(self, body: int, eqn: ir.Eqn, value: ir.Var, stage: str) -> bool:
        if eqn.primitive.name == "rsqrt":
            return stage == "sum"
        is_divisor = eqn.primitive.name == "div" and eqn.invars[1] is value
        return is_divisor and stage == "root" and self._numbers.of(body, eqn.invars[0]) is None

    def _stage_after(
        self, eqn: ir.Eqn, value: ir.Var, axes: tuple[int, ...], stage: str
    ) -> str | None:
        """What the result of an equation is: the square, its sum, the root; None for another."""
        name = eqn.primitive.name
        if stage == "square":
            is_sum = name == "reduce_sum" and ir.reduced_axes(eqn) == axes
            return "sum" if is_sum else None
        if name == "sqrt":
            return "root" if stage == "sum" else None
        others = [v for v in eqn.invars if v is not value]
        is_scaled = name in ("add", "mul", "div") and not any(v.aval.shape for v in others)
        is_divisor = name == "div" and eqn.invars[0] is not value
        return stage if (is_scaled and not is_divisor) or hands_on(eqn, value) else None


def _reads(eqn: ir.Eqn, same: Collection[ir.Var]) -> bool:
    """Whether the first operand of an equation is one of some values."""
    return not ir.is_literal(eqn.invars[0]) and eqn.invars[0] in same


def _is_square(eqn: ir.Eqn) -> bool:
    name = eqn.primitive.name
    if name == "mul":
        return eqn.invars[0] is eqn.invars[1]
    return name in ("square", "integer_pow") and ir.exponent(eqn) == 2
