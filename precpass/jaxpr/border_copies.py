"""Border copies: 16-bit operands and results beside the float32 ones of an equation with bodies.

A value that is stored low, or that is cast once for all trips of a loop, crosses the border of a
body twice: in float32, through which derivatives pass, and as a 16-bit copy. If nothing is
differentiated, XLA drops the float32 value. For a CPU the copies are unsigned integers, because
XLA:CPU of jax 0.10 stores bfloat16 loop state as float32.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from precpass.jaxpr.bodies import Body, scan_split
from precpass.jaxpr.reading import open_jaxpr
from precpass.jaxpr.shardings import without_reduced
from precpass.jaxpr.types import Aval, Eqn, Jaxpr

__all__ = [
    "Crossing",
    "border_copy_aval",
    "crossing",
    "named",
    "scan_counts",
    "takes_border_copies",
    "with_border_copies_in_order",
]

_CROSSED = frozenset(("jit", "remat2", "closed_call", "eval_jaxpr", "scan", "while", "cond"))


def takes_border_copies(eqn: Eqn) -> bool:
    """Whether an equation's bodies can be given more operands and results.

    They cannot if a custom rule is written for exactly the present operands, nor if an effect
    names an operand by its position.
    """
    if eqn.primitive.name not in _CROSSED or (eqn.primitive.name == "jit" and _is_laid_out(eqn)):
        return False
    return not any(hasattr(effect, "input_index") for effect in eqn.effects)


def _is_laid_out(eqn: Eqn) -> bool:
    layouts = (*eqn.params.get("in_layouts", ()), *eqn.params.get("out_layouts", ()))
    return any(layout is not None for layout in layouts)


def border_copy_aval(aval: Aval, dtype: Any = np.uint16) -> Any:
    """The aval of a value's border copy, by default as unsigned integers that hold its 16 bits."""
    return without_reduced(aval).update(dtype=np.dtype(dtype), weak_type=False)


class Crossing(NamedTuple):
    """How an equation changes when it gets border copies.

    Attributes:
        operands: the new order of its operands. A number below the old count is the position of
            an old operand; the numbers from the old count on are the border copies, in the order
            of the operands that they copy.
        results: the same for its results.
        params: the params that count or describe operands and results, except the bodies.
    """

    operands: list[int]
    results: list[int]
    params: dict[str, Any]


def crossing(
    eqn: Eqn, operands: Sequence[int], results: Sequence[int], unread: Collection[int] = ()
) -> Crossing:
    """The change to an equation that gives it border copies.

    Args:
        eqn: the equation.
        operands: the ascending positions of the operands that get a border copy.
        results: the ascending positions of the results that get one.
        unread: the positions of operands that nothing reads because all readers read the copy.
    """
    ins, outs = _groups(eqn)
    old, name = eqn.params, eqn.primitive.name
    params: dict[str, Any] = {}
    if name == "jit":
        ends = {"in_shardings": operands, "in_layouts": operands}
        ends |= {"out_shardings": results, "out_layouts": results}
        params = {p: (*old[p], *(old[p][i] for i in at)) for p, at in ends.items()}
        params["donated_invars"] = (*old["donated_invars"], *(False for _ in operands))
    elif name == "remat2":
        params = {"prevent_cse": _barred(old["prevent_cse"], ins[0], operands, unread)}
    elif name == "while":
        counts = _counts(ins, operands)
        params = {"cond_nconsts": counts[0], "body_nconsts": counts[1]}
    elif name == "scan":
        consts, carry, xs = _counts(ins, operands)
        params = scan_counts(eqn, consts, carry, xs, _counts(outs, results)[1])
    return Crossing(_order(ins, operands), _order(outs, results), params)


def _barred(
    old: bool | tuple[bool, ...], count: int, operands: Sequence[int], unread: Collection[int]
) -> bool | tuple[bool, ...]:
    """Which operands of a checkpoint pass the barrier that keeps its body from being merged.

    An operand that passes it stays in memory until then, whether or not anything reads it.
    """
    before = old if isinstance(old, tuple) else (old,) * count
    if not any(before):
        return old if isinstance(old, bool) else (*before, *(False for _ in operands))
    operand_bars = (bar and i not in unread for i, bar in enumerate(before))
    return (*operand_bars, *(before[i] for i in operands))


def _groups(eqn: Eqn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes of the groups of an equation's operands (constants, carry, ...) and results."""
    n_in, n_out = len(eqn.invars), len(eqn.outvars)
    if eqn.primitive.name == "scan":
        consts, carry = scan_split(eqn.params)
        return (consts, carry, n_in - consts - carry), (carry, n_out - carry)
    if eqn.primitive.name == "while":
        consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        return (*consts, n_in - sum(consts)), (n_out,)
    return (n_in,), (n_out,)


def _counts(groups: Sequence[int], border_copies: Sequence[int]) -> tuple[int, ...]:
    ends = np.cumsum(groups)
    more = np.bincount(np.searchsorted(ends, border_copies, side="right"), minlength=len(groups))
    return tuple(int(n) for n in np.asarray(groups) + more)


def _order(groups: Sequence[int], border_copies: Sequence[int]) -> list[int]:
    """The positions of each group's values, and behind each group those of its border copies."""
    total, order, start = sum(groups), list[int](), 0
    for size in groups:
        order += range(start, start + size)
        order += (total + k for k, at in enumerate(border_copies) if start <= at < start + size)
        start += size
    return order


def scan_counts(eqn: Eqn, consts: int, carry: int, xs: int, ys: int) -> dict[str, Any]:
    """The params that count a scan's operands and results, for other numbers of them."""
    if "num_consts" in eqn.params:
        return {"num_consts": consts, "num_carry": carry}
    return dict(zip(("ft_in", "ft_out"), _scan_trees(consts, carry, xs, ys), strict=True))


@functools.lru_cache(maxsize=1024)
def _scan_trees(consts: int, carry: int, xs: int, ys: int) -> tuple[Any, Any]:
    """The trees that jax 0.11 has in the place of a scan's two counts, for these numbers."""
    scalar, row = jax.ShapeDtypeStruct((), np.float32), jax.ShapeDtypeStruct((1,), np.float32)

    def program(held: Sequence[Any], start: Sequence[Any], rows: Sequence[Any]) -> Any:
        def body(state: Any, _row: Any) -> Any:
            for x in held:  # read each in the body, so that it becomes a constant of the scan
                lax.neg(x)
            # scan drops a carry that is returned unchanged and a constant that is never read; use
            # each once so that both are counted
            return [lax.neg(x) for x in state], (lax.iota(np.float32, 1),) * ys

        return lax.scan(body, start, rows, length=1)

    with jax.disable_jit(False):  # under disable_jit there would be no scan
        jaxpr = jax.make_jaxpr(program)([scalar] * consts, [scalar] * carry, [row] * xs)
    (eqn,) = (eqn for eqn in open_jaxpr(jaxpr).eqns if eqn.primitive.name == "scan")
    return eqn.params["ft_in"], eqn.params["ft_out"]


def with_border_copies_in_order(
    eqn: Eqn, body: Body, jaxpr: Jaxpr, operands: Sequence[int], results: Sequence[int]
) -> Any:
    """The jaxpr of a body with its border copies in the order that the equation's params require.

    Args:
        eqn: the equation without border copies.
        body: one of its bodies.
        jaxpr: the body's jaxpr, whose border copies stand behind all operands and all results.
        operands: the positions, in the body, of the operands that have a border copy.
        results: the positions, in the body, of the results that have one.
    """
    ins, outs = _groups(eqn)
    opened = open_jaxpr(jaxpr)
    order_in = _order(_of_body(ins, body.operands), operands)
    order_out = _order(_of_body(outs, body.results), results)
    if not body.results:  # the predicate of a while is no result of the equation
        order_out = list(range(len(opened.outvars)))
    if order_in == sorted(order_in) and order_out == sorted(order_out):
        return jaxpr
    parts = {
        "invars": [opened.invars[i] for i in order_in],
        "outvars": [opened.outvars[i] for i in order_out],
        "debug_info": named(opened, order_in, order_out),
    }
    if opened is jaxpr or hasattr(opened, "with_consts"):  # 0.11 merged the two classes
        return opened.replace(**parts)
    return jaxpr.replace(jaxpr=opened.replace(**parts))


def named(opened: Jaxpr, operands: Sequence[int], results: Sequence[int]) -> Any:
    """The debug info of a jaxpr whose operands and results have been reordered or added to.

    Args:
        opened: the jaxpr before that.
        operands: for each operand its position before; one beyond the end for a new operand.
        results: the same for each result.
    """
    info = opened.debug_info

    def chosen(names: Any, order: Sequence[int]) -> Any:
        if names is None:
            return None
        return tuple(names[i] if i < len(names) else "" for i in order)

    arguments, paths = chosen(info.arg_names, operands), chosen(info.result_paths, results)
    return info._replace(arg_names=arguments, result_paths=paths)


def _of_body(groups: Sequence[int], positions: Sequence[int]) -> list[int]:
    """For each group of an equation's operands or results, how many of them a body has."""
    groups_of = np.searchsorted(np.cumsum(groups), positions, side="right")
    return np.bincount(groups_of, minlength=len(groups)).tolist()
