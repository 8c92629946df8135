"""Measures a product in float32 and in its low form, in the surroundings that it has in a program.

The cost of a low product depends on its surroundings, so they are timed with it
(`precpass.analysis.operand_origin`). An operand that elementwise work makes is made by such work
here too, so that its cast is free. The cast of an operand in memory reads and writes it. A loop's
constant is low before the measured time begins. An operand that is given in 8 bits is so here. A
transpose of the result is included, because XLA folds it into a float32 product, and elementwise
work reads the result. The low program is the one that the pass makes of the float32 program. The
time is the shortest of interleaved rounds.

Both programs are compiled and run in a thread of their own, in which no trace, context or region
of the caller is in force, so nothing is added to the user's program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precpass import jaxpr as ir
from precpass.analysis.operand_origin import OperandOrigin
from precpass.analysis.sizes import nbytes
from precpass.autotune.apart import apart
from precpass.measure import execute
from precpass.planner.planner import make_plan
from precpass.planner.profit import Product, ProductTimes
from precpass.policy.policy import PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.policy.presets import Custom
from precpass.policy.primitives import OpKind
from precpass.policy.rules import Rule
from precpass.rewrite.rewriter import Rewriter

__all__ = ["NotTimed", "timed"]

SECONDS, FEWEST, MOST = 0.15, 7, 101
"""The seconds for which a product's programs run, and the fewest and most rounds."""

LARGEST = 2**29
"""A product whose operands and result have at least this many bytes is not timed."""


class NotTimed(Exception):
    """A product is not timed; the text says why."""


_EIGHT_BITS = {
    OperandOrigin.IN_INT8: Precision.INT8.dtype,
    OperandOrigin.IN_FLOAT8: Precision.F8E4M3.dtype,
}
"""The dtypes of operands that a program is given in 8 bits."""

Runs = Mapping[str, Callable[..., Any]]
Rounds = Callable[[Runs], dict[str, execute.Timing]]


def timed(product: Product, device: Any, rounds: Rounds | None = None) -> ProductTimes:
    """The times of a product on a JAX device.

    Args:
        product: the product.
        device: where it is to run.
        rounds: times the runs "call" (without the product), "wide" and "low" in turns; by default
            in as many rounds as fit into `SECONDS`.

    Raises:
        NotTimed: if it is too large, or with the error of JAX in compiling or running it.
    """
    eqn = product.eqn
    if sum(nbytes(v.aval) for v in (*eqn.invars, *eqn.outvars)) > LARGEST:
        raise NotTimed("too large to be timed")
    try:
        return apart(lambda: _timed(product, device, rounds or _rounds))
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise NotTimed(f"it cannot be timed: {type(error).__name__}: {text}") from error


def _timed(product: Product, device: Any, rounds: Rounds) -> ProductTimes:
    # Settings of the whole process hold in this thread too.
    with jax.default_device(device), jax.disable_jit(False), jax.debug_nans(False):
        operands = [jax.device_put(x, device) for x in _operands(product)]
        wide = ir.trace(_surrounded(product), *operands)
        plan = make_plan(
            wide,
            _ordering(product.low),
            platform=device.platform,
            device_kind=device.device_kind,
        )
        low = Rewriter(lambda *_: plan, lambda _: None, contextlib.nullcontext).jaxpr(wide, plan)
        in_loop = [
            x.astype(product.low.dtype)
            if origin is OperandOrigin.LOOP_INVARIANT and product.low.is_format
            else x
            for x, origin in zip(operands, product.origins, strict=False)
        ]
        runs = {
            "call": _run(ir.trace(_nothing_for(product), *operands), operands, operands),
            "wide": _run(wide, operands, operands),
            "low": _run(low, [*in_loop, *operands[2:]], operands),
        }
        timings = rounds(runs)
    # Other work on the machine only adds time, and several times as much if there are more threads
    # than cores: medians then gave 1.3 for a product that takes 0.69, and minima always 0.69.
    least = {name: min(timing.seconds) for name, timing in timings.items()}
    # A call takes as long as ten small products, and a product in a loop has no such cost.
    took_wide, took_low = (max(least[name] - least["call"], 1e-9) for name in ("wide", "low"))
    return ProductTimes(took_wide, took_low, "measured")


def _ordering(low: Precision) -> PrecisionPolicy:
    """A policy that orders a precision of 16 or of 8 bits for every product."""
    if low.is_format:
        return Custom({OpKind.COMPUTE: low})
    rule = Rule(primitive="dot_general", precision=low)
    return Custom({OpKind.COMPUTE: Precision.BF16}, [rule])


def _surrounded(product: Product) -> Callable[..., Any]:
    """The product in float32 between what makes its operands and what reads its result."""

    def program(*operands: Any) -> Any:
        made_operands = [
            _made(product, side, x) for side, x in enumerate(operands[: len(product.origins)])
        ]
        out = product.eqn.primitive.bind(*made_operands, *operands[2:], **product.settings)
        if product.behind:
            out = lax.transpose(out, product.behind)
        return out * 1.5 + 0.5

    return program


def _made(product: Product, side: int, x: Any) -> Any:
    """An operand, made as the program around the product makes it."""
    origin = product.origins[side]
    if origin is OperandOrigin.FUSED:
        return x * 1.25 + 0.5
    if origin not in _EIGHT_BITS:
        return x
    numbers = ir.dot_numbers(product.eqn)
    shape: tuple[int, ...] = ()
    if origin is OperandOrigin.IN_INT8 and numbers is not None:
        summed = numbers[0][side]
        shape = tuple(1 if d in summed else size for d, size in enumerate(x.shape))
    return ir.QuantizedArray(x, jnp.full(shape, 2.0**-7, np.float32)).array()


def _nothing_for(product: Product) -> Callable[..., Any]:
    """A program with the operands and the type of result of `_surrounded`, and no product."""
    like = jax.eval_shape(_surrounded(product), *_shapes(product))
    return lambda *_operands: lax.full(like.shape, 1.0, like.dtype)


def _run(jaxpr: ir.Jaxpr, given: list[Any], like: list[Any]) -> Callable[[], Any]:
    """A call of a program, compiled ahead of time, in which XLA does not widen low operands."""
    dtypes = [x.dtype for x in like]

    def program(*xs: Any) -> Any:
        widened = [x.astype(dtype) for x, dtype in zip(xs, dtypes, strict=True)]
        return ir.evaluate(jaxpr, widened)

    jitted = jax.jit(program)
    jax.block_until_ready(jitted(*given))
    return lambda: jitted(*given)


def _shapes(product: Product) -> list[jax.ShapeDtypeStruct]:
    each = zip(_dtypes(product), product.avals, strict=True)
    return [jax.ShapeDtypeStruct(shape, dtype) for dtype, (_, shape) in each]


def _dtypes(product: Product) -> list[Any]:
    """The dtypes in which the program is given a product's operands."""
    given = [np.dtype(dtype) for dtype, _ in product.avals]
    for side, origin in enumerate(product.origins):
        given[side] = _EIGHT_BITS.get(origin, given[side])
    return given


def _operands(product: Product) -> list[np.ndarray[Any, Any]]:
    """Values for a product's operands; the groups of a ragged product have equal sizes."""
    rng = np.random.default_rng(0)
    (_, lhs), *_ = product.avals
    arrays: list[Any] = []
    for dtype, (_, shape) in zip(_dtypes(product), product.avals, strict=True):
        if dtype in _EIGHT_BITS.values():
            arrays.append(np.asarray(100 * rng.random(shape, np.float32) - 50, dtype))
        elif np.issubdtype(dtype, np.floating) or jnp.issubdtype(dtype, jnp.floating):
            arrays.append(rng.random(shape, np.float32) - 0.5)
        elif shape:
            rows = lhs[ir.ragged_dimension(product.eqn)]
            arrays.append(np.full(shape, rows // shape[-1], dtype))
        else:
            arrays.append(np.zeros((), dtype))
    return arrays


def _rounds(runs: Runs) -> dict[str, execute.Timing]:
    once = sum(min(execute.timed(run)[1] for _ in range(3)) for run in runs.values())
    rounds = min(MOST, max(FEWEST, round(SECONDS / max(once, 1e-6))))
    return execute.interleaved(runs, rounds)
