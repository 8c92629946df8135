"""precpass: automatic mixed precision for JAX, as a compiler pass over jaxprs.

`from precpass import *` leaves out `inspect`, `bisect` and `profile`, which are modules of Python's
own; write `pp.inspect`, or import them by name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from precpass.api import (
    auto_mixed,
    cast_floating,
    explain,
    in_compute_dtype,
    keep,
    use_policy,
)
from precpass.api import inspect as inspect
from precpass.jit.mixed import Mixed
from precpass.plan.plan import Action, Decision, Plan
from precpass.policy.policy import PrecisionPolicy
from precpass.policy.precision import Precision
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
from precpass.policy.primitives import OpKind
from precpass.policy.rules import EqnView, Rule
from precpass.policy.warned import PrecisionWarning
from precpass.version import __version__

if TYPE_CHECKING:
    from precpass.numerics.delayed_scaling import DelayedScales, delayed_scaling
    from precpass.numerics.fallback.checks import IllConditioned, NonFinite, OutOfRange, Predicate
    from precpass.numerics.fallback.fallback import FallbackReport, with_fallback
    from precpass.numerics.ladder.ladder import Ladder
    from precpass.numerics.loss_scale.gradients import (
        all_finite,
        scaled_value_and_grad,
        skip_nonfinite,
    )
    from precpass.numerics.loss_scale.optax_wrapper import (
        MasterState,
        ScaledState,
        master_copies,
        scaled_optimizer,
    )
    from precpass.numerics.loss_scale.scale import (
        DynamicLossScale,
        LossScale,
        NoOpLossScale,
        StaticLossScale,
    )
    from precpass.numerics.monitor.calibrate import calibrate
    from precpass.numerics.monitor.health import Health
    from precpass.numerics.monitor.monitor import monitor
    from precpass.numerics.quantized import QuantizedArray, quantized
    from precpass.numerics.solvers.least_squares import LeastSquares, least_squares
    from precpass.numerics.solvers.linear import LinearSolve, solve
    from precpass.numerics.solvers.roles import Roles
    from precpass.report.audit.audit import Audit, audit
    from precpass.report.bisect.bisect import bisect as bisect
    from precpass.report.bisect.bisection import Bisection
    from precpass.report.compare.compare import compare
    from precpass.report.compare.comparison import Comparison
    from precpass.report.compare.profile import profile as profile
    from precpass.report.compare.profiled import Profile
    from precpass.view.diff import between
    from precpass.view.explain import Explanation
    from precpass.view.inspection import Inspection

__all__ = [
    "Action",
    "AlwaysBf16",
    "AlwaysF16",
    "AlwaysF32",
    "Audit",
    "AutoMixed",
    "AutoMixedBf16",
    "AutoMixedConservative",
    "AutoMixedConservativeF16",
    "AutoMixedF8",
    "AutoMixedF16",
    "AutoMixedInt8",
    "Bisection",
    "Comparison",
    "Custom",
    "Decision",
    "DelayedScales",
    "DynamicLossScale",
    "EqnView",
    "Explanation",
    "FallbackReport",
    "Health",
    "IllConditioned",
    "Inspection",
    "Ladder",
    "LeastSquares",
    "LinearSolve",
    "LossScale",
    "MasterState",
    "Mixed",
    "NoOpLossScale",
    "NonFinite",
    "OpKind",
    "OutOfRange",
    "Plan",
    "Precision",
    "PrecisionPolicy",
    "PrecisionWarning",
    "Predicate",
    "Profile",
    "QuantizedArray",
    "Roles",
    "Rule",
    "ScaledState",
    "StaticLossScale",
    "__version__",
    "all_finite",
    "audit",
    "auto_mixed",
    "between",
    "calibrate",
    "cast_floating",
    "compare",
    "delayed_scaling",
    "explain",
    "in_compute_dtype",
    "keep",
    "least_squares",
    "master_copies",
    "monitor",
    "quantized",
    "scaled_optimizer",
    "scaled_value_and_grad",
    "skip_nonfinite",
    "solve",
    "use_policy",
    "with_fallback",
]

_IMPORTED_WHEN_USED = {
    "IllConditioned": "precpass.numerics.fallback.checks",
    "NonFinite": "precpass.numerics.fallback.checks",
    "OutOfRange": "precpass.numerics.fallback.checks",
    "Predicate": "precpass.numerics.fallback.checks",
    "FallbackReport": "precpass.numerics.fallback.fallback",
    "with_fallback": "precpass.numerics.fallback.fallback",
    "Ladder": "precpass.numerics.ladder.ladder",
    "all_finite": "precpass.numerics.loss_scale.gradients",
    "scaled_value_and_grad": "precpass.numerics.loss_scale.gradients",
    "skip_nonfinite": "precpass.numerics.loss_scale.gradients",
    "MasterState": "precpass.numerics.loss_scale.optax_wrapper",
    "master_copies": "precpass.numerics.loss_scale.optax_wrapper",
    "ScaledState": "precpass.numerics.loss_scale.optax_wrapper",
    "scaled_optimizer": "precpass.numerics.loss_scale.optax_wrapper",
    "DynamicLossScale": "precpass.numerics.loss_scale.scale",
    "LossScale": "precpass.numerics.loss_scale.scale",
    "NoOpLossScale": "precpass.numerics.loss_scale.scale",
    "StaticLossScale": "precpass.numerics.loss_scale.scale",
    "calibrate": "precpass.numerics.monitor.calibrate",
    "Health": "precpass.numerics.monitor.health",
    "monitor": "precpass.numerics.monitor.monitor",
    "DelayedScales": "precpass.numerics.delayed_scaling",
    "delayed_scaling": "precpass.numerics.delayed_scaling",
    "QuantizedArray": "precpass.numerics.quantized",
    "quantized": "precpass.numerics.quantized",
    "LeastSquares": "precpass.numerics.solvers.least_squares",
    "least_squares": "precpass.numerics.solvers.least_squares",
    "LinearSolve": "precpass.numerics.solvers.linear",
    "solve": "precpass.numerics.solvers.linear",
    "Roles": "precpass.numerics.solvers.roles",
    "Audit": "precpass.report.audit.audit",
    "audit": "precpass.report.audit.audit",
    "bisect": "precpass.report.bisect.bisect",
    "Bisection": "precpass.report.bisect.bisection",
    "compare": "precpass.report.compare.compare",
    "Comparison": "precpass.report.compare.comparison",
    "profile": "precpass.report.compare.profile",
    "Profile": "precpass.report.compare.profiled",
    "between": "precpass.view.diff",
    "Explanation": "precpass.view.explain",
    "Inspection": "precpass.view.inspection",
}
"""Names that a program which only calls `auto_mixed` does not need; they are imported when used."""


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_IMPORTED_WHEN_USED[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
