"""A reader of XLA's HLO text: computations, instructions, types, and where each came from.

It reads what `jax.stages.Lowered.as_text(dialect="hlo", debug_info=True)` and
`jax.stages.Compiled.as_text()` print. Nothing here depends on JAX's IR, except how
name stacks are joined. The grammar is that of XLA's `HloModule::ToString`
(openxla.org/xla/hlo_dumps); a line that cannot be parsed is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from precpass.policy.scopes import join_scopes

__all__ = ["Computation", "Instruction", "Module", "Placed", "Shape", "bits"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's element type and sizes, as HLO writes them.

    Example:
        >>> str(Shape("bf16", (8, 128)))
        'bf16[8,128]'
    """

    dtype: str
    dims: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.dims)

    @property
    def bits(self) -> int:
        """The bits of a floating element; 0 for any other."""
        return bits(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@functools.cache
def bits(dtype: str) -> int:
    """The bits of a floating element type; 0 for any other type.

    Example:
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
        file, function, line: the user's line; "", "", 0 if XLA recorded none.
        index: the number of a parameter, or of the element that is read of a tuple; -1 for others.
        target: the target of a custom call; "" for others.
        is_root: whether its result is that of its computation.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...] = ()
    called: tuple[tuple[str, str], ...] = ()
    op_name: str = ""
    file: str = ""
    function: str = ""
    line: int = 0
    index: int = -1
    target: str = ""
    is_root: bool = False


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
    def root(self) -> Instruction | None:
        """The instruction whose result is the computation's; None in an empty one."""
        marked = (i for i in self.instructions if i.is_root)
        return next(marked, self.instructions[-1] if self.instructions else None)

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that one reads."""
        return [self.by_name[name] for name in instruction.operands if name in self.by_name]


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
        name: as JAX named it.
        computations: by name.
        entry: the name of the one that runs first.
    """

    name: str
    computations: Mapping[str, Computation]
    entry: str

    @classmethod
    def parse(cls, text: str) -> Module:
        """Reads HLO text, of a lowered program or of a compiled one.

        Args:
            text: with or without `%` before names, operands' types, and the tables
                of files and stack frames at its head.

        Raises:
            ValueError: if the text holds no computation.

        Example:
            >>> text = '''HloModule m
            ...
            ... ENTRY main.1 {
            ...   x.1 = f32[4]{0} parameter(0)
            ...   ROOT y.1 = bf16[4]{0} convert(x.1), metadata={op_name="jit(f)/convert"}
            ... }'''
            >>> [i.opcode for i in Module.parse(text).computations["main.1"].instructions]
            ['parameter', 'convert']
        """
        frames = _frames(text)
        computations: dict[str, Computation] = {}
        entry, name, instructions = "", "", list[Instruction]()
        for line in text.splitlines():
            if name:
                if line.startswith("}"):
                    computations[name] = Computation(name, tuple(instructions))
                    name = ""
                elif instruction := _instruction(line, frames):
                    instructions.append(instruction)
            elif header := _HEADER.match(line):
                name, instructions = header[2], []
                entry = name if header[1] else entry
        if not computations:
            raise ValueError(
                "this is no HLO text: give what Lowered.as_text(dialect='hlo') or "
                f"Compiled.as_text() returns, not {text[:60]!r}"
            )
        title = re.match(r"HloModule ([^\s,]+)", text)
        return cls(title[1] if title else "", computations, entry or next(reversed(computations)))

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
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{\s*$")
_START = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([^\]]*)\]")
_CALLED = re.compile(
    r"\b(calls|to_apply|condition|body|true_computation|false_computation|async_computation)"
    r"=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\b(branch_computations|called_computations|calls)=\{([^}]*)\}")
_STRING = r'"((?:[^"\\]|\\.)*)"'
_OP_NAME = re.compile(rf"\bop_name={_STRING}")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_FILE, _LINE = re.compile(rf"\bsource_file={_STRING}"), re.compile(r"\bsource_line=(\d+)")
_TARGET = re.compile(rf"\bcustom_call_target={_STRING}")
_INDEX = re.compile(r"\bindex=(\d+)")

Frames = Mapping[int, tuple[str, str, int]]


def _instruction(line: str, frames: Frames) -> Instruction | None:
    start = _START.match(line)
    if start is None:
        return None
    at = start.end()
    end = _closed(line, at) if line[at : at + 1] == "(" else line.find(" ", at)
    opcode = _OPCODE.match(line, end) if end > 0 else None
    if opcode is None:
        return None
    close = _closed(line, opcode.end() - 1)
    inside, rest = line[opcode.end() : close - 1], line[close:]
    shapes = [Shape(m[1], _dims(m[2])) for m in _SHAPE.finditer(line, at, end)]
    called = [(m[1], m[2]) for m in _CALLED.finditer(rest)]
    for match in _BRANCHES.finditer(rest):
        called += [(match[1], name.strip().lstrip("%")) for name in match[2].split(",") if name]
    index = _INDEX.search(rest) if opcode[1] == "get-tuple-element" else None
    literal = opcode[1] in ("parameter", "constant")
    target = _TARGET.search(rest) if opcode[1] == "custom-call" else None
    op_name, file, function, number = _origin(rest, frames)
    return Instruction(
        name=start[2],
        opcode=opcode[1],
        shapes=tuple(shapes),
        operands=() if literal else tuple(_operands(inside)),
        called=tuple(called),
        op_name=op_name,
        file=file,
        function=function,
        line=number,
        index=int(inside) if opcode[1] == "parameter" else int(index[1]) if index else -1,
        target=target[1] if target else "",
        is_root=bool(start[1]),
    )


def _origin(rest: str, frames: Frames) -> tuple[str, str, str, int]:
    """Name stack and line, from the metadata or from the frame that it names."""
    at = rest.find("metadata={")
    if at < 0:
        return "", "", "", 0
    text = rest[at : _closed(rest, at + len("metadata="))]
    name, frame = _OP_NAME.search(text), _FRAME.search(text)
    file, function, line = frames.get(int(frame[1]), ("", "", 0)) if frame else ("", "", 0)
    # Before stack frames had a table of their own, each instruction named its file.
    own_file, own_line = _FILE.search(text), _LINE.search(text)
    return (
        name[1].replace('\\"', '"') if name else "",
        own_file[1] if own_file else file,
        function,
        int(own_line[1]) if own_line else line,
    )


def _closed(text: str, at: int) -> int:
    """The index behind the bracket that closes the one at `at`; quoted text is passed over."""
    depth, quoted = 0, False
    while at < len(text):
        char = text[at]
        if quoted:
            at += char == "\\"
            quoted = char != '"'
        elif char == '"':
            quoted = True
        elif char in "({[":
            depth += 1
        elif char in ")}]":
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return len(text)


def _operands(text: str) -> Iterator[str]:
    """The names in a list of operands, whose types may stand before them."""
    at = start = 0
    while at <= len(text):
        if at == len(text) or text[at] == ",":
            words = text[start:at].split()
            if words:
                yield words[-1].lstrip("%")
            start = at + 1
        elif text[at] in "({[":
            at = _closed(text, at) - 1
        at += 1


def _dims(text: str) -> tuple[int, ...]:
    # A dynamic dimension is written as its bound, "<=8".
    return tuple(int(d.lstrip("<=")) for d in text.split(",") if d.strip("<=? "))


def _frames(text: str) -> Frames:
    """Each stack frame's innermost file, function and line, from the tables at the head."""
    files = {
        int(i): name for i, name in re.findall(rf"^(\d+) {_STRING}$", _table(text, "FileN"), re.M)
    }
    functions = dict(re.findall(rf"^(\d+) {_STRING}$", _table(text, "FunctionN"), re.M))
    pattern = r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)"
    places = {
        place: (files.get(int(file), ""), functions.get(function, ""), int(line))
        for place, file, function, line in re.findall(pattern, _table(text, "FileL"), re.M)
    }
    pairs = re.findall(r"^(\d+) \{file_location_id=(\d+)", _table(text, "StackF"), re.M)
    return {int(frame): places.get(place, ("", "", 0)) for frame, place in pairs}


def _table(text: str, start: str) -> str:
    match = re.search(rf"^{start}\w+\n((?:\d+ .*\n?)*)", text, re.M)
    return match[1] if match else ""
