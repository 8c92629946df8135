"""Which equations of a loop body add to what the loop carries.

Rounding such an equation in every trip loses the sum: 16384 ones carried
through a scan in bfloat16 add up to 256.
"""

from __future__ import annotations

from typing import Any

from precpass import jaxpr as ir
from precpass.opkinds import OpKind, op

__all__ = ["Pairs", "accumulating"]

Pairs = frozenset[tuple[int, int]]

_ADDS = frozenset(
    ("add", "sub", "add_any", "mul", "neg", "copy", "select_n", "convert_element_type")
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
