"""Which equations of a loop body add to what the loop carries.

Rounding such an equation in every trip loses the sum: 16384 ones carried
through a scan in bfloat16 add up to 256.
"""

from __future__ import annotations

from typing import Any

from precpass import jaxpr as ir
from precpass.opkinds import OpKind, op

__all__ = ["Pairs", "accumulating", "cyclic_pairs"]

Pairs = frozenset[tuple[int, int]]

_ADDS = frozenset(
    (
        "add",
        "sub",
        "add_any",
        "mul",
        "neg",
        "copy",
        "select_n",
        "convert_element_type",
        "max",
        "min",
        "clamp",
    )
)


def accumulating(jaxpr: Any, carried: Pairs) -> frozenset[int]:
    """The equations on an additive path from a carried invar to its outvar.

    Args:
        jaxpr: a loop's body, or a body inside it.
        carried: pairs (invar, outvar) of what is fed back.

    Returns:
        Their positions. A nested body on such a path counts as a whole.
    """
    opened = ir.open_jaxpr(jaxpr)
    found: set[int] = set()
    for invar, outvar in carried:
        end = opened.outvars[outvar]
        if ir.is_literal(end) or end is opened.invars[invar]:
            continue
        after = _forward(opened, opened.invars[invar])
        found |= _backward(opened, end, after)
    return frozenset(found)


def cyclic_pairs(body: ir.Body) -> Pairs:
    """The pairs (invar, outvar) of a loop's carry that lie on an additive cycle.

    A carry may accumulate through others: two that change places and add one
    each trip are both sums.
    """
    opened = ir.open_jaxpr(body.jaxpr)
    invar_of = {outvar: invar for invar, outvar in body.carry}
    reaches: dict[int, set[int]] = {}
    for invar in invar_of.values():
        start = opened.invars[invar]
        rows = _forward(opened, start)
        made = {start, *(v for row in rows for v in opened.eqns[row].outvars)}
        ends = ((o, opened.outvars[o]) for o in invar_of)
        reaches[invar] = {o for o, v in ends if not ir.is_literal(v) and v in made}

    def returns(first: int, target: int) -> bool:
        seen, stack = set[int](), [first]
        while stack:
            at = stack.pop()
            if at == target:
                return True
            if at not in seen:
                seen.add(at)
                stack.extend(invar_of[o] for o in reaches[at])
        return False

    return frozenset((i, o) for i, outs in reaches.items() for o in outs if returns(invar_of[o], i))


def _passes(eqn: Any) -> bool:
    name = eqn.primitive.name
    row = op(name)
    adds = row.kind in (OpKind.DATA_MOVEMENT, OpKind.REDUCTION) or name in _ADDS
    return adds or bool(ir.bodies(eqn) and all(map(_passes, ir.all_eqns_of(eqn))))


def _forward(opened: Any, start: Any) -> set[int]:
    """Equations reached from `start` through additive ones."""
    reached, rows = {start}, set[int]()
    for row, eqn in enumerate(opened.eqns):
        reads = any(not ir.is_literal(v) and v in reached for v in eqn.invars)
        if reads and _passes(eqn):
            rows.add(row)
            reached.update(eqn.outvars)
    return rows


def _backward(opened: Any, end: Any, allowed: set[int]) -> set[int]:
    """Those of `allowed` that reach `end` through each other."""
    needed, rows = {end}, set[int]()
    for row in sorted(allowed, reverse=True):
        eqn = opened.eqns[row]
        if any(v in needed for v in eqn.outvars):
            rows.add(row)
            needed.update(v for v in eqn.invars if not ir.is_literal(v))
    return rows
