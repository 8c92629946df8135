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
from precpass.analysis.ranges import ValueRange
from precpass.analysis.reach import hands_on, is_shift, tells_apart
from precpass.analysis.sizes import nbytes
from precpass.planner.guards import why_out_of_range
from precpass.planner.storage.eligibility import Eligibility
from precpass.planner.storage.value_classes import StorageClass
from precpass.planner.storage.written import maker_of
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind, op

__all__ = ["CACHE_LINE", "VETOES", "Veto", "hands_on_or_scales_by_number", "why_not_stored"]

CACHE_LINE = 64
"""The bytes of a cache line."""


def why_not_stored(program: Eligibility, values: StorageClass) -> str | None:
    """Why a class of values may not be stored low; None if it may."""
    vetoes = (veto(program, values) for veto in VETOES)
    return next((why for why in vetoes if why is not None), None)


# ---------------------------------------------------------------- what the class is


def crosses_the_programs_border(_program: Eligibility, values: StorageClass) -> str | None:
    """An argument and a result have the dtype that the user gave them."""
    return "is an argument or a result" if values.is_input or values.is_output else None


def is_never_in_memory(_program: Eligibility, values: StorageClass) -> str | None:
    """Inside a fusion a value costs nothing in any format, and XLA drops what nothing reads."""
    is_read = bool(values.low_readers or values.wide_readers)
    return None if values.places and is_read else "is never in memory"


def is_small(program: Eligibility, values: StorageClass) -> str | None:
    """Memory moves whole cache lines."""
    eqns = program.graph.eqns
    sizes = (nbytes(eqns[row].outvars[k].aval) for row, k in values.defined)
    return "is smaller than a cache line" if max(sizes, default=0.0) < CACHE_LINE else None


def is_a_loops_state(_program: Eligibility, values: StorageClass) -> str | None:
    """A carry that is read in float32 would be rounded again in every trip."""
    is_carried = bool(values.wide_readers) and any(place.kind == "carry" for place in values.places)
    return "is a loop's state" if is_carried else None


def may_be_computed_again(program: Eligibility, values: StorageClass) -> str | None:
    """XLA may recompute a value that is only saved for the backward pass, where it is read.

    The value is then never in memory, and rounding it gains nothing. The same holds for a stack
    that the user's program makes, unless a derivative reads it. A GPU's fusions write a selection.
    """
    if values.low_readers or values.written or _is_made_by_products(program, values):
        return None
    is_only_kept = {place.kind for place in values.places} == {"kept"}
    read = [(body, row) for body, rows in values.wide_readers.items() for row in rows]
    is_users = bool(read) and not any(program.is_backward(*at) for at in read)
    return (
        "need not be saved: XLA may compute it again where it is read"
        if is_only_kept or is_users
        else None
    )


def has_all_digits(program: Eligibility, values: StorageClass) -> str | None:
    """No lowered product has rounded it yet: a position or a time has all of its digits."""
    if not values.wide_readers:
        return None
    following = program.following_products
    results = (program.graph.eqns[row].outvars[k] for row, k in values.defined)
    follows = all(v in following for v in results)
    # What products decide alone, and do not give, is a choice of exact numbers.
    for row in values.written:
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


def is_needed_exactly(program: Eligibility, values: StorageClass) -> str | None:
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


def is_added_to(program: Eligibility, values: StorageClass) -> str | None:
    """A sum of whole arrays is added to, so rounding it would lose a small step.

    In the backward pass that counts for sums that only fusions write: they need not write them.
    """
    if not any(_adds_arrays(program, row) for row, _ in values.defined):
        return None
    is_added_to = any(
        program.adds(body, program.graph.eqns[row])
        for body, rows in values.wide_readers.items()
        for row in rows
        if not program.is_backward(body, row)
    ) or (values.written and _is_added_to_behind(program, values))
    return (
        "is a sum to which more is added, so rounding would lose small terms"
        if is_added_to
        else None
    )


def _is_added_to_behind(program: Eligibility, values: StorageClass) -> bool:
    eqns = program.graph.eqns
    sums = any(_adds(program, eqns[row]) for row in values.written)
    rows = itertools.chain.from_iterable(values.wide_readers.values())
    return sums and any(op(eqns[row].primitive.name).adds for row in rows)


def _is_made_by_products(program: Eligibility, values: StorageClass) -> bool:
    eqns = [program.graph.eqns[row] for row, _ in values.defined]
    kinds = {op(eqn.primitive.name).kind for eqn in eqns if not ir.keeps_bits(eqn)}
    return kinds <= {OpKind.COMPUTE}


def _adds_arrays(program: Eligibility, row: int) -> bool:
    """Whether an equation adds whole arrays, and not an array and a bias, or chooses from such."""
    eqn = program.graph.eqns[row]
    if op(program.graph.eqns[maker_of(program.graph, row)].primitive.name).chooses:
        body = int(program.graph.body[row])
        return any(_is_sum(program, body, v) for v in eqn.invars)
    return _adds(program, eqn)


def _is_sum(program: Eligibility, body: int, atom: ir.Atom) -> bool:
    """Whether a value is a sum of whole arrays that was moved, scaled or chosen since."""
    todo, seen = [(body, atom)], set[tuple[int, ir.Var]]()
    while todo:
        body, atom = todo.pop()
        if ir.is_literal(atom) or (body, atom) in seen:
            continue
        seen.add((body, atom))
        maker = program.graph.maker(body, atom)
        if maker is None:
            before = program.reach.before(body, atom)
            todo += [] if before is None else [before]
        elif _adds(program, maker):
            return True
        elif maker.primitive.name == "custom_jvp_call" or any(
            not ir.is_literal(v) and (hands_on(maker, v) or op(maker.primitive.name).scales)
            for v in maker.invars
        ):
            todo += [(body, v) for v in maker.invars]
    return False


def _adds(program: Eligibility, eqn: ir.Eqn) -> bool:
    if not op(eqn.primitive.name).adds:
        return False
    return not any(
        ir.is_literal(v) or v in program.spread or v.aval.shape != eqn.outvars[0].aval.shape
        for v in eqn.invars
    )


# ---------------------------------------------------------------- who makes it


def is_made_elsewhere(program: Eligibility, values: StorageClass) -> str | None:
    """An equation with bodies or in a sampler makes it, or the policy orders float32 for it."""
    for row, k in values.defined:
        if (row, k) in program.classes.stacked_states:
            continue  # It is rounded where the loop stacks it, and not by an equation in the loop.
        is_inside = row in program.graph.children and row not in values.written
        if is_inside or program.in_sampler(row):
            return "is made by an equation with a body of its own, or by a sampler"
        if not program.requests.may_store(maker_of(program.graph, row), program.low):
            return "stays in float32 by the policy"
        if ir.is_unreduced(program.graph.eqns[row].outvars[k].aval):
            return "is a sum of which each device holds one term"
    return None


def exceeds_range(program: Eligibility, values: StorageClass) -> str | None:
    """It would overflow, vanish or lose integers in the low format."""
    is_read_low = bool(values.low_readers) and not values.wide_readers
    for row, k in values.defined:
        body, eqn = int(program.graph.body[row]), program.graph.eqns[row]
        # A pooling's derivative reads in the low format what was pooled.
        picked = eqn.invars if ir.picks_from_apart_windows(eqn) else ()
        all_facts = program.analysis.facts_of.get(body, ())
        for known in (facts.of(v) for v in (eqn.outvars[k], *picked) for facts in all_facts):
            if known.random:
                return "follows random bits"
            is_clipped = row in values.written and row not in program.classes.put_together
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


def decides_a_loop(program: Eligibility, values: StorageClass) -> str | None:
    """A loop's predicate is computed from it."""
    decides = any(
        body in program.analysis.deciding for body in (*values.wide_readers, *values.low_readers)
    )
    return "decides whether a loop goes on" if decides else None


def is_read_exactly(program: Eligibility, values: StorageClass) -> str | None:
    """A reader needs digits that the low format does not have."""
    by_body = (*values.wide_readers.values(), *values.low_readers.values())
    for row in itertools.chain.from_iterable(by_body):
        why = _why_read_exactly(program, row)
        # The derivative of a softmax's maximum is an equation that nothing reads.
        if why is None or program.dead[row]:
            continue
        is_harmless = _is_shift(program, values, row) or _is_complement(program, values, row)
        if not (values.written and is_harmless):
            return why
    return None


def is_read_exactly_behind(program: Eligibility, values: StorageClass) -> str | None:
    """What a fusion writes is read exactly behind equations that hand it on or multiply it.

    A clip is a choice from a choice, so what guards a logarithm, or is returned, stands behind the
    first choice; and a softmax subtracts a maximum that was repeated.
    """
    states = program.classes.stacked_states.intersection(values.defined)
    written = values.written - program.classes.put_together
    for row, k in (*((row, 0) for row in written), *states):
        body, result = int(program.graph.body[row]), program.graph.eqns[row].outvars[k]
        for reader in program.reach.readers(body, result, hands_on_or_scales_by_number):
            if reader.eqn is None:
                return "is returned, or a loop's state, behind equations that hand it on"
            if (
                op(reader.eqn.primitive.name).adds
                and not program.is_backward(reader.body, program.reach.row_of(reader))
                and _adds_arrays(program, row)
            ):
                return "is a sum that is added to"
        is_larger = _is_larger_of_two(program, row)
        through = _hands_on_adds_or_multiplies if is_larger else _hands_on_or_multiplies
        for reader in program.reach.readers(body, result, through):
            if reader.eqn is None and is_larger:
                return "is returned, or a loop's state, behind a sum"
            if reader.eqn is None or program.dead[at := program.reach.row_of(reader)]:
                continue
            name = reader.eqn.primitive.name
            table = op(name)
            magnifies = name == "sub" or (table.full_precision and table.kind is OpKind.ELEMENTWISE)
            is_harmless = program.reach.is_shift(reader) or _is_complement(program, values, at)
            if (magnifies or tells_apart(reader.eqn)) and not is_harmless:
                return f"is read by {name} behind equations that hand it on"
    return None


def hands_on_or_scales_by_number(eqn: ir.Eqn, var: ir.Var) -> bool:
    """Whether the result of an equation is an operand, moved or times a number."""
    is_scaling = op(eqn.primitive.name).scales and any(map(ir.is_literal, eqn.invars))
    return is_scaling or hands_on(eqn, var)


def _hands_on_or_multiplies(eqn: ir.Eqn, var: ir.Var) -> bool:
    return hands_on(eqn, var) or eqn.primitive.name in ("mul", "integer_pow", "square")


def _hands_on_adds_or_multiplies(eqn: ir.Eqn, var: ir.Var) -> bool:
    return _hands_on_or_multiplies(eqn, var) or eqn.primitive.name in ("add", "add_any")


def _is_larger_of_two(program: Eligibility, row: int) -> bool:
    """Whether an equation returns the larger of two arrays, as `jnp.logaddexp` does inside.

    `jnp.logaddexp` adds a small term to it, and its derivative subtracts the sum from either array.
    If the larger one were rounded, each of these differences would have the error of the rounding.
    """
    eqn, body = program.graph.eqns[row], int(program.graph.body[row])
    if eqn.primitive.name != "max":
        return False
    return not any(ir.is_literal(_before_repetition(program, body, v)) for v in eqn.invars)


def _before_repetition(program: Eligibility, body: int, atom: ir.Atom) -> ir.Atom:
    """What `broadcast_in_dim` made a value of; any other value itself."""
    maker = program.graph.maker(body, atom)
    if maker is None or maker.primitive.name != "broadcast_in_dim":
        return atom
    return maker.invars[0]


def _is_shift(program: Eligibility, values: StorageClass, row: int) -> bool:
    """Whether a row subtracts their own maximum from values, whose products were rounded before."""
    eqn, body = program.graph.eqns[row], int(program.graph.body[row])
    if eqn.primitive.name != "sub":
        return False
    of_class = [v for v in eqn.invars if program.classes.of(body, v) is values]
    return len(of_class) == 1 and is_shift(program.graph, body, eqn, of_class[0])


def _is_complement(program: Eligibility, values: StorageClass, row: int) -> bool:
    """Whether a row subtracts the value of a bounded function from 1, as its derivative does.

    The difference has the absolute error of the value, and the derivative multiplies by it.
    """
    eqn, body = program.graph.eqns[row], int(program.graph.body[row])
    names = {program.graph.eqns[made].primitive.name for made, _ in values.defined}
    if eqn.primitive.name != "sub" or not all(op(name).is_bounded for name in names):
        return False
    readers = program.reach.direct(body, eqn.outvars[0])
    if not all(r is not None and r.primitive.name == "mul" for r in readers):
        return False
    one = _before_repetition(program, body, eqn.invars[0])
    return ir.is_literal(one) and one.val == 1


def _why_read_exactly(program: Eligibility, row: int) -> str | None:
    eqn = program.graph.eqns[row]
    name = eqn.primitive.name
    table = op(name)
    if row in program.graph.children or table.kind is OpKind.BOUNDARY or program.in_sampler(row):
        return "is read where nothing is rounded"
    # These multiply the error of their operand by a large factor, a difference by any factor.
    if (table.full_precision or name == "sub") and table.kind is OpKind.ELEMENTWISE:
        return f"is read by {name}, which magnifies its error"
    if name == "convert_element_type":
        is_float = ir.precision_of(eqn.outvars[0].aval) is not None
        return None if is_float else "is cast to integers"
    # A comparison with zero only reads the sign, which survives rounding.
    if table.ranks or (table.compares and not any(map(_is_zero, eqn.invars))):
        return f"is read by {name}, which tells close values apart"
    return None


def _is_zero(atom: ir.Atom) -> bool:
    return ir.is_literal(atom) and not atom.val


Veto = Callable[[Eligibility, StorageClass], str | None]

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
    is_read_exactly,
    is_read_exactly_behind,
)
