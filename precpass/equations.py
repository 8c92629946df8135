"""What a single equation is and allows, apart from any policy."""

from __future__ import annotations

from typing import Any

from precpass import jaxpr as ir
from precpass.facts import Facts, guard
from precpass.opkinds import Op, OpKind, op
from precpass.plan import Action, Decision
from precpass.precision import Precision
from precpass.rules import EqnView, clean_scope

_PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})


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
        eqn.params,
    )


def contracts(eqn: Any) -> bool:
    """Whether a product sums over anything; an outer or elementwise product does not."""
    if eqn.primitive.name != "dot_general":
        return True
    (contracting, _), _ = eqn.params["dimension_numbers"]
    return len(contracting) > 0


def guarded(eqn: Any, facts: Facts, target: Precision, table: Op) -> str | None:
    """Why the facts forbid an equation to run in `target`, or None."""
    if table.kind is not OpKind.COMPUTE and all(facts.of(v).constant for v in eqn.invars):
        return "made of constants alone: computed once, as written"
    for position, atom in enumerate((*eqn.invars, *eqn.outvars)):
        if ir.precision_of(atom.aval) is None:
            continue
        fact = facts.of(atom)
        if fact.random and position >= len(eqn.invars):
            return "follows random bits: a sampler's digits"
        if table.kind is OpKind.COMPUTE:
            # in a sum of products only an operand that vanishes as a whole matters
            fact = fact._replace(tiny=fact.reaches if fact.constant else 0.0)
        found = guard(fact, target)
        if found:
            what = "an operand" if position < len(eqn.invars) else "its result"
            return f"{what} {found}"
    return None


def keep(eqn: Any, kind: OpKind, reason: str) -> Decision:
    """The decision to bind an equation as it was written."""
    native = next((p for v in eqn.outvars if (p := ir.precision_of(v.aval))), None)
    return Decision(Action.KEEP, kind, native, (None,) * len(eqn.outvars), reason)


def widen(eqn: Any, table: Op, target: Precision, reason: str) -> Decision:
    """The decision to evaluate an equation in a higher precision."""
    stored = tuple(target if ir.precision_of(v.aval) else None for v in eqn.outvars)
    is_cast = eqn.primitive.name == "convert_element_type"
    drops = is_cast and bool(ir.precision_of(eqn.invars[0].aval)) and stored[0] is not None
    return Decision(Action.DROP if drops else Action.WIDEN, table.kind, target, stored, reason)


def stored_precision(name: str, target: Precision, table: Op) -> Precision | None:
    """What a lowered result is held in; None for its own dtype."""
    # (low, low) -> f32 is the fast and the accurate form of a dot; convolutions have none
    if table.kind is OpKind.COMPUTE and name == "dot_general":
        return None
    return target


def float_vars(eqn: Any) -> list[Any]:
    """The floating operands."""
    return [v for v in eqn.invars if ir.precision_of(v.aval)]


def has_low(eqn: Any) -> bool:
    """Whether anything inside an equation's bodies is low."""
    inside = (a for body in ir.bodies(eqn) for a in ir.all_avals(body.jaxpr))
    return any(p.is_low for a in inside if (p := ir.precision_of(a)))


def border_is_low(jaxpr: Any) -> bool:
    """Whether a low value crosses a border of the jaxpr."""
    border = (*ir.in_avals(jaxpr), *ir.out_avals(jaxpr))
    return any(p.is_low for a in border if (p := ir.precision_of(a)))


def product_names(jaxpr: Any) -> list[str]:
    """The products of a jaxpr and its bodies."""
    return [e.primitive.name for e in ir.all_eqns(jaxpr) if e.primitive.name in _PRODUCTS]
