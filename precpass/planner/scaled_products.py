"""Which of the products that a policy asks for in 8 bits have a form for that."""

from __future__ import annotations

import math

from precpass import jaxpr as ir
from precpass.analysis.equations import handed_on_operand
from precpass.analysis.graph import Graph
from precpass.analysis.sizes import product_sizes
from precpass.policy.precision import Precision
from precpass.policy.scopes import is_backward

__all__ = ["is_derivative", "is_given", "why_not_scaled"]

TILE = 16
"""The dimensions of a product in 8 bits are multiples of this, as cublasLt demands of float8
operands in bytes (NVIDIA, cuBLAS documentation, "cublasLtMatmul": 16-byte alignment)."""
_LARGEST_SUM = 2**31 // 127**2
"""So many products of two numbers of magnitude 127 have a sum in int32."""
_MARKS = ("convert_element_type", "pvary", "pcast")
"""Casts, and what marks for a `shard_map` that a value may differ between shards."""


def why_not_scaled(eqn: ir.Eqn, precision: Precision, *, in_tiles: bool) -> str:
    """Why an equation cannot be evaluated as a scaled product, in words; "" if it can.

    Args:
        eqn: a product.
        precision: of 8 bits.
        in_tiles: whether the product is to have the form that devices are fast in, because no user
            orders 8 bits for it.
    """
    numbers = ir.dot_numbers(eqn)
    if numbers is None:
        return "it is not a dot"
    (summed, _), (batch, _) = numbers
    if any(isinstance(n, int) and n == 0 for v in eqn.invars for n in v.aval.shape):
        return "it has an empty dimension"
    terms = [eqn.invars[0].aval.shape[d] for d in summed]
    if not all(isinstance(n, int) for n in terms):
        return "the number of its terms is unknown"
    if precision is Precision.INT8 and math.prod(terms) > _LARGEST_SUM:
        return "int32 cannot hold its sums"
    if in_tiles and batch:
        return "it has batch dimensions"
    known = (n for n in product_sizes(eqn) if isinstance(n, int))
    odd = next((n for n in known if n % TILE), 0) if in_tiles else 0
    return f"{odd} is not a multiple of {TILE}" if odd else ""


def is_derivative(scope: str) -> bool:
    """Whether an equation differentiates, instead of computing a value, perhaps once more."""
    return is_backward(scope) and "rematted_computation" not in scope


def is_given(graph: Graph, body: int, atom: ir.Atom) -> bool:
    """Whether a value is an argument or a constant of the program, moved or cast at the most.

    A weight is. So a product of a backward pass that reads such a value makes the gradient of data,
    and any other product there the gradient of a weight.

    Args:
        graph: the program.
        body: the index of the value's body.
        atom: the value. A loop's state counts as what it is at first.
    """
    while not ir.is_literal(atom):
        if (maker := graph.maker(body, atom)) is not None:
            is_same = maker.primitive.name in _MARKS or ir.dequantized_from(maker)
            if not is_same and handed_on_operand(maker) is None:
                return False
            atom = maker.invars[0]
            continue
        operands = ir.open_jaxpr(graph.bodies[body].jaxpr).invars
        if body == 0 or atom not in operands:
            return True
        row, called = graph.callers[body][0]
        atom = graph.eqns[row].invars[called.operands[operands.index(atom)]]
        body = int(graph.body[row])
    return False
