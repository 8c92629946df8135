"""The values of a body in 8 bits: those that it is given, and those that its products make."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from precpass import jaxpr as ir
from precpass.eight_bits.scaled_product import Rounding
from precpass.plan.borders import BorderCopy
from precpass.policy.precision import Precision

__all__ = ["EightBits", "eight_bit_avals", "quantized_copy"]


def quantized_copy(build: ir.Builder | ir.Direct, x: Any, rounding: Rounding) -> list[Any]:
    """A rounded operand of scaled products, and its scale; no derivative passes through them.

    Args:
        build: where its equations are added.
        x: the operand.
        rounding: how it is rounded.
    """
    low, scale = build.call(lambda x: ir.scaling(rounding, x), [x], rounding)
    # XLA:CPU is kept from folding a transpose into a product of int8, which then takes 3.4 to 5.4
    # times as long as float32's.
    pinned, is_matrix = low.aval.dtype == np.int8, len(low.aval.shape) <= 2
    return [build.detach(low, pinned=pinned, flat=pinned and is_matrix), scale]


class EightBits:
    """The values of a body in 8 bits, each with its scale.

    Args:
        opened: the jaxpr.
        build: where new equations are added.
    """

    def __init__(self, opened: ir.Jaxpr, build: ir.Builder) -> None:
        self.opened = opened
        self.build = build
        self._copies: dict[tuple[Any, Any], list[Any]] = {}
        self._crossing: dict[tuple[Any, bool], list[Any]] = {}

    def copy(self, atom: ir.Atom, read: Any, rounding: Rounding) -> list[Any]:
        """A rounded copy with its scale, which all scaled products share that can.

        Args:
            atom: the value.
            read: what stands for it in the new jaxpr.
            rounding: how it is rounded.
        """
        if ir.is_literal(atom):
            return quantized_copy(self.build, read, rounding)
        key, asked = (atom, rounding), (rounding.precision, rounding.summed)
        if key not in self._copies and (given := self.given(atom, *asked)):
            order, build = rounding.order, self.build
            given = [build.transpose(x, order) if order and x.aval.ndim else x for x in given]
            self._copies[key] = [build.detach(given[0]), given[1]]
        if key not in self._copies:
            self._copies[key] = quantized_copy(self.build, read, rounding)
        return self._copies[key]

    def given(self, atom: ir.Atom, precision: Precision, summed: tuple[int, ...]) -> Any:
        """The values of 8 bits and the scale that a value was made of, if a product can take them.

        None if it was made of others, or has other scales along a contracted dimension.
        """
        values, scale = self._given.get(atom, (None, None))
        if values is None and atom in self._moves:
            return self._given_moved(self._moves[atom], precision, summed)
        if values is None or values.aval.dtype != precision.dtype:
            return None
        shape = scale.aval.shape
        if summed:
            fits = bool(shape) and all(shape[d] == 1 for d in summed)
            return (values, scale) if fits else None
        if set(shape) == {1}:
            (scale,) = self.build.call(lambda s: [s.reshape(())], [scale], "as scalar")
        return None if scale.aval.ndim else (values, scale)

    def _given_moved(self, move: ir.Eqn, precision: Precision, summed: Sequence[int]) -> Any:
        """The values of 8 bits and the scale of a moved value, which are moved in its place."""
        operand, order = move.invars[0], ir.permutation(move)
        if ir.is_literal(operand) or (order is None and summed):
            return None
        given = self.given(operand, precision, tuple(order[d] for d in summed) if order else ())
        if given is None:
            return None
        if order is None:
            return [self.build.bind(move, [given[0]])[0], given[1]]
        return [self.build.transpose(x, order) if x.aval.ndim else x for x in given]

    @functools.cached_property
    def _given(self) -> dict[Any, Any]:
        pairs = ((eqn, ir.dequantized_from(eqn)) for eqn in self.opened.eqns)
        return {eqn.outvars[0]: pair for eqn, pair in pairs if pair}

    @functools.cached_property
    def _moves(self) -> dict[Any, Any]:
        """The body's transposes and reshapes, by their results."""
        return {eqn.outvars[0]: eqn for eqn in self.opened.eqns if ir.moves_whole(eqn)}

    # ------------------------------------------------------------ borders

    def crossing(self, atom: ir.Atom, read: Any, border_copy: BorderCopy) -> list[Any]:
        """The 8 bits, as integers, and the scale in which a value crosses a border.

        Args:
            atom: the value.
            read: what stands for it in the new jaxpr.
            border_copy: its border copy.
        """
        key = atom, border_copy.is_stack
        if not ir.is_literal(atom) and key in self._crossing:
            return self._crossing[key]
        summed = tuple(range(1, atom.aval.ndim)) if border_copy.is_stack else ()
        low, scale = self.copy(atom, read, Rounding(border_copy.precision, summed))
        # With all dimensions, it can be stacked and sliced as the values are.
        shape = tuple(_scale_shape(atom.aval, border_copy))
        if scale.aval.shape != shape:
            spread = functools.partial(jnp.broadcast_to, shape=shape)
            (scale,) = self.build.call(lambda s: [spread(s)], [scale], ("spread", shape))
        made = [self.build.byte_bits(low), scale]
        if not ir.is_literal(atom):
            self._crossing[key] = made
        return made

    def receive(self, var: ir.Var, copies: Sequence[Any], border_copy: BorderCopy) -> None:
        """Takes values and a scale that have crossed a border."""
        values, scale = copies
        self._given[var] = self.build.of_byte_bits(values, border_copy.precision.dtype), scale
        self._crossing[var, border_copy.is_stack] = list(copies)


def eight_bit_avals(aval: ir.Aval, border_copy: BorderCopy) -> list[ir.Aval]:
    """The avals of the values and the scale in which a value crosses a border."""
    values, shape = ir.border_copy_aval(aval, np.uint8), _scale_shape(aval, border_copy)
    return [values, ir.with_sizes(ir.without_reduced(aval), shape, np.dtype(np.float32))]


def _scale_shape(aval: ir.Aval, border_copy: BorderCopy) -> list[Any]:
    """The shape of a value's scale, or of the scales of a stack's slices."""
    keeps_first = border_copy.is_stack
    return [size if keeps_first and d == 0 else 1 for d, size in enumerate(aval.shape)]
