"""Plan and jaxpr in, rewritten program out: one loop that binds each equation again.

The environment holds every value once, in the precision it was made in; reading
it in another precision is the only place where a cast comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from precpass import jaxpr as ir
from precpass.graph import join_scopes
from precpass.island import run_island
from precpass.opkinds import OpKind, op
from precpass.plan import Action, Decision, Plan
from precpass.precision import Precision
from precpass.product import low_copy, lowered

__all__ = ["Rewriter"]

PlanRule = Callable[[Any, str], Plan]


class Rewriter:
    """Rewrites the jaxprs of one program; a body with one plan is rewritten once.

    Args:
        plan_rule: plans the jaxpr of a custom rule under a name scope, when JAX traces it.
        distinguish: what of a scope those plans depend on.
    """

    def __init__(self, plan_rule: PlanRule, distinguish: Callable[[str], Hashable]) -> None:
        self.plan_rule = plan_rule
        self.distinguish = distinguish
        # holds the jaxpr too: an id is only unique while its object lives
        self.memo: dict[tuple[int, Plan, Hashable], tuple[Any, Any]] = {}

    def jaxpr(self, jaxpr: Any, plan: Plan, scope: str = "") -> Any:
        """The rewritten jaxpr with the same avals at its border.

        It is `jaxpr` itself if nothing changes.
        """
        if not plan.changes:
            return jaxpr
        # equal plans of one jaxpr under two scopes may still plan its custom rules differently
        seen = self.distinguish(scope) if plan.rewrites_rules else None
        key = (id(ir.open_jaxpr(jaxpr)), plan, seen)
        if key not in self.memo:
            avals = [_widened(a) if plan.widens else a for a in ir.in_avals(jaxpr)]
            new = ir.retrace(jaxpr, lambda *args: self.run(jaxpr, plan, args, scope), avals)
            self.memo[key] = (jaxpr, new)
        return self.memo[key][1]

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
        row = 0
        while row < len(opened.eqns):
            eqn, decision = opened.eqns[row], plan.decisions[row]
            if decision.compute is Precision.F64 and decision.action is Action.WIDEN:
                row = run_island(env, opened, plan, row)
                continue
            self._eqn(env, eqn, decision, scope)
            row += 1
        return [env.output(v, plan.widens) for v in opened.outvars]

    def _eqn(self, env: _Env, eqn: Any, decision: Decision, scope: str) -> None:
        if decision.action is Action.DROP:
            env.write(
                eqn.outvars[0], env.read_as(eqn.invars[0], decision.compute), decision.compute
            )
            return
        if decision.action is Action.ENTER and decision.changes:
            results = self._enter(env, eqn, decision, scope)
        elif decision.action is Action.LOWER and decision.kind is OpKind.COMPUTE:
            results = [_product(env, eqn, decision)]
        elif decision.action is Action.LOWER:
            results = _low(env, eqn, decision)
        elif decision.action is Action.WIDEN:
            results = _wide(env, eqn, decision)
        else:
            with ir.context_of(eqn):
                results = ir.bind(eqn, [env.read(v) for v in eqn.invars])
        if (pair := ir.widening(eqn)) is not None and decision.action is Action.KEEP:
            env.widened_from.update([pair])
        for var, value, stored in zip(eqn.outvars, results, decision.stored, strict=True):
            env.write(var, value, stored)

    def _enter(self, env: _Env, eqn: Any, decision: Decision, scope: str) -> list[Any]:
        inside = join_scopes(scope, ir.scope_of(eqn))
        found = ir.bodies(eqn)
        pairs = list(zip(found, decision.inner, strict=True))
        widened = {i for body, plan in pairs if plan.widens for i in body.operands}
        args = [
            env.read_as(v, _wide_of(v.aval)) if i in widened else env.read(v)
            for i, v in enumerate(eqn.invars)
        ]
        with ir.context_of(eqn):
            if eqn.primitive.name == "shard_map":
                ((body, plan),) = pairs

                def on_shards(*xs: Any) -> tuple[Any, ...]:
                    return tuple(self.run(body.jaxpr, plan, xs, inside))

                return ir.bind_shard_map(eqn, on_shards, args)
            new = [self.jaxpr(body.jaxpr, plan, inside) for body, plan in pairs]
            params = ir.with_bodies(eqn, found, new)
            if decision.rewrites_rules:
                ir.with_rewritten_rules(
                    eqn.primitive.name,
                    params,
                    lambda jaxpr: self.jaxpr(jaxpr, self.plan_rule(jaxpr, inside), inside),
                )
            return ir.bind(eqn, args, params)


class _Env:
    """The values of one run of a jaxpr."""

    def __init__(self, opened: Any, consts: Sequence[Any], args: Sequence[Any]) -> None:
        self.values: dict[Any, tuple[Any, Precision | None]] = {}
        self.low_copies: dict[Any, Any] = {}
        self.widened_from: dict[Any, Any] = {}
        self.uses: dict[Any, int] = {}
        for eqn in opened.eqns:
            weight = 2 if ir.bodies(eqn) else 1
            for atom in eqn.invars:
                if not ir.is_literal(atom):
                    self.uses[atom] = self.uses.get(atom, 0) + weight
        for atom in opened.outvars:
            if not ir.is_literal(atom):
                self.uses[atom] = self.uses.get(atom, 0) + 2
        for var, value in (
            *zip(opened.constvars, consts, strict=False),
            *zip(opened.invars, args, strict=True),
        ):
            held = Precision.of(getattr(value, "dtype", None))
            self.values[var] = (value, held if held is not ir.precision_of(var.aval) else None)

    def write(self, var: Any, value: Any, stored: Precision | None) -> None:
        """Holds a result.

        A low one with several readers is held widened, which is exact: each
        reader casts it for itself, so that their cotangents add up wide.
        """
        native = ir.precision_of(var.aval)
        if stored is not None and stored.is_low and self.uses.get(var, 0) > 1:
            value, stored = lax.convert_element_type(value, var.aval.dtype), None
        self.values[var] = (value, stored if stored is not native else None)

    def read(self, atom: Any) -> Any:
        """A value in the precision in which the original program has it."""
        if ir.is_literal(atom):
            return atom.val
        value, stored = self.values[atom]
        return value if stored is None else lax.convert_element_type(value, atom.aval.dtype)

    def read_as(self, atom: Any, precision: Precision | None) -> Any:
        """A value in another precision, with a cast of its own."""
        if precision is None or ir.precision_of(atom.aval) is None:
            return self.read(atom)
        if ir.is_literal(atom):
            return np.asarray(atom.val, precision.dtype)
        return _as(self._nearest(atom, precision), precision)

    def _nearest(self, atom: Any, precision: Precision) -> Any:
        source = self.widened_from.get(atom)
        widened = source is not None and ir.precision_of(source.aval) is precision
        return self.values[source if widened else atom][0]

    def low_copy(self, atom: Any, precision: Precision) -> Any:
        """A low copy that all products share; no derivative passes through it."""
        if ir.is_literal(atom):
            return self.read_as(atom, precision)
        key = (atom, precision)
        if key not in self.low_copies:
            self.low_copies[key] = low_copy(self._nearest(atom, precision), precision)
        return self.low_copies[key]

    def output(self, atom: Any, widens: bool) -> Any:
        """A result of the jaxpr with the aval that it had."""
        if widens:
            return self.read_as(atom, _wide_of(atom.aval))
        value = self.read(atom)
        weak = getattr(atom.aval, "weak_type", False)
        if weak != getattr(jax.typeof(value), "weak_type", False):
            value = ir.convert(value, atom.aval.dtype, weak)
        return value


def _product(env: _Env, eqn: Any, decision: Decision) -> Any:
    assert decision.compute is not None
    stored = decision.stored[0]
    dtype = eqn.outvars[0].aval.dtype if stored is None else stored.dtype
    with ir.context_of(eqn):
        low = [env.low_copy(v, decision.compute) for v in eqn.invars[:2]]
        return lowered(eqn, low, [env.read(v) for v in eqn.invars], dtype)


def _low(env: _Env, eqn: Any, decision: Decision) -> list[Any]:
    """An equation on low operands with low results; sums are taken wide and rounded once."""
    low = decision.compute
    assert low is not None
    row = op(eqn.primitive.name)
    with ir.context_of(eqn):
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
    params = dict(eqn.params)
    if eqn.primitive.name == "convert_element_type":
        params["new_dtype"] = wide.dtype
    for name in ("preferred_element_type", "out_dtype"):
        if params.get(name) is not None:
            params[name] = wide.dtype
    with ir.context_of(eqn):
        return ir.bind(eqn, [env.read_as(v, wide) for v in eqn.invars], params)


def _as(x: Any, precision: Precision | None) -> Any:
    if precision is None or Precision.of(x.dtype) in (None, precision):
        return x
    return lax.convert_element_type(x, precision.dtype)


def _wide_of(aval: Any) -> Precision | None:
    native = ir.precision_of(aval)
    return Precision.F32 if native is not None and native.is_low else native


def _widened(aval: Any) -> Any:
    wide = _wide_of(aval)
    return aval if wide in (None, ir.precision_of(aval)) else aval.update(dtype=wide.dtype)
