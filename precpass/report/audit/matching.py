"""Which instructions of a lowered and of a compiled program are the same operation.

Both programs are HLO text. The lowered program is the plan in XLA's terms, one to one; the
compiled one is what runs. XLA keeps the name stack and the source line of an instruction through
its passes, so equal names and lines mean the same operation.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import TypeVar

from precpass import jaxpr as ir
from precpass.measure.hlo import PRODUCTS, Computation, Instruction, Module, Placed, Shape, bits

__all__ = [
    "MOVES",
    "UNKNOWN",
    "Change",
    "Key",
    "Sides",
    "change",
    "entries",
    "factors",
    "formats_read",
    "is_product",
    "past_moves",
    "readers",
    "sizes",
    "widened",
]

Key = tuple[str, str, int]
"""Name stack and primitive, file, line."""

Slot = TypeVar("Slot", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Change:
    """Something that runs or is stored in another precision than planned.

    Attributes:
        kind: "product widened", "product narrowed", "cast removed", "cast moved",
            "loop state widened", "buffer widened" or "collective widened".
        name: JAX's name stack and primitive.
        calls: the user's line, and behind it those of its callers.
        planned, compiled: the types, as HLO writes them.
        planned_dtype, compiled_dtype: the element types that differ.
        why: the consequence, in a sentence.
    """

    kind: str
    name: str
    calls: tuple[ir.Source, ...]
    planned: str
    compiled: str
    planned_dtype: str
    compiled_dtype: str
    why: str

    @property
    def source(self) -> ir.Source:
        """The user's line."""
        return self.calls[0] if self.calls else ir.Source()


def change(
    kind: str, placed: Placed, planned: object, compiled: object, dtypes: tuple[str, str], why: str
) -> Change:
    """A change of a planned instruction."""
    instruction = placed.instruction
    calls = tuple(
        ir.Source(file, function.rpartition(".")[2], line)
        for file, function, line in instruction.calls
    )
    return Change(kind, placed.name, calls, str(planned), str(compiled), *dtypes, why)


class Sides:
    """The instructions of both programs by key.

    Attributes:
        planned: those of the lowered program, in its order.
        compiled: those of the compiled program, under the keys of the planned ones; under "" if
            XLA recorded no name, or made a new one.
        product_keys: the keys of planned products, in the program's order.
        loops: the names of the compiled program's loops.
        modules: both programs.
    """

    def __init__(self, planned: Module, compiled: Module) -> None:
        self.modules = planned, compiled
        self.planned: dict[Key, list[Placed]] = defaultdict(list)
        for placed in planned.walk():
            self.planned[_key(placed.name, placed.instruction)].append(placed)
        self.product_keys = dict.fromkeys(
            key for key, there in self.planned.items() if any(map(is_product, there))
        )
        self.compiled: dict[Key, list[Placed]] = defaultdict(list)
        self.loops: set[str] = set()
        for placed in compiled.walk():
            key = self._compiled_key(placed)
            self.compiled[key].append(placed)
            if placed.instruction.opcode == "while":
                self.loops.add(key[0])

    def _compiled_key(self, placed: Placed) -> Key:
        instruction = placed.instruction
        # The instructions of an inlined call have whole names already.
        names = (instruction.op_name, placed.name) if instruction.op_name else ()
        keys = [_key(name, instruction) for name in names]
        product = is_product(placed)
        wanted = self.product_keys if product else self.planned
        if shared_key := next((key for key in keys if key in wanted), None):
            return shared_key
        again = self._key_of_product(placed, names) if product else None
        return again or (keys[0] if keys else ("", "", 0))

    def _key_of_product(self, placed: Placed, names: Collection[str]) -> Key | None:
        """The key of the planned product that a compiled one with an unknown key was.

        XLA gives some products another line. It builds others anew: those with a vector, and those
        that it moves a transpose into. They have no name, or that of the transpose, and what
        reads or feeds them has the product's. The planned one has operands of the same sizes.
        """
        instruction = placed.instruction
        scope = instruction.op_name.rpartition("/")[0]
        named = [k for k in self.product_keys if k[0] in names]
        near = [_key(i.op_name, i) for i in self._near(placed)]
        line = [k for k in self.product_keys if k[1:] == (instruction.file, instruction.line)]
        same = [k for k in line if k[0].rpartition("/")[0] == scope]
        line.sort(key=lambda k: -_shared(k[0], scope))
        for key in (*named, *same, *near, *line):
            planned = self.planned[key] if key in self.product_keys else ()
            if any(sizes(p) == sizes(placed) for p in planned if is_product(p)):
                return key
        return None

    def _near(self, placed: Placed) -> Iterator[Instruction]:
        """The readers and operands of an instruction, also inside fusions."""
        name, computation = placed.instruction.name, placed.computation
        for reader in _past_tuples(computation, name):
            yield reader
            for inside, entry in entries(self.modules[1], reader, name):
                yield from inside.readers[entry.name]
        if placed.instruction.is_root and placed.caller is not None:
            yield placed.caller
        yield from computation.operands(placed.instruction)

    def pairs(
        self, wanted: Callable[[Placed], bool]
    ) -> Iterator[tuple[Key, list[Placed], list[Placed]]]:
        """The wanted instructions of both sides, for each key that the planned side has."""
        for key, placed in self.planned.items():
            chosen = [p for p in placed if wanted(p)] if key[0] else []
            if chosen:
                yield key, chosen, [c for c in self.compiled.get(key, ()) if wanted(c)]


def _key(name: str, instruction: Instruction) -> Key:
    return name, instruction.file, instruction.line


def _past_tuples(computation: Computation, name: str) -> Iterator[Instruction]:
    """The readers of a result, and of what they take out of it if it is a tuple."""
    for reader in computation.readers[name]:
        if reader.opcode == "get-tuple-element":
            yield from _past_tuples(computation, reader.name)
        yield reader


def _shared(name: str, other: str) -> int:
    """The number of outermost parts that two name stacks have in common."""
    pairs = zip(name.split("/"), other.split("/"), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


_ONEDNN = ("__onednn$matmul", "__onednn$convolution")
"""oneDNN's kernels, which jax 0.12 calls on some CPUs; the second result is working memory."""

MOVES = frozenset(
    ("bitcast", "broadcast", "copy", "opt-barrier", "reshape", "reverse", "slice", "transpose")
)
"""Opcodes that only move or repeat elements."""


def readers(placed: Placed) -> Iterator[Instruction | None]:
    """The readers of a result, looking through data movement.

    None stands for a reader that is not visible: of a computation's result, or none at all.
    """
    waiting, seen = [placed.instruction], set[str]()
    while waiting:
        instruction = waiting.pop()
        readers = placed.computation.readers[instruction.name]
        if instruction.is_root or not readers:
            yield None
        for reader in readers:
            if reader.opcode not in MOVES:
                yield reader
            elif reader.name not in seen:
                seen.add(reader.name)
                waiting.append(reader)


def past_moves(computation: Computation, instruction: Instruction) -> Instruction:
    """The instruction that makes the elements which another one moves; itself if it moves none."""
    while instruction.opcode in MOVES:
        before = computation.operands(instruction)
        if len(before) != 1:
            break
        (instruction,) = before
    return instruction


def entries(
    module: Module, fusion: Instruction, name: str
) -> Iterator[tuple[Computation, Instruction]]:
    """The parameters through which a fusion reads a value; none for other instructions."""
    for computation in module.called(fusion) if fusion.opcode == "fusion" else ():
        for instruction in computation.instructions:
            if instruction.opcode == "parameter" and fusion.operands[instruction.index] == name:
                yield computation, instruction


UNKNOWN = "?"
"""Stands among the formats in which a value is read for a reader that cannot be followed."""


def formats_read(module: Module, computation: Computation, value: Instruction) -> set[str]:
    """The formats to which readers cast a value, moved or not; "" stands for any other reader."""
    found = set[str]()
    waiting, seen = [(computation, value)], set[tuple[str, str]]()
    while waiting:
        computation, value = waiting.pop()
        if (computation.name, value.name) in seen:
            continue
        seen.add((computation.name, value.name))
        is_entry = computation.name == module.entry
        if value.is_root:
            outside = () if is_entry else module.callers.get(computation.name, ())
            found |= {""} if is_entry else set()
            found |= {UNKNOWN} if any(i.opcode != "fusion" for _, i in outside) else set()
            waiting += [of for of in outside if of[1].opcode == "fusion"]
        for reader in computation.readers[value.name]:
            if reader.opcode in MOVES:
                waiting.append((computation, reader))
            elif reader.opcode == "fusion":
                waiting += entries(module, reader, value.name)
            elif reader.opcode == "convert":
                found.add(reader.shapes[0].dtype)
            else:
                is_result = is_entry and reader.is_root
                hides = reader.called or reader.opcode in ("tuple", "custom-call")
                found.add(UNKNOWN if hides and not is_result else "")
    return found


def is_product(placed: Placed) -> bool:
    """Whether an instruction is a product of floating operands, or of two in int8."""
    instruction = placed.instruction
    is_known = instruction.opcode in PRODUCTS or instruction.target in _ONEDNN
    return is_known and len(factors(placed)) == 2


def sizes(placed: Placed) -> tuple[int, ...]:
    """The numbers of elements of a product's operands, in any order."""
    return tuple(sorted(s.size for s in factors(placed)))


def factors(placed: Placed) -> tuple[Shape, ...]:
    """The types of an instruction's first two operands that products multiply."""
    operands = placed.computation.operands(placed.instruction)
    return tuple(i.shapes[0] for i in operands if len(i.shapes) == 1 and i.shapes[0].is_factor)[:2]


def widened(
    planned: Iterable[tuple[Slot, str]], compiled: Iterable[tuple[Slot, str]]
) -> Iterator[tuple[Slot, str, str]]:
    """The slots that went from a narrower element type to a wider one, as (slot, narrow, wide).

    A slot counts if its planned type is missing on the compiled side, and a wider one of the same
    slot is there that was not planned. Types that were only added or only removed do not count.
    """
    here, there = Counter(planned), Counter(compiled)
    lost, gained = here - there, there - here
    left: dict[Slot, list[str]] = defaultdict(list)
    for (where, dtype), times in sorted(gained.items(), key=lambda item: bits(item[0][1])):
        left[where] += [dtype] * times
    for (where, dtype), times in lost.items():
        for _ in range(times):
            wide = next((d for d in left[where] if bits(d) > bits(dtype) > 0), None)
            if wide is not None:
                left[where].remove(wide)
                yield where, dtype, wide
