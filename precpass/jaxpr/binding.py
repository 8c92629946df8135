"""Tracing and binding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

from precpass.jaxpr.reading import (
    consts_of,
    in_avals,
    is_literal,
    open_jaxpr,
    precision_of,
    source_of,
)
from precpass.jaxpr.types import Atom, Aval, Eqn, Jaxpr
from precpass.policy.precision import Precision

DTYPE_PARAMS = ("new_dtype", "preferred_element_type", "out_dtype")
"""The params that name the dtype of an equation's results."""

_cast_p = jex.primitives.convert_element_type_p


def trace(fn: Callable[..., Any], *args: Any) -> Any:
    """The closed jaxpr of `fn` at arguments, avals or `ShapeDtypeStruct`s."""
    return jax.make_jaxpr(fn)(*args)


def jit_is_disabled() -> bool:
    """Whether `jax.disable_jit` is in force."""
    return bool(jax.config.jax_disable_jit)  # pyright: ignore[reportAttributeAccessIssue] -- dynamic


class Call(NamedTuple):
    """A traced call of a jitted function.

    Attributes:
        jaxpr: the function's jaxpr.
        operands: the values of its operands: first the outer traces' values that the function
            closes over, then the arguments.
        closed_over: how many operands are closed over.
        tree: the structure of the results.
        eqn: the call as an equation; None if JAX made none.
    """

    jaxpr: Jaxpr
    operands: list[Any]
    closed_over: int
    tree: Any
    eqn: Eqn = None


def trace_call(call: Callable[..., Any], arguments: Sequence[Any]) -> Call:
    """The jaxpr of a function as `jax.jit` traces it, with jit's errors and jit's cache.

    Args:
        call: calls the jitted function once, and does nothing else.
        arguments: the arrays that the function is called with.
    """
    closed, shapes = jax.make_jaxpr(call, return_shape=True)(*arguments)
    opened, tree = open_jaxpr(closed), jax.tree.structure(shapes)
    if [eqn.primitive.name for eqn in opened.eqns] != ["jit"]:
        return Call(closed, list(arguments), 0, tree)
    (eqn,) = opened.eqns
    if list(opened.outvars) != list(eqn.outvars):
        return Call(closed, list(arguments), 0, tree)
    values = dict(zip(opened.constvars, consts_of(closed), strict=True))
    values.update(zip(opened.invars, arguments, strict=True))
    operands = [v.val if is_literal(v) else values[v] for v in eqn.invars]
    return Call(eqn.params["jaxpr"], operands, len(operands) - len(arguments), tree, eqn)


def run(call: Call, jaxpr: Jaxpr) -> list[Any]:
    """The results of a call with another jaxpr in the place of its own."""
    # Under a derivative or a vmap too JAX runs a program again that made a NaN.
    seeks_nan = jax.config.jax_debug_nans or jax.config.jax_debug_infs  # pyright: ignore[reportAttributeAccessIssue] -- dynamic
    if jit_is_disabled() or not is_tracing() or seeks_nan:
        return one_by_one(jaxpr, call.operands)
    if call.eqn is None:
        return evaluate(jaxpr, call.operands)
    results = _taken_over(call, jaxpr)
    if results is None:
        results = bind(call.eqn, call.operands, {**call.eqn.params, "jaxpr": jaxpr})
    return results


def _taken_over(call: Call, jaxpr: Jaxpr) -> list[Any] | None:
    """The results of a call whose equations are added to the trace of its arguments.

    In a jit of the function's name inside the jit of the call, "jit(f)/jit(f)/" would begin the
    names in profiles. To evaluate the jaxpr would take as long as its trace did, and JAX has no
    public way to add equations that are already traced. None if this JAX has none at all, or no
    argument is traced.
    """
    opened, at = open_jaxpr(jaxpr), source_info_util.current()
    arguments = (x for x in call.operands[call.closed_over :] if isinstance(x, jax.core.Tracer))
    first: Any = next(arguments, None)
    trace: Any = getattr(first, "_trace", None)
    if not hasattr(trace, "emit_eqn") or getattr(opened, "is_high", False):
        return None
    operands = [*consts_of(jaxpr), *call.operands]
    tracers = [trace.to_jaxpr_tracer(x, at) for x in operands]
    values = dict(zip([*opened.constvars, *opened.invars], tracers, strict=True))

    def read(atom: Atom) -> Any:
        return type(first)(trace, atom.aval, atom, at) if is_literal(atom) else values[atom]

    for eqn in opened.eqns:
        own, ins, outs = eqn.source_info, map(read, eqn.invars), [v.aval for v in eqn.outvars]
        place = own.replace(name_stack=at.name_stack + own.name_stack) if at.name_stack else own
        effects: Any = eqn.effects
        if effects:  # those on references name the operand
            effects = {e.replace(read(e.input).val) if hasattr(e, "input") else e for e in effects}
        added = trace.emit_eqn(list(ins), outs, eqn.primitive, eqn.params, effects, place, eqn.ctx)
        values.update(zip(eqn.outvars, added, strict=True))
    return [read(v) for v in opened.outvars]


def bind(eqn: Eqn, args: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """An equation's primitive applied to other operands or params; always a list."""
    params = eqn.params if params is None else params
    primitive = eqn.primitive
    out = primitive.bind(*args, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


def one_by_one(
    jaxpr: Jaxpr,
    args: Sequence[Any],
    apply: Callable[[Any, Sequence[Any]], Sequence[Any]] = bind,
    within: Any = None,
) -> list[Any]:
    """The results of a jaxpr, run equation by equation, also inside its jits.

    JAX's own evaluation compiles inner jits. If `jax_debug_nans` then finds a NaN in one, its
    exception does not name the user's line.

    Args:
        jaxpr: the jaxpr.
        args: its operands.
        apply: computes the results of an equation from the values of its operands.
        within: the jit whose line stands for equations that have no line of the user's.
    """
    opened = open_jaxpr(jaxpr)
    values = dict(zip(opened.constvars, consts_of(jaxpr), strict=True))
    values.update(zip(opened.invars, args, strict=True))

    def read(atom: Atom) -> Any:
        return atom.val if is_literal(atom) else values[atom]

    outside = source_info_util.current_name_stack()
    for eqn in opened.eqns:
        operands = [read(v) for v in eqn.invars]
        place = eqn if within is None or source_of(eqn).file else within
        if eqn.primitive.name == "jit":
            results = one_by_one(eqn.params["jaxpr"], operands, apply, place)
        else:
            stack = outside + eqn.source_info.name_stack
            traceback = place.source_info.traceback
            user = source_info_util.user_context(traceback, name_stack=stack)
            with user, eqn.ctx.manager:
                results = apply(eqn, operands)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in opened.outvars]


# The tracers' classes are private to JAX. `LinearizeTracer` is the one of grad since 0.5.
DIFFERENTIATED = ("JVPTracer", "LinearizeTracer")
"""The names of the classes of values that are operands of a derivative."""


def is_differentiated(x: Any) -> bool:
    """Whether a value is an operand of a derivative that is being taken around the call."""
    return type(x).__name__ in DIFFERENTIATED


def outer_value(x: Any) -> Any:
    """The value of the surrounding trace that a tracer of a derivative or of a vmap wraps.

    Any other value is returned as it is.
    """
    while isinstance(x, jax.core.Tracer):
        inner = getattr(x, "primal" if is_differentiated(x) else "val", None)
        if not isinstance(inner, jax.Array):  # a tracer is one, too
            break
        x = inner
    return x


def is_tracing() -> bool:
    """Whether anything is being traced in this thread."""
    with jax.core.eval_context():
        outermost = jex.get_opaque_trace_state()
    return jex.get_opaque_trace_state() != outermost


def is_valid(x: Any) -> bool:
    """Whether `jax.jit` takes a leaf, or has an error of its own for it."""
    if isinstance(x, type):  # JAX looks for `__jax_array__`, which the class of an array has too
        return False
    try:
        return jex.valid_jaxtype(x)
    except (OverflowError, ValueError):
        return True


def as_operand(x: Any) -> Any:
    """An argument in the dtype that `jax.jit` would give it."""
    return jnp.asarray(x) if isinstance(x, (np.ndarray, np.generic)) else x


def retrace(jaxpr: Jaxpr, fn: Callable[..., Any], avals: Sequence[Aval] | None = None) -> Any:
    """The jaxpr of `fn` at the operands of `jaxpr`: open if that is open, else closed."""
    avals = in_avals(jaxpr) if avals is None else avals
    closed = jax.make_jaxpr(fn)(*avals)
    if hasattr(jaxpr, "consts"):
        return closed
    # on 0.10 the jaxpr of remat and shard_map is open
    if consts_of(closed):
        raise NotImplementedError("an open jaxpr cannot hold the constants of its rewrite")
    return open_jaxpr(closed)


def evaluate(jaxpr: Jaxpr, args: Sequence[Any], consts: Sequence[Any] | None = None) -> list[Any]:
    """The results of a jaxpr at `args`, and at other constants than its own if they are given."""
    consts = consts_of(jaxpr) if consts is None else consts
    return jax.core.eval_jaxpr(open_jaxpr(jaxpr), consts, *args)


def retyped(eqn: Eqn, dtype: Any) -> dict[str, Any]:
    """The params of an equation after its floating operands and results have changed their dtype.

    A cast to a type that is not floating keeps its result's dtype. A scatter's combiner is
    traced again, because it names the dtype of the scalars that it combines.
    """
    params = dict(eqn.params)
    for name in DTYPE_PARAMS:
        if Precision.of(params.get(name)) is not None:
            params[name] = dtype
        elif dtype == np.float64 and params.get(name) == np.complex64:
            params[name] = np.dtype(np.complex128)
    combiner = params.get("update_jaxpr")
    if combiner is not None:
        avals = [
            a if precision_of(a) is None else a.update(dtype=dtype) for a in in_avals(combiner)
        ]
        if dtype == np.float64:
            avals = [a.update(dtype=np.complex128) if a.dtype == np.complex64 else a for a in avals]

        def combined(*xs: Any) -> list[Any]:
            return one_by_one(
                combiner, xs, lambda inner, ops: bind(inner, ops, retyped(inner, dtype))
            )

        params["update_jaxpr"] = retrace(combiner, combined, avals)
    return params


def bind_shard_map(
    eqn: Eqn,
    fn: Callable[..., Any],
    args: Sequence[Any],
    copied: Sequence[Sequence[int]] = ((), ()),
    more_specs: Sequence[Any] = (),
) -> list[Any]:
    """`fn` mapped over shards as an equation of `shard_map` says.

    The public form is used because the primitive wants its specs as thunks, and
    because a body with collectives can only be traced with its axes bound.

    Args:
        eqn: the equation.
        fn: the function.
        args: its operands.
        copied: the positions of the equation's operands, and of its results, of which `fn` takes
            and returns border copies behind the others.
        more_specs: of what it returns behind these.
    """
    params = eqn.params
    sides = params["in_specs"], params["out_specs"]
    specs = [(*side, *(side[i] for i in at)) for side, at in zip(sides, copied, strict=True)]
    mapped = jax.shard_map(
        fn,
        mesh=params["mesh"],
        in_specs=specs[0],
        out_specs=(*specs[1], *more_specs),
        check_vma=params["check_vma"],
        axis_names=set(params["newly_manual_axes"]),
    )
    return list(mapped(*args))


def convert(x: Any, dtype: Any, weak_type: bool = False) -> Any:
    """`x` in `dtype`, weakly typed or not as `weak_type` says, on the mesh in the type of `x`."""
    params = {"new_dtype": np.dtype(dtype), "weak_type": weak_type, "sharding": None}
    context = jax.sharding.get_abstract_mesh()
    if not context.empty:
        # A reshard's operand may be typed with an Auto mesh where the context's is Explicit.
        mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", context)
        if not mesh.empty and mesh != context:
            with jax.sharding.use_abstract_mesh(mesh):
                return _cast_p.bind(x, **params)
    return _cast_p.bind(x, **params)
