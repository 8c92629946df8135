"""Which equations hold jaxprs, and how values cross their borders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.extend.core as jex
import jax.stages
import numpy as np

from precpass.jaxpr.reading import in_avals, open_jaxpr


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
    "remat_opt": _whole("fwd_jaxpr", fixed=True),
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

    `call_hi_primitive`, which `lax.custom_root` is from 0.12 and which JAX's
    flags `jax_remat3`, `jax_custom_jvp3`, `jax_custom_vjp3` and `jax_scan3` make,
    holds them in attributes of its `_prim` param, as jaxprs or as `jax.stages.Traced`.
    """
    if eqn.primitive.name in _COMBINERS or eqn.primitive.name.startswith("scatter"):
        return []
    params = dict(eqn.params)
    if eqn.primitive.name == "call_hi_primitive":
        for name, value in vars(eqn.params["_prim"]).items():
            params[name] = value.jaxpr if isinstance(value, jax.stages.Traced) else value
    return list(jex.jaxprs_in_params(params))


def name_of(eqn: Any) -> str:
    """The primitive's name, with the hidden one's where it hides one."""
    hidden = eqn.params.get("_prim")
    name = eqn.primitive.name
    return name if hidden is None else f"{name} ({type(hidden).__name__})"


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
