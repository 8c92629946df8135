"""precpass: automatic mixed precision for JAX, as a compiler pass over jaxprs."""

from precpass.api import Mixed, auto_mixed, inspect, keep, use_policy
from precpass.inspection import Inspection
from precpass.opkinds import OpKind
from precpass.plan import Action, Decision, Plan
from precpass.policy import (
    AlwaysBf16,
    AlwaysF16,
    AlwaysF32,
    AutoMixed,
    AutoMixedBf16,
    AutoMixedConservative,
    Custom,
    PrecisionPolicy,
    PrecisionWarning,
)
from precpass.precision import Precision
from precpass.rules import EqnView, Rule
from precpass.view.diff import between

__all__ = [
    "Action",
    "AlwaysBf16",
    "AlwaysF16",
    "AlwaysF32",
    "AutoMixed",
    "AutoMixedBf16",
    "AutoMixedConservative",
    "Custom",
    "Decision",
    "EqnView",
    "Inspection",
    "Mixed",
    "OpKind",
    "Plan",
    "Precision",
    "PrecisionPolicy",
    "PrecisionWarning",
    "Rule",
    "auto_mixed",
    "between",
    "inspect",
    "keep",
    "use_policy",
]
