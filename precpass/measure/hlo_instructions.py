"""One instruction of XLA's HLO text: its shapes, what it reads and calls, where it came from."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from math import prod

__all__ = ["MOSAIC_KERNEL", "Frames", "Instruction", "Shape", "bits", "frames_of", "instruction_of"]

MOSAIC_KERNEL = "tpu_custom_call"
"""The target of a TPU's custom calls that are kernels in Mosaic, such as Pallas'."""


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
        return _width(self.dtype)

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


@functools.cache
def _width(dtype: str) -> int:
    match = re.match(r"(?:b?f|c|[su])(\d+)", dtype)
    return int(match[1]) if match else 8 * (dtype == "pred")


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

    @property
    def file(self) -> str:
        """The user's file; "" if XLA recorded none."""
        return self.calls[0][0] if self.calls else ""

    @property
    def line(self) -> int:
        """The user's line; 0 if XLA recorded none."""
        return self.calls[0][2] if self.calls else 0


# ---------------------------------------------------------------- reading a line

_START = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([^\]]*)\](?:\{[^}]*?(?:S\((\d+)\)[^}]*)?\})?")
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
_COMMENT = re.compile(r"/\*.*?\*/")
_DIRECTION = re.compile(r"\bdirection=(\w+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NO_CYCLES = 2**63 - 1
# As attributes of a dot or a convolution, and in the configuration of a GPU's library call.
_ALGORITHM = re.compile(r'\balgorithm=dot_(\w+)|"algorithm":"ALG_DOT_(\w+)"')
_PRECISION = re.compile(r'\boperand_precision=\{(high\w*)|"operand_precision":\["(HIGH\w*)"')

Place = tuple[str, str, int]
"""A file, a function and a line."""
Frames = Mapping[int, tuple[Place, ...]]
"""The place of each stack frame, and behind it those of its callers."""


def instruction_of(line: str, frames: Frames) -> Instruction | None:
    """The instruction that a line holds; None if it holds none."""
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
    shapes = [Shape(m[1], _dims(m[2]), int(m[3] or 0)) for m in _SHAPE.finditer(line, at, end)]
    index = _INDEX.search(rest) if opcode[1] == "get-tuple-element" else None
    literal = opcode[1] in ("parameter", "constant")
    direction = _DIRECTION.search(rest) if opcode[1] == "compare" else None
    target = _TARGET.search(rest) if opcode[1] == "custom-call" else None
    op_name, calls = _origin(rest, frames)
    instruction = Instruction(
        name=start[2],
        opcode=opcode[1],
        shapes=tuple(shapes),
        operands=() if literal else tuple(_operands(inside)),
        called=tuple(_called(rest)),
        op_name=op_name,
        calls=calls,
        index=int(inside) if opcode[1] == "parameter" else int(index[1]) if index else -1,
        target=target[1] if target else "",
        is_root=bool(start[1]),
        text=inside if opcode[1] == "constant" else direction[1] if direction else "",
        trips=_number(_TRIPS, rest) if opcode[1] == "while" else None,
        cycles=_cycles(rest),
        multiplied=_multiplied(rest),
    )
    is_ragged = instruction.target == MOSAIC_KERNEL and _RAGGED_DOT.match(instruction.name)
    return _as_ragged_dot(instruction) if is_ragged else instruction


# Another kernel, "ragged-dot-metadata", prepares the sizes of the groups.
_RAGGED_DOT = re.compile(r"ragged-dot-(?!metadata)")


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


def _called(rest: str) -> Iterator[tuple[str, str]]:
    """The computations that an instruction calls, by attribute."""
    for match in _CALLED.finditer(rest):
        yield match[1], match[2]
    for match in _BRANCHES.finditer(rest):
        for name in filter(None, match[2].split(",")):
            yield match[1], name.strip().lstrip("%")


def _cycles(rest: str) -> int:
    """The compiler's estimate of an instruction's cycles; 0 where it knows none."""
    cycles = _number(_CYCLES, rest) or 0
    return cycles if cycles < _NO_CYCLES else 0


def _multiplied(rest: str) -> str:
    """How a product's operands are multiplied; "" by default, and for all other instructions."""
    found = _ALGORITHM.search(rest) or _PRECISION.search(rest)
    return (found[1] or found[2]).lower() if found else ""


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    """The number that a pattern finds in a text; None if it finds none."""
    match = pattern.search(text)
    return int(match[1]) if match else None


def _origin(rest: str, frames: Frames) -> tuple[str, tuple[Place, ...]]:
    """Name stack, and the line and its callers, from the metadata or the frame that it names."""
    at = rest.find("metadata={")
    if at < 0:
        return "", ()
    text = rest[at : _closed(rest, at + len("metadata="))]
    name, frame = _OP_NAME.search(text), _FRAME.search(text)
    calls = frames.get(int(frame[1]), ()) if frame else ()
    # Before stack frames had a table of their own, each instruction named its file.
    if own_file := _FILE.search(text):
        own_line = _LINE.search(text)
        function = calls[0][1] if calls else ""
        calls = ((own_file[1], function, int(own_line[1]) if own_line else 0), *calls[1:])
    return name[1].replace('\\"', '"') if name else "", calls


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
    """The names in a list of operands, whose types and numbers may stand before them."""
    text = _COMMENT.sub("", text)  # XLA numbers each fifth operand: "/*index=5*/%x"
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


def frames_of(text: str) -> Frames:
    """The places of each stack frame and of its callers, from the tables at the head."""
    files = {
        int(i): name for i, name in re.findall(rf"^(\d+) {_STRING}$", _table(text, "FileN"), re.M)
    }
    functions = dict(re.findall(rf"^(\d+) {_STRING}$", _table(text, "FunctionN"), re.M))
    pattern = r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)"
    places = {
        place: (files.get(int(file), ""), functions.get(function, ""), int(line))
        for place, file, function, line in re.findall(pattern, _table(text, "FileL"), re.M)
    }
    pattern = r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
    rows = re.findall(pattern, _table(text, "StackF"), re.M)
    # Some releases of XLA print numbers of parents that are one too large.
    shift = any(frame == parent for frame, _, parent in rows)
    frames: dict[int, tuple[Place, ...]] = {}
    for frame, place, parent in rows:  # callers first
        callers = frames.get(int(parent or 0) - shift, ())
        frames[int(frame)] = (places.get(place, ("", "", 0)), *callers)
    return frames


def _table(text: str, start: str) -> str:
    match = re.search(rf"^{start}\w+\n((?:\d+ .*\n?)*)", text, re.M)
    return match[1] if match else ""
