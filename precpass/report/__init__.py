"""The reports that `inspect`, `explain`, `compare`, `audit` and `bisect` return, and two functions.

`profile` estimates the gain on other devices, and `between` compares two plans.
"""

from __future__ import annotations

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
