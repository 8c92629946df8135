"""The figures of devices, published or measured.

An accelerator's figures are published peaks (`precpass.devices.peaks`). Costs are only compared
with each other, so the plan is the same for a device that reaches half of all its peaks. If a
figure is neither published nor measured but assumed, its source says so.
"""

from __future__ import annotations

import dataclasses
from typing import cast

from precpass.devices.peaks import PEAKS, Peaks, Source, is_of_kind
from precpass.policy.precision import Precision

__all__ = ["DEVICES", "Device", "device_named"]


@dataclasses.dataclass(frozen=True)
class Device:
    """The figures of a kind of device.

    Attributes:
        name: its name in this package.
        platform: JAX's name, "cpu", "gpu" or "tpu".
        kinds: globs of JAX's `device_kind`; for a CPU, globs of `precpass.devices.cpu_info`'s text.
        f32, bf16, f16: FLOP/s of matrix products with operands of a format, at JAX's default
            precision: TF32 passes on NVIDIA's, one bfloat16 pass on a TPU.
        f8, int8: the same for operands of 8 bits; what runs instead where XLA widens them.
        bandwidth: of its memory, in bytes/s.
        sources: the sources of all figures.
        kind: JAX's name for the present device; "" in the table.
        is_known: whether the device is in the table; otherwise the figures are those of `name`.
    """

    name: str
    platform: str
    kinds: tuple[str, ...]
    f32: float
    bf16: float
    f16: float
    f8: float
    int8: float
    bandwidth: float
    sources: tuple[Source, ...]
    kind: str = ""
    is_known: bool = True

    def flops(self, precision: Precision) -> float:
        """Return the FLOP/s of matrix products with operands of a format.

        Raises:
            ValueError: for float64, for which there are no figures.
        """
        if precision is Precision.F64:
            raise ValueError("devices have figures for f32, bf16, f16 and 8 bits: not for f64")
        name = "f8" if precision is Precision.F8E4M3 else str(precision)
        return cast(float, getattr(self, name))

    def __str__(self) -> str:
        if self.is_known:
            return self.kind or self.name
        return f"{self.kind or 'a device'} (not in the table: figures of {self.name})"


# ---------------------------------------------------------------- the table

_MEASURED_HERE = (
    "measured: 2048 x 2048 products, elementwise programs of 256 MB, jax 0.10.2 and "
    "0.12.0.1, two cores of an Intel Xeon with AVX512-BF16 and AMX"
)
_CPU_FIGURES = ("f32", "bandwidth")
_WIDENS = (
    "precpass.audit: XLA:CPU has no kernel, and runs the product on operands widened to float32"
)
_EMULATED = "assumed from precpass.audit: XLA:CPU runs float8 products on operands of float32"
_TWICE = (
    "assumed: int8 is twice as fast as bfloat16. Measured with jax 0.10.2 and 0.12.0.1: with AMX a "
    "product of 1024 cubed takes 0.16 and 0.09 of float32's time in int8 and 0.21 and 0.38 in "
    "bfloat16; without AMX one of 2048 cubed takes 1.25 and 0.52 of bfloat16's time in int8"
)
_WIDENS_8 = "assumed: XLA widens the operands to bfloat16"
_NO_FLOAT16 = "assumed: as fast as bfloat16, as no figure is published"


def _cpu(name: str, kinds: tuple[str, ...], bf16: float, *more: Source, int8: float) -> Device:
    sources = (
        Source(_CPU_FIGURES, _MEASURED_HERE, "2026-11-22"),
        *more,
        Source(("f16",), _WIDENS, "2026-11-22"),
        Source(("f8",), _EMULATED, "2026-11-26"),
    )
    return Device(
        name,
        "cpu",
        kinds,
        f32=155e9,
        bf16=bf16,
        f16=155e9,
        f8=155e9,
        int8=int8,
        bandwidth=4e9,
        sources=sources,
    )


def _accelerator(peaks: Peaks) -> Device:
    """The `Device` of an accelerator with published peaks."""
    wide, _ = peaks.float32["default"]
    origins = {"f32": wide, "bf16": "bf16", "f16": "f16", "bandwidth": "bandwidth"}
    sources = [peaks.source_of(origin)._replace(figures=(f,)) for f, origin in origins.items()]
    if peaks.f16 is None:
        sources[2] = Source(("f16",), _NO_FLOAT16, "2026-11")
    for name in ("f8", "int8"):
        has = getattr(peaks, name) is not None
        found = peaks.source_of(name)._replace(figures=(name,))
        sources.append(found if has else Source((name,), _WIDENS_8, "2026-11-26"))
    return Device(
        peaks.name,
        peaks.platform,
        peaks.kinds,
        f32=getattr(peaks, wide),
        bf16=peaks.bf16,
        f16=peaks.f16 or peaks.bf16,
        f8=peaks.f8 or peaks.bf16,
        int8=peaks.int8 or peaks.bf16,
        bandwidth=peaks.bandwidth,
        sources=tuple(sources),
    )


DEVICES: tuple[Device, ...] = (
    _cpu(
        "CPU with bfloat16 instructions",
        ("*bf16*",),
        510e9,
        Source(("bf16",), _MEASURED_HERE, "2026-11-22"),
        Source(("int8",), _TWICE, "2026-11-26"),
        int8=1020e9,
    ),
    _cpu(
        "CPU without bfloat16 instructions",
        ("*",),
        155e9,
        Source(("bf16",), f"assumed from {_WIDENS}", "2026-11-22"),
        Source(("int8",), "assumed: as fast as float32", "2026-11-26"),
        int8=155e9,
    ),
    *map(_accelerator, PEAKS),
)
"""The table. For a device the first row of its platform counts whose glob matches."""

_DEFAULTS = {"cpu": "CPU without bfloat16 instructions", "tpu": "TPU v5e"}
_OTHERWISE = "NVIDIA A100, 80 GB"


def device_named(platform: str, kind: str) -> Device:
    """Return the `Device` of a kind. If it is not in the table, its name says whose figures it has.

    Args:
        platform: JAX's name; "cuda" and "rocm" count as "gpu".
        kind: JAX's `device_kind`; for a CPU the text of `precpass.devices.cpu_info`.

    Examples:
        >>> device_named("gpu", "NVIDIA H200").name
        'NVIDIA H200 SXM'
        >>> print(device_named("gpu", "Quux 9000"))
        Quux 9000 (not in the table: figures of NVIDIA A100, 80 GB)
    """
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    for row in DEVICES:
        if row.platform == platform and is_of_kind(kind, row.kinds):
            return dataclasses.replace(row, kind=kind)
    name = _DEFAULTS.get(platform, _OTHERWISE)
    (row,) = (row for row in DEVICES if row.name == name)
    return dataclasses.replace(row, platform=platform, kind=kind, is_known=False)
