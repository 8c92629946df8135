"""The jaxprs that hi-primitives hold as attributes: `call_hi_primitive`'s param `_prim`.

JAX makes them of `jax.checkpoint`, `jax.custom_jvp`, `jax.custom_vjp` and `lax.scan` under its
flags `jax_remat3`, `jax_custom_jvp3`, `jax_custom_vjp3` and `jax_scan3`, and from 0.12 of
`lax.custom_root`. A hi-primitive (`jax.experimental.hijax`) is an object with `params`, which are
its attributes too; its methods are its rules. To change its jaxprs, it is copied with new params.

Each is entered in exactly the layouts that the tested releases have. One of any other layout is a
leaf that keeps its dtypes, with a warning if it holds products.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.stages

from precpass.jaxpr.binding import evaluate, trace
from precpass.jaxpr.reading import open_jaxpr
from precpass.jaxpr.types import Eqn, Jaxpr
from precpass.jaxpr.weak import WeakIdMap


class _Layout(NamedTuple):
    """A class of hi-primitives in one release or several.

    Attributes:
        params: the names of its params. `unset` are those that must be None or False.
        jaxpr: the param that holds the body, or a `jax.stages.Traced` of it; "" if only its
            method `expand` makes the body.
        function: the param that is called to run the body, if that is not `jaxpr`.
        rules: the params that are functions JAX calls with pytrees of arrays to differentiate.
    """

    params: frozenset[str]
    jaxpr: str
    function: str = ""
    rules: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()


def _layout(params: str, jaxpr: str, **options: Any) -> _Layout:
    return _Layout(frozenset(params.split()), jaxpr, **options)


_LAYOUTS: dict[str, tuple[_Layout, ...]] = {
    "RematTraced": (
        _layout("jaxpr policy", "jaxpr"),  # 0.10
        _layout("jaxpr policy prevent_cse", "jaxpr"),
    ),
    "CustomJVPTraced": (  # since 0.12
        _layout("traced jvp_rule symbolic_zeros", "traced", rules=("jvp_rule",)),
    ),
    "CustomVJPTraced": (
        _layout(
            "traced fwd bwd symbolic_zeros static_argnums opt_remat",  # 0.10
            "traced",
            rules=("fwd", "bwd"),
            # its forward rule takes symbolic zeros in objects that are no pytrees; the derivative
            # of one that optimises remat is another hi-primitive, which runs the original
            unset=("symbolic_zeros", "opt_remat"),
        ),
        _layout(
            "traced fwd bwd symbolic_zeros opt_remat with_logs remat_rules bwd_accums"
            " generic_batching",
            "traced",
            rules=("fwd", "bwd"),
            # rules that replay a forward pass or write into accumulators
            unset=("opt_remat", "remat_rules", "bwd_accums"),
        ),
    ),
    "CustomRoot": (
        _layout(
            "f solve tangent_solve solve_jaxpr has_aux",
            "solve_jaxpr",
            function="solve",
            rules=("f", "tangent_solve"),
        ),
    ),
    # the linear map that custom_root solves with: a function's derivative, made when it is used
    "_RootLinearMap": (_layout("f transposed", "", rules=("f",)),),
}
"""Class -> how it holds its jaxprs, for each release that holds them in a way of its own."""

_MADE_BY: dict[str, str] = {
    "RematTraced": "jax.checkpoint under the flag jax_remat3",
    "CustomJVPTraced": "jax.custom_jvp under the flag jax_custom_jvp3",
    "CustomVJPTraced": "jax.custom_vjp under the flag jax_custom_vjp3",
    "OptRemat": "jax.custom_vjp with optimize_remat under the flag jax_custom_vjp3",
    "Scan3": "lax.scan under the flag jax_scan3",
    "CustomRoot": "lax.custom_root",
    "_RootLinearMap": "lax.custom_root",
}


def _layout_of(prim: Any) -> _Layout | None:
    # a user's own hi-primitive may have any name
    if not type(prim).__module__.startswith("jax."):
        return None
    for layout in _LAYOUTS.get(type(prim).__name__, ()):
        same = layout.params == frozenset(prim.params)
        if same and not any(prim.params[name] for name in layout.unset):
            return layout
    return None


def hi_name(eqn: Eqn) -> str:
    """The class of the hi-primitive that an equation applies; "" for other equations."""
    prim = eqn.params.get("_prim")
    return "" if prim is None else type(prim).__name__


def hi_body(eqn: Eqn) -> Any:
    """The jaxpr of an equation's hi-primitive; None for one that is not entered."""
    prim = eqn.params["_prim"]
    layout = _layout_of(prim)
    if layout is None:
        return None
    if not layout.jaxpr:
        return _expansion(prim)
    return _jaxpr_in(prim.params[layout.jaxpr])


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


def _jaxpr_in(value: Any) -> Any:
    return value.jaxpr if isinstance(value, jax.stages.Traced) else value


def with_hi_body(prim: Any, jaxpr: Jaxpr) -> Any:
    """A hi-primitive with another jaxpr, of the same avals."""
    layout = _layout_of(prim)
    assert layout is not None
    if not layout.jaxpr:
        copied = copy.copy(prim)
        copied.expand = _function(jaxpr, prim.out_tree)
        return copied
    body = prim.params[layout.jaxpr]
    new: dict[str, Any] = {layout.jaxpr: jaxpr}
    if isinstance(body, jax.stages.Traced):
        new[layout.jaxpr] = _traced(body, jaxpr)
    if layout.function:
        new[layout.function] = _function(jaxpr, prim.out_tree)
    return _replaced(prim, new)


def _replaced(prim: Any, new: dict[str, Any]) -> Any:
    copied = copy.copy(prim)
    copied.params = {**prim.params, **new}
    vars(copied).update(new)
    return copied


def _function(jaxpr: Jaxpr, out_tree: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        results = evaluate(jaxpr, jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(out_tree, results)

    return run


def _traced(held: Any, jaxpr: Jaxpr) -> Any:
    avals = [v.aval for v in open_jaxpr(jaxpr).invars]
    args, kwargs = jax.tree.unflatten(held.in_tree, avals)
    run = _function(jaxpr, held.out_tree)
    run.__name__ = held.fun_name
    return jax.jit(run).trace(*args, **kwargs)


def hi_rules(prim: Any, rewrite: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """A hi-primitive with other derivative rules.

    Args:
        prim: one that is entered.
        rewrite: makes of a rule, a function of pytrees, the one to put in its place.
    """
    layout = _layout_of(prim)
    assert layout is not None
    return _replaced(prim, {name: rewrite(prim.params[name]) for name in layout.rules})


def has_hi_rules(prim: Any) -> bool:
    """Whether a hi-primitive that is entered has derivative rules of its user's."""
    layout = _layout_of(prim)
    return layout is not None and bool(layout.rules)


def why_not_entered(prim: Any) -> str:
    """Why the jaxprs of a hi-primitive keep their precision, and what the user can do."""
    reason = "its jaxprs are attributes of an object"
    maker = _maker(prim)
    if not maker:
        return reason
    # These rules exist only under the flag.
    needed = prim.params.get("remat_rules") or prim.params.get("bwd_accums")
    optional = "flag" in maker and not needed
    cure = "; turn the flag off to have them lowered" if optional else ""
    return f"made by {maker}, {reason}{cure}"


def _maker(prim: Any) -> str:
    inner_prims = (v for v in prim.params.values() if _is_hi_primitive(v))
    return _MADE_BY.get(type(prim).__name__) or next(map(_maker, inner_prims), "")


def _is_hi_primitive(value: Any) -> bool:
    return hasattr(value, "in_avals_flat") and hasattr(value, "expand")


def hi_jaxprs(prim: Any) -> list[Any]:
    """The jaxprs that a hi-primitive holds, also in others that it holds.

    One that holds none is expanded: Python functions can make products too.
    """
    jaxprs = list(_held(prim))
    if jaxprs:
        return jaxprs
    try:
        return [_expansion(prim)]
    except Exception:  # a step of a kernel can only be expanded inside that kernel
        return []


def _held(prim: Any) -> Iterator[Any]:
    for value in prim.params.values():
        if _is_hi_primitive(value):
            yield from _held(value)
        else:
            yield from jex.jaxprs_in_params({"": _jaxpr_in(value)})
