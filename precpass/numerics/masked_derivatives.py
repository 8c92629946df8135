"""Results that may be thrown away, and their derivatives with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from precpass import jaxpr as ir

__all__ = ["differentiated_if_chosen"]

Tree = Any


def differentiated_if_chosen(fn: Callable[[], tuple[Tree, Any]]) -> Tree:
    """A result whose derivatives of every order are zero, and not NaN, if it is not chosen.

    A result that is not chosen gets a cotangent of zero, and zero times the infinite derivative of
    an overflow is a NaN. So the tangents of everything that `fn` closes over are masked, except
    those of values that the devices of a `jax.shard_map` share if they do not choose alike. The
    residuals of a derivative are computed in the same way, so that the derivatives of the next
    order are masked too.

    In a `jax.lax.scan` or `fori_loop`, jax 0.10 drops this rule (as all custom rules) in reverse
    mode over reverse mode, unless the loop's body is in a `jax.checkpoint`. A `lax.cond` in `fn`
    whose predicate a `jax.vmap` batches cannot be transposed then (jax-ml/jax#39219).

    Args:
        fn: returns a pytree of arrays, and whether it is chosen, a boolean scalar.
    """
    return _differentiated(fn, first=True)


def _differentiated(fn: Callable[[], tuple[Tree, Any]], *, first: bool) -> Tree:
    """`differentiated_if_chosen`; `first` for the result itself, and not for residuals."""
    structure: list[Any] = []

    def flat() -> list[Any]:
        out, chosen = fn()
        leaves, tree = jax.tree.flatten(out)
        structure[:] = [tree]
        return [*leaves, jnp.asarray(chosen)]

    traced = ir.trace(flat)
    operands, jaxpr = ir.consts_of(traced), ir.without_consts(traced)

    def evaluated(operands: Any) -> list[Any]:
        return ir.evaluate(jaxpr, (), operands)

    def rule(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        (operands,), (moves,) = primals, tangents
        moving = [i for i, t in enumerate(moves) if not isinstance(t, SymbolicZero)]
        maps: list[_Linear] = []

        def linearized() -> tuple[Any, Any]:
            results, linear, residuals = _linearized(evaluated, operands, moving)
            maps[:] = [linear]
            return (results, residuals), results[-1]

        # jax 0.10 drops rules in a loop inside a checkpoint, but not in a checkpoint inside a loop.
        results, residuals = _held(lambda: _differentiated(linearized, first=False))()
        given = [moves[i] for i in moving]
        pushed = iter(_pushed(maps[0], residuals, operands, results[-1], given, first=first))
        return alike(results), [
            next(pushed) if _is_inexact(x) else SymbolicZero(jax.typeof(x).to_tangent_aval())
            for x in results
        ]

    def alike(results: Sequence[Any]) -> list[Any]:
        """Results that are batched if their tangents are, as JAX assumes; masked tangents are."""
        *leaves, chosen = results
        return [
            *(ir.selected(chosen, x, x) if first and _is_inexact(x) else x for x in leaves),
            chosen,
        ]

    # JAX refuses effects in custom rules.
    if any(map(_is_inexact, operands)) and not any(map(ir.effects_of, ir.open_jaxpr(jaxpr).eqns)):
        # a checkpoint's batch dimension is the first, in the function as in the rule
        masked = jax.custom_jvp(_held(lambda operands: alike(evaluated(operands))))
        masked.defjvp(rule, symbolic_zeros=True)
        *leaves, _ = masked(operands)
    else:
        *leaves, _ = evaluated(operands)
    return jax.tree.unflatten(structure[0], leaves)


class _Linear(NamedTuple):
    """A derivative as a linear map.

    Attributes:
        jaxpr: the map's jaxpr, a function of the tangents; its constants are the residuals.
        places: for each residual the index of the operand that it equals; None if it is computed.
    """

    jaxpr: ir.Jaxpr
    places: Sequence[int | None]


def _linearized(
    evaluated: Callable[[Any], list[Any]], operands: Sequence[Any], moving: Sequence[int]
) -> tuple[list[Any], _Linear, list[Any]]:
    """The results at `operands`, their derivative by the `moving` ones, and computed residuals."""

    def on_moving(*xs: Any) -> tuple[list[Any], list[Any]]:
        moved = dict(zip(moving, xs, strict=True))
        results = evaluated([moved.get(i, x) for i, x in enumerate(operands)])
        return [x for x in results if _is_inexact(x)], results

    at = [operands[i] for i in moving]
    _, push, results = jax.linearize(on_moving, *at, has_aux=True)
    jaxpr = ir.trace(push, *at)
    index = {id(x): i for i, x in enumerate(operands)}
    residuals = ir.consts_of(jaxpr)
    places = [index.get(id(x)) for x in residuals]
    computed = [x for x, place in zip(residuals, places, strict=True) if place is None]
    return results, _Linear(jaxpr, places), computed


def _pushed(
    linear: _Linear,
    computed: Iterable[Any],
    operands: Sequence[Any],
    chosen: Any,
    tangents: Sequence[Any],
    *,
    first: bool,
) -> list[Any]:
    """Applies the linear map to masked tangents, with its residuals guarded."""
    shared = {i: operands[i] for i in linear.places if i is not None}

    # masks and guards run again with the map: no zeros are kept, and of the operands no copies
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def push(shared: Any, computed: Any, chosen: Any, tangents: Any) -> list[Any]:
        rest = iter(computed)
        residuals = [next(rest) if i is None else shared[i] for i in linear.places]
        # what elements of a vmap share has a mask for each of them only here, as they are copies
        masked = [ir.selected(chosen, t, 0) if first else ir.masked(chosen, t) for t in tangents]
        guarded = ir.guarded(chosen, residuals, filled=not first)
        return ir.evaluate(linear.jaxpr, masked, guarded)

    return push(shared, computed, chosen, tangents)


def _held(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function in a checkpoint that saves everything."""
    saved = jax.checkpoint_policies.everything_saveable
    return jax.checkpoint(fn, prevent_cse=False, policy=saved)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)
