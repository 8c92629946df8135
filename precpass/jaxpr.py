"""All contact with JAX's IR: reading jaxprs, re-tracing and re-binding them.

Every difference between JAX releases lives here, beside the release that made it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax.extend import linear_util, source_info_util

from precpass.precision import Precision

__all__ = [
    "Body",
    "Source",
    "bind",
    "bind_shard_map",
    "bodies",
    "consts_of",
    "evaluate",
    "hidden_jaxprs",
    "is_literal",
    "open_jaxpr",
    "platform",
    "precision_of",
    "retrace",
    "scope_of",
    "source_of",
    "trace",
    "trace_shaped",
    "with_bodies",
    "with_rewritten_rules",
]

source_info_util.register_exclusion(os.path.dirname(__file__))


# ---------------------------------------------------------------- reading


def open_jaxpr(jaxpr: Any) -> Any:
    """The object with `eqns`, `invars` and `outvars` (0.11 merged ClosedJaxpr into Jaxpr)."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def consts_of(jaxpr: Any) -> Sequence[Any]:
    """The values of `constvars`; () for an open jaxpr, which has none of its own."""
    return getattr(jaxpr, "consts", ())


def is_literal(atom: Any) -> bool:
    """Whether an operand is a value written into the equation."""
    return isinstance(atom, jex.Literal)


def in_avals(jaxpr: Any) -> list[Any]:
    """The avals of the operands, weak types included."""
    return [v.aval for v in open_jaxpr(jaxpr).invars]


def out_avals(jaxpr: Any) -> list[Any]:
    """The avals of the results."""
    return [v.aval for v in open_jaxpr(jaxpr).outvars]


def precision_of(aval: Any) -> Precision | None:
    """The precision of a floating value of a known format; None for all else."""
    return Precision.of(getattr(aval, "dtype", None))


@dataclasses.dataclass(frozen=True)
class Source:
    """A line of the user's code; an empty file where JAX recorded none."""

    file: str = ""
    function: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "<unknown>"


_JAX_FOLDERS = tuple(os.path.join(os.path.dirname(jax.__file__), "")[:-1] + s for s in "/\\")


def source_of(eqn: Any) -> Source:
    """The innermost line outside of JAX and this package that made an equation."""
    traceback = eqn.source_info.traceback
    return _first_user_frame(traceback) if traceback is not None else Source()


@functools.lru_cache(maxsize=65536)
def _first_user_frame(traceback: Any) -> Source:
    own = os.path.dirname(__file__) + os.sep
    for frame in traceback.frames:
        file = frame.file_name
        if not file.startswith((*_JAX_FOLDERS, own, "<frozen")):
            function = frame.function_name.rpartition(".")[2]
            return Source(file, function, frame.line_num)
    return Source()


def scope_of(eqn: Any) -> str:
    """The equation's own name stack as JAX prints it; its callers' stacks come before."""
    return str(eqn.source_info.name_stack)


# ---------------------------------------------------------------- bodies


@dataclasses.dataclass(frozen=True)
class Body:
    """A sub-jaxpr of an equation and how values cross its border.

    Attributes:
        param, index: where it stands in the equation's params.
        jaxpr: the jaxpr, open or closed as the param has it.
        operands: for each of its invars, the position in the equation's invars.
        results: for each of its outvars, the position in the equation's outvars;
            empty where the results do not leave (the predicate of a while).
        trips: how often it runs per call; None where only run time knows.
        carry: pairs (invar, outvar) that are fed back.
        decides: whether its result decides how the program runs on.
        fixed: whether its border must keep its avals (custom rules, collectives).
    """

    param: str
    index: int | None
    jaxpr: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]
    trips: int | None = 1
    carry: tuple[tuple[int, int], ...] = ()
    decides: bool = False
    fixed: bool = False


def _whole(param: str, *, fixed: bool = False) -> Callable[[Any], tuple[Body, ...]]:
    def one(eqn: Any) -> tuple[Body, ...]:
        ins, outs = tuple(range(len(eqn.invars))), tuple(range(len(eqn.outvars)))
        return (Body(param, None, eqn.params[param], ins, outs, fixed=fixed),)

    return one


def scan_split(params: Any) -> tuple[int, int]:
    """The numbers of constants and carries of a scan."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # 0.11 replaced the two counts by a tree of (consts, carry, xs)
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def _scan(eqn: Any) -> tuple[Body, ...]:
    consts, carry = scan_split(eqn.params)
    fed_back = tuple((consts + i, i) for i in range(carry))
    (body,) = _whole("jaxpr")(eqn)
    return (dataclasses.replace(body, trips=eqn.params["length"], carry=fed_back),)


def _while(eqn: Any) -> tuple[Body, ...]:
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = tuple(range(n_cond + n_body, len(eqn.invars)))
    outs = tuple(range(len(eqn.outvars)))
    fed_back = tuple((n_body + i, i) for i in range(len(carry)))
    cond = Body(
        "cond_jaxpr",
        None,
        eqn.params["cond_jaxpr"],
        (*range(n_cond), *carry),
        (),
        None,
        decides=True,
    )
    consts = range(n_cond, n_cond + n_body)
    body = Body(
        "body_jaxpr", None, eqn.params["body_jaxpr"], (*consts, *carry), outs, None, fed_back
    )
    return cond, body


def _cond(eqn: Any) -> tuple[Body, ...]:
    ins, outs = tuple(range(1, len(eqn.invars))), tuple(range(len(eqn.outvars)))
    return tuple(
        Body("branches", i, branch, ins, outs) for i, branch in enumerate(eqn.params["branches"])
    )


def _linear_solve(eqn: Any) -> tuple[Body, ...]:
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    starts = np.cumsum([0, *lengths])
    right_hand_sides = tuple(range(int(starts[-1]), len(eqn.invars)))
    outs = tuple(range(len(eqn.outvars)))
    return tuple(
        Body(
            "jaxprs",
            i,
            jaxpr,
            (*range(int(starts[i]), int(starts[i + 1])), *right_hand_sides),
            outs,
            None,
            fixed=True,
        )
        for i, jaxpr in enumerate(jaxprs)
        if jaxpr is not None
    )


def _call(eqn: Any) -> tuple[Body, ...]:
    # 0.12 renamed composite's param, and made closed_call an eval_jaxpr
    return _whole("jaxpr" if "jaxpr" in eqn.params else "call_jaxpr", fixed=True)(eqn)


_ENTERED: dict[str, Callable[[Any], tuple[Body, ...]]] = {
    "jit": _whole("jaxpr"),
    "remat2": _whole("jaxpr"),
    "checkpoint": _whole("jaxpr"),
    "closed_call": _call,
    "core_call": _call,
    "eval_jaxpr": _call,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_jvp_call": _whole("call_jaxpr", fixed=True),
    "custom_vjp_call": _whole("call_jaxpr", fixed=True),
    "custom_vmap_call": _whole("call", fixed=True),
    "linear_call": _whole("callee", fixed=True),
    "composite": _call,
    "custom_linear_solve": _linear_solve,
    "shard_map": _whole("jaxpr", fixed=True),
}
# Their jaxprs combine two scalars and are run by the kernel: no place for a cast.
_COMBINERS = frozenset({"reduce", "reduce_window", "select_and_scatter", "sort", "argsort"})


def bodies(eqn: Any) -> tuple[Body, ...]:
    """The sub-jaxprs of an equation that are entered; () for a leaf or an opaque one."""
    rule = _ENTERED.get(eqn.primitive.name)
    if rule is None or any(_is_ref(v.aval) for v in eqn.invars):
        return ()
    found = rule(eqn)
    crosses = all(len(open_jaxpr(b.jaxpr).invars) == len(b.operands) for b in found)
    return found if crosses else ()


def _is_ref(aval: Any) -> bool:
    return hasattr(aval, "inner_aval")


def hidden_jaxprs(eqn: Any) -> list[Any]:
    """The jaxprs inside an equation that is not entered, scalar combiners apart.

    From 0.12 `call_hi_primitive` holds them in attributes of its `_prim` param.
    """
    if eqn.primitive.name in _COMBINERS or eqn.primitive.name.startswith("scatter"):
        return []
    params = dict(eqn.params)
    for value in eqn.params.values():
        if eqn.primitive.name == "call_hi_primitive" and hasattr(value, "__dict__"):
            params.update(vars(value))
    return list(jex.jaxprs_in_params(params))


# ---------------------------------------------------------------- tracing


def trace(fn: Callable[..., Any], *args: Any) -> Any:
    """The closed jaxpr of `fn` at arguments, avals or `ShapeDtypeStruct`s."""
    return jax.make_jaxpr(fn)(*args)


def trace_shaped(fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """`trace`, and the pytree of the results' shapes."""
    return jax.make_jaxpr(fn, return_shape=True)(*args)


def retrace(jaxpr: Any, fn: Callable[..., Any], avals: Sequence[Any] | None = None) -> Any:
    """`fn` traced at the operands of `jaxpr`, in the form (open or closed) that it had."""
    avals = in_avals(jaxpr) if avals is None else avals
    closed = jax.make_jaxpr(fn)(*avals)
    if hasattr(jaxpr, "consts"):
        return closed
    # on 0.10 the jaxpr of remat and shard_map is open
    if consts_of(closed):
        raise NotImplementedError("an open jaxpr cannot hold the constants of its rewrite")
    return open_jaxpr(closed)


def evaluate(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr at `args`."""
    return jax.core.eval_jaxpr(open_jaxpr(jaxpr), consts_of(jaxpr), *args)


@contextlib.contextmanager
def context_of(eqn: Any) -> Iterator[None]:
    """The name stack, source line and configuration under which an equation was traced."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with (
        source_info_util.user_context(eqn.source_info.traceback, name_stack=stack),
        eqn.ctx.manager,
    ):
        yield


def bind(eqn: Any, args: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """An equation's primitive applied to other operands or params; always a list."""
    params = eqn.params if params is None else params
    out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


def bind_shard_map(eqn: Any, fn: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """`fn` mapped over shards as an equation of `shard_map` says.

    The public form is used because the primitive wants its specs as thunks, and
    because a body with collectives can only be traced with its axes bound.
    """
    params = eqn.params
    mapped = jax.shard_map(
        fn,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=set(params["newly_manual_axes"]),
    )
    return list(mapped(*args))


def convert(x: Any, dtype: Any, weak_type: bool = False) -> Any:
    """`x` as `dtype`, with the weak type that is asked for."""
    return jex.primitives.convert_element_type_p.bind(
        x, new_dtype=np.dtype(dtype), weak_type=weak_type, sharding=None
    )


def transpose(x: Any, permutation: Sequence[int]) -> Any:
    """`x` transposed by an equation, also where the permutation is the identity."""
    return jex.primitives.transpose_p.bind(x, permutation=tuple(permutation))


def with_bodies(eqn: Any, found: Sequence[Body], new: Sequence[Any]) -> dict[str, Any]:
    """The params of an equation with other jaxprs in the places of its bodies."""
    params = dict(eqn.params)
    for body, jaxpr in zip(found, new, strict=True):
        if body.index is None:
            params[body.param] = jaxpr
            continue
        held = list(params[body.param])
        held[body.index] = jaxpr
        # custom_linear_solve's is a namedtuple
        make = getattr(type(params[body.param]), "_make", tuple)
        params[body.param] = make(held)
    return params


# ---------------------------------------------------------------- custom rules

Rewrite = Callable[[Any, bool], Any]
"""Rewrites a rule's jaxpr, given whether JAX may transpose it as it stands."""


def with_rewritten_rules(primitive: str, params: dict[str, Any], rewrite: Rewrite) -> None:
    """Puts functions that rewrite what they trace in the place of an equation's custom rules.

    The rules are traced when they are used, so the rewrite happens then.
    """
    if primitive == "custom_jvp_call":
        params["jvp_jaxpr_fun"] = _rewritten_thunk(params["jvp_jaxpr_fun"], rewrite, True)
    elif primitive == "custom_vjp_call":
        params["fwd_jaxpr_thunk"] = _rewritten_thunk(params["fwd_jaxpr_thunk"], rewrite, False)
        params["bwd"] = _rewritten_bwd(params["bwd"], rewrite)
    elif primitive == "custom_vmap_call":
        params["rule"] = _rewritten_function(params["rule"], rewrite)
    elif primitive == "linear_call":
        params["transpose_thunk"] = _rewritten_transpose(params["transpose_thunk"], rewrite)


@linear_util.transformation2
def _rewritten_thunk(
    f: Callable[..., Any], rewrite: Rewrite, is_linear: bool, *zeros: bool
) -> Any:
    jaxpr, consts, *rest = f(*zeros)
    new = rewrite(_closed(jaxpr, consts), is_linear)
    return open_jaxpr(new), consts_of(new), *rest


def _closed(jaxpr: Any, consts: Sequence[Any]) -> Any:
    if hasattr(jaxpr, "with_consts"):  # 0.11 and later
        return jaxpr.with_consts(consts)
    return jex.ClosedJaxpr(jaxpr, consts)


@linear_util.transformation2
def _rewritten_bwd(f: Callable[..., Any], rewrite: Rewrite, *args: Any) -> Any:
    return _rewritten_function(f, rewrite)(*args)


def _rewritten_function(f: Callable[..., Any], rewrite: Rewrite) -> Callable[..., Any]:
    """`f` with its arrays traced and rewritten; symbolic zeros, flags and logs pass through."""

    def is_array(x: Any) -> bool:
        return isinstance(x, (jax.Array, np.ndarray))

    def rewritten(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        arrays = [x for x in leaves if is_array(x)]
        out: list[Any] = []

        def on_arrays(*xs: Any) -> list[Any]:
            given = iter(xs)
            filled = [next(given) if is_array(x) else x for x in leaves]
            result = f(*jax.tree.unflatten(tree, filled))
            out[:] = jax.tree.flatten(result)
            return [x for x in out[0] if is_array(x)]

        results = iter(evaluate(rewrite(trace(on_arrays, *arrays), False), arrays))
        return jax.tree.unflatten(out[1], [next(results) if is_array(x) else x for x in out[0]])

    return rewritten


def _rewritten_transpose(thunk: Callable[..., Any], rewrite: Rewrite) -> Callable[..., Any]:
    def rewritten(*args: Any) -> Any:
        jaxpr, *rest = thunk(*args)
        return (rewrite(jaxpr, True), *rest)

    return rewritten


def platform() -> str | None:
    """The platform that a trace will most likely run on: the default device's."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue] -- dynamic
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def all_eqns(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr and of the bodies that are entered."""
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        yield from all_eqns_of(eqn)


def all_eqns_of(eqn: Any) -> Iterator[Any]:
    """Every equation inside an equation's bodies."""
    for body in bodies(eqn):
        yield from all_eqns(body.jaxpr)


def all_avals(jaxpr: Any) -> Iterator[Any]:
    """The aval of every value of a jaxpr and of its bodies."""
    yield from in_avals(jaxpr)
    for eqn in all_eqns(jaxpr):
        yield from (v.aval for v in eqn.outvars)


def user_order(eqn: Any) -> str | None:
    """What the user said about a product's precision, in words; None where nothing."""
    params = eqn.params
    precision = params.get("precision")
    given = precision if isinstance(precision, tuple) else (precision,)
    if any(p is not None and p != jax.lax.Precision.DEFAULT for p in given):
        return f"precision={precision}"
    preferred = params.get("preferred_element_type")
    if preferred is not None and any(preferred != v.aval.dtype for v in eqn.invars[:2]):
        return f"preferred_element_type={np.dtype(preferred).name}"
    out_dtype = params.get("out_dtype")
    return f"out_dtype={np.dtype(out_dtype).name}" if out_dtype is not None else None


CARRIER = "precpass_carrier"
"""The name of the function that carries a lowered product's derivative."""


def is_carrier(eqn: Any) -> bool:
    """Whether an equation is the derivative of a lowered product (`product.lowered`).

    It is recognised by its form: a custom JVP that hands its first operand, the
    product, through, and keeps the product's two wide operands for its rule.
    """
    if eqn.primitive.name != "custom_jvp_call" or len(eqn.invars) < 3:
        return False
    inner = open_jaxpr(eqn.params["call_jaxpr"])
    name = inner.debug_info.func_src_info or ""
    return not inner.eqns and inner.outvars == inner.invars[:1] and CARRIER in name
