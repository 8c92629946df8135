"""From a plan and a jaxpr to the rewritten jaxpr: one loop over the equations.

An equation that stays as it is is reused, and not bound again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from typing import Any

import jax

from precpass import jaxpr as ir
from precpass.plan.borders import Border, BorderCopy
from precpass.plan.plan import Action, Decision, Plan
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind
from precpass.policy.scopes import join_scopes
from precpass.rewrite.env import Env, border_avals, crossing_aval
from precpass.rewrite.float64_spans import Float64Span, float64_spans, from_bits, to_bits
from precpass.rewrite.low_equation import (
    add_low_transpose,
    chosen_low,
    low_results,
    put_together_low,
)
from precpass.rewrite.lowered import lowered

__all__ = ["Rewriter"]

PlanRule = Callable[[Any, str, Border], Plan]
_Key = tuple[int, Plan, Hashable, bool]


class Rewriter:
    """Rewrites the jaxprs of one program; a body is rewritten once for each plan that it has.

    Args:
        plan_rule: plans the jaxpr of a custom rule under a name scope and with a border,
            when JAX traces it.
        distinguish: gives a key of a scope; these plans are equal for scopes with equal keys.
        around_rule: a context in which custom rules are traced.
    """

    def __init__(
        self,
        plan_rule: PlanRule,
        distinguish: Callable[[str], Hashable],
        around_rule: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self.plan_rule = plan_rule
        self.distinguish = distinguish
        self.around_rule = around_rule
        self.x64 = ir.in_x64()
        self.memo: dict[_Key, tuple[Any, Any, list[int]]] = {}
        self.templates: ir.Templates = {}
        self.constants: dict[Any, Any] | None = None

    def jaxpr(self, jaxpr: ir.Jaxpr, plan: Plan, scope: str = "") -> Any:
        """The rewritten jaxpr, with the same avals at its border unless the plan changes them.

        It is `jaxpr` itself if nothing changes.
        """
        if not plan.changes:
            return jaxpr
        if self.constants is None and not ir.in_x64():
            has_spans = any(d.in_float64_span for d in plan.walk())
            self.constants = ir.constant_operands(jaxpr) if has_spans else {}
        todo: list[tuple[Any, Any, Plan, str]] = [(None, jaxpr, plan, scope)]
        # innermost bodies first: nested rewriting would soon reach Python's recursion limit
        while todo:
            eqn, body, its_plan, inside = todo[-1]
            if self.key(body, its_plan, inside) in self.memo:
                todo.pop()
            elif inner := self._not_rewritten(body, its_plan, inside):
                todo += inner
            else:
                self._rewrite(eqn, body, its_plan, inside)
        return self.memo[self.key(jaxpr, plan, scope)][1]

    def added(
        self, jaxpr: ir.Jaxpr, plan: Plan, scope: str
    ) -> tuple[Sequence[Any], list[Sequence[Any]], Sequence[Any]] | None:
        """The new equations at the start of a body, in the place of each equation, and at the end.

        The first of consecutive equations of a float64 region has those that replace all of them.
        None if the body was not rewritten.
        """
        memoized = self.memo.get(self.key(jaxpr, plan, scope))
        if memoized is None:
            return None
        eqns, starts = ir.open_jaxpr(memoized[1]).eqns, memoized[2]
        pairs = zip(starts, [*starts[1:], len(eqns)], strict=True)
        *spans, last = [eqns[start:stop] for start, stop in pairs]
        return eqns[: starts[0]], spans, last

    def key(self, jaxpr: ir.Jaxpr, plan: Plan, scope: str) -> _Key:
        """The key under which the rewrite of a body is cached."""
        # Under two scopes equal plans of one jaxpr may still plan its custom rules differently.
        seen = self.distinguish(scope) if plan.rewrites_rules else None
        return id(ir.open_jaxpr(jaxpr)), plan, seen, ir.in_x64()

    def _not_rewritten(self, jaxpr: ir.Jaxpr, plan: Plan, scope: str) -> list[Any]:
        """The bodies that `jaxpr` needs first, each with its equation, plan and scope."""
        reasons: list[Any] = []
        pairs = zip(ir.open_jaxpr(jaxpr).eqns, plan.decisions, strict=True)
        for eqn, decision in [pair for pair in pairs if pair[1].inner]:
            # The body of a shard_map is rewritten where it is traced, with its axes bound.
            if eqn.primitive.name == "shard_map":
                continue
            # nor are the bodies of a float64 span, where x64 is on
            if decision.in_float64_span and not ir.in_x64():
                continue
            inside = join_scopes(scope, ir.scope_of(eqn))
            reasons += [
                (eqn, body.jaxpr, inner, inside)
                for body, inner in zip(ir.bodies(eqn), decision.inner, strict=True)
                if inner.changes and self.key(body.jaxpr, inner, inside) not in self.memo
            ]
        return reasons

    def _rewrite(self, within: Any, jaxpr: ir.Jaxpr, plan: Plan, scope: str) -> None:
        opened = ir.open_jaxpr(jaxpr)
        build = ir.Builder(self.templates, within)
        env = Env(opened, build)
        invars = [env.enter(v, plan.border) for v in opened.invars]
        for t in plan.border_copies.operands:
            invars += env.enter_border_copy(opened.invars[t.position], t)
        spans = float64_spans(opened, plan) if plan.has_float64_spans and not ir.in_x64() else {}
        starts, new_eqns, beyond = list[int](), build.eqns, 0
        exact: dict[Any, Any] = {}
        for row, (eqn, decision) in enumerate(zip(opened.eqns, plan.decisions, strict=True)):
            starts.append(len(new_eqns))
            if row in spans:
                self._add_float64_span(env, spans[row], scope, exact)
                beyond = spans[row].stop
            if row >= beyond:
                self._eqn(env, eqn, decision, scope)
        starts.append(len(new_eqns))
        build.leave()
        outvars = [env.output(v, plan.border) for v in opened.outvars]
        for t in plan.border_copies.results:
            outvars += env.border_copy(opened.outvars[t.position], t)
        new = build.finish(jaxpr, invars, outvars)
        # the entry keeps the jaxpr alive: an id is only unique while its object lives
        self.memo[self.key(jaxpr, plan, scope)] = jaxpr, new, starts

    def _add_float64_span(
        self, env: Env, span: Float64Span, scope: str, exact: dict[Any, Any]
    ) -> None:
        """Adds a float64 span; `exact` holds the bits of float64 values that other spans made."""

        def inside(*args: Any) -> list[Any]:
            return self._in_float64_span(env.opened, span, args, scope)

        args = [env.read(v) for v in span.invars] + [exact[v] for v in span.exact_in]
        env.build.at_line_of(span.eqns[0])
        results = iter(env.build.call(lambda *xs: ir.float64(inside, xs), args))
        for var in span.outvars:
            env.write(var, next(results), None)
        exact.update(zip(span.exact_out, results, strict=True))

    def _in_float64_span(
        self, opened: ir.Jaxpr, span: Float64Span, args: Sequence[Any], scope: str
    ) -> list[Any]:
        """The results of a float64 span, which is traced with x64 on."""
        build = ir.Builder(self.templates, span.eqns[0])
        env = Env(span, build)
        build.at(span.eqns[0])
        constants = self.constants or {}
        for var in filter(constants.__contains__, span.invars):
            env.enter_constant(var, constants[var])
        bits = [ir.new_variable(jax.typeof(x)) for x in args[len(span.invars) :]]
        for var, its_bits in zip(span.exact_in, bits, strict=True):
            (env.values[var],) = build.call(lambda b, r: [from_bits(b, r)], [its_bits, var])
        for eqn, decision in zip(span.eqns, span.decisions, strict=True):
            self._eqn(env, eqn, decision, scope)
        build.leave()
        wide = [env.read_as(v, Precision.F64) for v in span.exact_out]
        exact = [build.call(lambda x: [to_bits(x)], [x])[0] for x in wide]
        outvars = [env.output(v, ()) for v in span.outvars]
        return build.evaluate(opened, [*span.invars, *bits], [*outvars, *exact], args)

    def _eqn(self, env: Env, eqn: ir.Eqn, decision: Decision, scope: str) -> None:
        action = decision.action
        if action is Action.KEEP:
            if decision.product.exchanged:
                env.build.at(eqn)
                env.write(eqn.outvars[0], _exchanged(env, eqn), None)
            else:
                env.keep(eqn)
            if decision.alters:
                _finish_kept(env, eqn, decision)
            return
        env.build.at(eqn)
        if action is Action.ENTER and decision.keeps_rounding:
            unrounded = (None,) * len(decision.stored)
            self._enter(env, eqn, dataclasses.replace(decision, stored=unrounded), scope)
            low = decision.stored[0]
            if low is None or decision.pins_rounding or not chosen_low(env, eqn, low):
                _round(env, eqn, decision)
        elif action is Action.ENTER:
            self._enter(env, eqn, decision, scope)
        elif action is Action.DROP:
            kept = env.read_as(ir.wide_operand(eqn), decision.compute)
            _write(env, eqn, [kept], (decision.compute,))
        elif action is Action.WIDEN:
            _write(env, eqn, _wide(env, eqn, decision), decision.stored)
        elif action is Action.MULTIPLY:
            env.write(eqn.outvars[0], self.multiplied(env, eqn, decision), None)
            _round(env, eqn, decision)
        elif decision.kind is OpKind.COMPUTE:
            low, form = decision.compute, decision.product
            assert low is not None
            env.write(eqn.outvars[0], lowered(env, eqn, low, form), None)
            if form.low_result:
                env.note_rounded(eqn.outvars[0], low)
            _round(env, eqn, decision)
        else:
            _write(env, eqn, low_results(env, eqn, decision), decision.stored)

    def multiplied(self, env: Env, eqn: ir.Eqn, decision: Decision) -> Any:
        """A product of float32 operands, which says how they are multiplied."""
        assert decision.compute is not None
        if decision.product.exchanged:
            eqn = ir.exchanged(eqn)
        params = ir.multiplied_in(eqn, decision.compute)
        return env.build.keep(eqn, [env.read(v) for v in eqn.invars], params)[0]

    @functools.cached_property
    def _of_rules(self) -> Rewriter:
        """A second rewriter, for custom rules.

        The rewritten equations refer to it, and this rewriter refers to them. If it were this one,
        they would keep each other, and everything that the program closes over, alive until the
        cycle collector runs.
        """
        rewriter = Rewriter(self.plan_rule, self.distinguish, self.around_rule)
        rewriter.x64, rewriter.templates = self.x64, self.templates
        rewriter.constants = {}
        return rewriter

    def _rewrites_of_rules(self, scope: str, border: Border) -> ir.Rewrite:
        rewriter, plan_rule = self._of_rules, self.plan_rule

        def rewritten(rule: Any) -> Any:
            return rewriter.jaxpr(rule, plan_rule(rule, scope, border), scope)

        return ir.Rewrite(rewritten, functools.partial(_around_rule, self.around_rule, self.x64))

    def _body(self, eqn: ir.Eqn, body: ir.Body, plan: Plan, scope: str) -> Any:
        """The rewritten jaxpr of a body, with its border copies in the equation's order."""
        new = self.jaxpr(body.jaxpr, plan, scope)
        places = [_places((t.position, t) for t in copies) for copies in plan.border_copies]
        return ir.with_border_copies_in_order(eqn, body, new, *places) if any(places) else new

    def _enter(self, env: Env, eqn: ir.Eqn, decision: Decision, scope: str) -> None:
        if not decision.changes:
            env.build.keep(eqn, [env.read(v) for v in eqn.invars])
            return
        inside = join_scopes(scope, ir.scope_of(eqn))
        pairs = list(zip(ir.bodies(eqn), decision.inner, strict=True))
        border = {i: plan.border for body, plan in pairs if plan.border for i in body.operands}
        args = [env.crossing(v, border.get(i, ())) for i, v in enumerate(eqn.invars)]
        if eqn.primitive.name == "shard_map":
            self._enter_shards(env, eqn, decision, inside, args)
            return
        new = [self._body(eqn, body, plan, inside) for body, plan in pairs]
        params = ir.with_bodies(eqn, [body for body, _ in pairs], new)
        if decision.rules is not None:
            rewrite = self._rewrites_of_rules(inside, decision.rules)
            ir.with_rewritten_rules(eqn, params, rewrite)
        leaving = {i: plan.border for body, plan in pairs if plan.border for i in body.results}
        avals = [crossing_aval(v.aval, leaving.get(i, ())) for i, v in enumerate(eqn.outvars)]
        if any(any(plan.border_copies) for _, plan in pairs):
            _cross(env, eqn, decision, params, args, avals)
        else:
            _write(env, eqn, env.build.keep(eqn, args, params, avals), decision.stored)

    def _enter_shards(
        self, env: Env, eqn: ir.Eqn, decision: Decision, scope: str, args: Sequence[Any]
    ) -> None:
        """Adds a `shard_map`, whose border copies have the specs of the values that they copy."""
        ((body, plan),) = zip(ir.bodies(eqn), decision.inner, strict=True)
        copies = plan.border_copies
        low = [x for t in copies.operands for x in env.border_copy(eqn.invars[t.position], t)]
        places = [[t.position for t in each] for each in copies]

        def on_shards(*xs: Any) -> tuple[Any, ...]:
            return tuple(ir.evaluate(self.jaxpr(body.jaxpr, plan, scope), xs))

        def mapped(*xs: Any) -> list[Any]:
            return ir.bind_shard_map(eqn, on_shards, xs, places)

        results = env.build.call(mapped, [*args, *low])
        count = len(eqn.outvars)
        _write(env, eqn, results[:count], decision.stored)
        for t, copy in zip(copies.results, results[count:], strict=True):
            env.receive(eqn.outvars[t.position], [copy], t)


def _cross(
    env: Env,
    eqn: ir.Eqn,
    decision: Decision,
    params: Any,
    args: Sequence[Any],
    avals: Sequence[ir.Aval],
) -> None:
    """Adds an equation with border copies."""
    pairs = list(zip(ir.bodies(eqn), decision.inner, strict=True))
    first_sliced, first_stacked = ir.loop_rows(eqn) or (len(eqn.invars), len(eqn.outvars))
    operands = ((body.operands, plan.border_copies.operands) for body, plan in pairs)
    copies_in = _border_copies(operands, first_sliced)
    of_results = ((body.results, plan.border_copies.results) for body, plan in pairs)
    copies_out = _border_copies(of_results, first_stacked)
    unread = {at for at, t in copies_in.items() if t.rounds}
    places = _places(copies_in.items()), _places(copies_out.items())
    crossing = ir.crossing(eqn, *places, unread)
    low = [x for at, t in copies_in.items() for x in env.border_copy(eqn.invars[at], t)]
    results = [ir.new_variable(aval) for aval in avals]
    received = {
        at: [ir.new_variable(aval) for aval in border_avals(eqn.outvars[at].aval, t)]
        for at, t in copies_out.items()
    }
    every = [*results, *(x for copies in received.values() for x in copies)]
    env.build.cross(eqn, crossing, [*args, *low], every, params)
    _write(env, eqn, results, decision.stored)
    for at, copies in received.items():
        env.receive(eqn.outvars[at], copies, copies_out[at])


@contextlib.contextmanager
def _around_rule(
    around: Callable[[], contextlib.AbstractContextManager[Any]], x64: bool
) -> Generator[None]:
    # A custom rule in a float64 span is the user's code, written for the x64 setting outside.
    with around(), jax.enable_x64(x64):
        yield


def _border_copies(
    sides: Iterable[tuple[Sequence[int], Sequence[BorderCopy]]], first_stack: int
) -> dict[int, BorderCopy]:
    """The border copies of an equation, by position, from those of its bodies.

    From the position `first_stack` on the body has slices of the equation's operands or results.
    """
    copies = {places[t.position]: t for places, border_copies in sides for t in border_copies}
    pairs = sorted(copies.items())
    return {at: t._replace(is_stack=at >= first_stack) for at, t in pairs}


def _places(copies: Iterable[tuple[int, BorderCopy]]) -> list[int]:
    """The positions of border copies, one for each of their arrays."""
    return [at for at, border_copy in copies for _ in range(border_copy.arrays)]


def _write(
    env: Env, eqn: ir.Eqn, values: Sequence[Any], stored: Sequence[Precision | None]
) -> None:
    for var, value, precision in zip(eqn.outvars, values, stored, strict=True):
        env.write(var, value, precision)


def _round(env: Env, eqn: ir.Eqn, decision: Decision) -> None:
    for var, precision in zip(eqn.outvars, decision.stored, strict=True):
        if precision is not None:
            keeps, pins = decision.keeps_rounding, decision.pins_rounding
            env.round(var, precision, keeps=keeps, pins=pins)


def _finish_kept(env: Env, eqn: ir.Eqn, decision: Decision) -> None:
    """Rounds the results of an equation that was taken over, and adds what its derivative reads."""
    env.build.at(eqn)
    if decision.device_sum is not None:
        add_low_transpose(env, eqn, decision.device_sum)
    if decision.converts:
        low = decision.stored[0]
        if low is None or decision.keeps_rounding or not put_together_low(env, eqn, low):
            _round(env, eqn, decision)
    if decision.backward:
        env.add_backward_form(eqn, decision.backward, Precision.BF16)


def _exchanged(env: Env, eqn: ir.Eqn) -> Any:
    """A product with exchanged operands, in the precision in which it was written."""
    eqn = ir.exchanged(eqn)
    return env.build.keep(eqn, [env.read(v) for v in eqn.invars])[0]


def _wide(env: Env, eqn: ir.Eqn, decision: Decision) -> Sequence[Any]:
    wide = decision.compute
    assert wide is not None
    args = [env.read_as(v, wide) for v in eqn.invars]
    return env.build.bind(eqn, args, ir.retyped(eqn, wide.dtype))
