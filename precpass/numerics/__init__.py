"""Solvers, ladders of precisions, and the checks and reports of `with_fallback` and `monitor`."""

from __future__ import annotations

from precpass.numerics.fallback.checks import IllConditioned, NonFinite, OutOfRange, Predicate
from precpass.numerics.fallback.fallback import FallbackReport
from precpass.numerics.ladder.ladder import Ladder
from precpass.numerics.monitor.calibrate import calibrate
from precpass.numerics.monitor.health import Health
from precpass.numerics.solvers.least_squares import LeastSquares, least_squares
from precpass.numerics.solvers.linear import LinearSolve, solve
from precpass.numerics.solvers.roles import Roles

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
