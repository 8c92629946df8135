"""Hi-primitives: objects in the param `_prim` of a `call_hi_primitive`, which hold their jaxprs.

The params of a hi-primitive (`jax.experimental.hijax`) are its attributes too, and its methods are
its rules. To change its jaxpr, it is copied with new params.

Of JAX's own, those of `lax.custom_root` (since 0.12) are entered. `CustomRoot` holds the jaxpr of
its solver; `_RootLinearMap`, the linear map that its derivative solves with, makes one when it is
used. All others are leaves that keep their dtypes: those of users, and those that JAX makes under
flags that are off by default.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax

from precpass.jaxpr.binding import evaluate, trace
from precpass.jaxpr.types import Eqn, Jaxpr
from precpass.jaxpr.weak import WeakIdMap

_ENTERED = {
    "CustomRoot": {"f", "solve", "tangent_solve", "solve_jaxpr", "has_aux"},
    "_RootLinearMap": {"f", "transposed"},
}
"""Class -> its params; one with other params is of a release that was not tested."""
_RULES = ("f", "tangent_solve")
"""The params that are functions of pytrees of arrays, which derivatives call."""


def hi_name(eqn: Eqn) -> str:
    """The class of the hi-primitive that an equation applies; "" for other equations."""
    prim = eqn.params.get("_prim")
    return "" if prim is None else type(prim).__name__


def hi_body(eqn: Eqn) -> Any:
    """The jaxpr of an equation's hi-primitive; None for one that is not entered."""
    prim = eqn.params["_prim"]
    # A user's own hi-primitive may have any name.
    is_of_jax = type(prim).__module__.startswith("jax.")
    if not is_of_jax or _ENTERED.get(hi_name(eqn)) != set(prim.params):
        return None
    return prim.params["solve_jaxpr"] if "solve_jaxpr" in prim.params else _expansion(prim)


_known = WeakIdMap[Any]()


def _expansion(prim: Any) -> Any:
    """The jaxpr that a hi-primitive expands to, cached."""
    # The cache is by identity, because a copy with another `expand` equals its original.
    expansion = _known.get(prim)
    return (
        _known.setdefault(prim, trace(prim.expand, *prim.in_avals))
        if expansion is None
        else expansion
    )


def hi_jaxprs(eqn: Eqn) -> list[Any]:
    """The jaxpr that an equation's hi-primitive runs, entered or not; [] if it has none."""
    try:
        return [hi_body(eqn) or _expansion(eqn.params["_prim"])]
    except Exception:  # a step of a kernel can only be expanded inside that kernel
        return []


def with_hi_body(prim: Any, jaxpr: Jaxpr) -> Any:
    """A hi-primitive that is entered, with another jaxpr of the same avals."""

    def run(*args: Any) -> Any:
        return jax.tree.unflatten(prim.out_tree, evaluate(jaxpr, jax.tree.leaves(args)))

    if "solve" in prim.params:
        return _replaced(prim, {"solve_jaxpr": jaxpr, "solve": run})
    copied = copy.copy(prim)
    copied.expand = run
    return copied


def with_hi_rules(prim: Any, rewrite: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """A hi-primitive that is entered, with other derivative rules.

    Args:
        prim: the hi-primitive.
        rewrite: makes of a rule, a function of pytrees, the one to put in its place.
    """
    rules = {name: rewrite(prim.params[name]) for name in _RULES if name in prim.params}
    return _replaced(prim, rules)


def _replaced(prim: Any, new: dict[str, Any]) -> Any:
    copied = copy.copy(prim)
    copied.params = {**prim.params, **new}
    vars(copied).update(new)
    return copied
