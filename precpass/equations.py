"""What a single equation is and allows, apart from any policy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from precpass import jaxpr as ir
from precpass import reasons
from precpass.boundary import BOUNDARY
from precpass.facts import ANY, Facts, guard
from precpass.graph import nbytes
from precpass.opkinds import Op, OpKind, op
from precpass.plan import Action, Border, Decision
from precpass.policy import PrecisionPolicy
from precpass.precision import Precision
from precpass.rules import EqnView, clean_scope
from precpass.wording import counted

# They have no low kernels, and take float64 as they take float32.
WIDENED = frozenset(
    (
        *("cholesky", "cholesky_update", "eigh", "geqrf", "hessenberg", "householder_product"),
        *("lu", "ormqr", "qr", "schur", "svd", "symmetric_product", "triangular_solve"),
        *("tridiagonal", "tridiagonal_solve"),
    )
)
_PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})

# Where an order rounds one operand, equality with what it was selected from holds only if the other
# is rounded too: the derivative of a maximum divides by the number of elements that equal it.
EQUALITIES = frozenset({"eq", "ne"})

REPEATS = frozenset(("broadcast_in_dim", "all_gather", "all_gather_invariant", "tile", "reshard"))
"""Those that may only repeat what they are given."""
CHOOSES = frozenset(("dynamic_slice",))
"""Those that take a part of an operand which is chosen at run time."""


def view_of(eqn: Any, scope: str, source: ir.Source) -> EqnView:
    """What rules see of an equation under a whole name stack."""

    def shapes(atoms: list[Any]) -> tuple[tuple[Any, ...], ...]:
        return tuple(tuple(getattr(v.aval, "shape", ())) for v in atoms)

    def dtypes(atoms: list[Any]) -> tuple[str, ...]:
        return tuple(str(getattr(v.aval, "dtype", "")) for v in atoms)

    return EqnView(
        eqn.primitive.name,
        op(eqn.primitive.name).kind,
        clean_scope(scope),
        source.file,
        source.function,
        source.line,
        shapes(eqn.invars),
        dtypes(eqn.invars),
        shapes(eqn.outvars),
        dtypes(eqn.outvars),
        dict(ir.sorted_params(eqn)),
    )


def contracts(eqn: Any) -> bool:
    """Whether a product sums over anything; an outer or elementwise product does not."""
    if eqn.primitive.name != "dot_general":
        return True
    numbers = ir.summed_and_batch(eqn)
    return numbers is not None and len(numbers[0][0]) > 0


def mixes_types(eqn: Any) -> bool:
    """Whether a product's two operands have different types, such as float32 and complex64."""
    lhs, rhs = (v.aval.dtype for v in eqn.invars[:2])
    return lhs != rhs


def blocked_by_kind(
    eqn: Any, table: Op, ordered: bool, adds: bool, selects: bool
) -> reasons.Reason | None:
    """Why an equation is not lowered for what it does, whatever its values are; or None."""
    if selects:
        return reasons.SELECTS()
    if adds:
        return reasons.ACCUMULATES()
    if table.kind is not OpKind.COMPUTE and any(map(_is_term, (*eqn.invars, *eqn.outvars))):
        return reasons.TERMS()
    if table.joins:
        return reasons.COTANGENTS()
    if table.kind is OpKind.COMPUTE and mixes_types(eqn):
        return reasons.MIXED_TYPES()
    if table.wide and not ordered:
        return reasons.FULL_PRECISION_SET()
    order = ir.user_order(eqn)
    return reasons.USERS_ORDER(order) if order else None


def _is_term(atom: Any) -> bool:
    return ir.is_unreduced(atom.aval)


def guarded(eqn: Any, facts: Facts, target: Precision, table: Op) -> reasons.Reason | None:
    """Why the facts forbid an equation to run in `target`, or None."""
    operands = [facts.of(v) for v in eqn.invars]
    if table.kind is not OpKind.COMPUTE and all(fact.constant for fact in operands):
        return reasons.CONSTANTS()
    for position, atom in enumerate((*eqn.invars, *eqn.outvars)):
        fact = operands[position] if position < len(operands) else facts.of(atom)
        if fact is ANY or ir.precision_of(atom.aval) is None:
            continue
        # a product ends what follows the bits, except inside of a sampler that correlates them
        if fact.random and (position >= len(eqn.invars) or _is_samplers(facts, table)):
            return reasons.RANDOM_BITS()
        if table.kind is OpKind.COMPUTE:
            # in a sum of products only an operand that vanishes as a whole matters
            fact = fact._replace(tiny=fact.magnitude)
        what = "an operand" if position < len(eqn.invars) else "its result"
        if found := guard(fact, target, what):
            return found
    return None


def _is_samplers(facts: Facts, table: Op) -> bool:
    return facts.sampler and table.kind is OpKind.COMPUTE


def keep(eqn: Any, kind: OpKind, reason: reasons.Reason) -> Decision:
    """The decision to bind an equation as it was written."""
    native = next((p for v in eqn.outvars if (p := ir.precision_of(v.aval))), None)
    return _kept(kind, native, len(eqn.outvars), reason)


@functools.lru_cache(maxsize=4096)
def _kept(kind: OpKind, native: Precision | None, results: int, reason: reasons.Reason) -> Decision:
    return Decision(Action.KEEP, kind, native, (None,) * results, reason)


@functools.lru_cache(maxsize=4096)
def lower(
    kind: OpKind, target: Precision, stored: tuple[Precision | None, ...], reason: reasons.Reason
) -> Decision:
    """The decision to evaluate an equation in a lower precision."""
    return Decision(Action.LOWER, kind, target, stored, reason)


def in_region(decision: Decision, eqn: Any) -> Decision:
    """The decision for an equation of a float64 region."""
    return decision if ir.effects_of(eqn) else dataclasses.replace(decision, island=True)


def widen(eqn: Any, table: Op, target: Precision, reason: reasons.Reason) -> Decision:
    """The decision to evaluate an equation in a higher precision."""
    stored = tuple(target if ir.precision_of(v.aval) else None for v in eqn.outvars)
    is_cast = eqn.primitive.name == "convert_element_type"
    drops = is_cast and bool(ir.precision_of(eqn.invars[0].aval)) and stored[0] is not None
    action = Action.DROP if drops else Action.WIDEN
    return Decision(action, table.kind, target, stored, reason)


def float_vars(eqn: Any) -> list[Any]:
    """The floating operands."""
    return [v for v in eqn.invars if ir.precision_of(v.aval)]


def moved_operand(eqn: Any) -> Any:
    """What an equation only moves, each element once at the most; None where it does more."""
    if len(eqn.invars) != 1:
        return None
    row = op(eqn.primitive.name)
    moves = row.kind is OpKind.DATA_MOVEMENT and not spreads(eqn) and row.data is None
    (moved,) = eqn.invars
    if not (moves or ir.keeps_bits(eqn)) or ir.is_unreduced(moved.aval):
        return None
    is_wide = ir.precision_of(moved.aval) is Precision.F32
    return moved if is_wide and not ir.is_literal(moved) else None


def spreads(eqn: Any) -> bool:
    """Whether one element of an operand reaches many results, whose cotangents are added up.

    So it is with a reshard to a type that is reduced over axes: each device has a cotangent.
    """
    is_reshard = eqn.primitive.name == "reshard"
    return op(eqn.primitive.name).spreads or (is_reshard and ir.is_reduced(eqn.outvars[0].aval))


def moves_low(eqn: Any, stored: Mapping[Any, Precision | None], low: Precision) -> bool:
    """Whether an equation only moves values that are stored in a low format."""
    if op(eqn.primitive.name).kind is not OpKind.DATA_MOVEMENT or spreads(eqn):
        return False
    return all(not ir.is_literal(v) and stored.get(v) is low for v in float_vars(eqn))


def chosen_operand(eqn: Any) -> Any:
    """What an equation takes a part of that is chosen at run time; None where it does not."""
    if eqn.primitive.name not in CHOOSES:
        return None
    whole = eqn.invars[0]
    is_wide = not ir.is_literal(whole) and ir.precision_of(whole.aval) is Precision.F32
    return whole if is_wide else None


def hands_on_layout(eqn: Any) -> bool:
    """Whether XLA gives what an equation makes the layout of what it reads."""
    kind = op(eqn.primitive.name).kind
    return kind in (OpKind.ELEMENTWISE, OpKind.DATA_MOVEMENT) or ir.keeps_bits(eqn)


def grows(eqn: Any) -> bool:
    """Whether an equation only repeats what it is given, so that a cast belongs before it.

    On the wire of an `all_gather`, and of a reshard that is one, it halves the bytes.
    """
    if eqn.primitive.name not in REPEATS:
        return False
    (before, *_), (after, *_) = eqn.invars, eqn.outvars
    if ir.is_literal(before) or ir.precision_of(before.aval) is not Precision.F32:
        return False
    if len(eqn.invars) != 1 or ir.is_unreduced(before.aval):
        return False
    here, there = (nbytes(v.aval) / ir.shards(v.aval) for v in (before, after))
    return there > here


def has_low(eqn: Any) -> bool:
    """Whether anything inside an equation's bodies is low."""
    inside = (a for body in ir.bodies(eqn) for a in ir.all_avals(body.jaxpr))
    return any(p.is_low for a in inside if (p := ir.precision_of(a)))


def crossing_formats(policy: PrecisionPolicy, wide: bool) -> Border:
    """How values cross the borders of an equation's bodies, in a float64 region or elsewhere."""
    target = Precision.F64 if wide else Precision.F32
    lows = (Precision.BF16, Precision.F16) if policy.widens else ()
    floats = (Precision.F32,) if wide and Precision.F32 in policy.retypes else ()
    return tuple((native, target) for native in (*lows, *floats))


def border_of(jaxpr: Any, border: Border) -> Border:
    """What of a border concerns the values that cross that of the jaxpr."""
    crossing = {ir.precision_of(a) for a in (*ir.in_avals(jaxpr), *ir.out_avals(jaxpr))}
    return tuple(pair for pair in border if pair[0] in crossing)


def unentered(eqn: Any, lowered: dict[Any, ir.Contents]) -> str | None:
    """Which products an equation that is not entered contains, in words; None for none.

    Args:
        eqn: the equation.
        lowered: what was found out about others, by all that tells them apart.
    """
    held = [e for j in ir.hidden_jaxprs(eqn) for e in ir.all_held_eqns(j)]
    products = sum(e.primitive.name in _PRODUCTS for e in held)
    why = BOUNDARY.get(eqn.primitive.name)
    shows_none = why is None or "sparse" in why or eqn.primitive.name == "call_exported"
    unknown = ir.why_opaque(eqn) is None and shows_none
    if not products and unknown and any(getattr(v.aval, "ndim", 0) for v in float_vars(eqn)):
        products, python = _contents(eqn, lowered)
        if python:
            return "calls Python: products there keep their precision"
    if not products:
        return None
    keep = "it keeps its" if products == 1 else "they keep their"
    return f"contains {counted(products, 'product')}: {keep} precision"


def _contents(eqn: Any, lowered: dict[Any, ir.Contents]) -> ir.Contents:
    key = eqn.primitive, tuple(v.aval for v in eqn.invars), ir.sorted_params(eqn)
    try:
        hash(key)
    except TypeError:
        return ir.contents_of(eqn)
    if key not in lowered:
        lowered[key] = ir.contents_of(eqn)
    return lowered[key]
