"""Sums between devices whose terms are sent in bfloat16 (`precpass.planner.device_sums`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from precpass import jaxpr as ir
from precpass.plan.plan import Decision, DeviceSum
from precpass.policy.precision import Precision
from precpass.rewrite.env import Env

__all__ = ["add_low_transpose", "summed_low"]


def summed_low(env: Env, eqn: ir.Eqn, decision: Decision) -> list[Any]:
    """The float32 results of an equation that sends its operands to other devices in bfloat16."""
    assert decision.device_sum is not None
    operands, dim = [env.read(v) for v in eqn.invars], decision.device_sum.dim
    if dim is None:
        low = [env.as_(x, Precision.BF16) for x in operands]
        return [env.as_(x, Precision.F32) for x in env.build.bind(eqn, low)]
    key = "summed in parts", dim, ir.alike(eqn)
    return env.build.call(lambda x: [_summed_in_parts(eqn, x, dim)], operands, key)


def add_low_transpose(env: Env, eqn: ir.Eqn, form: DeviceSum) -> None:
    """Gives an equation's result the derivative of one that sends bfloat16, as cotangents are."""
    (operand,), (result,) = eqn.invars, eqn.outvars
    wide = env.read(operand)
    if form.dim is None:
        (low,) = env.build.bind(eqn, [env.as_(wide, Precision.BF16)])
        sent = env.as_(low, Precision.F32)
    else:
        key = "gathered in parts", ir.alike(eqn)
        (sent,) = env.build.call(lambda x: [_gathered_in_parts(eqn, x)], [wide], key)
    env.values[result] = env.build.rounded(env.read(result), sent)


def _summed_in_parts(eqn: ir.Eqn, x: Any, dim: int) -> Any:
    """A sum to which each device adds up its part along a dimension, from all devices' terms."""
    params, is_whole = eqn.params, eqn.primitive.name != "reduce_scatter"
    axes = params["axes"] if is_whole else params["axis_name"]
    size = ir.axes_size(eqn.invars[0].aval, params["axes"]) if is_whole else params["axis_size"]
    if is_whole or params["tiled"]:
        x = lax.reshape(x, _divided(x.shape, dim, size))
    parts = lax.all_to_all(_low(x), axes, dim, 0)
    part = lax.reduce_sum(_wide(parts), axes=(0,))
    if not is_whole:
        return part
    to = "invarying" if eqn.primitive.name == "psum_invariant" else "varying"
    return _wide(lax.all_gather(_low(part), axes, axis=dim, tiled=True, to=to))


def _gathered_in_parts(eqn: ir.Eqn, x: Any) -> Any:
    """A gather as an exchange of equal parts, whose transpose adds up in float32."""
    params = eqn.params
    dim, size = params["all_gather_dimension"], params["axis_size"]
    each = lax.broadcast(x, (size,))
    parts = _wide(lax.all_to_all(_low(each), params["axis_name"], 0, dim))
    return lax.reshape(parts, eqn.outvars[0].aval.shape) if params["tiled"] else parts


def _divided(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, shape[dim] // size, *shape[dim + 1 :])


def _low(x: Any) -> Any:
    return ir.convert(x, Precision.BF16.dtype)


def _wide(x: Any) -> Any:
    return ir.convert(x, Precision.F32.dtype)
