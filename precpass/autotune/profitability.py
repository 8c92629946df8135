"""Which model of costs the planner asks, as the policy's `profitability` says."""

from __future__ import annotations

from typing import Any

import jax

from precpass.devices.detect import device_for, device_of_call
from precpass.planner.profit import Assumed, ProfitModel
from precpass.policy.policy import PrecisionPolicy

__all__ = ["profit_model_of"]


def profit_model_of(policy: PrecisionPolicy, args: Any = ()) -> ProfitModel | None:
    """What tells which products pay; None where all are lowered.

    Args:
        policy: its `profitability` decides.
        args: of the call that is planned, which tell the device (`precpass.devices.detect`).
    """
    if policy.profitability == "always":
        return None
    if policy.profitability == "assumed":
        return Assumed(device_for(args))
    if jax.process_count() > 1:
        # all of them must run one program, and would not measure the same
        return Assumed(device_for(args), "several processes are not measured for")
    # a program that measures nothing needs neither timers nor files
    from precpass.autotune.measured import measured

    return measured(device_of_call(args))
