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
        Their positions.
    """
    opened = ir.open_jaxpr(jaxpr)
    found: set[int] = set()
    for invar, outvar in carried:
        end = opened.outvars[outvar]
        if ir.is_literal(end) or end is opened.invars[invar]:
            continue
        after, _ = _forward(opened, {opened.invars[invar]})
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
        _, made = _forward(opened, {opened.invars[invar]})
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


def _forward(opened: Any, starts: set[Any]) -> tuple[set[int], set[Any]]:
    """The equations reached from `starts` through additive ones, and the values reached."""
    reached, rows = set(starts), set[int]()
    for row, eqn in enumerate(opened.eqns):
        reads = {v for v in eqn.invars if not ir.is_literal(v) and v in reached}
        results = _passed_on(eqn, reads) if reads else set[Any]()
        if results:
            rows.add(row)
            reached |= results
    return rows, reached


def _passed_on(eqn: Any, reads: set[Any]) -> set[Any]:
    """The results into which an equation adds what it reads."""
    found = ir.bodies(eqn)
    results: set[Any] = set()
    for body in found:
        opened = ir.open_jaxpr(body.jaxpr)
        sides = zip(opened.invars, body.operands, strict=True)
        _, reached = _forward(opened, {v for v, i in sides if _reads(eqn.invars[i], reads)})
        ends = zip(opened.outvars, body.results, strict=False)
        results |= {eqn.outvars[o] for v, o in ends if not ir.is_literal(v) and v in reached}
    row = op(eqn.primitive.name)
    adds = row.kind in (OpKind.DATA_MOVEMENT, OpKind.REDUCTION) or eqn.primitive.name in _ADDS
    return results if found else set(eqn.outvars) if adds else set()


def _reads(atom: Any, values: set[Any]) -> bool:
    return not ir.is_literal(atom) and atom in values


def _backward(opened: Any, end: Any, allowed: set[int]) -> set[int]:
    """Those of `allowed` that reach `end` through each other."""
    needed, rows = {end}, set[int]()
    for row in sorted(allowed, reverse=True):
        eqn = opened.eqns[row]
        if any(v in needed for v in eqn.outvars):
            rows.add(row)
            needed.update(v for v in eqn.invars if not ir.is_literal(v))
    return rows
