"""The names of release 0.1 that have moved from the top level into submodules."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

__all__ = ["MOVED", "moved"]

MOVED = {
    "DynamicLossScale": "precpass.loss_scale",
    "LossScale": "precpass.loss_scale",
    "MasterState": "precpass.loss_scale",
    "NoOpLossScale": "precpass.loss_scale",
    "ScaledState": "precpass.loss_scale",
    "StaticLossScale": "precpass.loss_scale",
    "all_finite": "precpass.loss_scale",
    "master_copies": "precpass.loss_scale",
    "scaled_optimizer": "precpass.loss_scale",
    "scaled_value_and_grad": "precpass.loss_scale",
    "skip_nonfinite": "precpass.loss_scale",
    "FallbackReport": "precpass.numerics",
    "Health": "precpass.numerics",
    "IllConditioned": "precpass.numerics",
    "Ladder": "precpass.numerics",
    "LeastSquares": "precpass.numerics",
    "LinearSolve": "precpass.numerics",
    "NonFinite": "precpass.numerics",
    "OutOfRange": "precpass.numerics",
    "Predicate": "precpass.numerics",
    "Roles": "precpass.numerics",
    "calibrate": "precpass.numerics",
    "least_squares": "precpass.numerics",
    "solve": "precpass.numerics",
    "QuantizedArray": "precpass.quant",
    "quantized": "precpass.quant",
    "Audit": "precpass.report",
    "Bisection": "precpass.report",
    "Comparison": "precpass.report",
    "Explanation": "precpass.report",
    "Inspection": "precpass.report",
    "Profile": "precpass.report",
    "between": "precpass.report",
    "profile": "precpass.report",
    "Action": "precpass.types",
    "Decision": "precpass.types",
    "EqnView": "precpass.types",
    "Mixed": "precpass.types",
    "OpKind": "precpass.types",
    "Precision": "precpass.types",
    "PrecisionPolicy": "precpass.types",
}
"""The submodule in which each of them is now."""


def moved(name: str) -> Any:
    """Return what a name stands for, and warn the caller's caller of its new place."""
    place = MOVED[name]
    text = f"precpass.{name} is now {place}.{name}; the old name goes away in 0.2"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(place), name)
