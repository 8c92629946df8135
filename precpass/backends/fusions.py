"""Which values the fusions of a GPU or TPU write to memory, beside those that cross a border.

A fusion computes a value again for each kernel that reads it, if that is cheap. These are written:

- what is chosen from operands, as a relu does, because products read it, and on a GPU the masked
  scores of an attention;
- on a GPU what is picked from windows, as a max pooling does, and what its derivative puts back;
- functions that are too dear to be computed twice, such as tanh. In a program without a backward
  pass the derivative that JAX may add later counts as one more reader of them;
- on a TPU the exponentials of a softmax;
- what low products read, because their kernels read their operands from memory. If anything else
  reads the value too, XLA writes it a second time in float32, or computes it a second time.

`Backend` has the differences between the compilers, with what was measured.
"""

from __future__ import annotations

from precpass import jaxpr as ir
from precpass.analysis.equations import is_wide
from precpass.analysis.graph import Graph
from precpass.analysis.idioms import Idioms
from precpass.backends.backend import Backend
from precpass.backends.fused_readers import FusedReaders
from precpass.policy.primitives import OpKind, op

__all__ = ["computed_again", "maker_of", "materialized_by_fusions", "only_picks"]


def materialized_by_fusions(
    graph: Graph, readers: FusedReaders, idioms: Idioms, backend: Backend
) -> frozenset[int]:
    """The rows of equations, mostly elementwise, whose float32 results a fusion writes to memory.

    Args:
        graph: the program.
        readers: who reads its values.
        idioms: what its equations belong to.
        backend: whose fusions they are.
    """
    rows: set[int] = set()
    # A derivative that JAX adds later is one more reader.
    is_forward, joins = not graph.has_backward_pass, backend.joins_softmax
    for body, node in enumerate(graph.bodies):
        for row in range(node.start, node.stop):
            eqn = graph.eqns[row]
            if (
                backend.writes_windows
                and ir.picks_from_apart_windows(eqn)
                and is_wide(eqn.outvars[0])
            ):
                rows.add(row)
                continue
            traits = op(graph.eqns[maker_of(graph, row)].primitive.name)
            if traits.kind is not OpKind.ELEMENTWISE or not is_wide(eqn.outvars[0]):
                continue
            result = eqn.outvars[0]
            is_low, others = readers.readers_of(body, result)
            if (
                (traits.chooses and not (joins and _is_shifted(graph, idioms, body, result)))
                or (joins and others > 1 and _is_of_attention(graph, idioms, body, eqn, readers))
                or (traits.computed_once and others + is_low + is_forward > 1)
                or (is_low and others > 0)
            ):
                rows.add(row)
    return frozenset(rows)


def only_picks(graph: Graph, row: int) -> bool:
    """Whether each element of a result is one of an operand's, so that it may be made in 16 bits.

    Rounding the operands first then rounds the result, and nothing else.
    """
    eqn = graph.eqns[row]
    return op(eqn.primitive.name).chooses or ir.picks_from_apart_windows(eqn)


def computed_again(graph: Graph, backend: Backend) -> frozenset[int]:
    """The rows whose written results the compiler would compute again for the backward pass."""
    if not (backend.computes_again and graph.has_backward_pass):
        return frozenset()
    each = enumerate(graph.eqns)
    return frozenset(row for row, eqn in each if op(eqn.primitive.name).is_expanded)


def _is_shifted(graph: Graph, idioms: Idioms, body: int, value: ir.Var) -> bool:
    """Whether a value's own maximum is subtracted from it, in its body or where that is called."""
    node = graph.bodies[body]
    opened = ir.open_jaxpr(node.jaxpr)
    shifts = [e for e in opened.eqns if e.primitive.name == "sub" and e.invars[0] is value]
    if any(idioms.is_maximum(body, eqn.invars[1], of=value) for eqn in shifts):
        return True
    if value not in opened.outvars:
        return False
    at = opened.outvars.index(value)
    callers = [(row, inner) for row, inner in graph.callers[body] if at < len(inner.results)]
    return any(
        _is_shifted(graph, idioms, int(graph.body[row]), graph.eqns[row].outvars[inner.results[at]])
        for row, inner in callers
    )


def _is_of_attention(
    graph: Graph, idioms: Idioms, body: int, eqn: ir.Eqn, readers: FusedReaders
) -> bool:
    """Whether an equation is the exponential of a softmax whose weights low products read."""
    if eqn.primitive.name != "exp" or ir.is_literal(eqn.invars[0]):
        return False
    shift = graph.maker(body, eqn.invars[0])
    if shift is None or shift.primitive.name != "sub" or ir.is_literal(shift.invars[0]):
        return False
    (result,) = eqn.outvars
    eqns = ir.open_jaxpr(graph.bodies[body].jaxpr).eqns
    scaling = [e for e in eqns if e.primitive.name in ("div", "mul") and result in e.invars]
    is_weight = any(readers.readers_of(body, e.outvars[0]).low for e in scaling)
    return is_weight and idioms.is_maximum(body, shift.invars[1], of=shift.invars[0])


def maker_of(graph: Graph, row: int) -> int:
    """The row that makes a row's result: for a custom JVP, as `jax.nn.relu` is, one inside of it.

    It is the row itself for any other equation, and for a custom JVP that only moves its operand.
    """
    at = row
    while graph.eqns[row].primitive.name == "custom_jvp_call" and at in graph.children:
        ((body, child), *_) = graph.children[at]
        results = ir.open_jaxpr(body.jaxpr).outvars
        made_at = graph.row_of_maker(child, results[0])
        if len(results) != 1 or made_at is None:
            return row
        at = made_at
    return at
