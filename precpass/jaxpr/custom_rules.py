"""Custom derivative and batching rules, rewritten when JAX traces them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax.extend import linear_util

from precpass.jaxpr.binding import evaluate, trace
from precpass.jaxpr.reading import consts_of, open_jaxpr

Rewrite = Callable[[Any], Any]


def with_rewritten_rules(primitive: str, params: dict[str, Any], rewrite: Rewrite) -> None:
    """Puts functions that rewrite what they trace in the place of an equation's custom rules.

    The rules are traced when they are used, so the rewrite happens then.
    """
    if primitive == "custom_jvp_call":
        params["jvp_jaxpr_fun"] = _rewritten_thunk(params["jvp_jaxpr_fun"], rewrite)
    elif primitive == "custom_vjp_call":
        params["fwd_jaxpr_thunk"] = _rewritten_thunk(params["fwd_jaxpr_thunk"], rewrite)
        params["bwd"] = _rewritten_bwd(params["bwd"], rewrite)
    elif primitive == "remat_opt":
        params["fun_jaxpr_thunk"] = _rewritten_primal(params["fun_jaxpr_thunk"], rewrite)
    elif primitive == "custom_vmap_call":
        params["rule"] = _rewritten_function(params["rule"], rewrite)
    elif primitive == "linear_call":
        params["transpose_thunk"] = _rewritten_transpose(params["transpose_thunk"], rewrite)


@linear_util.transformation2
def _rewritten_thunk(f: Callable[..., Any], rewrite: Rewrite, *zeros: bool) -> Any:
    jaxpr, consts, *rest = f(*zeros)
    new = rewrite(_closed(jaxpr, consts))
    return open_jaxpr(new), consts_of(new), *rest


def _rewritten_primal(thunk: Callable[..., Any], rewrite: Rewrite) -> Callable[..., Any]:
    def rewritten() -> Any:
        jaxpr, consts = thunk()
        new = rewrite(_closed(jaxpr, consts))
        return open_jaxpr(new), consts_of(new)

    return rewritten


def _closed(jaxpr: Any, consts: Sequence[Any]) -> Any:
    if hasattr(jaxpr, "with_consts"):  # 0.11 and later
        return jaxpr.with_consts(consts)
    make: Any = vars(jex)["ClosedJaxpr"]  # 0.12's type information exports it no more
    return make(jaxpr, consts)


@linear_util.transformation2
def _rewritten_bwd(f: Callable[..., Any], rewrite: Rewrite, *args: Any) -> Any:
    return _rewritten_function(f, rewrite)(*args)


def _rewritten_function(f: Callable[..., Any], rewrite: Rewrite) -> Callable[..., Any]:
    """`f` with its arrays traced and rewritten; symbolic zeros, flags and logs pass through."""

    def is_array(x: Any) -> bool:
        return isinstance(x, (jax.Array, np.ndarray))

    def rewritten(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        arrays = [x for x in leaves if is_array(x)]
        out: list[Any] = []

        def on_arrays(*xs: Any) -> list[Any]:
            given = iter(xs)
            filled = [next(given) if is_array(x) else x for x in leaves]
            result = f(*jax.tree.unflatten(tree, filled))
            out[:] = jax.tree.flatten(result)
            return [x for x in out[0] if is_array(x)]

        results = iter(evaluate(rewrite(trace(on_arrays, *arrays)), arrays))
        return jax.tree.unflatten(out[1], [next(results) if is_array(x) else x for x in out[0]])

    return rewritten


def _rewritten_transpose(thunk: Callable[..., Any], rewrite: Rewrite) -> Callable[..., Any]:
    def rewritten(*args: Any) -> Any:
        jaxpr, *rest = thunk(*args)
        return (rewrite(jaxpr), *rest)

    return rewritten
