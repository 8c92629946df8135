"""What devices can do: matrix products by format, and memory, each figure with its source.

An accelerator's figures are published peaks: dense, without sparsity, and of one device, a GPU in
its SXM or OAM form or a TPU chip. A peak that no vendor publishes is None. A CPU's figures are
measured; one that is assumed says so. Costs are only compared with each other, so a plan is the
same for a device that reaches half of all its peaks.

JAX, not the device, chooses what a matrix product of float32 operands runs in. By
`jax.lax.Precision` (JAX's documentation, 2026-11) it is TF32 on an NVIDIA GPU that has it, by
default and at HIGH, and float32 at HIGHEST; on a TPU it is one pass in bfloat16 by default,
three at HIGH and six at HIGHEST. On AMD's XLA takes float32 throughout (openxla/xla#46177,
2026-07, which would change that, is open).
"""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import NamedTuple

from precpass.policy.precision import Precision

__all__ = [
    "CPUS",
    "PEAKS",
    "Device",
    "Peaks",
    "Source",
    "device_named",
    "peaks_of_kind",
]


class Source(NamedTuple):
    """The source of figures.

    Attributes:
        figures: the attributes of `Peaks` that it is the source of.
        title: the title of the vendor's document, or how they were measured, or why assumed.
        date: the date of the document or measurement, or when the page was read; a year, month
            or day.
        url: the document's address.
    """

    figures: tuple[str, ...]
    title: str
    date: str
    url: str = ""


Form = tuple[str, int]
"""A format, and the number of passes that a product takes in it."""


@dataclasses.dataclass(frozen=True)
class Peaks:
    """The peaks of a kind of device.

    Attributes:
        name: the device's name.
        platform: JAX's name, "cpu", "gpu" or "tpu".
        kinds: globs of JAX's `device_kind`, in lower case; for a CPU, of
            `precpass.devices.cpu_info`'s text. The first row that matches counts.
        f64, f32, tf32, bf16, f16: FLOP/s of matrix products in a format, by the fastest units that
            compute in it; None if nothing is published.
        bandwidth: of its memory, in bytes/s.
        float32: the form in which matrix products of float32 operands run, at JAX's precisions
            "default", "high" and "highest".
        sources: the sources of the figures.
        f8, int8: the same for operands of 8 bits; None if XLA widens them to 16 bits, so that no
            unit for 8 bits is used.
        sums_last: whether these units take only operands whose contracted dimensions are the last
            ones in memory.
    """

    name: str
    platform: str
    kinds: tuple[str, ...]
    f64: float | None
    f32: float | None
    tf32: float | None
    bf16: float
    f16: float | None
    bandwidth: float
    float32: dict[str, Form]
    sources: tuple[Source, ...]
    f8: float | None = None
    int8: float | None = None
    sums_last: bool = False

    def flops(self, name: str, asked: str = "default") -> float | None:
        """Return the FLOP/s of matrix products; None if nothing is published.

        Args:
            name: the name of the operands' format, "f32", or of their dtype. Products of complex
                numbers have the FLOP/s of their parts. "f8e4m3" and "f8e5m2" are "f8".
            asked: the precision of float32 products, "default", "high" or "highest"; or the name of
                a dot algorithm, which names the format too.

        Examples:
            >>> h100 = peaks_of_kind("gpu", "NVIDIA H100 80GB HBM3")
            >>> h100.flops("f32") == h100.tf32, h100.flops("f32", "highest") == h100.f32
            (True, True)
            >>> h100.flops("f32", "BF16_BF16_F32_X3") == h100.bf16 / 3
            True
        """
        name = {"complex64": "f32", "complex128": "f64"}.get(name, name)
        if "_" not in asked:
            form, passes = self.float32[asked] if name == "f32" else (name, 1)
        else:  # BF16_BF16_F32_X3: the operands', the sums' format, and the passes
            form, _, more = asked.lower().partition("_")
            passes = int(more.rpartition("_x")[2]) if "_x" in more else 1
        form = "f8" if form in ("f8e4m3", "f8e5m2") else form
        peak = getattr(self, form) if form in _FORMS else None
        return None if peak is None else peak / passes

    def source_of(self, figure: str) -> Source:
        """Return the source of a figure; a `Source` that says so if the figure is not published."""
        sources = (source for source in self.sources if figure in source.figures)
        return next(sources, Source((figure,), "not published", ""))

    def __str__(self) -> str:
        return self.name


_FORMS = ("f64", "f32", "tf32", "bf16", "f16", "f8", "int8")


# ---------------------------------------------------------------- the table

_NVIDIA: dict[str, Form] = {"default": ("tf32", 1), "high": ("tf32", 1), "highest": ("f32", 1)}
_AMD: dict[str, Form] = {"default": ("f32", 1), "high": ("f32", 1), "highest": ("f32", 1)}
_TPU: dict[str, Form] = {"default": ("bf16", 1), "high": ("bf16", 3), "highest": ("bf16", 6)}

_AMPERE = Source(
    ("f64", "f32", "tf32", "bf16", "f16", "int8"),
    "NVIDIA A100 Tensor Core GPU data sheet",
    "2021-06",
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
)
_HOPPER = Source(
    ("f64", "f32", "tf32", "bf16", "f16", "f8", "int8"),
    "NVIDIA H100 Tensor Core GPU Architecture",
    "2022-10",
    "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper",
)
_BLACKWELL = Source(
    (*_FORMS, "bandwidth"),
    "NVIDIA Blackwell Architecture Technical Brief, by the B200 of an HGX board",
    "2024-03",
    "https://resources.nvidia.com/en-us-blackwell-architecture",
)
_CDNA3 = Source(
    ("f64", "f32", "tf32", "bf16", "f16", "int8", "bandwidth"),
    "AMD Instinct MI300X Accelerator data sheet, by its matrix cores",
    "2023-12",
    "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
)


def _memory(title: str, date: str, url: str) -> Source:
    return Source(("bandwidth",), title, date, url)


def _ampere(name: str, kind: str, bandwidth: float, memory: Source) -> Peaks:
    flops = 19.5e12, 19.5e12, 156e12, 312e12, 312e12
    sources = _AMPERE, memory
    eight = None, 624e12
    return Peaks(name, "gpu", (kind,), *flops, bandwidth, _NVIDIA, sources, *eight, sums_last=True)


def _hopper(name: str, kind: str, bandwidth: float, memory: Source) -> Peaks:
    flops = 66.9e12, 66.9e12, 494.7e12, 989.4e12, 989.4e12
    sources, eight = (_HOPPER, memory), (1978.9e12, 1978.9e12)
    return Peaks(name, "gpu", (kind,), *flops, bandwidth, _NVIDIA, sources, *eight, sums_last=True)


def _tpu(
    version: str,
    kinds: tuple[str, ...],
    bf16: float,
    bandwidth: float,
    *,
    page: str | None = None,
    f8: float | None = None,
    int8: float | None = None,
) -> Peaks:
    # Which 8 bits XLA multiplies as such is from the cycles that libtpu 0.0.50.1 estimates for a
    # product of 4096^3 (2026-11). To bfloat16's: int8 takes 1.09 on a v4, 0.50 on a v5e, 0.51 on a
    # v5p, 0.76 on a v6e and 1.00 on a 7x, float8 1.17, 1.01, 1.01, 1.09 and 0.48. The peaks of
    # those that it widens are left out.
    url = f"https://cloud.google.com/tpu/docs/{page or version}"
    figures = "bf16", "bandwidth", *(n for n, peak in (("f8", f8), ("int8", int8)) if peak)
    source = Source(figures, f"Google Cloud: TPU {version}", "2026-11-22", url)
    flops = None, None, None, bf16, None
    name = f"TPU {version}"
    return Peaks(name, "tpu", kinds, *flops, bandwidth, _TPU, (source,), f8, int8)


PEAKS: tuple[Peaks, ...] = (
    _ampere(
        "NVIDIA A100, 40 GB",
        "nvidia a100*40gb*",
        1.555e12,
        _memory(
            "NVIDIA A100 Tensor Core GPU Architecture",
            "2020-05",
            "https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/"
            "nvidia-ampere-architecture-whitepaper.pdf",
        ),
    ),
    _ampere(
        "NVIDIA A100, 80 GB",
        "nvidia a100*",
        2.039e12,
        _AMPERE._replace(figures=("bandwidth",)),
    ),
    _hopper(
        "NVIDIA H100 SXM",
        "nvidia h100*",
        3.35e12,
        _memory(
            "NVIDIA H100 Tensor Core GPU data sheet",
            "2023",
            "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet",
        ),
    ),
    _hopper(
        "NVIDIA H200 SXM",
        "nvidia h200*",
        4.8e12,
        _memory(
            "NVIDIA H200 Tensor Core GPU data sheet; its products are the H100's",
            "2023-11",
            "https://www.nvidia.com/en-us/data-center/h200/",
        ),
    ),
    Peaks(
        "NVIDIA B200 SXM",
        "gpu",
        ("nvidia b200*",),
        f64=40e12,
        f32=80e12,
        tf32=1.1e15,
        bf16=2.25e15,
        f16=2.25e15,
        bandwidth=8e12,
        float32=_NVIDIA,
        sources=(_BLACKWELL,),
        f8=4.5e15,
        int8=4.5e15,
    ),
    Peaks(
        "AMD Instinct MI300X",
        "gpu",
        ("amd instinct mi300x*",),
        f64=163.4e12,
        f32=163.4e12,
        tf32=653.7e12,
        bf16=1307.4e12,
        f16=1307.4e12,
        bandwidth=5.3e12,
        float32=_AMD,
        sources=(_CDNA3,),
        # Its float8 formats have another bias than these (`float8_e4m3fnuz`).
        int8=2614.9e12,
    ),
    _tpu("v4", ("tpu v4*",), 275e12, 1.2e12),
    _tpu("v5e", ("tpu v5 lite*", "tpu v5e*"), 197e12, 819e9, int8=393e12),
    _tpu("v5p", ("tpu v5", "tpu v5p*"), 459e12, 2.765e12, int8=918e12),
    _tpu("v6e", ("tpu v6 lite*", "tpu v6e*"), 918e12, 1.64e12, int8=1836e12),
    # A device is one of a chip's two halves.
    _tpu(
        "7x",
        ("tpu7x*", "tpu 7x*"),
        2307e12 / 2,
        7.38e12 / 2,
        page="tpu7x",
        f8=4614e12 / 2,
    ),
)
"""The accelerators."""

_TITLE = (
    "measured: 2048 x 2048 products, elementwise programs of 256 MB, jax 0.10.2 and 0.12.0.1, two "
    "cores of an Intel Xeon with AVX512-BF16 and AMX"
)
_WIDENS = "precpass.audit: XLA:CPU has no kernel, and runs the product on operands of float32"
_TWICE = (
    "assumed: int8 is twice as fast as bfloat16. Measured with jax 0.10.2 and 0.12.0.1: with AMX a "
    "product of 1024 cubed takes 0.16 and 0.09 of float32's time in int8 and 0.21 and 0.38 in "
    "bfloat16; without AMX one of 2048 cubed takes 1.25 and 0.52 of bfloat16's time in int8"
)


def _cpu(name: str, kind: str, bf16: float, int8: float, *more: Source) -> Peaks:
    measured = Source(("f32", "bandwidth"), _TITLE, "2026-11-22")
    widened = Source(("f16", "f8"), _WIDENS, "2026-11-26")
    flops = None, 155e9, None, bf16, 155e9
    sources = measured, widened, *more
    return Peaks(name, "cpu", (kind,), *flops, 4e9, _AMD, sources, 155e9, int8)


CPUS = (
    _cpu(
        "CPU with bfloat16 instructions",
        "*bf16*",
        510e9,
        1020e9,
        Source(("bf16",), _TITLE, "2026-11-22"),
        Source(("int8",), _TWICE, "2026-11-26"),
    ),
    _cpu(
        "CPU without bfloat16 instructions",
        "*",
        155e9,
        155e9,
        Source(("bf16",), f"assumed from {_WIDENS}", "2026-11-22"),
        Source(("int8",), "assumed: as fast as float32", "2026-11-26"),
    ),
)


# ---------------------------------------------------------------- the device of a plan


@dataclasses.dataclass(frozen=True)
class Device:
    """A device that programs are planned for.

    Attributes:
        platform: JAX's name, "cpu", "gpu" or "tpu".
        kind: JAX's name for the kind of device.
        peaks: its figures, or those of another device.
        is_known: whether they are its own.
    """

    platform: str
    kind: str
    peaks: Peaks
    is_known: bool = True

    def flops(self, precision: Precision) -> float:
        """Return the FLOP/s of matrix products with operands of a format.

        Where a device has no units for a format, XLA multiplies in bfloat16.

        Raises:
            ValueError: for float64, for which there are no figures.
        """
        if precision is Precision.F64:
            raise ValueError("devices have figures for f32, bf16, f16 and 8 bits: not for f64")
        return self.peaks.flops(str(precision)) or self.peaks.bf16

    def __str__(self) -> str:
        if self.is_known:
            return self.kind
        return f"{self.kind or 'a device'} (not in the table: figures of {self.peaks})"


def peaks_of_kind(platform: str, kind: str) -> Peaks | None:
    """Return the peaks of a kind of accelerator; None if it is not in the table, and for a CPU.

    Args:
        platform: "gpu" or "tpu".
        kind: JAX's `device_kind`.
    """
    return _row(PEAKS, platform, kind)


def _row(table: tuple[Peaks, ...], platform: str, kind: str) -> Peaks | None:
    for peaks in table:
        kinds = peaks.kinds if peaks.platform == platform else ()
        if any(fnmatch.fnmatch(kind.lower(), glob) for glob in kinds):
            return peaks
    return None


_BY_NAME = {peaks.name: peaks for peaks in (*CPUS, *PEAKS)}
_INSTEAD = {"cpu": CPUS[1].name, "tpu": "TPU v5e"}


def device_named(platform: str, kind: str) -> Device:
    """Return the `Device` of a kind. If it is not in the table, its name says whose figures it has.

    Args:
        platform: JAX's name; "cuda" and "rocm" count as "gpu".
        kind: JAX's `device_kind`; for a CPU the text of `precpass.devices.cpu_info`.

    Examples:
        >>> device_named("gpu", "NVIDIA H200").peaks.name
        'NVIDIA H200 SXM'
        >>> print(device_named("gpu", "Quux 9000"))
        Quux 9000 (not in the table: figures of NVIDIA A100, 80 GB)
    """
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    known = _row((*CPUS, *PEAKS), platform, kind)
    figures = known or _BY_NAME[_INSTEAD.get(platform, "NVIDIA A100, 80 GB")]
    return Device(platform, kind, figures, known is not None)
