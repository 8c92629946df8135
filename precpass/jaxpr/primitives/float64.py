"""The primitive that runs a span of equations in float64 while x64 is off outside.

`float64(*args, jaxpr=...)` evaluates a jaxpr that was traced with x64 on and
whose operands and results have types that exist with x64 off. It is a primitive
because JAX's own rules for the equations inside (transposition above all) make
new equations, and make them right only with x64 on: a `jax.custom_vjp` around
the span would have that in the backward pass only, and no forward mode.

Every rule below is the same one: JAX's transform of the whole span, traced
with x64 on, as a span of its own. Derivatives are made from the operands,
so reverse mode computes the span again and saves nothing of it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from precpass.jaxpr.binding import evaluate, trace
from precpass.jaxpr.reading import consts_of, is_inexact, open_jaxpr, out_avals
from precpass.jaxpr.types import Eqn, Jaxpr
from precpass.jaxpr.weak import WeakIdMap

__all__ = ["float64", "in_x64", "is_float64"]


def in_x64() -> bool:
    """Whether x64 is on."""
    return bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue] -- dynamic


def float64(fn: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """`fn(*args)` with x64 on, under any transform.

    Args:
        fn: a function of arrays that returns a sequence of arrays; none of them has 64 bits.
        args: its operands. Values of outer traces that it closes over become operands too.
    """
    # before x64 is on, where a tracer of a numpy array would have 64 bits
    avals = list(map(jax.typeof, args))
    with jax.enable_x64(True):
        jaxpr = trace(fn, *avals)
        outer = [isinstance(c, jax.core.Tracer) for c in consts_of(jaxpr)]
        if any(outer):
            outer_consts, own_consts = _split(outer, consts_of(jaxpr))
            closed = functools.partial(_with_consts, jaxpr, outer, own_consts)
            args = [*outer_consts, *args]
            jaxpr = trace(closed, *map(jax.typeof, outer_consts), *avals)
    return _float64_p.bind(*args, jaxpr=jaxpr)


def _with_consts(jaxpr: Jaxpr, outer: Sequence[bool], own: Sequence[Any], *args: Any) -> list[Any]:
    outer_count = sum(outer)
    return evaluate(jaxpr, args[outer_count:], _merge(outer, args[:outer_count], own))


def is_float64(eqn: Eqn) -> bool:
    """Whether an equation is a float64 span."""
    return eqn.primitive is _float64_p


def _run(*args: Any, jaxpr: Jaxpr) -> list[Any]:
    with jax.enable_x64(True):
        return evaluate(jaxpr, args)


def _impl(*args: Any, jaxpr: Jaxpr) -> list[Any]:
    # Some lowering rules trace functions too, such as that of argmax.
    with jax.enable_x64(True):
        return _jitted(jaxpr)(*args)


_known = WeakIdMap[Any]()


def _jitted(jaxpr: Jaxpr) -> Any:
    """The `jax.jit` of a jaxpr, cached as long as the jaxpr lives."""
    jitted = _known.get(jaxpr)
    if jitted is None:
        borrowed = weakref.ref(jaxpr)
        jitted = _known.setdefault(jaxpr, jax.jit(lambda *args: _run(*args, jaxpr=borrowed())))
    return jitted


def _merge(mask: Sequence[bool], first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Operands in their order: those where `mask` is set come from `first`."""
    chosen, others = iter(first), iter(second)
    return [next(chosen) if m else next(others) for m in mask]


def _split(mask: Sequence[bool], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    pairs = list(zip(mask, values, strict=True))
    return [x for m, x in pairs if m], [x for m, x in pairs if not m]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: Jaxpr) -> Any:
    # numpy arrays and Python's numbers, which tracers of derivatives hold as they are
    primals = [x if isinstance(x, jax.core.Tracer) else jnp.asarray(x) for x in primals]
    moves = [not isinstance(t, ad.Zero) for t in tangents]
    moving_tangents, _ = _split(moves, tangents)
    inexact = [is_inexact(a) for a in out_avals(jaxpr)]

    def tangent(*args: Any) -> list[Any]:
        moving, still = _split(moves, args[: len(moves)])

        def on_moving(*xs: Any) -> list[Any]:
            return _split(inexact, evaluate(jaxpr, _merge(moves, xs, still)))[0]

        return jax.jvp(on_moving, moving, list(args[len(moves) :]))[1]

    primals_out = _float64_p.bind(*primals, jaxpr=jaxpr)
    tangents_out = iter(float64(tangent, [*primals, *moving_tangents]))
    return primals_out, [
        next(tangents_out) if m else ad.Zero(jax.typeof(x).to_tangent_aval())
        for m, x in zip(inexact, primals_out, strict=True)
    ]


def _transpose(cotangents: Sequence[Any], *operands: Any, jaxpr: Jaxpr) -> list[Any]:
    linear = [ad.is_undefined_primal(x) for x in operands]
    unknown, known = _split(linear, operands)
    avals = [x.aval for x in unknown]
    arrive = [not isinstance(ct, ad.Zero) for ct in cotangents]
    arriving, _ = _split(arrive, cotangents)

    def backward(*args: Any) -> Sequence[Any]:
        def forward(*xs: Any) -> list[Any]:
            return _split(arrive, evaluate(jaxpr, _merge(linear, xs, args[: len(known)])))[0]

        return jax.linear_transpose(forward, *avals)(list(args[len(known) :]))

    if not arriving:
        return [None] * len(operands)
    return _merge(linear, float64(backward, [*known, *arriving]), [None] * len(known))


def _batch(
    axis: Any, operands: Sequence[Any], dims: Sequence[int | None], *, jaxpr: Jaxpr
) -> tuple[list[Any], list[int | None]]:
    if all(d is None for d in dims) and not open_jaxpr(jaxpr).effects:
        out = _float64_p.bind(*operands, jaxpr=jaxpr)
        return out, [None] * len(out)
    mapped = jax.vmap(
        lambda *args: evaluate(jaxpr, args),
        in_axes=tuple(dims),
        axis_size=axis.size,
        axis_name=axis.name,
        spmd_axis_name=axis.spmd_name,
    )
    out = float64(mapped, operands)
    return out, [0] * len(out)


_lower_run = mlir.lower_fun(_run, multiple_results=True)


def _lower(ctx: Any, *operands: Any, jaxpr: Jaxpr) -> Any:
    # as in `_impl`
    with jax.enable_x64(True):
        return _lower_run(ctx, *operands, jaxpr=jaxpr)


def _to_lojax(*operands: Any, jaxpr: Jaxpr) -> list[Any]:
    """The span with its hi-primitives expanded, as JAX expands those around it."""
    with jax.enable_x64(True):
        traced = jax.jit(functools.partial(_evaluate, jaxpr)).trace(*map(jax.typeof, operands))
        expanded: Any = traced.lojax
    return _float64_p.bind(*operands, jaxpr=expanded.jaxpr)


def _evaluate(jaxpr: Jaxpr, *args: Any) -> list[Any]:
    return evaluate(jaxpr, args)


_float64_p = jex.Primitive("precpass_float64")
_float64_p.multiple_results = True
_float64_p.def_impl(_impl)
# the effects are the named axes of collectives
_float64_p.def_effectful_abstract_eval(
    lambda *_avals, jaxpr: (out_avals(jaxpr), open_jaxpr(jaxpr).effects)
)
_float64_p.to_lojax = _to_lojax
mlir.register_lowering(_float64_p, _lower)
ad.primitive_jvps[_float64_p] = _jvp
ad.primitive_transposes[_float64_p] = _transpose
batching.fancy_primitive_batchers[_float64_p] = _batch
