"""Attributes of modules that are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["load"]

_LEFT = dict.fromkeys(
    ("DelayedScales", "DelayedScaling", "LostValues", "delayed_scaling"),
    ": delayed scaling is no longer supported, because it moved more memory than scales of the "
    "present values. Use auto_mixed(f, 'AutoMixedF8')",
)
"""Names that were there once -> what to write instead."""


def load(module: str, name: str, places: Mapping[str, str]) -> Any:
    """Return a module's attribute from the module that defines it, and keep it: for `__getattr__`.

    Args:
        module: the module whose attribute it is.
        name: the attribute.
        places: attribute -> the module that defines it.

    Raises:
        AttributeError: for a name that has no place.
    """
    if name not in places:
        raise AttributeError(f"module {module!r} has no attribute {name!r}{_LEFT.get(name, '')}")
    value = getattr(importlib.import_module(places[name]), name)
    setattr(sys.modules[module], name, value)
    return value
