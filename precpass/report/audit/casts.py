"""Roundings that a compiler left out, and casts that it moved out of a loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from precpass.measure.hlo import PRODUCTS, Computation, Instruction, Module, Placed, Shape, bits
from precpass.report.audit.matching import (
    UNKNOWN,
    Change,
    Key,
    Sides,
    change,
    formats_read,
    past_moves,
    readers,
)

__all__ = ["casts"]


def casts(sides: Sides) -> Iterator[Change]:
    """Changes: omitted roundings, and widening casts that were moved out of a loop."""
    yield from _removed(sides)
    yield from _unrounded(sides)
    for _, planned, compiled in sides.pairs(lambda p: _cast(p) is not None):
        for placed in planned:
            yield from _moved(sides, placed, compiled)


def _cast(placed: Placed) -> tuple[Shape, Shape] | None:
    """The types before and after a cast between floating types; None for other instructions."""
    operands = placed.computation.operands(placed.instruction)
    if placed.instruction.opcode != "convert" or len(operands) != 1:
        return None
    before, after = operands[0].shapes[0], placed.instruction.shapes[0]
    return (before, after) if before.bits and after.bits else None


def _moved(sides: Sides, placed: Placed, compiled: Sequence[Placed]) -> Iterator[Change]:
    before, after = _cast(placed) or (Shape(""), Shape(""))
    same = [c for c in compiled if c.instruction.shapes[0].dtype == after.dtype]
    depth = max((len(c.loops) for c in same), default=len(placed.loops))
    if after.bits <= before.bits or depth >= len(placed.loops):
        return
    if placed.loops[depth] in sides.loops:  # otherwise the loop itself is gone
        why = f"the loop holds {after.dtype} from its start to its end, not {before.dtype}"
        types = f"{before} -> {after} in the loop", f"{before} -> {after} before it"
        yield change("cast moved", placed, *types, (before.dtype, after.dtype), why)


# ---------------------------------------------------------------- casts that round


def _removed(sides: Sides) -> Iterator[Change]:
    """Casts to a narrower format and back that the compiled program does not have."""
    left = {
        (c.instruction.file, c.instruction.line, cast[1].size, cast[1].dtype)
        for placed in sides.compiled.values()
        for c in placed
        if (cast := _cast(c))
    }
    kept = {_value(p) for key, ps in sides.planned.items() for p in ps if _remains(sides, key, p)}
    for key, planned, _ in sides.pairs(lambda p: _cast(p) is not None):
        for placed in planned:
            before, after = _cast(placed) or (Shape(""), Shape(""))
            gone = (key[1], key[2], after.size, after.dtype) not in left
            if after.bits >= before.bits or not gone or _value(placed) in kept:
                continue
            if _widened_to(placed) == before.dtype and _is_unrounded(sides, placed, after.dtype):
                why = f"values keep digits of {before.dtype} that the plan rounds away"
                types = f"{before} -> {after} -> {before}", before
                yield change("cast removed", placed, *types, (after.dtype, before.dtype), why)


def _remains(sides: Sides, key: Key, placed: Placed) -> bool:
    """Whether the compiled program has a cast of this name."""
    if placed.instruction.opcode != "convert":
        return False
    dtype = placed.instruction.shapes[0].dtype
    same = (c.instruction for c in sides.compiled.get(key, ()))
    return any(i.opcode == "convert" and i.shapes[0].dtype == dtype for i in same)


def _value(placed: Placed) -> tuple[str, ...]:
    """A key of the value that a cast rounds and of the format: XLA computes equal casts once."""
    instruction = placed.instruction
    return placed.computation.name, *instruction.operands, instruction.shapes[0].dtype


def _widened_to(placed: Placed) -> str:
    """The format to which every reader of a result widens it; "" if they differ."""
    formats = {
        reader.shapes[0].dtype if reader is not None and reader.opcode == "convert" else ""
        for reader in readers(placed)
    }
    (dtype,) = formats if len(formats) == 1 else ("",)
    return dtype if bits(dtype) > placed.instruction.shapes[0].bits else ""


def _is_unrounded(sides: Sides, placed: Placed, dtype: str) -> bool:
    """Whether the compiled program has the operand of a cast, and nothing rounds it.

    An argument, or a result computed in the cast's operand format, certainly has digits to round.
    A constant is rounded at compile time, and a value that was widened before has no more digits.
    """
    planned, compiled = sides.modules
    computation, made = _made(planned, placed)
    if made is None:
        return False
    calls: list[tuple[Computation, Instruction]] = []
    if made.opcode == "parameter":
        entry = compiled.computations[compiled.entry]
        arguments = (i for i in entry.instructions if i.opcode == "parameter")
        calls = [(entry, i) for i in arguments if i.index == made.index]
    elif made.opcode in _ROUNDS and computation is placed.computation:
        # Its whole name is known if it stands beside the cast.
        scope = placed.name.removesuffix(placed.instruction.op_name)
        same = sides.compiled.get((scope + made.op_name, made.file, made.line), ())
        calls = [
            (c.computation, c.instruction) for c in same if c.instruction.opcode == made.opcode
        ]
    return bool(calls) and not any(_is_rounded(compiled, *value, dtype) for value in calls)


def _made(module: Module, placed: Placed) -> tuple[Computation, Instruction | None]:
    """The program's argument, or the instruction, that a cast's operand comes from."""
    computation, name = placed.computation, placed.instruction.operands[0]
    while instruction := computation.by_name.get(name):
        instruction = past_moves(computation, instruction)
        if instruction.opcode != "parameter" or computation.name == module.entry:
            return computation, instruction
        callers = module.callers.get(computation.name, ())
        if len(callers) != 1 or callers[0][1].opcode != "call":
            break
        computation, call = callers[0]
        name = call.operands[instruction.index]
    return computation, None


# ---------------------------------------------------------------- results that are not rounded

# Instructions that round their result to its own format.
_ROUNDS = PRODUCTS | frozenset(
    ("add", "subtract", "multiply", "divide", "power", "sqrt", "rsqrt", "cbrt", "reduce")
    + ("exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "erf")
    + ("tanh", "sine", "cosine", "tan", "atan2", "reduce-window")
)


def _unrounded(sides: Sides) -> Iterator[Change]:
    """Changes: low results that a kernel computes in a wider format and does not round.

    If XLA has no arithmetic in a format, it computes in a wider one and rounds after each
    operation. It drops that rounding if the plan widens the result next.
    """
    for _, planned, compiled in sides.pairs(lambda p: p.instruction.opcode in _ROUNDS):
        shapes = {p.instruction.shapes for p in planned}
        undone = [(p, dtype) for p in planned if (dtype := _widened_to(p))]
        if len(shapes) != 1 or not undone:
            continue
        ((shape, *_),) = shapes
        # By plan every instruction of this name rounds, so one that does not has lost its rounding.
        wide = [(c, Shape(dtype, shape.dims)) for c in compiled for dtype in {d for _, d in undone}]
        not_rounded = [
            c
            for c, wanted in wide
            if c.instruction.shapes == (wanted,)
            and not _is_rounded(sides.modules[1], c.computation, c.instruction, shape.dtype)
        ]
        for (placed, dtype), _ in zip(undone, not_rounded, strict=False):
            why = f"the result is not rounded to {shape.dtype} before it is widened"
            types = f"{shape} -> {dtype}", Shape(dtype, shape.dims)
            yield change("cast removed", placed, *types, (shape.dtype, dtype), why)


def _is_rounded(module: Module, computation: Computation, value: Instruction, dtype: str) -> bool:
    """Whether anything casts a value to `dtype`; a reader that cannot be followed counts as one."""
    return not {dtype, UNKNOWN}.isdisjoint(formats_read(module, computation, value))
