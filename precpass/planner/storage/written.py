"""Which values the fusions of a GPU or TPU write to memory, beside those that cross a border.

A fusion computes a value again for each kernel that reads it, if that is cheap. These are written:

- what is chosen from operands, as a relu does, because products read it;
- functions that are too dear to be computed twice, such as tanh;
- what low products read, because their kernels read their operands from memory. If anything else
  reads the value too, XLA writes it a second time in float32, or computes it a second time.
"""

from __future__ import annotations

import collections
from collections.abc import Collection

from precpass import jaxpr as ir
from precpass.analysis.equations import moved_operand
from precpass.analysis.graph import BodyNode, Graph
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind, op

__all__ = ["maker_of", "written_by_fusions"]


def written_by_fusions(graph: Graph, reads_low: Collection[int]) -> frozenset[int]:
    """The rows of elementwise equations whose float32 results a fusion writes to memory.

    Args:
        graph: the program.
        reads_low: the rows that read their first two operands on 16 bits.
    """
    rows: set[int] = set()
    for node in graph.bodies:
        low, others = _readers(graph, node, reads_low)
        for row in range(node.start, node.stop):
            eqn = graph.eqns[row]
            traits = op(graph.eqns[maker_of(graph, row)].primitive.name)
            if traits.kind is not OpKind.ELEMENTWISE or not _is_wide(eqn.outvars[0]):
                continue
            result = eqn.outvars[0]
            count = others[result]
            if (
                traits.chooses
                or (traits.computed_once and count + (result in low) > 1)
                or (result in low and count > 0)
            ):
                rows.add(row)
    return frozenset(rows)


def maker_of(graph: Graph, row: int) -> int:
    """The row that makes a row's result: for a custom JVP, as `jax.nn.relu` is, one inside of it.

    It is the row itself for any other equation, and for a custom JVP that only moves its operand.
    """
    at = row
    while graph.eqns[row].primitive.name == "custom_jvp_call" and at in graph.children:
        ((body, child), *_) = graph.children[at]
        results = ir.open_jaxpr(body.jaxpr).outvars
        node = graph.bodies[child]
        makers = [r for r in range(node.start, node.stop) if results[0] in graph.eqns[r].outvars]
        if len(results) != 1 or not makers:
            return row
        (at,) = makers
    return at


def _readers(
    graph: Graph, node: BodyNode, reads_low: Collection[int]
) -> tuple[set[ir.Var], collections.Counter[ir.Var]]:
    """The values of a body that low products read, and how often anything else reads each value.

    Who reads a value that is only moved reads the value before it.
    """
    low, others = set[ir.Var](), collections.Counter[ir.Var]()
    others.update(v for v in ir.open_jaxpr(node.jaxpr).outvars if not ir.is_literal(v))
    for row in reversed(range(node.start, node.stop)):
        eqn = graph.eqns[row]
        moved = moved_operand(eqn)
        if moved is not None:
            others[moved] += sum(others[v] for v in eqn.outvars)
            low.update([moved] if low.intersection(eqn.outvars) else [])
            continue
        for at, v in enumerate(eqn.invars):
            if ir.is_literal(v):
                continue
            if row in reads_low and at < 2:
                low.add(v)
            else:
                others[v] += 1
    return low, others


def _is_wide(var: ir.Var) -> bool:
    return ir.precision_of(var.aval) is Precision.F32
