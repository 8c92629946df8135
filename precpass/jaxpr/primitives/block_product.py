"""The primitive for a product of micro-scaled operands, which a device's own units multiply.

Like the arithmetic around scaled products (`precpass.jaxpr.primitives.scaling`) it is one equation
without a derivative, whatever it is lowered to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from jax.interpreters import batching

from precpass.jaxpr.primitives.scaling import Arithmetic, without_derivative
from precpass.jaxpr.types import Aval, Eqn, Jaxpr

__all__ = ["BlockArithmetic", "block_format", "block_product"]


class BlockArithmetic(Arithmetic, Protocol):
    """An `Arithmetic` that multiplies two arrays, its first operands; their scales follow."""

    @property
    def format(self) -> str:
        """The name of the format."""
        ...

    @property
    def numbers(self) -> Any:
        """The dimension numbers of the product, as of a `dot_general`."""
        ...

    def under_vmap(
        self, avals: Sequence[Aval], dims: Sequence[int | None]
    ) -> tuple[BlockArithmetic, int]:
        """The arithmetic with mapped operands, and the mapped dimension of its result."""
        ...


def block_product(arithmetic: BlockArithmetic, *operands: Any, calls: Jaxpr) -> Any:
    """The product as one equation, whose derivative is zero.

    Args:
        arithmetic: multiplies.
        operands: two arrays and their scales.
        calls: a jaxpr with the primitives in the arithmetic that are lowered by devices, as
            `jax.custom_partitioning` is. JAX tells lowering rules the devices only if it finds such
            a primitive in the program's jaxprs. This one is never run.
    """
    return _product_p.bind(
        *operands, arithmetic=arithmetic, dimension_numbers=arithmetic.numbers, calls=calls
    )[0]


def block_format(eqn: Eqn) -> str:
    """The format in which an equation multiplies micro-scaled operands; "" for all others."""
    return eqn.params["arithmetic"].format if eqn.primitive is _product_p else ""


def _batch(operands: Any, dims: Any, *, arithmetic: BlockArithmetic, calls: Jaxpr, **_: Any) -> Any:
    mapped, dim = arithmetic.under_vmap([x.aval for x in operands], dims)
    return [block_product(mapped, *operands, calls=calls)], [dim]


_product_p = without_derivative("precpass_block_product")
batching.primitive_batchers[_product_p] = _batch
