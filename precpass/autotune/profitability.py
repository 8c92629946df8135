"""The profit model that a policy's `profitability` asks for."""

from __future__ import annotations

from typing import Any

import jax

from precpass.devices.detect import device_for, device_of_call, is_present
from precpass.planner.profit import Assumed, ProfitModel
from precpass.policy.policy import PrecisionPolicy

__all__ = ["profit_model_of"]


def profit_model_of(policy: PrecisionPolicy, args: Any = ()) -> ProfitModel | None:
    """The profit model of a policy; None if every product is lowered.

    Args:
        policy: its `profitability` decides.
        args: the arguments of the call, which determine the device (`precpass.devices.detect`).
    """
    if policy.profitability in ("always", "compiled"):
        # all products of a compiled form are lowered (`precpass.autotune.compiled`)
        return None
    if policy.profitability == "assumed":
        return Assumed(device_for(args))
    device = device_of_call(args)
    if not is_present(device):
        return Assumed(device_for(device=device), "a device that is not there is not measured")
    if jax.process_count() > 1:
        # All processes must run one program, but would measure different times.
        return Assumed(device_for(args), "several processes are not measured for")
    # Imported here, because a program that measures nothing needs neither timers nor files.
    from precpass.autotune.measured import measured

    return measured(device)
