"""A reader of XLA's HLO text: computations, instructions, types, and where each came from.

It reads `jaxlib`'s `HloModule.to_string()`: what `jax.stages.Compiled.as_text()` returns of a
compiled program, and `lowered_text` of a lowered one. The objects of an `HloModule` do not suffice:
in jax 0.10 its instructions have names, opcodes, operands and users, but neither types nor
attributes, name stacks and source lines. The grammar is on openxla.org/xla/hlo_dumps; a line that
cannot be parsed is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from precpass.policy.scopes import join_scopes

__all__ = [
    "COLLECTIVES",
    "MOSAIC_KERNEL",
    "PRODUCTS",
    "Computation",
    "Instruction",
    "Module",
    "Placed",
    "Shape",
    "bits",
    "lowered_text",
]

MOSAIC_KERNEL = "tpu_custom_call"
"""The target of a TPU's custom calls that are kernels in Mosaic, such as Pallas'."""

PRODUCTS = frozenset(("dot", "convolution", "ragged-dot", "scaled-dot"))
COLLECTIVES = frozenset(
    ("all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute")
    + ("ragged-all-to-all", "reduce-scatter")
)

Place = tuple[str, str, int]
"""A file, a function and a line."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's element type and sizes, as HLO writes them.

    Attributes:
        dtype: "f32", "bf16", "s32", "pred", ...
        dims: the sizes.
        space: the number of the memory that the compiler chose; 0 is the device's own, and on a
            TPU 1 is the memory on the chip. Shapes are equal whatever their memory is.

    Examples:
        >>> str(Shape("bf16", (8, 128))), Shape("bf16", (8, 128)).nbytes
        ('bf16[8,128]', 2048.0)
    """

    dtype: str
    dims: tuple[int, ...] = ()
    space: int = dataclasses.field(default=0, compare=False)

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.dims)

    @property
    def bits(self) -> int:
        """The bits of a floating element; 0 for any other."""
        return bits(self.dtype)

    @property
    def width(self) -> int:
        """The bits of an element of any type; 0 for tokens and opaque values."""
        match = re.match(r"(?:b?f|c|[su])(\d+)", self.dtype)
        return int(match[1]) if match else 8 * (self.dtype == "pred")

    @property
    def is_factor(self) -> bool:
        """Whether products multiply such elements: floating ones, and those of scaled products."""
        return bool(self.bits) or self.dtype == "s8"

    @property
    def nbytes(self) -> float:
        """The bytes of all elements, without padding."""
        return self.size * self.width / 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@functools.cache
def bits(dtype: str) -> int:
    """The bits of a floating element type; 0 for any other type.

    Examples:
        >>> bits("bf16"), bits("f8e4m3fn"), bits("s32")
        (16, 8, 0)
    """
    match = re.match(r"b?f(\d+)", dtype)
    return int(match[1]) if match else 0


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: unique in its module.
        opcode: "dot", "convert", "fusion", ...
        shapes: the shape of its result, or those in its tuple of results, flattened.
        operands: the names of the instructions that it reads.
        called: the computations that it calls, by attribute ("body", "calls", ...).
        op_name: JAX's name stack and primitive; "" if XLA recorded none.
        calls: the user's line, and behind it those of its callers; () if XLA recorded none.
        index: the number of a parameter, or of the element that is read of a tuple; -1 for others.
        target: the target of a custom call; "" for others.
        is_root: whether its result is that of its computation.
        text: what a constant holds, and the direction of a comparison ("LT"); "" for others.
        trips: how often a loop runs, if the compiler wrote it down; else None.
        cycles: the TPU compiler's own estimate of one run; 0 where it has none.
        multiplied: how a product's operands are multiplied, if that is not the default: "high",
            "highest", or a dot algorithm such as "bf16_bf16_f32_x3".
        channel: the number that the parts of one collective share; "" for others.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...] = ()
    called: tuple[tuple[str, str], ...] = ()
    op_name: str = ""
    calls: tuple[Place, ...] = ()
    index: int = -1
    target: str = ""
    is_root: bool = False
    text: str = ""
    trips: int | None = None
    cycles: int = 0
    multiplied: str = ""
    channel: str = ""

    @property
    def size(self) -> int:
        """The number of elements of its result, or of the largest one."""
        return max((shape.size for shape in self.shapes), default=0)

    @property
    def file(self) -> str:
        """The user's file; "" if XLA recorded none."""
        return self.calls[0][0] if self.calls else ""

    @property
    def line(self) -> int:
        """The user's line; 0 if XLA recorded none."""
        return self.calls[0][2] if self.calls else 0

    @property
    def collective(self) -> str:
        """The collective that it begins, such as "all-gather"; "" for any other instruction."""
        opcode = self.opcode.removesuffix("-start")
        return opcode if opcode in COLLECTIVES else ""


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """Instructions in the order in which they are printed, operands first."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """The instructions by name."""
        return {i.name: i for i in self.instructions}

    @functools.cached_property
    def readers(self) -> Mapping[str, Sequence[Instruction]]:
        """The instructions that read each instruction."""
        readers: dict[str, list[Instruction]] = {i.name: [] for i in self.instructions}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                if operand in readers:
                    readers[operand].append(instruction)
        return readers

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @property
    def results(self) -> list[Instruction]:
        """The instructions whose results are the computation's, those of a tuple one by one."""
        return self.operands(self.root) if self.root.opcode == "tuple" else [self.root]

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that one reads."""
        return [self.by_name[name] for name in instruction.operands if name in self.by_name]

    def sent(self, collective: Instruction) -> tuple[Shape, ...]:
        """The floating results of a collective; the start of one lists its operands too."""
        shapes = tuple(s for s in collective.shapes if s.bits)
        count = sum(s.bits > 0 for i in self.operands(collective) for s in i.shapes)
        is_start = collective.opcode.endswith("-start")
        return shapes[count:] if is_start and len(shapes) == 2 * count else shapes


@dataclasses.dataclass(frozen=True)
class Placed:
    """An instruction where it runs.

    Attributes:
        instruction: the instruction.
        computation: the computation that it stands in.
        name: its name stack and primitive, after the stacks of its callers.
        loops: the names of the loops around it, outermost first.
        caller: the fusion that it is part of, of which only the result is stored.
    """

    instruction: Instruction
    computation: Computation
    name: str
    loops: tuple[str, ...]
    caller: Instruction | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A program in HLO.

    Attributes:
        computations: by name.
        entry: the name of the one that runs first.
    """

    computations: Mapping[str, Computation]
    entry: str

    @classmethod
    def parse(cls, text: str) -> Module:
        """Reads HLO text, of a lowered program or of a compiled one.

        Raises:
            ValueError: if the text holds no computation.

        Examples:
            >>> text = '''HloModule m
            ...
            ... ENTRY %main.1 (x.1: f32[4]) -> bf16[4] {
            ...   %x.1 = f32[4]{0} parameter(0)
            ...   ROOT %y.1 = bf16[4]{0} convert(%x.1), metadata={op_name="jit(f)/convert"}
            ... }'''
            >>> [i.opcode for i in Module.parse(text).computations["main.1"].instructions]
            ['parameter', 'convert']
        """
        frames = _frames(text)
        computations: dict[str, Computation] = {}
        entry, name, instructions = "", "", list[Instruction]()
        for line in text.splitlines():
            if header := _HEADER.match(line):
                name, instructions = header[2], []
                entry = name if header[1] else entry
            elif line.startswith("}"):
                computations[name] = Computation(name, tuple(instructions))
            elif instruction := _instruction(line, frames):
                instructions.append(instruction)
        if not computations:
            raise ValueError(
                "this is not HLO text: give what Compiled.as_text() or lowered_text returns, not "
                f"{text[:60]!r}"
            )
        return cls(computations, entry or next(reversed(computations)))

    @functools.cached_property
    def callers(self) -> Mapping[str, Sequence[tuple[Computation, Instruction]]]:
        """The instructions that call each computation, and where they stand."""
        callers: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions:
                for _, name in instruction.called:
                    callers.setdefault(name, []).append((computation, instruction))
        return callers

    def called(self, instruction: Instruction) -> list[Computation]:
        """The computations that an instruction calls."""
        names = (name for _, name in instruction.called)
        return [self.computations[name] for name in names if name in self.computations]

    def walk(self) -> Iterator[Placed]:
        """Every instruction where it runs, once per place that calls it.

        Combiners of reductions, scatters and sorts are left out.
        """
        yield from self._inside(self.computations[self.entry], "", (), None)

    def _inside(
        self,
        computation: Computation,
        prefix: str,
        loops: tuple[str, ...],
        caller: Instruction | None,
    ) -> Iterator[Placed]:
        for instruction in computation.instructions:
            joined = join_scopes(prefix, instruction.op_name)
            yield Placed(instruction, computation, joined, loops, caller)
            if instruction.opcode not in _CALLERS:
                continue
            inner = joined if instruction.opcode == "call" else prefix
            deeper = (*loops, joined) if instruction.opcode == "while" else loops
            fusion = instruction if instruction.opcode == "fusion" else caller
            for called in self.called(instruction):
                yield from self._inside(called, inner, deeper, fusion)


# Opcodes that call computations of instructions; the others' are combiners of two scalars.
_CALLERS = frozenset(
    ("call", "while", "conditional", "fusion", "custom-call", "async-start", "composite")
)


def lowered_text(lowered: Any) -> str:
    """The text of a `jax.stages.Lowered`, in the form of a compiled program's."""
    return lowered.compiler_ir("hlo").get_hlo_module().to_string()


# ---------------------------------------------------------------- reading a line

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_LINE = re.compile(r"\s+(ROOT )?%([\w.\-]+) = (.+?) ([a-z][\w\-]*)\(([^)]*)\)(.*)")
_NAME = re.compile(r"%([\w.\-]+)")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([^\]]*)\](?:\{[^}]*?(?:S\((\d+)\)[^}]*)?\})?")
_CALLED = re.compile(
    r"\b(calls|to_apply|condition|body|true_computation|false_computation|async_computation"
    r"|branch_computations|called_computations)=\{?((?:%[\w.\-]+(?:, )?)+)"
)
_STRING = r'"((?:[^"\\]|\\.)*)"'
_OP_NAME = re.compile(rf"\bop_name={_STRING}")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_TARGET = re.compile(rf"\bcustom_call_target={_STRING}")
_DIRECTION = re.compile(r"\bdirection=(\w+)")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d{1,18})"')  # the largest int64 is no estimate
# As attributes of a dot or a convolution, and in the configuration of a GPU's library call.
_MULTIPLIED = re.compile(
    r'\balgorithm=dot_(\w+)|"algorithm":"ALG_DOT_(\w+)"'
    r'|\boperand_precision=\{(high\w*)|"operand_precision":\["(HIGH\w*)"'
)
# Another kernel, "ragged-dot-metadata", prepares the sizes of the groups.
_RAGGED_DOT = re.compile(r"ragged-dot-(?!metadata)")


def _instruction(line: str, frames: Mapping[str, tuple[Place, ...]]) -> Instruction | None:
    """The instruction that a line holds; None if it holds none."""
    found = _LINE.match(line)
    if found is None:
        return None
    root, name, types, opcode, inside, rest = found.groups()
    is_literal = opcode in ("parameter", "constant")
    index = inside if opcode == "parameter" else _first(_INDEX, rest, opcode == "get-tuple-element")
    trips = _first(_TRIPS, rest, opcode == "while")
    instruction = Instruction(
        name=name,
        opcode=opcode,
        shapes=tuple(
            Shape(dtype, _dims(dims), int(space or 0))
            for dtype, dims, space in _SHAPE.findall(types)
        ),
        operands=() if is_literal else tuple(_NAME.findall(inside)),
        called=tuple((m[1], n) for m in _CALLED.finditer(rest) for n in _NAME.findall(m[2])),
        op_name=_first(_OP_NAME, rest).replace('\\"', '"'),
        calls=frames.get(_first(_FRAME, rest), ()),
        index=int(index or -1),
        target=_first(_TARGET, rest, opcode == "custom-call"),
        is_root=bool(root),
        text=inside if opcode == "constant" else _first(_DIRECTION, rest, opcode == "compare"),
        trips=int(trips) if trips else None,
        cycles=int(_first(_CYCLES, rest) or 0),
        multiplied=_first(_MULTIPLIED, rest).lower(),
        channel=_first(_CHANNEL, rest),
    )
    is_ragged = instruction.target == MOSAIC_KERNEL and _RAGGED_DOT.match(name)
    return _as_ragged_dot(instruction) if is_ragged else instruction


def _first(pattern: re.Pattern[str], text: str, is_asked: bool = True) -> str:
    """What a pattern's group finds in a text; "" if it finds nothing, or is not asked to look."""
    match = pattern.search(text) if is_asked else None
    return match[match.lastindex or 0] if match else ""


def _dims(text: str) -> tuple[int, ...]:
    # A dynamic dimension is written as its bound, "<=8".
    return tuple(int(d.lstrip("<=")) for d in text.split(",") if d.strip("<=? "))


def _as_ragged_dot(kernel: Instruction) -> Instruction:
    """A Mosaic kernel as the ragged product that it computes, which a TPU's compiler replaced.

    Its last two operands are the factors (jax 0.12.0.1), and its name stack has one part more.
    """
    return dataclasses.replace(
        kernel,
        opcode="ragged-dot",
        operands=kernel.operands[-2:],
        op_name=kernel.op_name.removesuffix("/ragged-dot-none"),
    )


def _frames(text: str) -> Mapping[str, tuple[Place, ...]]:
    """The place of each stack frame and of its callers, from the tables at the head."""
    files, functions = (
        dict(re.findall(rf"^(\d+) {_STRING}$", _table(text, name), re.M))
        for name in ("FileNames", "FunctionNames")
    )
    pattern = r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)"
    places = {
        place: (files.get(file, ""), functions.get(function, ""), int(line))
        for place, file, function, line in re.findall(pattern, _table(text, "FileLocations"), re.M)
    }
    pattern = r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
    rows = re.findall(pattern, _table(text, "StackFrames"), re.M)
    # Some releases of XLA print numbers of parents that are one too large.
    shift = any(frame == parent for frame, _, parent in rows)
    frames: dict[str, tuple[Place, ...]] = {}
    for frame, place, parent in rows:  # callers first
        callers = frames.get(str(int(parent or 0) - shift), ())
        frames[frame] = (places.get(place, ("", "", 0)), *callers)
    return frames


def _table(text: str, name: str) -> str:
    match = re.search(rf"^{name}\n((?:\d+ .*\n?)*)", text, re.M)
    return match[1] if match else ""
