"""The model and instructions of this machine's processor, which JAX only calls "cpu"."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import subprocess
from pathlib import Path

__all__ = ["CpuInfo", "cpu_info"]

UNKNOWN = "unknown CPU"


@dataclasses.dataclass(frozen=True)
class CpuInfo:
    """The processor of this machine.

    Attributes:
        model: its name in the operating system.
        bf16: the names of its bfloat16 instructions in the operating system.
        cores: the number of cores that this process may use.
    """

    model: str
    bf16: tuple[str, ...]
    cores: int

    def __str__(self) -> str:
        formats = f" with {', '.join(self.bf16)}" if self.bf16 else ""
        return f"{self.model}{formats}, {self.cores} cores"


@functools.cache
def cpu_info() -> CpuInfo:
    """Return the processor that this process runs on; the result is cached."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        model, flags = _of_linux(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        model, flags = _of_mac() if platform.system() == "Darwin" else ("", ())
    model = model or platform.processor() or platform.machine() or UNKNOWN
    return CpuInfo(model, flags, cores or 1)


def _of_linux(text: str) -> tuple[str, tuple[str, ...]]:
    lines = [line.partition(":") for line in text.splitlines()]
    # The first processor's entry. Those of Arm have no model name.
    facts = {key.strip(): value.strip() for key, _, value in reversed(lines)}
    flags = facts.get("flags") or facts.get("Features") or ""
    return facts.get("model name", ""), tuple(f for f in flags.split() if "bf16" in f)


def _of_mac() -> tuple[str, tuple[str, ...]]:
    names = "machdep.cpu.brand_string", "hw.optional.arm.FEAT_BF16"
    model, bf16 = map(_sysctl, names)
    return model, ("bf16",) if bf16 == "1" else ()


def _sysctl(name: str) -> str:
    try:
        said = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout.strip()
