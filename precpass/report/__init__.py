"""The reports that `inspect`, `explain`, `compare`, `audit` and `bisect` return, and `between`.

`between` compares two plans.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from precpass.lazy import load

if TYPE_CHECKING:
    from precpass.report.audit.audit import Audit
    from precpass.report.bisect.bisection import Bisection
    from precpass.report.compare.compare import profile as profile
    from precpass.report.compare.comparison import Comparison
    from precpass.view.diff import between
    from precpass.view.explain import Explanation
    from precpass.view.inspection import Inspection

__all__ = [
    "Audit",
    "Bisection",
    "Comparison",
    "Explanation",
    "Inspection",
    "between",
]

_PLACES = {
    "Audit": "precpass.report.audit.audit",
    "Bisection": "precpass.report.bisect.bisection",
    "Comparison": "precpass.report.compare.comparison",
    "profile": "precpass.report.compare.compare",
    "between": "precpass.view.diff",
    "Explanation": "precpass.view.explain",
    "Inspection": "precpass.view.inspection",
}


def __getattr__(name: str) -> Any:
    if name == "Profile":
        text = "precpass.report.Profile is Comparison now; the old name goes away in 0.2"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        name = "Comparison"
    return load(__name__, name, _PLACES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
