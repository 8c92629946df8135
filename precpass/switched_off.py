"""The plan of a pass that is switched off."""

from __future__ import annotations

from typing import Any

from precpass import jaxpr as ir
from precpass import reasons
from precpass.equations import keep
from precpass.opkinds import op
from precpass.plan import Action, Decision, Plan

__all__ = ["unchanged_plan"]


def unchanged_plan(jaxpr: Any) -> Plan:
    """The plan of a pass that is switched off: it enters what another one enters."""
    return _unchanged(jaxpr, {})


def _unchanged(jaxpr: Any, known: dict[int, Plan]) -> Plan:
    opened = ir.open_jaxpr(jaxpr)
    if id(opened) not in known:
        decisions: list[Decision] = []
        for eqn in opened.eqns:
            kind = op(eqn.primitive.name).kind
            inner = tuple(_unchanged(body.jaxpr, known) for body in ir.bodies(eqn))
            stored = (None,) * len(eqn.outvars)
            decisions.append(
                Decision(Action.ENTER, kind, None, stored, reasons.ENTERED(), inner)
                if inner
                else keep(eqn, kind, reasons.OFF())
            )
        known[id(opened)] = Plan(tuple(decisions))
    return known[id(opened)]
