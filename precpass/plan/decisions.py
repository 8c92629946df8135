"""Constructors of decisions (keep, lower, widen, drop), and the formats that cross borders."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from precpass import jaxpr as ir
from precpass.plan import reasons
from precpass.plan.borders import Border
from precpass.plan.plan import Action, Decision, Plan
from precpass.plan.reasons import Reason
from precpass.policy.policy import PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind, op

__all__ = [
    "Formats",
    "border_of",
    "crossing_formats",
    "drop",
    "enter",
    "formats_of",
    "keep",
    "lower",
    "multiply",
    "unchanged_plan",
    "widen",
]

Formats = tuple[Precision | None, ...]
"""The format of each result of an equation; None for a result that is not floating-point."""


@functools.lru_cache(maxsize=4096)
def keep(kind: OpKind, results: Formats, reason: Reason) -> Decision:
    """The decision to evaluate an equation as it was written.

    Args:
        kind: the equation's.
        results: the formats of its results.
        reason: why.
    """
    native = next(filter(None, results), None)
    return _decision(Action.KEEP, kind, native, (None,) * len(results), reason)


@functools.lru_cache(maxsize=4096)
def lower(kind: OpKind, target: Precision, results: Formats, reason: Reason) -> Decision:
    """The decision to evaluate an equation in a lower precision.

    A product's results keep their format, because (bf16, bf16) -> f32 is fast and its sums are not
    rounded.
    """
    stored_as = None if kind is OpKind.COMPUTE else target
    stored = tuple(stored_as if native else None for native in results)
    return _decision(Action.LOWER, kind, target, stored, reason)


@functools.lru_cache(maxsize=4096)
def multiply(target: Precision, results: Formats, reason: Reason) -> Decision:
    """The decision to multiply the float32 operands of a product in another way."""
    return _decision(Action.MULTIPLY, OpKind.COMPUTE, target, (None,) * len(results), reason)


def widen(
    kind: OpKind, target: Precision, results: Formats, reason: Reason, *, is_cast: bool = False
) -> Decision:
    """The decision to evaluate an equation in a higher precision.

    Args:
        kind: the equation's.
        target: the precision.
        results: the formats of its results.
        reason: why.
        is_cast: whether it casts between floating formats, and so is dropped.
    """
    stored = tuple(target if native else None for native in results)
    action = Action.DROP if is_cast else Action.WIDEN
    return _decision(action, kind, target, stored, reason)


def drop(kind: OpKind, target: Precision, stored: Formats, reason: Reason) -> Decision:
    """The decision to replace an equation by its operand in a format."""
    return _decision(Action.DROP, kind, target, stored, reason)


def enter(
    kind: OpKind,
    stored: Formats,
    inner: tuple[Plan, ...],
    rules: Border | None = None,
    *,
    in_float64_span: bool = False,
) -> Decision:
    """The decision to rewrite the bodies of an equation, by their plans.

    The arguments are as for `Decision`.
    """
    decision = _decision(Action.ENTER, kind, None, stored, reasons.ENTERED())
    return dataclasses.replace(decision, inner=inner, rules=rules, in_float64_span=in_float64_span)


def _decision(
    action: Action, kind: OpKind, compute: Precision | None, stored: Formats, reason: Reason
) -> Decision:
    return Decision(action, kind, compute, stored, reason, reason.template.decided_by)


def crossing_formats(policy: PrecisionPolicy, wide: bool) -> Border:
    """How values cross the borders of an equation's bodies, in a float64 region or elsewhere."""
    target = Precision.F64 if wide else Precision.F32
    lows = (Precision.BF16, Precision.F16) if policy.widens else ()
    floats = (Precision.F32,) if wide and Precision.F32 in policy.retypes else ()
    return tuple((native, target) for native in (*lows, *floats))


def border_of(jaxpr: ir.Jaxpr, border: Border) -> Border:
    """The part of a border that concerns the formats which cross the border of the jaxpr."""
    crossing = {ir.parts_of(a) for a in (*ir.in_avals(jaxpr), *ir.out_avals(jaxpr))}
    return tuple(pair for pair in border if pair[0] in crossing)


def unchanged_plan(
    jaxpr: ir.Jaxpr, changed: Callable[[ir.Eqn], Decision | None] = lambda _eqn: None
) -> Plan:
    """The plan of a pass that is switched off. It enters the same bodies as any other plan.

    Args:
        jaxpr: open or closed.
        changed: gives the decision for an equation that is to change all the same.
    """
    return _unchanged(jaxpr, changed, {})


_Changed = Callable[[ir.Eqn], Decision | None]


def _unchanged(jaxpr: ir.Jaxpr, changed: _Changed, known: dict[int, Plan]) -> Plan:
    opened = ir.open_jaxpr(jaxpr)
    if id(opened) not in known:
        decisions = [
            changed(eqn) or _unchanged_equation(eqn, changed, known) for eqn in opened.eqns
        ]
        known[id(opened)] = Plan(tuple(decisions))
    return known[id(opened)]


def _unchanged_equation(eqn: ir.Eqn, changed: _Changed, known: dict[int, Plan]) -> Decision:
    kind, results = op(eqn.primitive.name).kind, formats_of(eqn.outvars)
    inner = tuple(_unchanged(body.jaxpr, changed, known) for body in ir.bodies(eqn))
    if not inner:
        return keep(kind, results, reasons.OFF())
    return enter(kind, (None,) * len(results), inner)


def formats_of(atoms: Sequence[ir.Atom]) -> Formats:
    """The formats of some values."""
    return tuple(ir.precision_of(v.aval) for v in atoms)
