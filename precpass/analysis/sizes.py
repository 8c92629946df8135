"""Bytes, floating-point operations and matrix sizes of values and equations."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from precpass import jaxpr as ir
from precpass.policy.primitives import OpKind, op

__all__ = ["NOMINAL_SIZE", "element_count", "flops", "nbytes", "product_sizes"]


NOMINAL_SIZE = 128
"""The size that a symbolic dimension counts as, and the trips of a while loop."""


def element_count(shape: tuple[Any, ...]) -> float:
    """The number of elements in an array; a symbolic dimension counts as `NOMINAL_SIZE`."""
    return math.prod((d if isinstance(d, int) else NOMINAL_SIZE for d in shape), start=1.0)


@functools.lru_cache(maxsize=4096)
def nbytes(aval: ir.Aval) -> float:
    """The bytes of a value; 0 for tokens, keys and references."""
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return itemsize * element_count(getattr(aval, "shape", ()))


def flops(eqn: ir.Eqn) -> float:
    """Floating-point operations of one execution.

    A product counts 2 M N K, a reduction one per operand element, elementwise work one
    per result element; data movement and bodies count none. Products are counted in real
    operations: a complex multiply-add is four real ones, and one of a complex and a real
    number two. Elsewhere a complex element is one operation. Terms do not count whose factor is a
    zero that a convolution inserts between the elements of its operand, as the gradient of a
    strided one does.
    """
    kind = op(eqn.primitive.name).kind
    out = element_count(getattr(eqn.outvars[0].aval, "shape", ())) if eqn.outvars else 0.0
    if kind is OpKind.COMPUTE:
        parts = sum(np.issubdtype(v.aval.dtype, np.complexfloating) for v in eqn.invars[:2])
        terms = out * _contracted(eqn) / ir.lhs_dilation(eqn)
        return 2.0**parts * 2.0 * terms
    if kind is OpKind.REDUCTION:
        return element_count(getattr(eqn.invars[0].aval, "shape", ()))
    return out if kind is OpKind.ELEMENTWISE else 0.0


def product_sizes(eqn: ir.Eqn) -> tuple[Any, ...]:
    """A product's sizes as a matrix product: free sizes of both sides, and the contracted size.

    For a convolution they are those of its output and input features.
    """
    numbers = ir.summed_and_batch(eqn)
    if numbers is None:
        return ir.kernel_features(eqn)
    shapes = [v.aval.shape for v in eqn.invars[:2]]
    sides = zip(shapes, *numbers, strict=True)
    kept = [
        math.prod(n for d, n in enumerate(shape) if d not in (*summed, *batch))
        for shape, summed, batch in sides
    ]
    return (*kept, math.prod(shapes[0][d] for d in numbers[0][0]))


def _contracted(eqn: ir.Eqn) -> float:
    numbers = ir.summed_and_batch(eqn)
    if numbers is None:
        # Each output element is a sum over the kernel's elements of one output feature.
        features, _ = ir.kernel_features(eqn)
        return element_count(eqn.invars[1].aval.shape) / max(element_count((features,)), 1.0)
    lhs = eqn.invars[0].aval.shape
    return element_count(tuple(lhs[d] for d in numbers[0][0]))
