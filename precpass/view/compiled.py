"""The compiler's figures for a program, in words."""

from __future__ import annotations

import dataclasses

from precpass.measure.execute import Memory
from precpass.measure.traffic import Traffic
from precpass.units import counted, sized
from precpass.view.text import Line

__all__ = ["Compiled", "compiled_lines"]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What XLA's compiler reports of a program that it compiled for a device.

    Attributes:
        device_kind: JAX's name for the kind of device ("NVIDIA H100 80GB HBM3", ...).
        memory: what XLA allocates; None if the backend does not report it.
        traffic: the compiled program's kernels, the bytes that they move, and a TPU's cycles.
    """

    device_kind: str
    memory: Memory | None
    traffic: Traffic

    def lines(self) -> list[str]:
        """The figures in words: bytes and cycles, memory, and each kind of product."""
        traffic, memory = self.traffic, self.memory
        cycles = ""
        if traffic.cycles is not None:
            cycles = f", {traffic.cycles / 1e6:,.2f} Mcycles by the compiler's estimate"
        if traffic.without_cycles:
            cycles += f", which leaves out {counted(traffic.without_cycles, 'kernel')}"
        if traffic.guesses:
            cycles += ", with one iteration of each loop whose number is not known"
        each = f" of each of {memory.devices} devices" if memory and memory.devices > 1 else ""
        lines = [
            f"kernels{each} move {sized(traffic.moved)}{cycles}; {traffic.casts} only cast "
            f"({sized(traffic.cast_bytes)}), {traffic.transposes} only transpose or copy"
        ]
        if memory is not None:
            parts = f"arguments {sized(memory.arguments)}, results {sized(memory.outputs)}, temp "
            lines.append(f"memory{each}: {parts}{sized(memory.temp)}")
            if memory.available is not None and not memory.fits:
                sizes = f"it needs {sized(memory.needed)}, and there are {sized(memory.available)}"
                lines.append(f"the program does not fit into the device's memory: {sizes}")
        if traffic.sent:
            sent = ", ".join(f"{kind} {sized(nbytes)}" for kind, nbytes in traffic.sent)
            lines.append(f"sent between devices, sizes of whole arrays: {sent}")
        return [*lines, *(f"{kernel.runs:>6} x {kernel}" for kernel in traffic.products)]


def compiled_lines(compiled: Compiled | None, not_compiled: str) -> list[Line]:
    """What a compiler says of a program, or why it says nothing, as styled text.

    Args:
        compiled: what it says; None if it was not asked, or says nothing.
        not_compiled: why it says nothing; "" if it was not asked.
    """
    if compiled is None:
        return [[("not compiled  ", "frame"), (not_compiled, "reason")]] if not_compiled else []
    head = f"compiled for {compiled.device_kind}"
    return [[(head, "frame")], *([(f"  {line}", "")] for line in compiled.lines())]
