"""Transposes before products: operands that XLA:CPU would bring into another order in memory.

XLA:CPU gives the result of a transpose the layout of its operand, and widens those operands of a
low product that are transposed matrices in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.equations import hands_on_layout
from precpass.backends.cpu_kernels import is_in_order
from precpass.jaxpr.dimension_numbers import untransposed

__all__ = ["Layouts"]


class Layouts:
    """Which values of a body are out of row-major order in memory.

    Args:
        opened: the jaxpr.
    """

    def __init__(self, opened: ir.Jaxpr) -> None:
        self._opened = opened

    @functools.cached_property
    def _transposed(self) -> dict[Any, Any]:
        """The body's transposes, by their results."""
        return ir.transposes(self._opened)

    @functools.cached_property
    def out_of_order(self) -> set[Any]:
        """The results of transposes, and the matrices that are computed or moved from them.

        XLA gives the results of such equations the layout of their operands. Values with more
        dimensions are left alone: XLA's kernels take most of their layouts, and reordering them
        costs more (measured: tangents under a vmap took twice the time of a gradient).
        """
        transposed, is_literal = set(self._transposed), ir.is_literal
        for eqn in self._opened.eqns if transposed else ():
            for v in eqn.invars:
                if not is_literal(v) and v in transposed:
                    if hands_on_layout(eqn):
                        transposed.update(eqn.outvars)
                    break
        return {v for v in transposed if v in self._transposed or v.aval.ndim <= 2}

    def without_transposes(self, eqn: ir.Eqn, is_made: Callable[[Any], bool]) -> Any:
        """A product that reads its operands from before their transposes, if a dot can express it.

        Args:
            eqn: the product.
            is_made: whether a low copy of a value exists already, or another value is in its place.
        """
        if not self._transposed or ir.dot_numbers(eqn) is None:
            return eqn
        for side in (0, 1):
            read = eqn
            while (transpose := self._transposing(read.invars[side], is_made)) is not None:
                order = ir.permutation(transpose)
                assert order is not None
                numbers = untransposed(ir.dot_numbers(read), side, order)
                if numbers is None:
                    break
                read = ir.with_operand(read, side, transpose.invars[0], numbers)
                # Transposed here once more, an operand would be saved twice for the backward pass.
                eqn = read if side == 1 or is_in_order(len(order), numbers) else eqn
        return eqn

    def _transposing(self, atom: ir.Atom, is_made: Callable[[Any], bool]) -> Any:
        """The transpose that makes a value, if the value is read in no other form yet."""
        return None if ir.is_literal(atom) or is_made(atom) else self._transposed.get(atom)
