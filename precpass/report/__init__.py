"""The reports that `inspect`, `explain`, `compare`, `audit` and `bisect` return, and two functions.

`profile` estimates the gain on other devices, and `between` compares two plans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from precpass.lazy import load

if TYPE_CHECKING:
    from precpass.report.audit.audit import Audit
    from precpass.report.bisect.bisection import Bisection
    from precpass.report.compare.comparison import Comparison
    from precpass.report.compare.profile import profile
    from precpass.report.compare.profiled import Profile
    from precpass.view.diff import between
    from precpass.view.explain import Explanation
    from precpass.view.inspection import Inspection

__all__ = [
    "Audit",
    "Bisection",
    "Comparison",
    "Explanation",
    "Inspection",
    "Profile",
    "between",
    "profile",
]

_PLACES = {
    "Audit": "precpass.report.audit.audit",
    "Bisection": "precpass.report.bisect.bisection",
    "Comparison": "precpass.report.compare.comparison",
    "profile": "precpass.report.compare.profile",
    "Profile": "precpass.report.compare.profiled",
    "between": "precpass.view.diff",
    "Explanation": "precpass.view.explain",
    "Inspection": "precpass.view.inspection",
}


def __getattr__(name: str) -> Any:
    return load(__name__, name, _PLACES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
