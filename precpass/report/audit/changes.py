"""What a compiler changed in the precision of a program, above all of its products.

If a line has several operations of one kind, they are told apart by size. Only a difference that no
pairing of them explains is a change; operations that cannot be told apart are not reported.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from precpass.measure.hlo import Computation, Instruction, Module, Placed, bits
from precpass.report.audit.casts import casts
from precpass.report.audit.matching import (
    Change,
    Sides,
    change,
    factors,
    is_product,
    past_moves,
    sizes,
)
from precpass.report.audit.storage import buffers, collectives, loops

__all__ = ["Changes", "changes"]


@dataclasses.dataclass(frozen=True)
class Changes:
    """All changes between two programs.

    Attributes:
        found: the changes in the order of the lowered program; equal ones are repeated.
        products: the number of products in the lowered program; those of a body count once per
            place that calls it.
        as_planned: the number that the compiled program runs on operands of the same types.
        merged: the number that are no products in the compiled program: merged with an equal one,
            computed at compile time, fused as multiplications, or built anew without a name.
    """

    found: tuple[Change, ...]
    products: int
    as_planned: int
    merged: int


def changes(planned: Module, compiled: Module) -> Changes:
    """The differences in precision between a lowered program and the compiled one.

    Args:
        planned: the lowered program.
        compiled: the same program after XLA's passes, for one of its devices.
    """
    sides = Sides(planned, compiled)
    findings, exact, merged, total = _products(sides)
    for other in (casts, loops, buffers, collectives):
        findings += other(sides)
    lines = dict.fromkeys((file, line) for _, file, line in sides.planned)
    order = {line: i for i, line in enumerate(lines)}
    findings.sort(key=lambda c: order.get((c.source.file, c.source.line), len(order)))
    return Changes(tuple(findings), total, exact, merged)


# ---------------------------------------------------------------- products


def _products(sides: Sides) -> tuple[list[Change], int, int, int]:
    findings: list[Change] = []
    exact = merged = total = 0
    for key, all_here in sides.planned.items():
        if key not in sides.product_keys:
            continue
        planned = [p for p in all_here if is_product(p)]
        runs = [c for c in sides.compiled.get(key, ()) if is_product(c) or _is_kernel(c)]
        total += len(planned)
        for some, others in _by_sizes(planned, runs):
            same, pairs = _paired(some, others)
            changed = [(p, c) for p, c in pairs if not _is_lossless(p, c)]
            exact += same + len(pairs) - len(changed)
            merged += len(some) - same - len(pairs)
            findings += [_product_change(p, c) for p, c in changed]
            if same and not pairs:
                findings += _rounded_results(some, others)
    return findings, exact, merged, total


def _is_kernel(placed: Placed) -> bool:
    """Whether a custom call with a product's name is a library's kernel for it."""
    return placed.instruction.opcode == "custom-call" and len(factors(placed)) == 2


def _formats(placed: Placed) -> tuple[str, ...]:
    return tuple(sorted((s.dtype for s in factors(placed)), key=lambda d: (bits(d), d)))


def _by_sizes(
    planned: Sequence[Placed], compiled: Sequence[Placed]
) -> Iterator[tuple[Sequence[Placed], Sequence[Placed]]]:
    """Instructions of one key, grouped by size.

    If the compiler changed sizes, those that one side has more often than the other are one group.
    """
    here, there = Counter(map(sizes, planned)), Counter(map(sizes, compiled))
    changed = not set(there) <= set(here)
    apart = {s for s in here if not changed or here[s] == there[s]}
    for s in sorted(apart):
        yield [p for p in planned if sizes(p) == s], [c for c in compiled if sizes(c) == s]
    rest = [p for p in planned if sizes(p) not in apart]
    if rest:
        yield rest, [c for c in compiled if sizes(c) not in apart]


def _paired(
    planned: Sequence[Placed], compiled: Sequence[Placed]
) -> tuple[int, list[tuple[Placed, Placed]]]:
    """The number that run on the planned formats, and the others with what runs in their place."""
    here, there = Counter(map(_formats, planned)), Counter(map(_formats, compiled))
    same = here & there
    left = Counter(same)

    def has_partner(placed: Placed) -> bool:
        left[_formats(placed)] -= 1
        return left[_formats(placed)] >= 0

    alone = [p for p in planned if not has_partner(p)]
    # A product that equals one on the other side is a copy of that one, and no change.
    return same.total(), list(
        zip(alone, (c for c in compiled if _formats(c) not in here), strict=False)
    )


def _widest(placed: Placed) -> str:
    return max((s.dtype for s in factors(placed)), key=bits)


def _signature(placed: Placed) -> str:
    return f"{' '.join(map(str, factors(placed)))} -> {placed.instruction.shapes[0]}"


def _product_change(planned: Placed, compiled: Placed) -> Change:
    before, after = _widest(planned), _widest(compiled)
    if bits(after) >= bits(before):
        kind = "product widened"
        why = f"the operands are widened first: it runs as a product of {after}, not of {before}"
    else:
        kind = "product narrowed"
        why = f"its operands are rounded to {after}, which no cast of the plan does"
        if bits(before) > 32:  # a TPU has no float64, so its compiler splits the operands
            why = f"the device emulates a product of {before} by several of {after}"
    types = _signature(planned), _signature(compiled)
    return change(kind, planned, *types, (before, after), why)


def _is_lossless(planned: Placed, compiled: Placed) -> bool:
    """Whether narrower operands hold the same values, because the plan widened them before."""
    wanted = _widest(compiled)
    if bits(wanted) >= bits(_widest(planned)):
        return False
    operands = planned.computation.operands(planned.instruction)[:2]
    return all(_comes_from(planned.computation, i, wanted) for i in operands)


def _comes_from(computation: Computation, instruction: Instruction, dtype: str) -> bool:
    instruction = past_moves(computation, instruction)
    if instruction.shapes[0].dtype == dtype:
        return True
    operands = computation.operands(instruction)
    narrow = len(operands) == 1 and operands[0].shapes[0].dtype == dtype
    return instruction.opcode == "convert" and narrow


def _rounded_results(planned: Sequence[Placed], compiled: Sequence[Placed]) -> list[Change]:
    """Changes: products on planned operands whose sums are rounded to fewer bits than planned."""
    before, after = (
        min(side, key=lambda p: p.instruction.shapes[0].bits) for side in (planned, compiled)
    )
    dtypes = before.instruction.shapes[0].dtype, after.instruction.shapes[0].dtype
    readers = before.computation.readers[before.instruction.name]
    rounds = [i.opcode == "convert" and i.shapes[0].dtype == dtypes[1] for i in readers]
    # The product's kernel may do the cast that follows it.
    if bits(dtypes[1]) >= bits(dtypes[0]) or (rounds and all(rounds)):
        return []
    why = f"its sums are rounded to {dtypes[1]} before anything reads them"
    types = _signature(before), _signature(after)
    return [change("product narrowed", before, *types, dtypes, why)]
