"""Float64 islands: stretches of equations evaluated in float64, with x64 on or off outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from precpass import jaxpr as ir
from precpass.plan import Action, Decision, Plan
from precpass.precision import Precision

__all__ = ["run_island"]


class Env(Protocol):
    """What an island needs of the rewriter's environment."""

    def read(self, atom: Any) -> Any:
        """A value in the original program's precision."""
        ...

    def write(self, var: Any, value: Any, stored: Precision | None) -> None:
        """Holds a result."""
        ...


def run_island(env: Env, opened: Any, plan: Plan, start: int) -> int:
    """Evaluates the stretch of float64 equations that begins at `start`; returns its end.

    What enters and leaves has the original program's precision. With x64 off the
    stretch is one custom VJP whose forward and backward pass both run under
    `jax.enable_x64(True)`: JAX's transposition would otherwise run outside of it
    and truncate. Reverse mode recomputes the stretch.
    """
    stop = _end(opened, plan, start)
    eqns = opened.eqns[start:stop]
    made = {v for eqn in eqns for v in eqn.outvars}
    reads = dict.fromkeys(
        v for eqn in eqns for v in eqn.invars if not ir.is_literal(v) and v not in made
    )
    later = {v for eqn in opened.eqns[stop:] for v in eqn.invars if not ir.is_literal(v)}
    later.update(v for v in opened.outvars if not ir.is_literal(v))
    leaves = [v for v in made if v in later]

    def inside(args: Sequence[Any]) -> list[Any]:
        return _evaluate(eqns, dict(zip(reads, args, strict=True)), leaves)

    args = [env.read(v) for v in reads]
    results = inside(args) if jax.config.jax_enable_x64 else _outside_x64(inside, args)  # pyright: ignore[reportAttributeAccessIssue] -- dynamic
    for var, value in zip(leaves, results, strict=True):
        env.write(var, value, None)
    return stop


def _end(opened: Any, plan: Plan, start: int) -> int:
    stop = start
    for row in range(start, len(opened.eqns)):
        decision = plan.decisions[row]
        if decision.compute is Precision.F64 and decision.action is Action.WIDEN:
            stop = row + 1
        elif not _is_bystander(opened.eqns[row], decision):
            break
    return stop


def _is_bystander(eqn: Any, decision: Decision) -> bool:
    keeps = decision.action is Action.KEEP and decision.compute is None
    return keeps and not ir.bodies(eqn) and not eqn.effects


def _evaluate(eqns: Sequence[Any], env: dict[Any, Any], leaves: Sequence[Any]) -> list[Any]:
    def wide(x: Any, native: Precision | None) -> Any:
        return x if native is None else lax.convert_element_type(x, Precision.F64.dtype)

    env = {v: wide(x, ir.precision_of(v.aval)) for v, x in env.items()}
    for eqn in eqns:
        params = dict(eqn.params)
        for name in ("preferred_element_type", "out_dtype"):
            if params.get(name) is not None:
                params[name] = Precision.F64.dtype
        args = [
            wide(v.val, ir.precision_of(v.aval)) if ir.is_literal(v) else env[v] for v in eqn.invars
        ]
        with ir.context_of(eqn):
            env.update(zip(eqn.outvars, ir.bind(eqn, args, params), strict=True))
    return [
        env[v]
        if ir.precision_of(v.aval) is None
        else lax.convert_element_type(env[v], v.aval.dtype)
        for v in leaves
    ]


def _outside_x64(inside: Any, args: Sequence[Any]) -> list[Any]:
    is_float = [bool(jnp.issubdtype(x.dtype, jnp.floating)) for x in args]

    def run(*floats: Any, others: Sequence[Any]) -> list[Any]:
        given, rest = iter(floats), iter(others)
        with jax.enable_x64(True):
            return inside([next(given) if f else next(rest) for f in is_float])

    def forward(floats: Sequence[Any], others: Sequence[Any]) -> Any:
        return run(*floats, others=others), (floats, others)

    def backward(kept: Any, cotangents: Any) -> Any:
        floats, others = kept
        with jax.enable_x64(True):
            _, pull = jax.vjp(lambda *xs: run(*xs, others=others), *floats)
            return list(pull(cotangents)), [None] * len(others)

    island = jax.custom_vjp(lambda floats, others: run(*floats, others=others))
    island.defvjp(forward, backward)
    floats = [x for x, f in zip(args, is_float, strict=True) if f]
    others = [x for x, f in zip(args, is_float, strict=True) if not f]
    return island(floats, others)
