"""Sums between devices whose terms are sent in bfloat16 (`precpass.planner.device_sums`)."""

from __future__ import annotations

from typing import Any

from precpass import jaxpr as ir
from precpass.plan.plan import DeviceSum
from precpass.policy.precision import Precision
from precpass.rewrite.env import Env

__all__ = ["add_low_transpose", "summed_low"]

_LOW = Precision.BF16.dtype


def summed_low(env: Env, eqn: ir.Eqn, form: DeviceSum) -> list[Any]:
    """The float32 results of an equation that sends its operands to other devices in bfloat16."""
    operands, dim = [env.read(v) for v in eqn.invars], form.dim
    if dim is None:
        return _sent(env, eqn, operands)
    key = "summed in parts", dim, ir.alike(eqn)
    return env.build.call(lambda x: [ir.summed_in_parts(eqn, x, dim, _LOW)], operands, key)


def add_low_transpose(env: Env, eqn: ir.Eqn, form: DeviceSum) -> None:
    """Gives a result the derivative of the equation that sends bfloat16, as its transpose does."""
    (operand,), (result,) = [env.read(v) for v in eqn.invars], eqn.outvars
    if form.dim is None:
        (sent,) = _sent(env, eqn, [operand])
    else:
        key = "gathered in parts", ir.alike(eqn)
        (sent,) = env.build.call(lambda x: [ir.gathered_in_parts(eqn, x, _LOW)], [operand], key)
    env.values[result] = env.build.rounded(env.read(result), sent)


def _sent(env: Env, eqn: ir.Eqn, operands: list[Any]) -> list[Any]:
    low = [env.as_(x, Precision.BF16) for x in operands]
    return [env.as_(x, Precision.F32) for x in env.build.bind(eqn, low)]
