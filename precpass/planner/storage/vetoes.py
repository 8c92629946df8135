"""Which values may be stored in 16 bits: those whose every reader tolerates the rounding.

A value that a low product made, or that low products read anyway, has lost its digits already. A
position, a time, or a state to which small steps are added has not, and nobody would write it in
16 bits by hand.

A veto takes what is known of the program and a class of values that are stored alike, and returns
a reason against storing the class low, or None. `VETOES` has them in their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from precpass import jaxpr as ir
from precpass.analysis.digits import Digits
from precpass.analysis.equations import hands_on
from precpass.analysis.ranges import ValueRange
from precpass.analysis.sizes import nbytes
from precpass.backends.fusions import maker_of
from precpass.planner.guards import why_out_of_range
from precpass.planner.storage.facts import StorageFacts
from precpass.planner.storage.value_classes import StorageClass
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind, op

__all__ = ["CACHE_LINE", "VETOES", "Veto", "why_not_stored"]

CACHE_LINE = 64
"""The bytes of a cache line."""


def why_not_stored(program: StorageFacts, values: StorageClass) -> str | None:
    """Why a class of values may not be stored low; None if it may."""
    vetoes = (veto(program, values) for veto in VETOES)
    return next((why for why in vetoes if why is not None), None)


# ---------------------------------------------------------------- what the class is


def crosses_the_programs_border(_program: StorageFacts, values: StorageClass) -> str | None:
    """An argument and a result have the dtype that the user gave them."""
    return "is an argument or a result" if values.is_input or values.is_output else None


def is_never_in_memory(_program: StorageFacts, values: StorageClass) -> str | None:
    """Inside a fusion a value costs nothing in any format, and XLA drops what nothing reads."""
    is_read = bool(values.low_readers or values.wide_readers)
    return None if values.places and is_read else "is never in memory"


def is_small(program: StorageFacts, values: StorageClass) -> str | None:
    """Memory moves whole cache lines."""
    eqns = program.graph.eqns
    sizes = (nbytes(eqns[row].outvars[k].aval) for row, k in values.defined)
    return "is smaller than a cache line" if max(sizes, default=0.0) < CACHE_LINE else None


def is_a_loops_state(_program: StorageFacts, values: StorageClass) -> str | None:
    """A carry that is read in float32 would be rounded again in every trip."""
    is_carried = bool(values.wide_readers) and any(place.kind == "carry" for place in values.places)
    return "is a loop's state" if is_carried else None


def may_be_computed_again(program: StorageFacts, values: StorageClass) -> str | None:
    """XLA may recompute a value that is only saved for the backward pass, where it is read.

    The value is then never in memory, and rounding it gains nothing. The same holds for a stack
    that the user's program makes, unless a derivative reads it. A GPU's fusions write a selection.
    """
    if values.low_readers or values.materialized or _is_made_by_products(program, values):
        return None
    is_only_kept = {place.kind for place in values.places} == {"kept"}
    read = [(body, row) for body, rows in values.wide_readers.items() for row in rows]
    is_users = bool(read) and not any(program.is_backward(*at) for at in read)
    return (
        "need not be saved: XLA may compute it again where it is read"
        if is_only_kept or is_users
        else None
    )


def has_all_digits(program: StorageFacts, values: StorageClass) -> str | None:
    """No lowered product has rounded it yet: a position or a time has all of its digits."""
    if not values.wide_readers:
        return None
    following = program.following_products
    results = (program.graph.eqns[row].outvars[k] for row, k in values.defined)
    follows = all(v in following for v in results)
    # What products decide alone, and do not give, is a choice of exact numbers.
    for row in values.materialized:
        eqn = program.graph.eqns[row]
        numbers = [v for v in eqn.invars if ir.precision_of(v.aval) is not None]
        known = [not ir.is_literal(v) and v in following for v in numbers]
        # The operand of a pooling's derivative says where a window's largest element is.
        follows = follows and (all(known) if ir.picks_from_apart_windows(eqn) else any(known))
    return (
        None
        if follows
        else "was not rounded by a matrix product before, so it has all of its digits"
    )


def is_needed_exactly(program: StorageFacts, values: StorageClass) -> str | None:
    """A reader needs float32's digits of it, or a loop around it ends on a tolerance."""
    graph = program.graph
    if not program.requests.follows_readers:
        return None
    needs = program.analysis.exact_needs
    for row, k in values.defined:
        body = int(graph.body[row])
        if body in needs.bodies or (body, graph.eqns[row].outvars[k]) in needs.values:
            return "is needed exactly"
    return None


def is_added_to(program: StorageFacts, values: StorageClass) -> str | None:
    """A sum of whole arrays is added to, so rounding it would lose a small step.

    In the backward pass that counts for sums that only fusions write: they need not write them.
    """
    if not any(_adds_arrays(program, row) for row, _ in values.defined):
        return None
    eqns = program.graph.eqns
    counts_later = any(_adds(program, eqns[row]) for row in values.materialized)
    for body, rows in values.wide_readers.items():
        for row in rows:
            is_later = program.is_backward(body, row)
            adds = op(eqns[row].primitive.name).adds and (counts_later or not is_later)
            if adds or (not is_later and _adds_later(program, body, eqns[row])):
                return "is a sum to which more is added, so rounding would lose small terms"
    return None


def _adds_later(program: StorageFacts, body: int, reader: ir.Eqn) -> bool:
    """Whether a reader scales or chooses what it reads, and the forward pass adds to that."""
    todo = [reader]
    while todo:
        eqn = todo.pop()
        if op(eqn.primitive.name).adds:
            return True
        if op(eqn.primitive.name).scales or op(eqn.primitive.name).chooses:
            rows = program.graph.readers(body).get(eqn.outvars[0], ())
            forward = (row for row in rows if row >= 0 and not program.is_backward(body, row))
            todo += [program.graph.eqns[row] for row in forward]
    return False


def _is_made_by_products(program: StorageFacts, values: StorageClass) -> bool:
    eqns = [program.graph.eqns[row] for row, _ in values.defined]
    kinds = {op(eqn.primitive.name).kind for eqn in eqns if not ir.keeps_bits(eqn)}
    return kinds <= {OpKind.COMPUTE}


def _adds_arrays(program: StorageFacts, row: int) -> bool:
    """Whether an equation adds whole arrays, and not an array and a bias, or chooses from such."""
    eqn = program.graph.eqns[row]
    if op(program.graph.eqns[maker_of(program.graph, row)].primitive.name).chooses:
        body = int(program.graph.body[row])
        return any(_is_sum(program, body, v) for v in eqn.invars)
    return _adds(program, eqn)


def _is_sum(program: StorageFacts, body: int, atom: ir.Atom) -> bool:
    """Whether a value is a sum of whole arrays that was moved, scaled or chosen since."""
    todo, seen = [(body, atom)], set[tuple[int, ir.Var]]()
    while todo:
        body, atom = todo.pop()
        if ir.is_literal(atom) or (body, atom) in seen:
            continue
        seen.add((body, atom))
        maker = program.graph.maker(body, atom)
        if maker is None:
            before = program.graph.outside(body, atom)
            todo += [(before.body, before.atom)] if before and before.is_same else []
        elif _adds(program, maker):
            return True
        elif maker.primitive.name == "custom_jvp_call" or any(
            not ir.is_literal(v) and (hands_on(maker, v) or op(maker.primitive.name).scales)
            for v in maker.invars
        ):
            todo += [(body, v) for v in maker.invars]
    return False


def _adds(program: StorageFacts, eqn: ir.Eqn) -> bool:
    if not op(eqn.primitive.name).adds:
        return False
    return not any(
        ir.is_literal(v) or v in program.spread or v.aval.shape != eqn.outvars[0].aval.shape
        for v in eqn.invars
    )


# ---------------------------------------------------------------- who makes it


def is_made_elsewhere(program: StorageFacts, values: StorageClass) -> str | None:
    """An equation with bodies or in a sampler makes it, or the policy orders float32 for it."""
    for row, k in values.defined:
        if (row, k) in program.classes.stacked_states:
            continue  # It is rounded where the loop stacks it, and not by an equation in the loop.
        is_inside = row in program.graph.children and row not in values.materialized
        if is_inside:
            return "is the result of an inner function or a loop"
        if program.in_sampler(row):
            return "is made by a sampler"
        if not program.requests.may_store(maker_of(program.graph, row), program.low):
            return "stays in float32 by the policy"
        if ir.is_unreduced(program.graph.eqns[row].outvars[k].aval):
            return "is a sum of which each device holds one term"
    return None


def exceeds_range(program: StorageFacts, values: StorageClass) -> str | None:
    """It would overflow, vanish or lose integers in the low format."""
    is_read_low = bool(values.low_readers) and not values.wide_readers
    for row, k in values.defined:
        body, eqn = int(program.graph.body[row]), program.graph.eqns[row]
        # A pooling's derivative reads in the low format what was pooled.
        picked = eqn.invars if ir.picks_from_apart_windows(eqn) else ()
        all_facts = program.analysis.facts_of.get(body, ())
        for known in (facts.range_of(v) for v in (eqn.outvars[k], *picked) for facts in all_facts):
            if known.random:
                return "follows random bits"
            is_clipped = row in values.materialized and row not in program.classes.put_together
            if is_clipped and program.constants_beyond(row):
                known = _within(known, program.low)
            if reason := why_out_of_range(_as_a_whole(known), program.low):
                return str(reason)
            if not (is_read_low or _fits(known, program.low)):
                return "may be larger than the low format's largest value"
    return None


def _within(known: ValueRange, low: Precision) -> ValueRange:
    """A range without what is beyond the low format's largest value."""
    bounds = max(known.lo, -low.max), min(known.hi, low.max)
    return known._replace(lo=bounds[0], hi=bounds[1], likely_max=min(known.likely_max, low.max))


def _fits(known: ValueRange, low: Precision) -> bool:
    """Whether the low format has the range for it: bfloat16 always has, float16 may not."""
    if low.smallest_normal <= Precision.F32.smallest_normal:
        return True
    return max(abs(known.lo), abs(known.hi)) <= low.max


def _as_a_whole(known: ValueRange) -> ValueRange:
    """A range that lets every element be as small as the constant that it is a multiple of."""
    sizes = [size for size in (known.likely_min_nonzero, known.overall_magnitude) if size]
    likely_min_nonzero, likely_max = (
        min(sizes, default=0.0),
        max(known.likely_max, known.overall_magnitude),
    )
    return known._replace(likely_min_nonzero=likely_min_nonzero, likely_max=likely_max)


# ---------------------------------------------------------------- who reads it


def decides_a_loop(program: StorageFacts, values: StorageClass) -> str | None:
    """A loop's predicate is computed from it."""
    decides = any(
        body in program.analysis.deciding for body in (*values.wide_readers, *values.low_readers)
    )
    return "decides whether a loop goes on" if decides else None


def is_read_where_nothing_is_rounded(program: StorageFacts, values: StorageClass) -> str | None:
    """An equation with bodies, a boundary or a sampler reads it."""
    by_body = (*values.wide_readers.values(), *values.low_readers.values())
    for row in itertools.chain.from_iterable(by_body):
        kind = op(program.graph.primitives[row]).kind
        is_shut = row in program.graph.children or kind is OpKind.BOUNDARY
        if (is_shut or program.in_sampler(row)) and not program.dead[row]:
            return "is read where nothing is rounded"
    return None


def is_read_exactly(program: StorageFacts, values: StorageClass) -> str | None:
    """A reader needs digits that the low format does not have."""
    materialized = [(row, 0) for row in values.materialized - program.classes.put_together]
    materialized += program.classes.stacked_states.intersection(values.defined)
    later = _READ_LATER | (0 if program.backend.splits_stacks else Digits.STACKED)
    read = program.digits_read(values.defined) & _READ | program.digits_read(materialized) & later
    return next((why for digit, why in _WHY.items() if read & digit), None)


_READ = Digits.SUBTRACTED | Digits.COMPARED | Digits.NEAR | Digits.RANKED | Digits.MAGNIFIED
_READ_LATER = Digits.LEAVING | Digits.STATE | Digits.CHOSEN | Digits.FACTOR | Digits.TERM
"""What else counts for a value that only a fusion writes, and for what a loop stacks."""
_WHY = {
    Digits.SUBTRACTED: "is subtracted, which magnifies its error",
    Digits.MAGNIFIED: "is read by a function that magnifies its error",
    Digits.COMPARED | Digits.NEAR: "is read where close values are told apart",
    Digits.RANKED: "is ranked",
    Digits.ANY_LEAVING | Digits.CHOSEN: "is returned, or a loop's state or stack",
    Digits.FACTOR: "is a factor of what is subtracted or magnified",
    Digits.TERM: "is a term of what is subtracted",
}


Veto = Callable[[StorageFacts, StorageClass], str | None]

VETOES: tuple[Veto, ...] = (
    crosses_the_programs_border,
    is_never_in_memory,
    is_small,
    is_a_loops_state,
    may_be_computed_again,
    has_all_digits,
    is_needed_exactly,
    is_added_to,
    is_made_elsewhere,
    exceeds_range,
    decides_a_loop,
    is_read_where_nothing_is_rounded,
    is_read_exactly,
)
