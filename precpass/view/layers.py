"""In which layers, of which names, an equation stands, and which call in your code made it."""

from __future__ import annotations

from typing import Any, NamedTuple

from precpass import jaxpr as ir
from precpass.plan.eqn_info import Site
from precpass.policy.rules import layers_around
from precpass.policy.scopes import called_scope, clean_scope, is_backward

__all__ = ["Around", "Path", "inside", "site_of"]

Path = tuple[str, ...]

_BACKWARD = "backward"
_NOT_SHOWN = "eqx.nn.", called_scope("")[:-1]
"""What scopes begin with that equinox opens with a layer's class, and this package for rules."""


class Around(NamedTuple):
    """What is around equations: a path, the calls, and how many parts at its end are layers."""

    path: Path = ()
    made: ir.Made = ir.Made()
    in_layers: int = 0


def inside(around: Around, eqn: Any) -> Around:
    """What is around an equation of a body."""
    path, outer, in_layers = around
    scope, made = ir.scope_of(eqn), ir.made_in(eqn)
    known = len(outer.layers)
    if made.layers[:known] != outer.layers or not made.key:
        # JAX keeps the jaxpr of a function that it traced in another layer's call.
        made = outer
    layers = () if made.has_scopes else made.layers[known:]
    backward = (_BACKWARD,) if is_backward(scope) and _BACKWARD not in path else ()
    # einsum opens a scope with its own formula.
    parts = filter(None, clean_scope(scope).split("/"))
    scopes = [part for part in parts if "->" not in part and not part.startswith(_NOT_SHOWN)]
    if backward or scopes:
        in_layers = 0
    return Around((*path, *backward, *scopes, *layers), made, in_layers + len(layers))


def site_of(around: Around, eqn: Any, caller: Site) -> tuple[Around, Site]:
    """What is around an equation of a body, and where you find the equation in your code.

    Args:
        around: what is around the body.
        eqn: the equation.
        caller: the site of the equation that enters the body.
    """
    found = inside(around, eqn)
    is_known = found.made is not around.made
    source = ir.called_from(eqn) if is_known else caller.source
    names = [part.partition(": ")[0] for part in found.path if part != _BACKWARD]
    module = ""
    if found.made.has_scopes:
        module = "/".join(layers_around("/".join(names)))
    elif found.made.layers:
        module = ".".join(name for name in names if not name.startswith("precpass."))
    return found, Site(module, source if source.file else caller.source)
