"""An equation other than a product, evaluated in a low format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from precpass import jaxpr as ir
from precpass.analysis.equations import gathered_operand, is_wide, pieces, spreads
from precpass.analysis.sizes import nbytes
from precpass.plan.plan import Decision, DeviceSum
from precpass.plan.reasons import DecidedBy
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind, op
from precpass.rewrite.copies import low_copy
from precpass.rewrite.env import Env

__all__ = ["add_low_transpose", "chosen_low", "low_results", "put_together_low"]


def low_results(env: Env, eqn: ir.Eqn, decision: Decision) -> Sequence[Any]:
    """An equation with low operands and results; sums are taken in float32 and rounded once."""
    low = decision.compute
    assert low is not None
    row = op(eqn.primitive.name)
    if decision.device_sum is not None and not decision.device_sum.of_cotangents:
        results = _sent_low(env, eqn, decision.device_sum)
        if decision.device_sum.dim is None:
            return results
        # The transpose of an exchange in bfloat16 would add up in bfloat16.
        wide = env.build.bind(eqn, [env.read(v) for v in eqn.invars])
        return [
            env.build.rounded(env.build.detach(x), w) for x, w in zip(results, wide, strict=True)
        ]
    if gathered_operand(eqn) is not None:
        return [env.as_(_gathered(env, eqn, low), low)]
    if spreads(eqn):
        results = env.build.bind(eqn, [env.read(v) for v in eqn.invars])
        return [env.as_(x, low) for x in results]
    if row.kind is OpKind.ELEMENTWISE:
        args = _elementwise_operands(env, eqn, decision, low)
    else:
        args = [env.read_as(v, low) for v in eqn.invars]
    if row.accumulates and not ir.picks_from_apart_windows(eqn):
        pairs = zip(args, eqn.invars, strict=True)
        args = [env.as_(x, ir.precision_of(v.aval)) for x, v in pairs]
    results = [env.as_(x, low) for x in env.build.bind(eqn, args)]
    is_asked = decision.decided_by is not DecidedBy.COST
    return _apart(env, results) if is_asked and eqn.primitive.name == "ppermute" else results


def _elementwise_operands(env: Env, eqn: ir.Eqn, decision: Decision, low: Precision) -> list[Any]:
    shape, read_as = eqn.outvars[0].aval.shape, env.read_as
    args = [
        read_as(v, low) if v.aval.shape == shape else _spread(env, v, shape, low)
        for v in eqn.invars
    ]
    for at in decision.clipped:
        args[at] = _clipped(env, eqn.invars[at], low)
    for at, number in decision.numbers:
        args[at] = _filled(env, eqn.invars[at], number, low)
    return args


def _apart(env: Env, results: Sequence[Any]) -> Sequence[Any]:
    """Low results that XLA's compilers do not fuse with casts.

    That for GPUs fails if a loop's state is widened right after a permutation (jax 0.12.0.1).
    """
    kept = [env.build.detach(x, keeps_rounding=True) for x in results]
    return [env.build.rounded(a, x) for a, x in zip(kept, results, strict=True)]


def add_low_transpose(env: Env, eqn: ir.Eqn, form: DeviceSum) -> None:
    """Gives a result the derivative of the equation that sends bfloat16, as its transpose does."""
    (sent,), (result,) = _sent_low(env, eqn, form), eqn.outvars
    env.values[result] = env.build.rounded(env.read(result), sent)


def _sent_low(env: Env, eqn: ir.Eqn, form: DeviceSum) -> list[Any]:
    """The float32 results of an equation that sends its operands to other devices in bfloat16."""
    operands, low, dim = [env.read(v) for v in eqn.invars], Precision.BF16, form.dim
    if dim is None:
        results = env.build.bind(eqn, [env.as_(x, low) for x in operands])
        return [env.as_(x, Precision.F32) for x in results]
    key = "in parts", dim, ir.alike(eqn)
    return env.build.call(lambda x: [ir.in_parts(eqn, x, dim, low.dtype)], operands, key)


def chosen_low(env: Env, eqn: ir.Eqn, low: Precision) -> bool:
    """Makes in a low format what a custom JVP alone chooses from its operands, as a relu does.

    The same choice in float32 has the derivative. What rounds it would keep a GPU's compiler from
    choosing in the kernel of a product.

    Returns:
        Whether the result was made so.
    """
    chosen = ir.called_alone(eqn)
    if chosen is None or not op(chosen.primitive.name).chooses:
        return False
    (result,) = env.build.bind(chosen, [env.read_as(v, low) for v in chosen.invars])
    env.low_copies[eqn.outvars[0], low] = env.build.detach(result)
    env.round(eqn.outvars[0], low)
    return True


def put_together_low(env: Env, eqn: ir.Eqn, low: Precision) -> bool:
    """Rounds the result of an equation that puts pieces together, by rounding the pieces.

    It does so if pieces with half of the result's bytes have a low copy already. If each trip of a
    loop replaces a piece of a state in 16 bits, the whole state is then not widened and rounded.

    Returns:
        Whether the result was rounded.
    """
    sizes = [(nbytes(v.aval), _is_low(env, eqn, v, low)) for v in pieces(eqn)]
    if not sizes or 2 * sum(size for size, is_low in sizes if is_low) < sum(s for s, _ in sizes):
        return False
    operands = [env.low_copy(v, low) if is_wide(v) else env.read(v) for v in eqn.invars]
    (result,) = env.build.bind(eqn, operands)
    env.low_copies[eqn.outvars[0], low] = low_copy(env.build, result, low)
    env.round(eqn.outvars[0], low)
    return True


def _is_low(env: Env, eqn: ir.Eqn, piece: ir.Atom, low: Precision) -> bool:
    """Whether a piece has a low copy that is worth using."""
    if eqn.primitive.name == "gather":
        # XLA fuses a gather with the cast of its result, so that only a loop's state gains.
        return (piece, low) in env.border_copies
    return not ir.is_literal(piece) and env.has_low(piece, low)


def _gathered(env: Env, eqn: ir.Eqn, low: Precision) -> Any:
    """A gather whose rows are cast before they are repeated.

    Its derivative is that of the float32 gather, because a row's cotangents are added up.
    """
    operand, *indices = eqn.invars
    others = [env.read(v) for v in indices]
    (wide,) = env.build.bind(eqn, [env.read(operand), *others])
    (gathered,) = env.build.bind(eqn, [env.low_copy(operand, low), *others])
    return env.build.rounded(env.build.detach(gathered), wide)


def _spread(env: Env, atom: ir.Atom, out: tuple[Any, ...], low: Precision) -> Any:
    """An operand of an elementwise equation in the low format, in the shape of its result.

    Elementwise equations broadcast dimensions of size 1, and clamp broadcasts scalar bounds. The
    transpose of that is a sum, which would be taken in the low format.
    """
    if ir.is_literal(atom) or ir.precision_of(atom.aval) is None:
        return env.read_as(atom, low)
    dims = tuple(range(len(out) - len(atom.aval.shape), len(out)))

    def spread(x: Any) -> list[Any]:
        return [lax.broadcast_in_dim(x, out, dims)]

    (wide,) = env.build.call(spread, [env.read(atom)], ("spread", out))
    return env.as_(wide, low)


def _clipped(env: Env, atom: ir.Atom, low: Precision) -> Any:
    """A finite constant in a low format that it is beyond: the largest number of its sign."""
    if ir.is_literal(atom):
        return ir.literal(np.clip(atom.val, -low.max, low.max).astype(low.dtype), atom)
    near = low.dtype.type(low.max).astype(np.float32)

    def clipped(x: Any) -> list[Any]:
        return [lax.clamp(-near, x, near)]

    (wide,) = env.build.call(clipped, [env.read(atom)], ("clipped", low))
    return env.as_(wide, low)


def _filled(env: Env, atom: ir.Atom, number: float, low: Precision) -> Any:
    """An array like another one, of one number in a low format, or of that format's nearest."""
    nearest = min(max(number, -low.max), low.max) if np.isfinite(number) else number

    def filled(x: Any) -> list[Any]:
        return [lax.full_like(x, nearest, low.dtype)]

    return env.build.call(filled, [env.read(atom)], ("filled", repr(nearest), low))[0]
