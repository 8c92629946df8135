"""Solvers, ladders of precisions, and the checks and reports of `with_fallback` and `monitor`."""

from __future__ import annotations

from precpass.numerics.checks import IllConditioned, NonFinite, OutOfRange, Predicate
from precpass.numerics.fallback import FallbackReport
from precpass.numerics.ladder import Ladder
from precpass.numerics.least_squares import LeastSquares, Roles, least_squares
from precpass.numerics.linear import LinearSolve, solve
from precpass.numerics.monitor.calibrate import calibrate
from precpass.numerics.monitor.health import Health

__all__ = [
    "FallbackReport",
    "Health",
    "IllConditioned",
    "Ladder",
    "LeastSquares",
    "LinearSolve",
    "NonFinite",
    "OutOfRange",
    "Predicate",
    "Roles",
    "calibrate",
    "least_squares",
    "solve",
]
