"""precpass: automatic mixed precision for JAX, as a compiler pass over jaxprs.

The functions and policies that you call and name most are here. Everything else is in submodules,
which are attributes (`pp.loss_scale.DynamicLossScale`):

- `precpass.loss_scale`: loss scaling, for gradients in float16.
- `precpass.numerics`: solvers, ladders of precisions, the checks of `with_fallback`, `calibrate`.
- `precpass.quant`: weights in 8 bits.
- `precpass.report`: the reports that the functions return, `profile` and `between`.
- `precpass.testing`: assertions for your tests.
- `precpass.types`: the classes that plans and policies are made of, such as `Precision`.

`from precpass import *` leaves out `inspect` and `bisect`, which are modules of Python's own; write
`pp.inspect`, or import them by name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from precpass.moved import moved
from precpass.policy.presets import (
    AlwaysBf16,
    AlwaysF16,
    AlwaysF32,
    AutoMixed,
    AutoMixedBf16,
    AutoMixedConservative,
    AutoMixedConservativeF16,
    AutoMixedF8,
    AutoMixedF16,
    AutoMixedInt8,
    Custom,
)
from precpass.policy.rules import Rule
from precpass.policy.warned import PrecisionWarning
from precpass.version import __version__

if TYPE_CHECKING:
    from precpass import (
        loss_scale as loss_scale,
        numerics as numerics,
        quant as quant,
        report as report,
        testing as testing,
        types as types,
    )
    from precpass.api import (
        auto_mixed,
        cast_floating,
        explain,
        in_compute_dtype,
        inspect as inspect,
        keep,
        use_policy,
    )
    from precpass.numerics.fallback import with_fallback
    from precpass.numerics.monitor.monitor import monitor
    from precpass.plan.plan import Plan
    from precpass.report.audit.audit import audit
    from precpass.report.bisect.bisect import bisect as bisect
    from precpass.report.compare.compare import compare

__all__ = [
    "AlwaysBf16",
    "AlwaysF16",
    "AlwaysF32",
    "AutoMixed",
    "AutoMixedBf16",
    "AutoMixedConservative",
    "AutoMixedConservativeF16",
    "AutoMixedF8",
    "AutoMixedF16",
    "AutoMixedInt8",
    "Custom",
    "Plan",
    "PrecisionWarning",
    "Rule",
    "__version__",
    "audit",
    "auto_mixed",
    "cast_floating",
    "compare",
    "explain",
    "in_compute_dtype",
    "keep",
    "monitor",
    "use_policy",
    "with_fallback",
]

_OF_API = "auto_mixed cast_floating explain in_compute_dtype inspect keep use_policy"
_IMPORTED_WHEN_USED = {
    **dict.fromkeys(_OF_API.split(), "precpass.api"),
    "Plan": "precpass.plan.plan",
    "with_fallback": "precpass.numerics.fallback",
    "monitor": "precpass.numerics.monitor.monitor",
    "audit": "precpass.report.audit.audit",
    "bisect": "precpass.report.bisect.bisect",
    "compare": "precpass.report.compare.compare",
}
"""The names that need JAX, which the help of the command line does without."""
_SUBMODULES = ("loss_scale", "numerics", "quant", "report", "testing", "types")
"""Submodules for users, which are imported when used."""


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _IMPORTED_WHEN_USED:
        return moved(name)
    value = globals()[name] = getattr(importlib.import_module(_IMPORTED_WHEN_USED[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES, "bisect", "inspect"})
