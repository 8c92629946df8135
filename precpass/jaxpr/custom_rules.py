"""Custom derivative and batching rules, rewritten when JAX traces them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jax.custom_derivatives import SymbolicZero
from jax.extend import linear_util

from precpass.jaxpr.binding import evaluate, trace
from precpass.jaxpr.hi_primitives import with_hi_rules
from precpass.jaxpr.reading import consts_of, in_avals, open_jaxpr, out_avals
from precpass.jaxpr.types import Aval, Eqn, Jaxpr

Natives = Callable[[], Sequence[Any]]

_WITH_RULES = frozenset(
    ("custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "linear_call", "remat_opt")
    + ("call_hi_primitive",)
)


class Rewrite(NamedTuple):
    """What is done with a custom rule.

    Attributes:
        jaxpr: rewrites the jaxpr of the rule. Operands and results may change their dtypes if those
            of the equation's body do.
        around: a context for the rule's trace, which may happen long after the function's.
    """

    jaxpr: Callable[[Any], Any]
    around: Callable[[], contextlib.AbstractContextManager[Any]]


class _Made:
    """The structure of what a rule returned when it was traced, in a form that JAX can hash."""

    avals: Sequence[Aval] = ()


def with_rewritten_rules(eqn: Eqn, params: dict[str, Any], rewrite: Rewrite) -> None:
    """Replaces an equation's custom rules by functions that rewrite what they trace.

    JAX traces the rules when it uses them, so the rewrite happens then.

    Args:
        eqn: the original equation.
        params: its new parameters, in which the rules are replaced.
        rewrite: how each rule is rewritten.
    """
    primitive = eqn.primitive.name
    if primitive == "custom_jvp_call":
        params["jvp_jaxpr_fun"] = _rewritten_thunk(params["jvp_jaxpr_fun"], rewrite, _Made())
    elif primitive == "custom_vjp_call":
        rule_results = _Made()
        params["fwd_jaxpr_thunk"] = _rewritten_thunk(
            params["fwd_jaxpr_thunk"], rewrite, rule_results
        )
        natives = functools.partial(_avals_of_bwd, eqn, rule_results)
        params["bwd"] = _rewritten_bwd(params["bwd"], rewrite, natives)
    elif primitive == "remat_opt":
        params["fun_jaxpr_thunk"] = _rewritten_primal(params["fun_jaxpr_thunk"], rewrite)
    elif primitive == "custom_vmap_call":
        natives = functools.partial(in_avals, eqn.params["call"])
        params["rule"] = _rewritten_function(params["rule"], rewrite, natives)
    elif primitive == "linear_call":
        params["transpose_thunk"] = _rewritten_transpose(params["transpose_thunk"], rewrite)
    elif primitive == "call_hi_primitive":
        params["_prim"] = with_hi_rules(
            params["_prim"], lambda rule: _rewritten_function(rule, rewrite, tuple)
        )


def has_rules(eqn: Eqn) -> bool:
    """Whether an equation that is entered has custom rules."""
    return eqn.primitive.name in _WITH_RULES


@linear_util.transformation2
def _rewritten_thunk(f: Callable[..., Any], rewrite: Rewrite, made: _Made, *zeros: bool) -> Any:
    with rewrite.around():
        jaxpr, consts, *rest = f(*zeros)
    made.avals = out_avals(jaxpr)
    new = rewrite.jaxpr(_closed(jaxpr, consts))
    return open_jaxpr(new), consts_of(new), *rest


def _avals_of_bwd(eqn: Eqn, made: _Made) -> list[Any]:
    """The avals of a backward rule's operands, residuals and cotangents, in the user's dtypes.

    Args:
        eqn: the `custom_vjp_call`.
        made: the structure of what the forward rule returns: residuals, then results.
    """
    call = eqn.params["call_jaxpr"]
    _, _, forwarded = eqn.params["out_trees"]()
    rule_avals, operands = iter(made.avals), in_avals(call)
    residuals = [next(rule_avals) if i is None else operands[i] for i in forwarded]
    return [*residuals, *out_avals(call)]


def _rewritten_primal(thunk: Callable[..., Any], rewrite: Rewrite) -> Callable[..., Any]:
    @functools.wraps(thunk)
    def rewritten() -> Any:
        with rewrite.around():
            jaxpr, consts = thunk()
        new = rewrite.jaxpr(_closed(jaxpr, consts))
        return open_jaxpr(new), consts_of(new)

    return rewritten


def _closed(jaxpr: Jaxpr, consts: Sequence[Any]) -> Any:
    if hasattr(jaxpr, "with_consts"):  # 0.11 and later
        return jaxpr.with_consts(consts)
    make: Any = vars(jex)["ClosedJaxpr"]  # the type stubs of 0.12 no longer export it
    return make(jaxpr, consts)


@linear_util.transformation2
def _rewritten_bwd(f: Callable[..., Any], rewrite: Rewrite, natives: Natives, *args: Any) -> Any:
    return _rewritten_function(f, rewrite, natives)(*args)


def _rewritten_function(
    f: Callable[..., Any], rewrite: Rewrite, natives: Natives
) -> Callable[..., Any]:
    """`f` with its arrays traced and rewritten; symbolic zeros, flags and logs pass through.

    `natives` gives the avals, batch dimensions apart, for which the user wrote
    the last operands. The rule is traced with their dtypes whatever arrives.
    """

    def is_array(x: Any) -> bool:
        return isinstance(x, (jax.Array, np.ndarray))

    @functools.wraps(f)
    def rewritten(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        avals = natives()
        first = len(leaves) - len(avals)
        like_users = [x if i < first else _like(x, avals[i - first]) for i, x in enumerate(leaves)]
        arrays = [x for x in leaves if is_array(x)]
        structure: list[Any] = []

        def on_arrays(*xs: Any) -> list[Any]:
            remaining = iter(xs)
            filled = [
                next(remaining) if is_array(x) else y
                for x, y in zip(leaves, like_users, strict=True)
            ]
            out, out_tree = jax.tree.flatten(f(*jax.tree.unflatten(tree, filled)))
            # Keep only the positions of arrays; holding a tracer would leak it.
            structure[:] = out_tree, [None if is_array(x) else (x,) for x in out]
            return [x for x in out if is_array(x)]

        with rewrite.around():
            jaxpr = trace(
                on_arrays, *(y for x, y in zip(leaves, like_users, strict=True) if is_array(x))
            )
        results = iter(evaluate(rewrite.jaxpr(jaxpr), arrays))
        out_tree, others = structure
        return jax.tree.unflatten(out_tree, [next(results) if x is None else x[0] for x in others])

    return rewritten


def _like(x: Any, native: Any) -> Any:
    """The operand with which a rule is traced if its floating dtype is not the user's.

    A cotangent of an extended dtype is as another custom rule has made it.
    """
    aval: Aval = x.aval if isinstance(x, SymbolicZero) else jax.typeof(x)
    dtype = getattr(native, "dtype", None)
    is_floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    if aval.dtype == dtype or not is_floating or jnp.issubdtype(aval.dtype, dtypes.extended):
        return x
    aval = aval.update(dtype=dtype)
    return SymbolicZero(aval) if isinstance(x, SymbolicZero) else aval


def _rewritten_transpose(thunk: Callable[..., Any], rewrite: Rewrite) -> Callable[..., Any]:
    @functools.wraps(thunk)
    def rewritten(*args: Any) -> Any:
        with rewrite.around():
            jaxpr, *rest = thunk(*args)
        return (rewrite.jaxpr(jaxpr), *rest)

    return rewritten
