"""The forms in which a whole program is compiled, to find the one that its compiler likes best."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from precpass.policy.policy import PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind

__all__ = ["FORMS", "forms_of", "in_form"]


def _nothing_low(policy: PrecisionPolicy) -> PrecisionPolicy:
    return dataclasses.replace(
        policy.with_scaled(None),
        name=f"{policy.title} by profitability='best'",  # for the reasons of decisions
        alias="",
        kinds=(Precision.F32,) * len(OpKind),
        orders=frozenset({OpKind.COMPUTE}),
    )


def _without_storage(policy: PrecisionPolicy) -> PrecisionPolicy:
    """Elementwise work in float32 by order, so that nothing is stored in 16 bits."""
    kinds = dict(zip(OpKind, policy.kinds, strict=True)) | {OpKind.ELEMENTWISE: Precision.F32}
    orders = policy.orders | {OpKind.ELEMENTWISE}
    policy = policy.with_scaled(None)
    return dataclasses.replace(policy, kinds=tuple(kinds.values()), orders=orders)


_OF_8_BITS = "products of 8 bits"

FORMS: Mapping[str, Callable[[PrecisionPolicy], PrecisionPolicy]] = {
    "float32": _nothing_low,
    "products with float32 results": lambda p: _without_storage(p).with_results("f32"),
    "products": _without_storage,
    "products and storage": lambda policy: policy.with_scaled(None),
    _OF_8_BITS: lambda policy: policy,
}
"""The candidates, the most accurate first; each makes a policy of the user's.

Elementwise work in 16 bits is none of them. It saves a residual network a quarter of its bytes on a
GPU, but its error was above that of programs written by hand where a loop carries a state (an ODE's
was 4 times as large) or a router chooses (4 times as well).
"""


def forms_of(policy: PrecisionPolicy) -> Sequence[str]:
    """The forms that a policy may take; the one of 8 bits only if it asks for 8 bits."""
    return [form for form in FORMS if policy.scaled is not None or form != _OF_8_BITS]


def in_form(policy: PrecisionPolicy, form: str) -> PrecisionPolicy:
    """A policy in one of `FORMS`, with every product lowered that it asks for; "" is itself."""
    return FORMS[form](policy).with_profitability("always") if form else policy
