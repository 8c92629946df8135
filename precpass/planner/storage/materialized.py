"""Which values the fusions of a GPU or TPU write to memory, beside those that cross a border.

A fusion computes a value again for each kernel that reads it, if that is cheap. These are written:

- what is chosen from operands, as a relu does, because products read it, and on a GPU the masked
  scores of an attention;
- on a GPU what is picked from windows, as a max pooling does, and what its derivative puts back. (A
  v5e has no arithmetic in bfloat16: the gradient of two convolutions with a pooling between them
  would take 1.0 of by hand's cycles, and takes 0.8. This is the compiler's estimate, jax 0.12.0.1);
- functions that are too dear to be computed twice, such as tanh. In a program without a backward
  pass the derivative that JAX may add later counts as one more reader of them;
- on a TPU the exponentials of a softmax. One kernel computes there the scores, their maximum, the
  exponentials and their sum, and writes the last two, if it need not round the scores before: the
  gradient of a decoder then takes 0.86 of the cycles that it takes with rounded scores on a v5e,
  and 0.93 on a v5p and a v6e (the compiler's estimate, jax 0.12.0.1);
- what low products read, because their kernels read their operands from memory. If anything else
  reads the value too, XLA writes it a second time in float32, or computes it a second time.
"""

from __future__ import annotations

from precpass import jaxpr as ir
from precpass.analysis.equations import is_wide
from precpass.analysis.graph import Graph
from precpass.analysis.idioms import Idioms
from precpass.planner.storage.readers import Readers
from precpass.policy.primitives import OpKind, op

__all__ = ["maker_of", "materialized_by_fusions", "only_picks", "recomputed_on_tpu"]


def materialized_by_fusions(
    graph: Graph, readers: Readers, idioms: Idioms, *, on_tpu: bool = False
) -> frozenset[int]:
    """The rows of equations, mostly elementwise, whose float32 results a fusion writes to memory.

    Args:
        graph: the program.
        readers: who reads its values.
        idioms: what its equations belong to.
        on_tpu: whether they are fusions of a TPU's compiler, and not of a GPU's.
    """
    rows: set[int] = set()
    # A derivative that JAX adds later is one more reader.
    is_forward = not graph.has_backward_pass
    for body, node in enumerate(graph.bodies):
        for row in range(node.start, node.stop):
            eqn = graph.eqns[row]
            if not on_tpu and ir.picks_from_apart_windows(eqn) and is_wide(eqn.outvars[0]):
                rows.add(row)
                continue
            traits = op(graph.eqns[maker_of(graph, row)].primitive.name)
            if traits.kind is not OpKind.ELEMENTWISE or not is_wide(eqn.outvars[0]):
                continue
            result = eqn.outvars[0]
            is_low, others = readers.readers_of(body, result)
            if (
                (traits.chooses and not (on_tpu and _is_shifted(graph, idioms, body, result)))
                or (on_tpu and others > 1 and _is_of_attention(graph, idioms, body, eqn, readers))
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


def recomputed_on_tpu(graph: Graph) -> frozenset[int]:
    """The rows whose written results a TPU's compiler would compute again for a backward pass.

    XLA writes the result of an error function, and computes it once more in the kernel of the
    product that makes a weight's gradient. In a block of a ConvNeXt that kernel then takes 3.7
    times the cycles on a v6e.

    A program without a backward pass has none of these rows. A forward pass alone would take 1.04
    to 1.11 times the cycles if every kernel read the result from memory, because XLA can fuse the
    function with the product that reads it. (All are the compiler's estimates for v5e, v5p and v6e,
    jax 0.12.0.1.)
    """
    if not graph.has_backward_pass:
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
    graph: Graph, idioms: Idioms, body: int, eqn: ir.Eqn, readers: Readers
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
