"""What a backward pass that JAX adds later saves and makes in 16 bits.

If JAX differentiates the rewritten program, no storage in its backward pass is planned, because
that does not exist yet. JAX then saves in float32 what derivatives read, such as the operands of an
elementwise product. A program by hand in bfloat16 saves all of it in bfloat16. So here

- the factors by which derivatives multiply are rounded, each once, if the values that they are
  computed from have lost their digits to a low product. In a loop every factor is written to
  memory. Elsewhere XLA computes it again in the backward pass, unless the function's value is
  stored in 16 bits: then the factor is computed from the rounded value;
- the cotangent of a low product with a bias is rounded. The product's own derivatives round it
  anyway. If the gradient of the bias read the value before, XLA would write that too, in float32.

A factor is not rounded if the result is subtracted, because the difference of two factors may be
small; and not of an equation by which a loop's state becomes its next state without a low product
in between. There the factors of all trips are multiplied: 0.999 would be 1 in each of 300, and the
gradient 1.35 times too large.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from precpass import jaxpr as ir
from precpass.analysis.cycles import Cycles
from precpass.analysis.digits import Digits
from precpass.analysis.equations import moved_operand
from precpass.analysis.graph import Graph
from precpass.analysis.sizes import nbytes
from precpass.plan.plan import BackwardForm
from precpass.planner.storage.facts import StorageFacts
from precpass.planner.storage.vetoes import CACHE_LINE
from precpass.policy.precision import Precision
from precpass.policy.primitives import op

__all__ = ["backward_forms"]

_SUBTRACTED = Digits.SUBTRACTED | Digits.TERM


def backward_forms(program: StorageFacts, rounded: Collection[int]) -> Mapping[int, BackwardForm]:
    """The rows whose derivatives save or make values in 16 bits; none in a gradient's program.

    Args:
        program: the program.
        rounded: the rows whose results are stored in 16 bits.
    """
    graph = program.graph
    if graph.has_backward_pass:
        return {}
    forms: dict[int, BackwardForm] = {}
    cycles = Cycles(graph, program.classes.reads_low)
    for row, eqn in enumerate(graph.eqns):
        traits = op(eqn.primitive.name)
        if not (traits.has_factors or traits.adds) or not _may_round(program, row):
            continue
        if traits.adds:
            if _adds_bias_to_product(program, row):
                forms[row] = BackwardForm(low_cotangent=True)
        elif row in rounded or _is_in_loop(graph, int(graph.body[row])):
            factors = _low_factors(program, cycles, row)
            if any(factors):
                forms[row] = BackwardForm(factors)
    return forms


def _is_in_loop(graph: Graph, body: int) -> bool:
    """Whether a loop writes what the equations of a body save: no checkpoint computes it again."""
    return any(
        not ir.is_checkpoint(graph.eqns[row])
        and (inner.trips != 1 or _is_in_loop(graph, int(graph.body[row])))
        for row, inner in graph.callers[body]
    )


def _may_round(program: StorageFacts, row: int) -> bool:
    (result,) = program.graph.eqns[row].outvars
    return (
        ir.precision_of(result.aval) is Precision.F32
        and nbytes(result.aval) >= CACHE_LINE
        and not (ir.is_unreduced(result.aval) or program.in_sampler(row))
        and program.requests.may_store(row, program.low)
    )


def _low_factors(program: StorageFacts, cycles: Cycles, row: int) -> tuple[bool, ...]:
    """For each operand of a row, whether the factor of the derivative in it is saved low."""
    eqn, following = program.graph.eqns[row], program.following_products
    body = int(program.graph.body[row])
    if program.analysis.digits.digits_of(body, eqn.outvars[0]) & _SUBTRACTED:
        return ()
    # An elementwise equation repeats dimensions of size 1.
    if any(v.aval.shape != eqn.outvars[0].aval.shape for v in eqn.invars if not ir.is_literal(v)):
        return ()
    follows = [not ir.is_literal(v) and v in following for v in eqn.invars]
    if eqn.primitive.name == "mul":  # the factor of one operand is the other one
        follows = follows[::-1]
    on_the_way = cycles.on_cycles(body)
    in_every_trip = eqn.outvars[0] in on_the_way
    is_free = (not ir.is_literal(v) and not (in_every_trip and v in on_the_way) for v in eqn.invars)
    return tuple(a and b for a, b in zip(follows, is_free, strict=True))


def _adds_bias_to_product(program: StorageFacts, row: int) -> bool:
    """Whether a row adds a repeated value to what a low product made, as it is or moved."""
    body, eqn = int(program.graph.body[row]), program.graph.eqns[row]
    lhs, rhs = eqn.invars

    def is_repeated(atom: ir.Atom) -> bool:
        is_smaller = atom.aval.shape != eqn.outvars[0].aval.shape
        return not ir.is_literal(atom) and (is_smaller or atom in program.spread)

    pairs = (lhs, rhs), (rhs, lhs)
    return any(is_repeated(bias) and _is_product(program, body, a) for a, bias in pairs)


def _is_product(program: StorageFacts, body: int, atom: ir.Atom | None) -> bool:
    while atom is not None and (row := program.graph.row_of_maker(body, atom)) is not None:
        if row in program.classes.reads_low:
            return True
        atom = moved_operand(program.graph.eqns[row])
    return False
