"""What a compiler changed in the precision in which a program stores and sends values."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from precpass.measure.hlo import (
    COLLECTIVES,
    PRODUCTS,
    Computation,
    Instruction,
    Module,
    Placed,
    Shape,
    bits,
)
from precpass.report.audit.matching import (
    Change,
    Sides,
    change,
    factors,
    formats_read,
    readers,
    widened,
)

__all__ = ["buffers", "collectives", "loops"]


# ---------------------------------------------------------------- loops


def loops(sides: Sides) -> Iterator[Change]:
    """Changes: loop state that is stored in more bits than planned."""
    for _, planned, compiled in sides.pairs(lambda p: p.instruction.opcode == "while"):
        here = [leaf for p in planned for leaf in _state(sides.modules[0], p)]
        there = [leaf for c in compiled for leaf in _state(sides.modules[1], c)]
        # A stack and a carry look alike if a fusion writes them.
        slots = [
            [((s.size, role == _INPUT), s.dtype) for s, role in side] for side in (here, there)
        ]
        for slot, narrow, wide in widened(*slots):
            shape, role = next(
                (s, role)
                for s, role in here
                if (s.size, role == _INPUT) == slot and s.dtype == narrow
            )
            times = bits(wide) // bits(narrow)
            why = f"it takes {times} times the memory, and {times} times the traffic in every trip"
            after = dataclasses.replace(shape, dtype=wide)
            types = f"{role} {shape}", f"{role} {after}"
            yield change("loop state widened", planned[0], *types, (narrow, wide), why)


_INPUT = "loop input"


def _state(module: Module, placed: Placed) -> Iterator[tuple[Shape, str]]:
    """The type of each part of a loop's state, and whether the loop reads, carries or fills it."""
    shapes = placed.instruction.shapes
    body = module.computations[dict(placed.instruction.called)["body"]]
    known = len(body.results) == len(shapes)
    for at, shape in enumerate(shapes):
        if shape.bits:
            role = _role(module, body, body.results[at], at) if known else ""
            yield shape, role or "loop carry"


def _role(module: Module, body: Computation, result: Instruction, at: int) -> str:
    while result.opcode in ("copy", "bitcast"):
        (result,) = body.operands(result)
    if result.opcode == "get-tuple-element" and result.index == at:
        (source,) = body.operands(result)
        return _INPUT if source.opcode == "parameter" else ""
    return "stacked output" if _updates(module, result) else ""


def _updates(module: Module, instruction: Instruction) -> bool:
    if instruction.opcode == "dynamic-update-slice":
        return True
    return any(_updates(module, inner.root) for inner in module.called(instruction))


# ---------------------------------------------------------------- buffers

# Opcodes that only name other instructions' results, or that are examined by themselves.
_NO_BUFFERS = PRODUCTS | frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional")
    + ("call", "opt-barrier", "custom-call")
)


def buffers(sides: Sides) -> Iterator[Change]:
    """Changes: results that are written to memory in more bits than planned.

    Values inside a fusion are not stored, but an update of a slice in another format there makes
    the fusion rewrite the whole buffer. Values that only products or collectives read are left
    out, because these are examined themselves.
    """
    for key, compiled in sides.compiled.items():
        stored = [c for c in compiled if _is_stored(c)] if key not in sides.product_keys else []
        by_size: dict[int, list[Placed]] = {}
        for placed in sides.planned.get(key, ()) if stored and key[0] else ():
            if len(placed.instruction.shapes) == 1:
                by_size.setdefault(placed.instruction.shapes[0].size, []).append(placed)
        for placed in stored:
            shape = placed.instruction.shapes[0]
            same = by_size.get(shape.size, [])
            before = max(same, key=lambda p: p.instruction.shapes[0].bits, default=placed)
            narrow = before.instruction.shapes[0]
            if not 0 < narrow.bits < shape.bits:
                continue
            if placed.instruction.opcode == "dynamic-update-slice":
                why = f"each update widens and rewrites the whole of {shape}, not a slice in place"
            elif _feeds_products(sides.modules[1], placed) or _are_widened(same, shape.dtype):
                continue
            else:
                why = f"{shape.bits // narrow.bits} times the bytes are written and read"
            dtypes = narrow.dtype, shape.dtype
            yield change("buffer widened", before, narrow, shape, dtypes, why)


def _is_stored(placed: Placed) -> bool:
    """Whether an instruction has one floating result and it is written to memory."""
    instruction = placed.instruction
    is_end = instruction.opcode.endswith("-done")  # of a collective
    if is_end or len(instruction.shapes) != 1 or not instruction.shapes[0].bits:
        return False
    if instruction.opcode == "dynamic-update-slice":
        return True
    return (
        placed.caller is None and not _collective(placed) and instruction.opcode not in _NO_BUFFERS
    )


def _feeds_products(module: Module, placed: Placed) -> bool:
    """Whether a result is read by products and collectives only."""

    def takes(reader: Instruction) -> bool:
        within = [i for computation in module.called(reader) for i in computation.instructions]
        opcodes = {i.opcode.removesuffix("-start") for i in (reader, *within)}
        return not opcodes.isdisjoint(PRODUCTS | COLLECTIVES | {"custom-call"})

    direct = placed.computation.readers[placed.instruction.name]
    return bool(direct) and all(map(takes, direct))


def _are_widened(planned: list[Placed], dtype: str) -> bool:
    """Whether the plan itself widens one of these values, or a reader of it is not visible."""
    return any(
        reader is None or (reader.opcode == "convert" and reader.shapes[0].dtype == dtype)
        for placed in planned
        for reader in readers(placed)
    )


# ---------------------------------------------------------------- collectives


def _collective(placed: Placed) -> str:
    return placed.instruction.collective


def _sent(placed: Placed) -> tuple[Shape, ...]:
    return placed.computation.sent(placed.instruction)


def collectives(sides: Sides) -> Iterator[Change]:
    """Changes: collectives that send more bits than planned, also those of the partitioner.

    What is sent and then only cast to a narrower format should have been cast before.
    """
    found = list(_of_planned(sides))
    yield from found
    known = {(of.name, of.calls) for of in found}
    for placed in itertools.chain.from_iterable(sides.compiled.values()):
        narrow = _cast_behind(sides.modules[1], placed)
        shape = next((s for s in _sent(placed) if s.bits > bits(narrow) > 0), None)
        if shape is not None:
            name = _collective(placed)
            types = f"{name} {dataclasses.replace(shape, dtype=narrow)}", f"{name} {shape}"
            dtypes = narrow, shape.dtype
            one = change("collective widened", placed, *types, dtypes, _why_sent(*dtypes))
            if (one.name, one.calls) not in known:
                yield one


def _why_sent(narrow: str, wide: str) -> str:
    return f"{bits(wide) // bits(narrow)} times the bytes are sent between devices"


def _cast_behind(module: Module, placed: Placed) -> str:
    """The one format to which all readers cast what a collective sends; "" if there is none."""
    if _collective(placed) in ("", "all-reduce", "reduce-scatter"):  # sums may be wide
        return ""
    sent = placed.instruction
    if sent.opcode.endswith("-start"):
        ends = placed.computation.readers[sent.name]
        if len(ends) != 1 or len(ends[0].shapes) != 1:
            return ""
        (sent,) = ends
    formats = formats_read(module, placed.computation, sent)
    return formats.pop() if len(formats) == 1 else ""


def _of_planned(sides: Sides) -> Iterator[Change]:
    for key, compiled in sides.compiled.items():
        planned = sides.planned.get(key, ())
        sent = [c for c in compiled if _collective(c)]
        if not sent or not planned or not key[0]:
            continue
        asked = [p for p in planned if _collective(p)]
        findings = _widened_as_asked(asked, sent) if asked else _wider_than_planned(planned, sent)
        for name, narrow, wide in findings:
            first = (asked or planned)[0]
            shape = next((s for c in sent for s in _sent(c) if s.dtype == wide), wide)
            before = next((s for s in first.instruction.shapes if s.dtype == narrow), narrow)
            types = f"{name} {before}", f"{name} {shape}"
            yield change(
                "collective widened", first, *types, (narrow, wide), _why_sent(narrow, wide)
            )


Widened = tuple[str, str, str]
"""A collective's name, the dtype that was planned, and the wider one that is sent."""


def _widened_as_asked(asked: Sequence[Placed], sent: Sequence[Placed]) -> list[Widened]:
    """The program's own collectives that send wider types than planned."""
    slots = [
        [(_collective(placed), shape.dtype) for placed in side for shape in _sent(placed)]
        for side in (asked, sent)
    ]
    return [(name, narrow, wide) for name, narrow, wide in widened(*slots)]


def _wider_than_planned(planned: Sequence[Placed], sent: Sequence[Placed]) -> list[Widened]:
    """The partitioner's collectives that send wider types than the operation around them has."""
    shapes = [s for p in planned for s in (*p.instruction.shapes, *factors(p))]
    widest = max(shapes, key=lambda s: s.bits).dtype if shapes else ""
    return [
        (_collective(placed), widest, shape.dtype)
        for placed in sent
        for shape in _sent(placed)
        if shape.bits > bits(widest) > 0
    ]
