"""A plan in which each equation's place is recorded, with the casts that the rewrite has there."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from precpass import jaxpr as ir
from precpass.analysis.equations import is_matrix_product
from precpass.analysis.sizes import flops, nbytes
from precpass.plan.borders import BorderCopy
from precpass.plan.eqn_info import Body, Cast, Crossed, EqnInfo, PlanSource, Site, Value
from precpass.plan.plan import Action, Decision, Plan
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind
from precpass.policy.scopes import join_scopes
from precpass.rewrite.rewriter import Rewriter
from precpass.view.layers import Around, site_of

__all__ = ["described"]


def described(
    jaxpr: ir.Jaxpr, plan: Plan, origin: PlanSource, rewriter: Rewriter | None = None
) -> Plan:
    """An equal plan with an `EqnInfo` for each equation.

    Args:
        jaxpr: the original program.
        plan: its plan.
        origin: the function and the policy that the plan was made from.
        rewriter: the one that rewrote the program under the plan; None if nothing was rewritten.
    """
    description = _Describer(rewriter).plan(jaxpr, plan, origin.scope, _Caller())
    return dataclasses.replace(description, origin=origin)


class _Caller(NamedTuple):
    """The equation that enters a body: what is around it, and where it stands."""

    around: Around = Around()
    site: Site = Site()
    source: ir.Source = ir.Source()


class _Describer:
    def __init__(self, rewriter: Rewriter | None) -> None:
        self.rewriter = rewriter
        self.memo: dict[Any, Plan] = {}
        self.bodies: dict[int, int] = {}
        self.homeless: list[Cast] = []
        """Of bodies without equations, until what enters them has them."""

    def plan(self, jaxpr: ir.Jaxpr, plan: Plan, scope: str, caller: _Caller) -> Plan:
        """A body's plan; a plan that several equations share stays one object."""
        rewriter = self.rewriter
        key = rewriter.key(jaxpr, plan, scope) if rewriter else (id(ir.open_jaxpr(jaxpr)), plan)
        if key not in self.memo:
            added = rewriter.added(jaxpr, plan, scope) if rewriter else None
            casts = _casts(ir.open_jaxpr(jaxpr), plan, *added) if added else {}
            self.homeless += casts.get(_NOWHERE, ())
            eqn_infos: list[EqnInfo] = []
            decisions: list[Decision] = []
            eqns = ir.open_jaxpr(jaxpr).eqns
            for row, (eqn, decision) in enumerate(zip(eqns, plan.decisions, strict=True)):
                around, site = site_of(caller.around, eqn, caller.site)
                info = _eqn_info(eqn, decision, caller, site, tuple(casts.get(row, ())))
                if decision.inner:
                    inside = join_scopes(scope, info.scope)
                    entering = _Caller(around, site, info.source)
                    inner = tuple(
                        self.plan(body.jaxpr, its_plan, inside, entering)
                        for body, its_plan in zip(ir.bodies(eqn), decision.inner, strict=True)
                    )
                    decision = dataclasses.replace(decision, inner=inner)
                    info = dataclasses.replace(info, casts=(*info.casts, *self.homeless))
                    self.homeless.clear()
                eqn_infos.append(info)
                decisions.append(decision)
            body = self.bodies.setdefault(id(ir.open_jaxpr(jaxpr)), len(self.bodies))
            self.memo[key] = dataclasses.replace(
                plan, decisions=tuple(decisions), eqn_infos=tuple(eqn_infos), body=body
            )
        return self.memo[key]


def _eqn_info(
    eqn: ir.Eqn, decision: Decision, caller: _Caller, site: Site, casts: tuple[Cast, ...]
) -> EqnInfo:
    source = ir.source_of(eqn)
    return EqnInfo(
        ir.name_of(eqn),
        ir.scope_of(eqn),
        source if source.file else caller.source,
        site,
        bool(source.file),
        tuple(_value(v.aval) for v in eqn.invars),
        tuple(_value(v.aval) for v in eqn.outvars),
        flops(eqn),
        decision.kind is OpKind.COMPUTE and _is_of_numbers(eqn) and is_matrix_product(eqn),
        casts,
        tuple(map(_body, ir.bodies(eqn))) if decision.inner else (),
        tuple(_crossed(eqn, decision)),
    )


def _crossed(eqn: ir.Eqn, decision: Decision) -> Iterator[Crossed]:
    """The values whose border copies cross an equation's borders, each once for all its bodies."""
    crossed: dict[tuple[bool, int], tuple[Any, BorderCopy]] = {}
    for body, plan in zip(ir.bodies(eqn), decision.inner, strict=bool(decision.inner)):
        border_copies = plan.border_copies
        crossed |= {
            (False, body.operands[t.position]): (eqn.invars, t) for t in border_copies.operands
        }
        crossed |= {
            (True, body.results[t.position]): (eqn.outvars, t) for t in border_copies.results
        }
    for (leaves, at), (atoms, border_copy) in sorted(crossed.items(), key=lambda item: item[0]):
        value, low = _value(atoms[at].aval), border_copy.precision
        nbytes = value.nbytes / atoms[at].aval.dtype.itemsize * low.dtype.itemsize
        yield Crossed(Value(str(low), value.shape, nbytes), not leaves, border_copy.rounds)


def _body(body: ir.Body) -> Body:
    trips: Any = body.trips
    return Body(body.name, trips if trips is None or isinstance(trips, int) else str(trips))


def _is_of_numbers(eqn: ir.Eqn) -> bool:
    return ir.has_complex(eqn) or any(ir.precision_of(v.aval) for v in eqn.invars)


def _value(aval: ir.Aval) -> Value:
    dtype = ir.precision_of(aval) or getattr(aval, "dtype", type(aval).__name__)
    shape = tuple(d if isinstance(d, int) else str(d) for d in getattr(aval, "shape", ()))
    return Value(str(dtype), shape, nbytes(aval))


_NOWHERE = -1


def _casts(
    opened: ir.Jaxpr,
    plan: Plan,
    first: Sequence[Any],
    spans: Sequence[Sequence[Any]],
    last: Sequence[Any],
) -> dict[int, list[Cast]]:
    """The casts that a body's rewrite added or removed, by the equation that they are listed with.

    In a body without equations they are listed under `_NOWHERE`.

    Args:
        opened: the body.
        plan: its plan.
        first: the new equations at the start of the body: casts of its operands, which are listed
            with the first equation that reads them.
        spans: for each equation, the new equations in its place.
        last: the new equations at the end: casts of the body's results, which are listed with the
            equation that makes the result.
    """
    body = _RewrittenBody(list(zip(opened.eqns, plan.decisions, spans, strict=True)), last)
    casts = {row: row_casts for row in range(len(body.rows)) if (row_casts := body.casts(row))}
    row_of = {v: row for row, span in enumerate(spans) for eqn in span for v in eqn.outvars}
    for eqn in last:
        if cast := body.inserted(eqn):
            casts.setdefault(row_of.get(eqn.invars[0], len(body.rows) - 1), []).append(cast)
    for row, eqn in _read_first(first, spans):
        if cast := body.inserted(eqn):
            casts.setdefault(row, []).insert(0, cast)
    return casts


class _RewrittenBody:
    """A body's equations, each with its decision and the new equations in its place.

    Args:
        rows: the equations with these.
        last: the new equations at the end of the body.
    """

    def __init__(
        self, rows: Sequence[tuple[Any, Decision, Sequence[Any]]], last: Sequence[Any]
    ) -> None:
        self.rows = rows
        self._again, self._homes = _made_again(rows, last)

    def inserted(self, eqn: ir.Eqn) -> Cast | None:
        """The `Cast` for an equation of the rewritten body, if it is one that the program lacks."""
        pair = None if id(eqn) in self._again else ir.cast_formats(eqn)
        return pair and Cast("inserted", pair[0], _value(eqn.outvars[0].aval))

    def casts(self, row: int) -> list[Cast]:
        """The casts that are listed with one equation of the program."""
        eqn, decision, span = self.rows[row]
        results = set(eqn.outvars)
        inserted = [c for e in span if results.isdisjoint(e.outvars) and (c := self.inserted(e))]
        if decision.in_float64_span:
            together = itertools.takewhile(lambda r: r[1].in_float64_span, self.rows[row:])
            users = [user for user, _, _ in together]
            inserted += [c for e in span if ir.is_float64(e) for c in _in_span(e, users)]
        pair = ir.cast_formats(eqn) if decision.action is Action.DROP else None
        return self._with_dropped(row, pair, inserted) if pair else inserted

    def _with_dropped(
        self, row: int, pair: tuple[Precision, Precision], found: list[Cast]
    ) -> list[Cast]:
        """The casts listed with a cast that is dropped, and what became of that one."""
        # A cast that is made again in the same place was not touched.
        before, after = pair[0], str(pair[1])
        same = [c for c in found if (c.before, c.after.dtype) == (before, after)]
        gone = self._homes.get(row, "removed")
        if same or not gone:
            return [c for c in found if c not in same]
        return [Cast(gone, before, _value(self.rows[row][0].outvars[0].aval)), *found]


def _read_first(first: Sequence[Any], spans: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Any]]:
    """The new equations at a body's start, in reverse, each with the first equation that reads it.

    An equation that only the body's results read counts as read by the last equation.
    """
    read: dict[Any, int] = {}
    for row, span in enumerate(spans if first else ()):
        for v in (v for eqn in span for v in eqn.invars if not ir.is_literal(v)):
            read.setdefault(v, row)
    for eqn in reversed(first):
        row = min((read[v] for v in eqn.outvars if v in read), default=len(spans) - 1)
        for v in (v for v in eqn.invars if not ir.is_literal(v)):
            read[v] = min(row, read.get(v, row))
        yield row, eqn


def _made_again(rows: Sequence[Any], last: Sequence[Any]) -> tuple[set[int], dict[int, str]]:
    """The casts of a rewrite that are dropped casts, made again where they are read.

    Returns:
        The ids of these casts; and for each dropped cast, by row, "moved", or "" if only casts
        stand between the two places.
    """
    dropped: dict[Any, list[tuple[int, int]]] = {}
    new_casts: list[tuple[Any, int]] = []
    place = 0
    for row, (eqn, decision, span) in enumerate(rows):
        is_dropped = decision.action is Action.DROP and not decision.reorders
        if is_dropped and not ir.is_literal(eqn.invars[0]):
            key = eqn.invars[0], eqn.outvars[0].aval.dtype
            dropped.setdefault(key, []).append((row, place))
        results = set(eqn.outvars)
        for e in span:
            if ir.cast_formats(e) is None:
                place += 1
            elif results.isdisjoint(e.outvars) and not ir.is_literal(e.invars[0]):
                new_casts.append((e, place))
    new_casts += [(e, place) for e in last if ir.cast_formats(e) and not ir.is_literal(e.invars[0])]
    again, homes = set[int](), dict[int, str]()
    for e, there in new_casts:
        if waiting := dropped.get((e.invars[0], e.outvars[0].aval.dtype)):
            row, here = waiting.pop(0)
            again.add(id(e))
            homes[row] = "moved" if there != here else ""
    return again, homes


def _in_span(span: Any, users: Sequence[Any]) -> Iterator[Cast]:
    """The casts that a float64 span has and the program has not.

    Args:
        span: the equation of the span.
        users: the program's equations that it replaces.
    """
    users_casts = Counter(pair[1] for eqn in users if (pair := ir.cast_formats(eqn)))
    (jaxpr,) = ir.hidden_jaxprs(span)
    for eqn in ir.open_jaxpr(jaxpr).eqns:
        if (pair := ir.cast_formats(eqn)) is None:
            continue
        if users_casts[pair[1]]:
            users_casts[pair[1]] -= 1
        else:
            yield Cast("inserted", pair[0], _value(eqn.outvars[0].aval))
