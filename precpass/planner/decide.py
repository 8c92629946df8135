"""The decision about one equation: a pure function of a query and a policy."""

from __future__ import annotations

import dataclasses

from precpass.plan import reasons
from precpass.plan.decisions import drop, keep, lower, multiply, widen
from precpass.plan.plan import Decision, ProductForm
from precpass.plan.reasons import DecidedBy, Reason
from precpass.planner.guards import first_reason
from precpass.planner.query import Query
from precpass.planner.requests import Request
from precpass.policy.policy import PrecisionPolicy
from precpass.policy.precision import BY_DTYPE, PARTS, Precision
from precpass.policy.primitives import OpKind

__all__ = ["decide"]


def decide(query: Query, policy: PrecisionPolicy) -> Decision:
    """The decision about an equation without bodies.

    What comes first wins:

    1. Types and BOUNDARY: what has no floating-point value of a format in `policy.retypes`, and
       what keeps exact dtypes, stays as it is.
    2. What the user wrote: a function with a policy of its own, a cast, an operand that was cast
       to a low format, an explicit precision of a product.
    3. Guards (`guards.GUARDS`): what would be wrong in the precision that is asked for.
    4. What is asked for: by the innermost keep region, by the first rule that matches, by a saved
       plan (`Request`).
    5. What the readers of a product's result need, if a preset asks for it.
    6. The preset, which is an order for some kinds of equations and a permission for others. What
       is permitted is left wide, because inside a fusion that costs nothing, unless the equation
       only moves values that are stored low.

    Examples:
        `Planner` asks this for each distinct `Query` of a program.
    """
    kind, place, traits = query.row.kind, query.place, query.traits
    if place.is_fixed:
        return _keep(query, reasons.FIXED())
    if policy.widens and traits.serves_product:
        return drop(kind, Precision.F32, (Precision.F32,), reasons.WIDE_AGAIN())
    if kind is OpKind.BOUNDARY:
        return _boundary(query)
    if traits.applies_function:
        return _keep(query, reasons.OWN_FUNCTION())
    if not query.formats:
        return _without_floats(query, policy)
    request = place.request
    assert request is not None
    if request.precision is Precision.F64:
        return _in_float64_region(_widened_to_float64(query, policy, request.reason), query)
    if (
        (request.precision is Precision.F32 or request.precision.is_multiplication)
        and policy.widens
        and any(p.is_low for p in query.formats)
    ):
        return _widen(query, Precision.F32, reasons.REMOVES_LOW())
    if query.primitive == "convert_element_type":
        return _cast(query)
    if place.decides_loop:
        return _keep(query, reasons.PREDICATE(query.widest))
    return _lowered(query, policy, request)


def _keep(query: Query, reason: Reason) -> Decision:
    return keep(query.row.kind, query.results, reason)


def _widen(query: Query, target: Precision, reason: Reason) -> Decision:
    is_cast = query.primitive == "convert_element_type" and query.dtypes[0] in BY_DTYPE
    is_cast = is_cast and query.results[0] is not None
    results = tuple(map(PARTS.get, query.dtypes[query.operands :]))
    if target is not Precision.F64:
        results = query.results
    return widen(query.row.kind, target, results, reason, is_cast=is_cast)


def _in_float64_region(decision: Decision, query: Query) -> Decision:
    """The decision for an equation of a float64 region, which is evaluated as one span."""
    return (
        decision
        if query.traits.has_effects
        else dataclasses.replace(decision, in_float64_span=True)
    )


def _without_floats(query: Query, policy: PrecisionPolicy) -> Decision:
    """The decision about an equation that has no real floating values, but perhaps complex ones."""
    if not query.has_complex:
        return _keep(query, reasons.NO_FLOATS())
    request = query.place.request
    if not (query.place.in_float64 or (request and request.precision is Precision.F64)):
        return _keep(query, reasons.COMPLEX())
    why = request.reason if request else reasons.NO_LOW_KERNELS()
    return _in_float64_region(_widened_to_float64(query, policy, why), query)


def _boundary(query: Query) -> Decision:
    """The decision about an equation that keeps exactly its dtypes."""
    if query.traits.is_float64_span:
        return _keep(query, reasons.FLOAT64_REGION())
    row, is_complex = query.row, query.has_complex and query.place.in_float64
    has_wide_kernel = row.no_low_kernel or (is_complex and row.computes_complex)
    if not query.formats and not (is_complex and has_wide_kernel):
        return _keep(query, reasons.NO_FLOATS())
    why = query.traits.why_boundary or "a primitive unknown to precpass"
    decision = _keep(query, reasons.EXACT_DTYPES(why))
    if not query.place.in_float64:
        return decision
    if has_wide_kernel and query.parts == {Precision.F32}:
        decision = _widen(query, Precision.F64, reasons.NO_LOW_KERNELS())
    return _in_float64_region(decision, query)


def _widened_to_float64(query: Query, policy: PrecisionPolicy, why: Reason) -> Decision:
    """The decision about an equation that is to run in float64."""
    is_random = any(known is not None and known.random for known in query.ranges[query.operands :])
    if query.place.in_sampler or is_random:
        return _keep(query, reasons.RANDOM_BITS())
    formats = query.parts
    if not policy.widens:
        if formats != {Precision.F32}:
            return _keep(query, reasons.USERS_PRECISION())
        if Precision.F32 not in policy.retypes:
            return _keep(query, reasons.NOT_RETYPED(Precision.F32))
    elif formats == {Precision.F64}:
        return _keep(query, why)
    elif Precision.F64 in formats and _is_of_saved_plan(query.place.request):
        # The float64 in a saved plan may be that of a product of mixed types' result.
        return _keep(query, why)
    return _widen(query, Precision.F64, why)


def _is_of_saved_plan(request: Request | None) -> bool:
    return request is not None and request.decided_by is DecidedBy.SAVED_PLAN


def _cast(query: Query) -> Decision:
    """The decision about a cast by the user: it is dropped if it undoes the one before it."""
    (target,) = query.results
    if target is not None and query.traits.undoes_cast_from is target:
        return drop(query.row.kind, target, (None,), reasons.EXACT_CASTS())
    return _keep(query, reasons.USERS_CAST())


def _lowered(query: Query, policy: PrecisionPolicy, request: Request) -> Decision:
    """The decision about an equation that may be lowered, if that is asked for."""
    native = query.formats.pop() if len(query.formats) == 1 else None
    if native is None or native.is_low:
        return _keep(query, reasons.USERS_PRECISION())
    if native not in policy.retypes:
        return _keep(query, reasons.NOT_RETYPED(native))
    target, is_order = request.precision, request.is_order
    if target.is_multiplication:
        return _multiplied(query, native, request)
    narrows = target.is_narrower_than(native)
    if not (target.is_low or (is_order and narrows)):
        return _keep(query, reasons.MAY_RUN(target, query.widest) if narrows else request.reason)
    if against := first_reason(query, target):
        return _keep(query, against)
    is_of_preset = request.decided_by is DecidedBy.PRESET
    if is_of_preset and (why := _not_by_preset(query, policy, target)):
        return _keep(query, why)
    if not (is_order or _moves_low(query, target)):
        return _keep(query, reasons.MAY_RUN(target, query.widest))
    reason = request.reason if is_order else reasons.MOVES_LOW()
    if query.traits.is_unchecked:
        reason = reason.plus(reasons.UNCHECKED)
    decision = lower(query.row.kind, target, query.results, reason)
    if query.row.kind is not OpKind.COMPUTE:
        return decision
    # A saved plan names no product of a derivative that JAX takes of the rewritten program.
    is_wanted = OpKind.ELEMENTWISE in policy.orders
    wide_outer = not is_wanted and (is_of_preset or _is_of_saved_plan(request))
    form = ProductForm(scaled=request.scaled, wide_outer=wide_outer, largest=request.largest)
    return dataclasses.replace(decision, product=form)


def _not_by_preset(query: Query, policy: PrecisionPolicy, target: Precision) -> Reason | None:
    """Why no preset lowers a product, though an order may; None if presets do."""
    if query.traits.sums_nothing and OpKind.ELEMENTWISE not in policy.orders:
        return reasons.ELEMENTWISE_PRODUCT()
    if query.need and not _is_held_exactly(query, target):
        return reasons.NEEDED(query.need)
    return None


def _is_held_exactly(query: Query, target: Precision) -> bool:
    """Whether the operands of a product are numbers that the low format holds, such as masks."""
    ranges = query.ranges[: query.operands]
    return all(
        r is not None and 0 < max(-r.lo, r.hi) <= r.grid * target.exact_integers for r in ranges
    )


def _multiplied(query: Query, native: Precision, request: Request) -> Decision:
    """The decision about an equation where a precision of products alone is asked for."""
    if query.row.kind is not OpKind.COMPUTE:
        return _keep(query, reasons.PRODUCTS_ALONE(request.precision))
    if native is not Precision.F32:
        return _keep(query, reasons.USERS_PRECISION())
    if order := query.traits.user_order:
        return _keep(query, reasons.USERS_ORDER(order))
    if query.traits.sums_nothing:
        return _keep(query, reasons.ELEMENTWISE_PRODUCT())
    return multiply(request.precision, query.results, request.reason)


def _moves_low(query: Query, low: Precision) -> bool:
    """Whether an equation only moves values that are stored in a low format."""
    if query.row.kind is not OpKind.DATA_MOVEMENT or query.traits.spreads:
        return False
    return all(stored is low for stored in query.stored_of_floats())
