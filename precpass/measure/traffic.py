"""What a compiled program does, read from XLA's text of it: kernels, formats, bytes, cycles.

XLA's own `cost_analysis` counts a loop's body once and has no figures for a GPU, so this counts in
the compiled text, on every platform in the same way:

- A kernel is an instruction that runs by itself: a fusion, a library call, an unfused operation.
- A kernel reads each operand once and writes its result once. Of an operand that it only slices it
  reads the slices, and of a result that it updates in place it writes the update.
- Everything in a loop counts times the loop's trips, and of a conditional's branches the one that
  moves the most bytes counts.
- On a TPU, values that the compiler keeps in the memory on the chip move nothing.

Bytes are those of elements: padding is not known. A TPU's compiler also estimates the cycles of
most kernels, which are summed here, times trips. It has no estimate of communication, of Mosaic
kernels (Pallas' and those of ragged products) and of copies that run beside other kernels. The runs
of the first two are counted, because the sum says little of a program that spends its time there.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from precpass.measure.hlo import (
    MOSAIC_KERNEL,
    PRODUCTS,
    Computation,
    Instruction,
    Module,
    Shape,
)
from precpass.measure.hlo_loops import trips_of

__all__ = ["MatrixKernel", "Traffic", "traffic_of"]


@dataclasses.dataclass(frozen=True)
class MatrixKernel:
    """Matrix products or convolutions of one kind, and how often they run.

    Attributes:
        call: "dot", "convolution", or the library call, such as "cublas$lt$matmul".
        operands: the formats of its two factors, as HLO writes them: "bf16", "f32", ...
        results: the formats that its kernel writes: a fusion may cast the product's sums first.
        runs: how often such kernels run in one run of the program.
        multiplied: how the operands are multiplied, if that is not the default: "high", "highest",
            or a dot algorithm such as "bf16_bf16_f32_x3".
    """

    call: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    runs: int
    multiplied: str = ""

    @property
    def is_low(self) -> bool:
        """Whether all factors have at most 16 bits."""
        return all(Shape(dtype).width <= 16 for dtype in self.operands)

    def __str__(self) -> str:
        how = f", {self.multiplied}" if self.multiplied else ""
        return f"{self.call} {' x '.join(self.operands)} -> {', '.join(self.results)}{how}"


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one run of a compiled program does.

    Attributes:
        moved: the bytes that its kernels read and write.
        products: its matrix and convolution kernels, the most frequent first.
        casts: the runs of kernels that only cast, and maybe transpose and copy as well.
        cast_bytes: the bytes that these move.
        transposes: the runs of kernels that only transpose or copy.
        cycles: the TPU compiler's estimate of all cycles; None for other platforms.
        without_cycles: the runs of kernels that `cycles` is without; 0 for other platforms.
        guesses: whether a loop whose trips only run time knows was counted once.
        sent: the collectives of floating values by their format, such as "all-gather bf16", each
            with the bytes of the whole arrays, which are the larger ones of operands and results.
    """

    moved: float
    products: tuple[MatrixKernel, ...]
    casts: int
    cast_bytes: float
    transposes: int
    cycles: int | None
    without_cycles: int
    guesses: bool
    sent: tuple[tuple[str, float], ...] = ()

    @property
    def sent_by_format(self) -> list[tuple[str, float]]:
        """The bytes of all collectives, by their format."""
        formats = sorted({kind.split()[1] for kind, _ in self.sent})
        return [(f, sum(n for kind, n in self.sent if kind.split()[1] == f)) for f in formats]

    @property
    def runs(self) -> int:
        """The runs of matrix and convolution kernels."""
        return sum(kernel.runs for kernel in self.products)

    @property
    def low_runs(self) -> int:
        """The runs of those whose factors have at most 16 bits."""
        return sum(kernel.runs for kernel in self.products if kernel.is_low)


def traffic_of(text: str, platform: str = "cpu") -> Traffic:
    """What a compiled program does.

    Args:
        text: what `jax.stages.Compiled.as_text()` returns.
        platform: JAX's name of the platform that it was compiled for.

    Raises:
        ValueError: if the text is no HLO.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> low = lambda x: (x @ x).astype(jnp.float32)
        >>> lowered = jax.jit(low).lower(jnp.ones((512, 512), jnp.bfloat16))
        >>> traffic = traffic_of(lowered.compile().as_text())
        >>> traffic.runs, traffic.moved >= 512 * 512 * (2 + 4)
        (1, True)
    """
    module = Module.parse(text)
    tally = _Tally(module, on_chip=1 if platform == "tpu" else -1)
    total = tally.of(module.computations[module.entry])
    kinds = sorted(kind for kind in total if isinstance(kind, tuple) and len(kind) == 4)
    products = [
        MatrixKernel(call, factors, results, int(total[call, factors, results, how]), how)
        for call, factors, results, how in kinds
    ]
    return Traffic(
        total["moved"],
        tuple(sorted(products, key=lambda kernel: -kernel.runs)),
        int(total["casts"]),
        total["cast_bytes"],
        int(total["transposes"]),
        int(total["cycles"]) if platform == "tpu" else None,
        int(total["without_cycles"]) if platform == "tpu" else 0,
        tally.guesses,
        tuple(sorted((kind[1], n) for kind, n in total.items() if kind[0] == _SENT)),
    )


_Sum = defaultdict[Any, float]
"""The figures of some instructions: `Traffic`'s by name, the runs of each kind of product, and the
bytes of each kind of collective."""
_SENT = "sent"


def _add(total: _Sum, other: _Sum, times: int = 1) -> None:
    for name, n in other.items():
        total[name] += times * n


# Instructions that run no kernel; the "-done" of an asynchronous pair runs none either.
_FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all")
    + ("add-dependency", "opt-barrier", "partition-id", "replica-id", "domain")
)
# What only renames a value or its layout, inside of a kernel too.
_VIEWS = frozenset(("bitcast", "reshape"))
_MOVES = frozenset(("copy", "transpose", "convert"))
_LIBRARY_PRODUCT = re.compile(
    r"cublas|cudnn\$(conv|fmha|blockScaledDot)|onednn\$(matmul|convolution)|__dot|gemm", re.I
)
_SLICES = frozenset(("slice", "dynamic-slice", "gather"))
_COMMUNICATION = re.compile(r"all-|collective-|ragged-all-|reduce-scatter|(recv|send)\b")
# A custom call that only names buffers moves nothing.
_BUFFERS = frozenset(("AllocateBuffer", "ConcatBitcast", "SliceBitcast", "Sharding"))


class _Tally:
    """Counts a module. A computation that is called from several places is counted once."""

    def __init__(self, module: Module, on_chip: int) -> None:
        self.module = module
        self.on_chip = on_chip
        self.guesses = False
        self._sums: dict[str, _Sum] = {}
        self._sent = set[tuple[str, str]]()

    def of(self, computation: Computation) -> _Sum:
        """The figures of one run of a computation."""
        if computation.name not in self._sums:
            total = _Sum(float)
            for instruction in computation.instructions:
                _add(total, self._instruction(computation, instruction))
            self._sums[computation.name] = total
        return self._sums[computation.name]

    def _instruction(self, computation: Computation, instruction: Instruction) -> _Sum:
        opcode, total = instruction.opcode, _Sum(float, cycles=instruction.cycles)
        called = self.module.called(instruction)
        if opcode in _FREE or opcode.endswith("-done"):
            return total
        if opcode == "while":
            trips = trips_of(self.module, computation, instruction)
            self.guesses |= trips is None
            for inner in called:
                _add(total, self.of(inner), 1 if trips is None else trips)
        elif opcode == "conditional":
            branches = [self.of(inner) for inner in called]
            if branches:
                _add(total, max(branches, key=lambda s: (s["moved"], s["cycles"])))
        elif opcode in ("call", "async-start"):
            for inner in called:
                _add(total, self.of(inner))
        else:
            self._kernel(computation, instruction, total)
        return total

    def _kernel(self, computation: Computation, instruction: Instruction, total: _Sum) -> None:
        total["without_cycles"] += not instruction.cycles and _has_no_estimate(instruction)
        if instruction.opcode in ("fusion", "fusion-start"):
            inner, *_ = self.module.called(instruction)
            moved = self._fused(computation, instruction, inner)
            body = list(_flattened(self.module, inner))
        else:
            moved = self._unfused(instruction, computation.operands(instruction))
            body = [(computation, instruction)]
        total["moved"] += moved
        for home, each in body:
            # A TPU's compiler puts the parts of a collective into several fusions.
            part = computation.name, each.channel
            if each.collective and (each is instruction or part not in self._sent):
                self._sent.add(part)
                _note_sent(home, each, total)
        for call, factors, how in _products(body):
            results = _without_workspace(instruction.shapes)
            total[call, factors, tuple(dict.fromkeys(s.dtype for s in results)), how] += 1
        opcodes = {i.opcode for _, i in body} - _FREE - _VIEWS
        if opcodes and opcodes <= _MOVES and instruction.size > 1:
            is_cast = "convert" in opcodes
            total["casts" if is_cast else "transposes"] += 1
            total["cast_bytes"] += moved * is_cast

    def _size(self, shapes: Sequence[Shape]) -> float:
        return sum(s.nbytes for s in shapes if s.space != self.on_chip)

    def _unfused(self, instruction: Instruction, operands: Sequence[Instruction]) -> float:
        opcode, shapes = instruction.opcode, instruction.shapes
        if opcode == "custom-call":
            if instruction.target in _BUFFERS or not operands:
                return 0.0
            shapes = _without_workspace(shapes)
        if opcode in ("copy-start", "slice-start"):
            # (destination, source, context) and ((source), destination, context)
            copied = shapes[:1] if opcode == "copy-start" else shapes[1:2]
            source = [dataclasses.replace(s, space=operands[0].shapes[0].space) for s in copied]
            return self._size(copied) + self._size(source)
        if opcode.endswith("-start"):
            # the operands, the result and a context
            count = sum(len(o.shapes) for o in operands)
            shapes = shapes[count : count + 1] or shapes
        if opcode in _SLICES:
            part = [dataclasses.replace(s, space=operands[0].shapes[0].space) for s in shapes]
            return self._size(shapes) + self._size(part)
        if opcode == "dynamic-update-slice":
            return 2 * self._size(operands[1].shapes)
        return self._size(shapes) + sum(self._size(o.shapes) for o in operands)

    def _fused(self, computation: Computation, fusion: Instruction, inner: Computation) -> float:
        """The bytes that a fusion reads and writes."""
        moved = 0.0
        for operand, elements in _reads(self.module, computation, fusion, 0.0):
            shape = operand.shapes[0]
            moved += self._size([shape]) * min(1.0, elements / max(1, shape.size))
        # An asynchronous fusion's results stand behind its operands.
        is_start = fusion.opcode != "fusion"
        results = fusion.shapes[len(fusion.operands) :] if is_start else fusion.shapes
        written = (s for value in inner.results for s in _written(inner, value).shapes)
        for shape, update in zip(_without_workspace(results), written, strict=False):
            moved += self._size([dataclasses.replace(update, space=shape.space)])
        return moved


def _note_sent(computation: Computation, collective: Instruction, total: _Sum) -> None:
    """Adds the bytes that a collective sends, by its kind and format."""
    results = computation.sent(collective)
    operands = [s for i in computation.operands(collective) for s in i.shapes if s.bits]
    for one, other in zip(results, operands, strict=False):
        kind = f"{collective.collective} {one.dtype}"
        total[_SENT, kind] += max(one.nbytes, other.nbytes)


def _has_no_estimate(instruction: Instruction) -> bool:
    """Whether a TPU's compiler estimates no cycles of what takes time by itself."""
    return instruction.target == MOSAIC_KERNEL or bool(_COMMUNICATION.match(instruction.opcode))


def _without_workspace(shapes: Sequence[Shape]) -> Sequence[Shape]:
    """The results of a kernel without the workspace of a library call, which is its last one."""
    has_workspace = len(shapes) > 1 and shapes[-1].dtype in ("s8", "u8")
    return shapes[:-1] if has_workspace else shapes


def _flattened(module: Module, inner: Computation) -> Iterator[tuple[Computation, Instruction]]:
    """A fusion's instructions, those of fusions inside of it included."""
    for instruction in inner.instructions:
        if instruction.opcode == "fusion":
            for called in module.called(instruction):
                yield from _flattened(module, called)
        else:
            yield inner, instruction


def _products(
    body: Sequence[tuple[Computation, Instruction]],
) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """The products among instructions: each one's call, its factors' formats, and how."""
    for computation, instruction in body:
        is_call = instruction.opcode == "custom-call" and _LIBRARY_PRODUCT.search(
            instruction.target
        )
        if is_call or instruction.opcode in PRODUCTS:
            factors = [s for o in computation.operands(instruction)[:2] for s in o.shapes[:1]]
            name = instruction.target.strip("_") if is_call else instruction.opcode
            if factors:
                yield name, tuple(shape.dtype for shape in factors), instruction.multiplied


def _written(inner: Computation, result: Instruction) -> Instruction:
    """What a fusion writes for a result: of a parameter that is updated in place, the update."""
    update = _past_views(inner, result)
    if update.opcode != "dynamic-update-slice" or not _is_in_place(inner, update):
        return result
    return inner.operands(update)[1]


def _is_in_place(inner: Computation, update: Instruction) -> bool:
    """Whether a dynamic-update-slice updates a parameter of a fusion."""
    return _past_views(inner, inner.operands(update)[0]).opcode == "parameter"


def _past_views(inner: Computation, value: Instruction) -> Instruction:
    while value.opcode in _VIEWS and inner.operands(value):
        value = inner.operands(value)[0]
    return value


def elements_read(module: Module, inner: Computation) -> Mapping[str, float]:
    """How many elements of each value of a fusion are computed or read, for all of its results.

    A value that is only sliced is read as far as its slices reach.
    """
    needed = {value.name: float(value.size) for value in inner.results}
    for instruction in reversed(inner.instructions):
        elements = needed.get(instruction.name, 0.0)
        for value, read in _reads(module, inner, instruction, elements) if elements else ():
            needed[value.name] = min(value.size, needed.get(value.name, 0.0) + read)
    return needed


# They read their operands whole, however little of their result is read.
_WHOLE = PRODUCTS | frozenset(
    ("reduce", "reduce-window", "scatter", "sort", "broadcast", "custom-call", "select-and-scatter")
)


def _reads(
    module: Module, inner: Computation, instruction: Instruction, elements: float
) -> Iterator[tuple[Instruction, float]]:
    """The operands of an instruction, and what some elements of its result need of each."""
    operands = inner.operands(instruction)
    if instruction.opcode in ("fusion", "fusion-start"):
        called, *_ = module.called(instruction)
        needed = elements_read(module, called)
        for value in called.instructions:
            if value.opcode == "parameter":
                yield operands[value.index], needed.get(value.name, 0.0)
        return
    for at, operand in enumerate(operands):
        if instruction.opcode == "dynamic-update-slice":
            # What is updated in place is not read.
            of_target = 0.0 if _is_in_place(inner, instruction) else elements
            yield operand, operand.size if at else of_target
        elif instruction.opcode in _WHOLE or (at and instruction.opcode in _SLICES):
            yield operand, operand.size
        else:
            yield operand, min(operand.size, elements)
