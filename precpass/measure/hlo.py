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

from precpass.measure.hlo_instructions import (
    Instruction,
    Shape,
    bits,
    frames_of,
    instruction_of,
)
from precpass.policy.scopes import join_scopes

__all__ = ["Computation", "Instruction", "Module", "Placed", "Shape", "bits"]


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

        Examples:
            >>> text = '''HloModule m
            ...
            ... ENTRY main.1 {
            ...   x.1 = f32[4]{0} parameter(0)
            ...   ROOT y.1 = bf16[4]{0} convert(x.1), metadata={op_name="jit(f)/convert"}
            ... }'''
            >>> [i.opcode for i in Module.parse(text).computations["main.1"].instructions]
            ['parameter', 'convert']
        """
        frames = frames_of(text)
        computations: dict[str, Computation] = {}
        entry, name, instructions = "", "", list[Instruction]()
        for line in text.splitlines():
            if name:
                if line.startswith("}"):
                    computations[name] = Computation(name, tuple(instructions))
                    name = ""
                elif instruction := instruction_of(line, frames):
                    instructions.append(instruction)
            elif header := _HEADER.match(line):
                name, instructions = header[2], []
                entry = name if header[1] else entry
        if not computations:
            raise ValueError(
                "this is not HLO text: give what Lowered.as_text(dialect='hlo') or "
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

    @functools.cached_property
    def homes(self) -> Mapping[str, Computation]:
        """The computation that each instruction stands in, by the instruction's name."""
        return {i.name: c for c in self.computations.values() for i in c.instructions}

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
