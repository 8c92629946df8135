"""Solvers, ladders of precisions, and the checks and reports of `with_fallback` and `monitor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from precpass.lazy import load

if TYPE_CHECKING:
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

_PLACES = {
    "IllConditioned": "precpass.numerics.fallback.checks",
    "NonFinite": "precpass.numerics.fallback.checks",
    "OutOfRange": "precpass.numerics.fallback.checks",
    "Predicate": "precpass.numerics.fallback.checks",
    "FallbackReport": "precpass.numerics.fallback.fallback",
    "Ladder": "precpass.numerics.ladder.ladder",
    "calibrate": "precpass.numerics.monitor.calibrate",
    "Health": "precpass.numerics.monitor.health",
    "LeastSquares": "precpass.numerics.solvers.least_squares",
    "least_squares": "precpass.numerics.solvers.least_squares",
    "LinearSolve": "precpass.numerics.solvers.linear",
    "solve": "precpass.numerics.solvers.linear",
    "Roles": "precpass.numerics.solvers.roles",
}


def __getattr__(name: str) -> Any:
    return load(__name__, name, _PLACES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
