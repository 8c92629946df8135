"""The names of release 0.1 that have moved from the top level into submodules."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

__all__ = ["MOVED", "absent", "moved"]

_BY_PLACE = {
    "precpass.loss_scale": "DynamicLossScale LossScale MasterState NoOpLossScale ScaledState "
    "StaticLossScale all_finite master_copies scaled_optimizer scaled_value_and_grad "
    "skip_nonfinite",
    "precpass.numerics": "FallbackReport Health IllConditioned Ladder LeastSquares LinearSolve "
    "NonFinite OutOfRange Predicate Roles calibrate least_squares solve",
    "precpass.quant": "QuantizedArray quantized",
    "precpass.report": "Audit Bisection Comparison Explanation Inspection Profile between profile",
    "precpass.types": "Action Decision EqnView Mixed OpKind Precision PrecisionPolicy",
}
MOVED = {name: place for place, names in _BY_PLACE.items() for name in names.split()}
"""The submodule in which each of them is now."""


_LEFT: dict[str, str] = dict.fromkeys(
    ("DelayedScales", "DelayedScaling", "LostValues", "delayed_scaling"),
    ": delayed scaling is no longer supported, because it moved more memory than scales of the "
    "present values. Use auto_mixed(f, 'AutoMixedF8')",
)
"""Names that were there once, with what to write instead."""


def absent(module: str, name: str) -> AttributeError:
    """The error for a name that a module does not have."""
    return AttributeError(f"module {module!r} has no attribute {name!r}{_LEFT.get(name, '')}")


def moved(name: str) -> Any:
    """Return what a name stands for, and warn the caller's caller of its new place.

    Raises:
        AttributeError: for a name that has not moved.
    """
    if name not in MOVED:
        raise absent("precpass", name)
    place = MOVED[name]
    text = f"precpass.{name} is now {place}.{name}; the old name goes away in 0.2"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(place), name)
