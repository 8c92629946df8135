"""Float64 spans: consecutive equations that are evaluated together in float64 while x64 is off.

With x64 on nothing is needed, because the rewriter's environment holds float64 values like any
others. With x64 off no equation of the program may have a float64 value. So consecutive equations
of a `keep("f64")` region become one equation (`jaxpr.primitives.float64`), whose operands and
results have the original program's types. A float64 value that one span makes and another one
reads, such as one that a forward pass saves for the backward pass, crosses twice: rounded to
float32, which carries its derivative, and exactly, as the bits of the float64 number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from precpass import jaxpr as ir
from precpass.plan.plan import Action, Decision, Plan
from precpass.policy.precision import Precision

__all__ = ["Float64Span", "float64_spans", "from_bits", "to_bits"]


@dataclasses.dataclass(frozen=True)
class Float64Span:
    """Consecutive equations of a body, in the form of a jaxpr.

    Attributes:
        start, stop: their rows in the body.
        eqns, decisions: the equations and the decision for each.
        invars: the body's values that they read.
        outvars: their results that the rest of the body reads.
        exact_in, exact_out: the operands and results that cross as bits too.
    """

    start: int
    stop: int
    eqns: Sequence[ir.Eqn]
    decisions: Sequence[Decision]
    invars: Sequence[ir.Atom]
    outvars: Sequence[ir.Var]
    exact_in: Sequence[Any]
    exact_out: Sequence[Any]


def float64_spans(opened: ir.Jaxpr, plan: Plan) -> dict[int, Float64Span]:
    """The float64 spans of a body by the row that they begin at."""
    spans = list(_spans(opened, plan))
    home = {row: i for i, (start, stop) in enumerate(spans) for row in range(start, stop)}
    readers = _readers(opened, home)
    wide = {
        v
        for row in home
        for v, stored in zip(opened.eqns[row].outvars, plan.decisions[row].stored, strict=True)
        if stored is Precision.F64
    }
    found: dict[int, Float64Span] = {}
    for i, (start, stop) in enumerate(spans):
        eqns = opened.eqns[start:stop]
        results = [v for eqn in eqns for v in eqn.outvars]
        own_results = set(results)
        reads = dict.fromkeys(v for e in eqns for v in _variables(e.invars) if v not in own_results)
        leaves = [v for v in results if readers.get(v, set()) - {i}]
        exact_in = [v for v in reads if v in wide]
        exact_out = [v for v in leaves if v in wide and readers[v] - {i, None}]
        decisions = plan.decisions[start:stop]
        found[start] = Float64Span(
            start, stop, eqns, decisions, list(reads), leaves, exact_in, exact_out
        )
    return found


def _readers(opened: ir.Jaxpr, home: Mapping[int, int]) -> dict[Any, set[int | None]]:
    """For each variable, the spans that read it; None for any reader that is in no span."""
    readers: dict[Any, set[int | None]] = {v: {None} for v in _variables(opened.outvars)}
    for row, eqn in enumerate(opened.eqns):
        for v in _variables(eqn.invars):
            readers.setdefault(v, set()).add(home.get(row))
    return readers


def _variables(atoms: Sequence[ir.Atom]) -> Iterator[Any]:
    return (v for v in atoms if not ir.is_literal(v))


def _spans(opened: ir.Jaxpr, plan: Plan) -> Iterator[tuple[int, int]]:
    start = 0
    while start < len(plan.decisions):
        stop = row = start
        while row < len(plan.decisions):
            if plan.decisions[row].in_float64_span:
                stop = row + 1
            elif stop == start or not _is_bystander(opened.eqns[row], plan.decisions[row]):
                break
            row += 1
        if any(d.in_float64_span and d.changes for d in plan.decisions[start:stop]):
            yield start, stop
        start = max(stop, start + 1)


def _is_bystander(eqn: ir.Eqn, decision: Decision) -> bool:
    keeps = decision.action is Action.KEEP and decision.compute is None
    return keeps and not ir.bodies(eqn) and not ir.effects_of(eqn)


def to_bits(x: Any) -> Any:
    """A float64 array as an array of a type that exists with x64 off."""
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], -1)
    return lax.bitcast_convert_type(x, jnp.uint32)


def from_bits(bits: Any, rounded: Any) -> Any:
    """The float64 array with these bits, with the derivative of its rounded form."""
    exact = lax.bitcast_convert_type(bits, Precision.F64.dtype)
    if jnp.iscomplexobj(rounded):
        exact = lax.complex(exact[..., 0], exact[..., 1])
    return ir.carry(_Widening(), exact, rounded, ir.detach(rounded))


@dataclasses.dataclass(frozen=True)
class _Widening(ir.Form):
    def tangent(self, tangent: Any, other: Any, rest: Sequence[Any], side: int) -> Any:
        return lax.convert_element_type(tangent, ir.dtype_in(tangent.dtype, Precision.F64))
