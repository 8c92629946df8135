"""The reports that `inspect`, `explain`, `compare`, `audit` and `bisect` return, and `between`.

`between` compares two plans.
"""

from __future__ import annotations

import warnings
from typing import Any

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


def __getattr__(name: str) -> Any:
    if name != "Profile":
        raise AttributeError(f"module 'precpass.report' has no attribute {name!r}")
    text = "precpass.report.Profile is Comparison now; the old name goes away in 0.2"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return Comparison
