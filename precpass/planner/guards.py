"""Why an equation must not, or need not, run in a lower precision.

A guard takes a query and the precision that is asked for, and returns a reason against it, or None.
`GUARDS` has them in their order: the first that has a reason decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from precpass.analysis.ranges import ValueRange
from precpass.plan import reasons
from precpass.plan.reasons import DecidedBy, Reason
from precpass.planner.query import Query
from precpass.policy.precision import BY_DTYPE, Precision
from precpass.policy.primitives import OpKind

__all__ = ["GUARDS", "Guard", "first_reason", "why_out_of_range"]

Guard = Callable[[Query, Precision], Reason | None]


def first_reason(query: Query, target: Precision) -> Reason | None:
    """The first guard's reason against evaluating an equation in `target`; None for none."""
    return next((reason for guard in GUARDS if (reason := guard(query, target))), None)


def selects_or_compares(query: Query, target: Precision) -> Reason | None:
    """It chooses among its operands, or compares them, so it needs the precision of the widest one.

    An equality in a low region is the exception: where one side was rounded and the other one was
    not, nothing compares equal any more (`policy.primitives`, column `tests_equality`).
    """
    if not query.row.selects:
        return None
    follows = query.row.tests_equality and is_ordered(query) and target in query.stored
    return None if follows else reasons.SELECTS()


def accumulates_in_carry(query: Query, _target: Precision) -> Reason | None:
    """A loop adds to its carry through it: 16384 ones in bfloat16 add up to 256.

    A rule may still order what goes from one device to the next, as between stages of a pipeline.
    """
    request, asking = query.place.request, (DecidedBy.RULE, DecidedBy.SAVED_PLAN)
    is_asked = request is not None and request.decided_by in asking
    is_sent = query.primitive == "ppermute" and is_asked
    return reasons.ACCUMULATES() if query.accumulates and not is_sent else None


def adds_terms_of_devices(query: Query, _target: Precision) -> Reason | None:
    """Each device holds one term of a sum, and the terms are added in the format that they have."""
    is_product = query.row.kind is OpKind.COMPUTE
    return reasons.TERMS() if query.traits.holds_terms and not is_product else None


def adds_cotangents(query: Query, _target: Precision) -> Reason | None:
    """It adds up the cotangents of a value that is read several times."""
    return reasons.COTANGENTS() if query.row.adds_cotangents else None


def mixes_types(query: Query, _target: Precision) -> Reason | None:
    """It is a product of operands of two types, such as float32 and complex64."""
    left, right = (*query.dtypes, None)[:2]
    mixes = query.row.kind is OpKind.COMPUTE and left != right
    return reasons.MIXED_TYPES() if mixes else None


def is_of_full_precision_set(query: Query, _target: Precision) -> Reason | None:
    """Its error would be its operand's times a large factor, and nobody ordered it low."""
    is_kept = query.row.full_precision and not is_ordered(query)
    return reasons.FULL_PRECISION_SET(query.widest) if is_kept else None


def has_users_order(query: Query, _target: Precision) -> Reason | None:
    """The user said how precise it is to be."""
    order = query.traits.user_order
    return reasons.USERS_ORDER(order) if order else None


def is_made_of_constants(query: Query, _target: Precision) -> Reason | None:
    """It is computed once, when the program is compiled."""
    operands = query.ranges[: query.operands]
    is_constant = all(known is not None and known.constant for known in operands)
    return reasons.CONSTANTS() if is_constant and query.row.kind is not OpKind.COMPUTE else None


def follows_random_bits(query: Query, _target: Precision) -> Reason | None:
    """A sampler makes numbers from random bits with it, and every digit of them matters.

    A product's result no longer counts as random bits, unless it stands in a sampler and correlates
    them.
    """
    of_operands = query.row.kind is OpKind.COMPUTE and query.place.in_sampler
    values = zip(query.ranges, query.dtypes, strict=True)
    follows = any(
        known is not None and known.random and dtype in BY_DTYPE
        for at, (known, dtype) in enumerate(values)
        if at >= query.operands or of_operands
    )
    return reasons.RANDOM_BITS() if follows else None


def exceeds_range(query: Query, target: Precision) -> Reason | None:
    """A value would overflow, vanish or lose integers in the low format."""
    for at, (known, dtype) in enumerate(zip(query.ranges, query.dtypes, strict=True)):
        if known is None or dtype not in BY_DTYPE:
            continue
        if query.row.kind is OpKind.COMPUTE:
            # In a sum of products only an operand that vanishes as a whole matters.
            known = known._replace(likely_min_nonzero=known.overall_magnitude)
        what = "an operand" if at < query.operands else "its result"
        if reason := why_out_of_range(known, target, what):
            return reason
    return None


def sums_cancelling_table(query: Query, _target: Precision) -> Reason | None:
    """It sums multiples of a table whose large elements cancel, which leaves few digits."""
    operands = query.ranges[: query.operands] if query.row.kind is OpKind.COMPUTE else ()
    is_table = any(f is not None and f.uneven and f.lo < 0 < f.hi for f in operands)
    return reasons.CANCELS() if is_table else None


def why_out_of_range(fact: ValueRange, target: Precision, what: str = "it") -> Reason | None:
    """Why a value in this range must not be stored in `target`, or None; `what` names the value."""
    bound = max(abs(fact.lo), abs(fact.hi))
    # An infinity is the same in the low format. What must not happen is that a new one arises.
    largest = bound if math.isfinite(bound) else fact.likely_max
    if largest > target.max:
        return reasons.REACHES(what, f"{largest:.3g}", target, f"{target.max:.3g}")
    if 0.0 < fact.likely_min_nonzero < target.smallest_normal:
        likely_min_nonzero, smallest = (
            f"{fact.likely_min_nonzero:.3g}",
            f"{target.smallest_normal:.3g}",
        )
        return reasons.VANISHES(what, likely_min_nonzero, target, smallest)
    if fact.integer and bound > target.exact_integers:
        return reasons.INTEGERS(what, f"{bound:.3g}", target, target.exact_integers)
    if fact.step and bound > (exact := fact.step * target.exact_integers):
        return reasons.GRID(what, f"{fact.step:.3g}", f"{bound:.3g}", target, f"{exact:.3g}")
    return None


def is_rounded_by_readers(query: Query, target: Precision) -> Reason | None:
    """Every reader casts its results to the low format, and rounding commutes with the equation.

    It commutes with data movement, and with a sum, which is rounded once in either order. A
    program that the pass has rewritten before has this form.
    """
    row = query.row
    reads_no_float = not query.stored_of_floats()
    commutes = (
        row.kind is OpKind.DATA_MOVEMENT
        or query.primitive == "stop_gradient"
        or reads_no_float
        or (row.accumulates and row.kind is OpKind.REDUCTION)
    )
    is_rounded = commutes and query.traits.readers_round_to is target
    return reasons.READERS_ROUND(target) if is_rounded else None


def is_ordered(query: Query) -> bool:
    """Whether the policy orders the precision; otherwise it permits it."""
    return query.place.request is not None and query.place.request.is_order


GUARDS: tuple[Guard, ...] = (
    selects_or_compares,
    accumulates_in_carry,
    adds_terms_of_devices,
    adds_cotangents,
    mixes_types,
    is_of_full_precision_set,
    has_users_order,
    is_made_of_constants,
    follows_random_bits,
    exceeds_range,
    sums_cancelling_table,
    is_rounded_by_readers,
)
