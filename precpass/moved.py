"""The names of release 0.1 that have moved from the top level into submodules."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

__all__ = ["moved"]

_SUBMODULES = ("loss_scale", "numerics", "quant", "report", "types")


def moved(name: str) -> Any:
    """Return what a name of a submodule stands for, and warn the caller's caller of its place.

    Raises:
        AttributeError: for a name that no submodule has.
    """
    for place in () if name.startswith("_") else [f"precpass.{module}" for module in _SUBMODULES]:
        module = importlib.import_module(place)
        if name in module.__all__:
            text = f"precpass.{name} is now {place}.{name}; the old name goes away in 0.2"
            warnings.warn(text, DeprecationWarning, stacklevel=3)
            return getattr(module, name)
    raise AttributeError(f"module 'precpass' has no attribute {name!r}")
