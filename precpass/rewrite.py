"""Plan and jaxpr in, rewritten program out: one loop that binds each equation again.

The environment holds every value once, in the precision it was made in; reading
it in another precision is the only place where a cast comes from.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from precpass import jaxpr as ir
from precpass.graph import join_scopes
from precpass.island import Island, from_bits, islands, to_bits
from precpass.opkinds import OpKind, op
from precpass.plan import Action, Border, Decision, Plan, across
from precpass.precision import Precision
from precpass.product import low_copy, lowered

__all__ = ["Rewriter"]

PlanRule = Callable[[Any, str, Border], Plan]


class Rewriter:
    """Rewrites the jaxprs of one program; a body with one plan is rewritten once.

    Args:
        plan_rule: plans the jaxpr of a custom rule under a name scope and with a border,
            when JAX traces it.
        distinguish: what of a scope those plans depend on.
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
        # holds the jaxpr too: an id is only unique while its object lives
        self.memo: dict[tuple[int, Plan, Hashable, bool], tuple[Any, Any]] = {}

    def jaxpr(self, jaxpr: Any, plan: Plan, scope: str = "") -> Any:
        """The rewritten jaxpr, with the same avals at its border unless the plan changes them.

        It is `jaxpr` itself if nothing changes.
        """
        if not plan.changes:
            return jaxpr
        todo: list[tuple[Any, Any, Plan, str]] = [(None, jaxpr, plan, scope)]
        # innermost bodies first: nested re-tracing would soon reach Python's recursion limit
        while todo:
            eqn, body, its_plan, inside = todo[-1]
            if self._key(body, its_plan, inside) in self.memo:
                todo.pop()
            elif inner := self._not_rewritten(body, its_plan, inside):
                todo += inner
            else:
                with contextlib.nullcontext() if eqn is None else ir.context_of(eqn):
                    self._rewrite(body, its_plan, inside)
        return self.memo[self._key(jaxpr, plan, scope)][1]

    def _key(self, jaxpr: Any, plan: Plan, scope: str) -> tuple[int, Plan, Hashable, bool]:
        # equal plans of one jaxpr under two scopes may still plan its custom rules differently
        seen = self.distinguish(scope) if plan.rewrites_rules else None
        return id(ir.open_jaxpr(jaxpr)), plan, seen, ir.in_x64()

    def _rewrite(self, jaxpr: Any, plan: Plan, scope: str) -> None:
        avals = [_crossing(a, plan.border) for a in ir.in_avals(jaxpr)]
        new = ir.retrace(jaxpr, lambda *args: self.run(jaxpr, plan, args, scope), avals)
        self.memo[self._key(jaxpr, plan, scope)] = (jaxpr, new)

    def _not_rewritten(self, jaxpr: Any, plan: Plan, scope: str) -> list[Any]:
        """The bodies that `jaxpr` needs first, each with its equation, plan and scope."""
        found: list[Any] = []
        for eqn, decision in zip(ir.open_jaxpr(jaxpr).eqns, plan.decisions, strict=True):
            # shards are re-traced in their own place, where their axes are bound
            if not decision.inner or eqn.primitive.name == "shard_map":
                continue
            # nor are the bodies of an island, where x64 is on
            if decision.island and not ir.in_x64():
                continue
            inside = join_scopes(scope, ir.scope_of(eqn))
            found += [
                (eqn, body.jaxpr, inner, inside)
                for body, inner in zip(ir.bodies(eqn), decision.inner, strict=True)
                if inner.changes and self._key(body.jaxpr, inner, inside) not in self.memo
            ]
        return found

    def run(self, jaxpr: Any, plan: Plan, args: Sequence[Any], scope: str = "") -> list[Any]:
        """The rewritten program evaluated at `args`.

        Args:
            jaxpr: the original.
            plan: its plan.
            args: its operands.
            scope: the name scopes around it.
        """
        opened = ir.open_jaxpr(jaxpr)
        env = _Env(opened, ir.consts_of(jaxpr), args)
        found = islands(opened, plan) if plan.has_islands and not ir.in_x64() else {}
        eqns, row = opened.eqns, 0
        with ir.Places() as places:
            while row < len(eqns):
                if row in found:
                    places.leave()
                    self._island(env, found[row], scope)
                    row = found[row].stop
                    continue
                with places.of(eqns[row]):
                    self._eqn(env, eqns[row], plan.decisions[row], scope)
                row += 1
        return [env.output(v, plan.border) for v in opened.outvars]

    def _island(self, env: _Env, island: Island, scope: str) -> None:
        rounded = len(island.invars)

        def inside(*args: Any) -> list[Any]:
            inner = _Env(island, (), args[:rounded])
            for v, bits in zip(island.exact_in, args[rounded:], strict=True):
                inner.values[v] = from_bits(bits, inner.values[v])
                inner.held[v] = Precision.F64
            with ir.Places() as places:
                for eqn, decision in zip(island.eqns, island.decisions, strict=True):
                    with places.of(eqn):
                        self._eqn(inner, eqn, decision, scope)
            exact = [to_bits(inner.read_as(v, Precision.F64)) for v in island.exact_out]
            return [inner.output(v, ()) for v in island.outvars] + exact

        args = [env.read(v) for v in island.invars] + [env.bits[v] for v in island.exact_in]
        with ir.line_of(island.eqns[0]):
            results = iter(ir.float64(inside, args))
        for var in island.outvars:
            env.write(var, next(results), None)
        env.bits.update(zip(island.exact_out, results, strict=True))

    @contextlib.contextmanager
    def _around_rule(self) -> Generator[None]:
        # a rule that is traced in an island is the user's code, written for x64 as it was outside
        with self.around_rule(), jax.enable_x64(self.x64):
            yield

    def _eqn(self, env: _Env, eqn: Any, decision: Decision, scope: str) -> None:
        action = decision.action
        if action is Action.KEEP:
            results = ir.bind(eqn, env.read_all(eqn.invars))
            if (pair := ir.widening(eqn)) is not None:
                env.widened_from.update([pair])
            env.values.update(zip(eqn.outvars, results, strict=True))
            return
        if action is Action.ENTER:
            results = self._enter(env, eqn, decision, scope)
        elif action is Action.DROP:
            results = [env.read_as(eqn.invars[0], decision.compute)]
        elif action is Action.WIDEN:
            results = _wide(env, eqn, decision)
        elif decision.kind is OpKind.COMPUTE:
            results = [_product(env, eqn, decision)]
        else:
            results = _low(env, eqn, decision)
        stored = (decision.compute,) if action is Action.DROP else decision.stored
        for var, value, precision in zip(eqn.outvars, results, stored, strict=True):
            env.write(var, value, precision)

    def _enter(self, env: _Env, eqn: Any, decision: Decision, scope: str) -> list[Any]:
        if not decision.changes:
            return ir.bind(eqn, [env.read(v) for v in eqn.invars])
        inside = join_scopes(scope, ir.scope_of(eqn))
        found = ir.bodies(eqn)
        pairs = list(zip(found, decision.inner, strict=True))
        border = {i: plan.border for body, plan in pairs if plan.border for i in body.operands}
        args = [
            env.read_as(v, across(border[i], ir.precision_of(v.aval)))
            if i in border
            else env.read(v)
            for i, v in enumerate(eqn.invars)
        ]
        if eqn.primitive.name == "shard_map":
            ((body, plan),) = pairs

            def on_shards(*xs: Any) -> tuple[Any, ...]:
                return tuple(self.run(body.jaxpr, plan, xs, inside))

            return ir.bind_shard_map(eqn, on_shards, args)
        new = [self.jaxpr(body.jaxpr, plan, inside) for body, plan in pairs]
        params = ir.with_bodies(eqn, found, new)
        if (rules := decision.rules) is not None:
            rewrite = ir.Rewrite(
                lambda rule: self.jaxpr(rule, self.plan_rule(rule, inside, rules), inside),
                self._around_rule,
            )
            ir.with_rewritten_rules(eqn, params, rewrite)
        return ir.bind(eqn, args, params)


class _Env:
    """The values of one run of a jaxpr."""

    def __init__(self, opened: Any, consts: Sequence[Any], args: Sequence[Any]) -> None:
        self.opened = opened
        self.values: dict[Any, Any] = {}
        self.held: dict[Any, Precision] = {}
        self.low_copies: dict[Any, Any] = {}
        self.wide_copies: dict[Any, Any] = {}
        self.widened_from: dict[Any, Any] = {}
        self.bits: dict[Any, Any] = {}
        for var, value in (
            *zip(opened.constvars, consts, strict=False),
            *zip(opened.invars, args, strict=True),
        ):
            self.write(var, value, Precision.of(getattr(value, "dtype", None)), shared=False)

    @functools.cached_property
    def uses(self) -> dict[Any, int]:
        """How often each variable is read, where a body and a border count as several readers."""
        uses: dict[Any, int] = {}
        for eqn in self.opened.eqns:
            weight = 2 if ir.bodies(eqn) else 1
            for atom in eqn.invars:
                if not ir.is_literal(atom):
                    uses[atom] = uses.get(atom, 0) + weight
        for atom in self.opened.outvars:
            if not ir.is_literal(atom):
                uses[atom] = uses.get(atom, 0) + 2
        return uses

    def write(self, var: Any, value: Any, stored: Precision | None, *, shared: bool = True) -> None:
        """Holds a result.

        A low one with several readers is held widened, which is exact: each
        reader casts it for itself, so that their cotangents add up wide.
        """
        self.values[var] = value
        native = ir.precision_of(var.aval)
        if stored is None or native is None or stored is native:
            return
        if shared and stored.is_narrower_than(native) and self.uses.get(var, 0) > 1:
            self.values[var] = ir.convert(value, var.aval.dtype)
        else:
            self.held[var] = stored

    def read(self, atom: Any) -> Any:
        """A value in the precision in which the original program has it."""
        if ir.is_literal(atom):
            return atom.val
        value = self.values[atom]
        return ir.convert(value, atom.aval.dtype) if atom in self.held else value

    def read_all(self, atoms: Sequence[Any]) -> list[Any]:
        """`read` of each: most programs hold most values as they were written."""
        if self.held:
            return [self.read(v) for v in atoms]
        values = self.values
        return [v.val if ir.is_literal(v) else values[v] for v in atoms]

    def read_as(self, atom: Any, precision: Precision | None) -> Any:
        """A value in another precision.

        All readers share one cast to a wider format, so that their cotangents add up
        wide; a narrowing cast is each reader's own, for the same reason.
        """
        if precision is None or ir.precision_of(atom.aval) is None:
            return self.read(atom)
        if ir.is_literal(atom):
            # a literal may have kept more digits than the program computes with
            return np.asarray(atom.val, atom.aval.dtype).astype(precision.dtype)
        value = self._nearest(atom, precision)
        if value.dtype.itemsize >= precision.dtype.itemsize:
            return _as(value, precision)
        key = (atom, precision)
        if key not in self.wide_copies:
            self.wide_copies[key] = _as(value, precision)
        return self.wide_copies[key]

    def _nearest(self, atom: Any, precision: Precision) -> Any:
        source = self.widened_from.get(atom)
        widened = source is not None and ir.precision_of(source.aval) is precision
        return self.values[source if widened else atom]

    def low_copy(self, atom: Any, precision: Precision) -> Any:
        """A low copy that all products share; no derivative passes through it."""
        if ir.is_literal(atom):
            return self.read_as(atom, precision)
        key = (atom, precision)
        if key not in self.low_copies:
            self.low_copies[key] = low_copy(self._nearest(atom, precision), precision)
        return self.low_copies[key]

    def output(self, atom: Any, border: Border) -> Any:
        """A result of the jaxpr as it crosses the border."""
        native = ir.precision_of(atom.aval)
        crossing = across(border, native)
        if crossing is not native:
            return self.read_as(atom, crossing)
        value = self.read(atom)
        weak = getattr(atom.aval, "weak_type", False)
        if weak != getattr(jax.typeof(value), "weak_type", False):
            value = ir.convert(value, atom.aval.dtype, weak)
        return value


def _product(env: _Env, eqn: Any, decision: Decision) -> Any:
    assert decision.compute is not None
    stored = decision.stored[0]
    dtype = eqn.outvars[0].aval.dtype if stored is None else stored.dtype
    low = [env.low_copy(v, decision.compute) for v in eqn.invars[:2]]
    return lowered(eqn, low, [env.read(v) for v in eqn.invars], dtype)


def _low(env: _Env, eqn: Any, decision: Decision) -> list[Any]:
    """An equation on low operands with low results; sums are taken wide and rounded once."""
    low = decision.compute
    assert low is not None
    row = op(eqn.primitive.name)
    if row.spreads:
        results = ir.bind(eqn, [env.read(v) for v in eqn.invars])
        return [_as(x, low) for x in results]
    args = [_spread(env, v, eqn, low) for v in eqn.invars]
    if row.accumulates:
        pairs = zip(args, eqn.invars, strict=True)
        args = [_as(x, ir.precision_of(v.aval)) for x, v in pairs]
    return [_as(x, low) for x in ir.bind(eqn, args)]


def _spread(env: _Env, atom: Any, eqn: Any, low: Precision) -> Any:
    """An operand in the low format, in the result's shape where the equation spreads it.

    Elementwise equations stretch dimensions of size 1, and clamp stretches
    scalar bounds: the transpose would add up in the low format.
    """
    shape, out = getattr(atom.aval, "shape", ()), eqn.outvars[0].aval.shape
    elementwise = op(eqn.primitive.name).kind is OpKind.ELEMENTWISE
    if not elementwise or shape == out or ir.is_literal(atom) or ir.precision_of(atom.aval) is None:
        return env.read_as(atom, low)
    dims = tuple(range(len(out) - len(shape), len(out)))
    return _as(lax.broadcast_in_dim(env.read(atom), out, dims), low)


def _wide(env: _Env, eqn: Any, decision: Decision) -> list[Any]:
    wide = decision.compute
    assert wide is not None
    return ir.bind(eqn, [env.read_as(v, wide) for v in eqn.invars], ir.retyped(eqn, wide.dtype))


def _as(x: Any, precision: Precision | None) -> Any:
    if precision is None or Precision.of(x.dtype) in (None, precision):
        return x
    return ir.convert(x, precision.dtype)


def _crossing(aval: Any, border: Border) -> Any:
    native = ir.precision_of(aval)
    crossing = across(border, native)
    return aval if crossing in (None, native) else aval.update(dtype=crossing.dtype)
