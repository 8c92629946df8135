"""Which equations hold jaxprs, and how values cross their borders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import numpy as np

from precpass.jaxpr.hi_primitives import hi_body, hi_jaxprs, hi_name, with_hi_body
from precpass.jaxpr.reading import in_avals, is_literal, open_jaxpr
from precpass.jaxpr.types import Aval, Eqn, Jaxpr


@dataclasses.dataclass(frozen=True)
class Body:
    """A sub-jaxpr of an equation and how values cross its border.

    Attributes:
        param, index: its place in the equation's params.
        jaxpr: the jaxpr, open or closed as it is in the param.
        operands: for each of its invars, the position in the equation's invars.
        results: for each of its outvars, the position in the equation's outvars;
            empty if its results are not the equation's (the predicate of a while).
        trips: how often it runs per call; None if that is only known at run time, 0 if only the
            equation's derivatives run it.
        carry: pairs (invar, outvar): the result becomes the operand of the next trip.
        decides: whether its result decides which way the program goes on.
        constants: how many of its first invars are a loop's constants.
    """

    param: str
    index: int | None
    jaxpr: Jaxpr
    operands: tuple[int, ...]
    results: tuple[int, ...]
    trips: int | None = 1
    carry: tuple[tuple[int, int], ...] = ()
    decides: bool = False
    constants: int = 0

    @property
    def name(self) -> str:
        """Its place in the equation's params, such as "branches[1]"."""
        return self.param if self.index is None else f"{self.param}[{self.index}]"


def called_alone(eqn: Eqn) -> Eqn | None:
    """The only equation of a call, of the call's operands; None if the call has several."""
    while found := bodies(eqn):
        body = found[0]
        opened = open_jaxpr(body.jaxpr)
        given = {v: eqn.invars[i] for v, i in zip(opened.invars, body.operands, strict=True)}
        if len(opened.eqns) != 1 or opened.eqns[0].outvars != list(opened.outvars):
            return None
        (only,) = opened.eqns
        if any(not is_literal(v) and v not in given for v in only.invars):
            return None
        eqn = only.replace(invars=[v if is_literal(v) else given[v] for v in only.invars])
    return eqn


def _whole(param: str) -> Callable[[Any], tuple[Body, ...]]:
    def one(eqn: Eqn) -> tuple[Body, ...]:
        ins, outs = tuple(range(len(eqn.invars))), tuple(range(len(eqn.outvars)))
        return (Body(param, None, eqn.params[param], ins, outs),)

    return one


def loop_rows(eqn: Eqn) -> tuple[int, int] | None:
    """The positions of a scan's first sliced operand and of its first stacked result.

    None for any other equation.
    """
    if eqn.primitive.name != "scan":
        return None
    consts, carry = scan_split(eqn.params)
    return consts + carry, carry


def scan_split(params: Any) -> tuple[int, int]:
    """The numbers of constants and carries of a scan."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # 0.11 replaced the two counts by a tree of (consts, carry, xs)
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def _scan(eqn: Eqn) -> tuple[Body, ...]:
    consts, carry = scan_split(eqn.params)
    fed_back = tuple((consts + i, i) for i in range(carry))
    (body,) = _whole("jaxpr")(eqn)
    trips = eqn.params["length"]
    return (dataclasses.replace(body, trips=trips, carry=fed_back, constants=consts),)


def _while(eqn: Eqn) -> tuple[Body, ...]:
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
        constants=n_cond,
    )
    consts = range(n_cond, n_cond + n_body)
    operands = *consts, *carry
    body = Body("body_jaxpr", None, eqn.params["body_jaxpr"], operands, outs, None, fed_back)
    body = dataclasses.replace(body, constants=n_body)
    return cond, body


def _cond(eqn: Eqn) -> tuple[Body, ...]:
    ins, outs = tuple(range(1, len(eqn.invars))), tuple(range(len(eqn.outvars)))
    return tuple(
        Body("branches", i, branch, ins, outs) for i, branch in enumerate(eqn.params["branches"])
    )


def _linear_solve(eqn: Eqn) -> tuple[Body, ...]:
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
            # Only derivatives run the others: each of these solves another equation.
            1 if name == "solve" else 0,
        )
        for i, (name, jaxpr) in enumerate(zip(jaxprs._fields, jaxprs, strict=True))
        if jaxpr is not None
    )


def _call(eqn: Eqn) -> tuple[Body, ...]:
    # jax 0.12 renamed composite's param, and made closed_call an eval_jaxpr.
    return _whole("jaxpr" if "jaxpr" in eqn.params else "call_jaxpr")(eqn)


def _hi_primitive(eqn: Eqn) -> tuple[Body, ...]:
    jaxpr = hi_body(eqn)
    if jaxpr is None:
        return ()
    # custom_root's solver runs on the first operands; the others serve its derivative.
    operands = tuple(range(len(open_jaxpr(jaxpr).invars)))
    return (Body("_prim", None, jaxpr, operands, tuple(range(len(eqn.outvars)))),)


ENTERED: dict[str, Callable[[Any], tuple[Body, ...]]] = {
    "jit": _whole("jaxpr"),
    "remat2": _whole("jaxpr"),
    # JAX itself has long made no `core.call` equations, but 0.10 still exports the primitive.
    "call": _call,
    "closed_call": _call,
    "eval_jaxpr": _call,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_jvp_call": _whole("call_jaxpr"),
    "custom_vjp_call": _whole("call_jaxpr"),
    "remat_opt": _whole("fwd_jaxpr"),
    "custom_vmap_call": _whole("call"),
    "linear_call": _whole("callee"),
    "composite": _call,
    "custom_linear_solve": _linear_solve,
    "shard_map": _whole("jaxpr"),
    # These are calls with a note for the compiler: where they run, how they are scheduled.
    "compute_on": _whole("jaxpr"),
    "xla_metadata_call": _whole("jaxpr"),
    "program_order": _whole("call_jaxpr"),  # since 0.12
    "call_hi_primitive": _hi_primitive,
}
"""The primitives whose bodies are planned and rewritten, each with a rule that finds them."""

# Their jaxprs combine two scalars and are run by the kernel: no place for a cast.
COMBINERS = frozenset(
    ("reduce", "reduce_window", "select_and_scatter")
    + ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
)


def _opaque(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


OPAQUE: dict[str, str] = {
    **_opaque(
        "a kernel whose body is written for its operands' types and memory",
        "pallas_call core_map mpmd_map run_scoped emit_pipeline pipeline_body parallel_loop"
        " jaxpr_call fused_call",
    ),
    **_opaque("it is part of a kernel that Pallas fuses", "fusible custom_fusion"),
    **_opaque("its body works on references", "run_state"),
    **_opaque(
        "a kernel of cuDNN", "cudnn_fusion dot_product_attention_fwd dot_product_attention_bwd"
    ),
    **_opaque("its partitioning rule is written for what it holds", "custom_partitioning"),
    **_opaque(
        "an instruction of XLA:GPU's own program",
        "thunky.async_start thunky.call_thunky_nested thunky.collective_group thunky.cond"
        " thunky.while",
    ),
    **_opaque(
        "a step of JAX's own differentiation of a hi-primitive",
        "call_hi_primitive_linearized",
    ),
}
"""The primitives that hold jaxprs and are not entered, and why."""


def bodies(eqn: Eqn) -> tuple[Body, ...]:
    """The sub-jaxprs of an equation that are entered; () for a leaf or an opaque one."""
    rule = ENTERED.get(eqn.primitive.name)
    if rule is None or any(is_ref(v.aval) for v in eqn.invars):
        return ()
    entered = rule(eqn)
    crosses = all(len(open_jaxpr(b.jaxpr).invars) == len(b.operands) for b in entered)
    return entered if crosses else ()


def is_ref(aval: Aval) -> bool:
    """Whether a type is that of a mutable reference to an array."""
    return hasattr(aval, "inner_aval")


def is_array(aval: Aval) -> bool:
    """Whether a type is an array's, and not a reference's or a hi-value's.

    `jax.experimental.hijax` lets a library define types of its own, as flax does for its variables.
    """
    return isinstance(aval, jax.core.ShapedArray)


def why_opaque(eqn: Eqn) -> str | None:
    """Why the jaxprs of an equation's primitive are not entered; None if it has none."""
    name = eqn.primitive.name
    if name not in ENTERED:
        return OPAQUE.get(name)
    if name == "call_hi_primitive" and hi_body(eqn) is None:
        return "a hi-primitive, such as JAX makes under experimental flags like jax_remat3"
    refs = any(is_ref(v.aval) for v in eqn.invars)
    return "it works on references" if refs else "its operands are not those of its jaxpr"


def hidden_jaxprs(eqn: Eqn) -> list[Any]:
    """The jaxprs in an equation's params or hidden in it, except combiners of two scalars."""
    if eqn.primitive.name in COMBINERS:
        return []
    if eqn.primitive.name == "call_hi_primitive":
        return hi_jaxprs(eqn)
    return list(jex.jaxprs_in_params(eqn.params))


def all_held_eqns(jaxpr: Jaxpr) -> Iterator[Any]:
    """Every equation of a jaxpr and of all jaxprs in its equations, entered or not."""
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        for inner in hidden_jaxprs(eqn):
            yield from all_held_eqns(inner)


def name_of(eqn: Eqn) -> str:
    """The primitive's name, with the name in its params of what it calls, if there is one."""
    name, hidden = eqn.primitive.name, hi_name(eqn)
    if not hidden:
        hidden = next((v.name for v in eqn.params.values() if isinstance(v, jex.Primitive)), "")
    return f"{name} ({hidden})" if hidden else name


def jax_function_name(eqn: Eqn) -> str | None:
    """The name of the function of JAX's own whose custom JVP an equation is; None for any other."""
    if eqn.primitive.name != "custom_jvp_call":
        return None
    info = open_jaxpr(eqn.params["call_jaxpr"]).debug_info
    own = Path(info.func_filename or "").is_relative_to(Path(jax.__file__).parent)
    return info.func_name if own else None


def with_bodies(eqn: Eqn, found: Sequence[Body], new: Sequence[Any]) -> dict[str, Any]:
    """The params of an equation with other jaxprs in the places of its bodies."""
    params = dict(eqn.params)
    for body, jaxpr in zip(found, new, strict=True):
        if body.param == "_prim":
            params["_prim"] = with_hi_body(params["_prim"], jaxpr)
            continue
        if body.index is None:
            params[body.param] = jaxpr
            continue
        branches = list(params[body.param])
        branches[body.index] = jaxpr
        # custom_linear_solve has its jaxprs in a namedtuple.
        make = getattr(type(params[body.param]), "_make", tuple)
        params[body.param] = make(branches)
    return params


def keeps_border(eqn: Eqn) -> bool:
    """Whether an equation's bodies must keep the dtypes of their operands and results.

    A hi-primitive states the avals of its operands and results.
    """
    return eqn.primitive.name == "call_hi_primitive"


def all_eqns(jaxpr: Jaxpr) -> Iterator[Any]:
    """Every equation of a jaxpr and of the bodies that are entered."""
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        yield from all_eqns_of(eqn)


def all_eqns_of(eqn: Eqn) -> Iterator[Any]:
    """Every equation inside an equation's bodies."""
    for body in bodies(eqn):
        yield from all_eqns(body.jaxpr)


def all_avals(jaxpr: Jaxpr) -> Iterator[Any]:
    """The aval of every value of a jaxpr and of its bodies."""
    yield from in_avals(jaxpr)
    for eqn in all_eqns(jaxpr):
        yield from (v.aval for v in eqn.outvars)


def placed_avals(jaxpr: Jaxpr) -> list[Any]:
    """The avals of what a program places on a mesh that it names; each body is read once."""
    todo, seen, found = [open_jaxpr(jaxpr)], set[int](), list[Any]()
    while todo:
        opened = todo.pop()
        for eqn in () if id(opened) in seen else opened.eqns:
            if eqn.primitive.name in ("sharding_constraint", "reshard", "shard_map"):
                found += [v.aval for v in eqn.outvars]
            elif eqn.primitive.name in ENTERED:
                todo += [open_jaxpr(body.jaxpr) for body in bodies(eqn)]
        seen.add(id(opened))
    return found
