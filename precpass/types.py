"""The classes that plans and policies are made of, for annotations, `isinstance` and `Custom`."""

from __future__ import annotations

from precpass.jit.mixed import Mixed
from precpass.plan.plan import Action, Decision
from precpass.policy.policy import PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind
from precpass.policy.rules import EqnView

__all__ = [
    "Action",
    "Decision",
    "EqnView",
    "Mixed",
    "OpKind",
    "Precision",
    "PrecisionPolicy",
]
