"""What devices can do, as vendors say or as it was measured, and what work costs on them.

A figure is a peak, dense, without sparsity. It decides nothing by itself: costs are compared
with each other, so a device that reaches half of everything is planned for as well. Where
a figure is assumed and neither published nor measured, its source says so.

Costs are in seconds, of numbers or of NumPy arrays of them.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from precpass.precision import Precision

__all__ = [
    "DEVICES",
    "Device",
    "Source",
    "cast_seconds",
    "device_named",
    "elementwise_seconds",
    "product_seconds",
    "stored_seconds",
]

Amount = TypeVar("Amount", float, npt.NDArray[np.float64])


class Source(NamedTuple):
    """Where figures are from.

    Attributes:
        figures: the attributes of `Device`.
        title: of the vendor's document, or how it was measured, or why it is assumed.
        date: of the document, or of the measurement; a year, month or day.
    """

    figures: tuple[str, ...]
    title: str
    date: str


@dataclasses.dataclass(frozen=True)
class Device:
    """The facts of a kind of device.

    Attributes:
        name: ours.
        platform: JAX's, "cpu", "gpu" or "tpu".
        kinds: globs of JAX's `device_kind`; of a CPU, of `precpass.processor`'s text.
        f32, bf16, f16: FLOP/s of products with operands of a format, at JAX's default
            precision: TF32 passes on NVIDIA's, one bfloat16 pass on a TPU.
        bandwidth: of its memory, in bytes/s.
        cache_bandwidth: in bytes/s where all that is moved fits into `cache` bytes.
        cache: those bytes; 0 where the memory's figure is taken throughout.
        launch: seconds that each kernel takes beyond its work.
        element: seconds of one elementwise operation in float32, its memory aside.
        low_element: how many times those it takes in a format of 16 bits.
        keeps_low_state: whether loop state of 16 bits is held as such, not widened.
        sources: where all of these are from.
        kind: as JAX names this one; "" in the table.
        is_known: whether it is in the table; else the figures are another one's.
    """

    name: str
    platform: str
    kinds: tuple[str, ...]
    f32: float
    bf16: float
    f16: float
    bandwidth: float
    cache_bandwidth: float
    cache: float
    launch: float
    element: float
    low_element: float
    keeps_low_state: bool
    sources: tuple[Source, ...]
    kind: str = ""
    is_known: bool = True

    def flops(self, precision: Precision) -> float:
        """FLOP/s of products with operands of a format.

        Raises:
            ValueError: for float64, which no cost is asked for.
        """
        if precision is Precision.F64:
            raise ValueError("devices have figures for f32, bf16 and f16: not for f64")
        return {Precision.F32: self.f32, Precision.BF16: self.bf16, Precision.F16: self.f16}[
            precision
        ]

    def __str__(self) -> str:
        if self.is_known:
            return self.kind or self.name
        return f"{self.kind or 'a device'} (not in the table: figures of {self.name})"


# ---------------------------------------------------------------- costs


def product_seconds(device: Device, flops: Amount, nbytes: Amount, precision: Precision) -> Amount:
    """The time of a product: of its arithmetic or of its memory, whichever is longer.

    Args:
        device: where it runs.
        flops: its floating-point operations.
        nbytes: of its operands and its result, as it reads and writes them.
        precision: of its operands.

    Example:
        >>> h200 = device_named("gpu", "NVIDIA H200")
        >>> print(f"{product_seconds(h200, 1e12, 1e9, Precision.BF16):.4f}")
        0.0010
    """
    computed, moved = flops / device.flops(precision), _moved(device, nbytes)
    return cast(Amount, np.maximum(computed, moved)) + device.launch


def cast_seconds(device: Device, n: Amount) -> Amount:
    """The time of a cast of n values between 32 and 16 bits that no fusion takes in."""
    return _moved(device, 6.0 * n) + device.launch


def stored_seconds(device: Device, nbytes: Amount, kept: bool) -> Amount:
    """The time in which a value is written and read again.

    Args:
        device: where it is.
        nbytes: its bytes, as they are held there (`Device.keeps_low_state`).
        kept: whether it is held long: loop state, or what the forward pass keeps for the
            backward pass. No cache holds that.
    """
    return 2.0 * nbytes / device.bandwidth if kept else _moved(device, 2.0 * nbytes)


def elementwise_seconds(device: Device, n: Amount, low: bool) -> Amount:
    """The time of n elementwise operations inside of a fusion, in 16 bits or in float32."""
    return n * (device.element * (device.low_element if low else 1.0))


def _moved(device: Device, nbytes: Amount) -> Amount:
    fits = np.less_equal(nbytes, device.cache)
    return nbytes / cast(Amount, np.where(fits, device.cache_bandwidth, device.bandwidth))


# ---------------------------------------------------------------- the table

_MEASURED_HERE = (
    "measured: 2048 x 2048 products, elementwise programs of 1 and 256 MB, jax 0.10.2 and "
    "0.12.0.1, two cores of an Intel Xeon with AVX512-BF16 and AMX"
)
_CPU_FIGURES = ("f32", "bandwidth", "cache_bandwidth", "cache", "launch", "element", "low_element")
_WIDENS = (
    "precpass.audit: XLA:CPU has no kernel, and runs the product on operands widened to float32"
)
_STATE = "precpass.audit: XLA:CPU on jax 0.10 holds bfloat16 loop state as float32"
_ACCELERATOR = "assumed: kernel launches of microseconds, arithmetic hidden behind memory"
_ASSUMED = ("cache_bandwidth", "cache", "launch", "element", "low_element", "keeps_low_state")
_PRODUCTS = ("f32", "bf16", "f16")
_TPU_DOTS = (
    "jax.lax.Precision: by default float32 products are bfloat16 ones on a TPU; float16 assumed"
)


def _cpu(name: str, kinds: tuple[str, ...], bf16: float, source: Source) -> Device:
    sources = (
        Source(_CPU_FIGURES, _MEASURED_HERE, "2026-11-22"),
        source,
        Source(("f16",), _WIDENS, "2026-11-22"),
        Source(("keeps_low_state",), _STATE, "2026-11-22"),
    )
    return Device(
        name,
        "cpu",
        kinds,
        f32=155e9,
        bf16=bf16,
        f16=155e9,
        bandwidth=4e9,
        cache_bandwidth=12e9,
        cache=4e6,
        launch=1e-6,
        element=0.6e-9,
        low_element=3.0,
        keeps_low_state=False,
        sources=sources,
    )


def _accelerator(
    name: str,
    platform: str,
    kinds: tuple[str, ...],
    f32: float,
    low: float,
    bandwidth: float,
    *sources: Source,
) -> Device:
    assumed = Source(_ASSUMED, _ACCELERATOR, "2026-11-22")
    return Device(
        name,
        platform,
        kinds,
        f32=f32,
        bf16=low,
        f16=low,
        bandwidth=bandwidth,
        cache_bandwidth=bandwidth,
        cache=0.0,
        launch=2e-6,
        element=1e-13,
        low_element=1.0,
        keeps_low_state=True,
        sources=(*sources, assumed),
    )


def _nvidia(
    name: str,
    kinds: tuple[str, ...],
    f32: float,
    low: float,
    bandwidth: float,
    products: Source,
    memory: Source,
) -> Device:
    return _accelerator(name, "gpu", kinds, f32, low, bandwidth, products, memory)


def _tpu(
    name: str, kinds: tuple[str, ...], flops: float, bandwidth: float, title: str, date: str
) -> Device:
    sources = (
        Source(("bf16", "bandwidth"), title, date),
        Source(("f32", "f16"), _TPU_DOTS, "2026-11"),
    )
    return _accelerator(name, "tpu", kinds, flops, flops, bandwidth, *sources)


_AMPERE = Source(_PRODUCTS, "NVIDIA A100 Tensor Core GPU data sheet; f32 in TF32", "2021-06")
_HOPPER = Source(_PRODUCTS, "NVIDIA H100 Tensor Core GPU Architecture; f32 in TF32", "2022-03")

DEVICES: tuple[Device, ...] = (
    _cpu(
        "CPU with bfloat16 instructions",
        ("*bf16*",),
        510e9,
        Source(("bf16",), _MEASURED_HERE, "2026-11-22"),
    ),
    _cpu(
        "CPU without bfloat16 instructions",
        ("*",),
        155e9,
        Source(("bf16",), f"assumed from {_WIDENS}", "2026-11-22"),
    ),
    _nvidia(
        "NVIDIA A100, 40 GB",
        ("nvidia a100*40gb*",),
        156e12,
        312e12,
        1.555e12,
        _AMPERE,
        Source(("bandwidth",), "NVIDIA A100 Tensor Core GPU Architecture", "2020-05"),
    ),
    _nvidia(
        "NVIDIA A100, 80 GB",
        ("nvidia a100*",),
        156e12,
        312e12,
        2.039e12,
        _AMPERE,
        Source(("bandwidth",), "NVIDIA A100 Tensor Core GPU data sheet, SXM", "2021-06"),
    ),
    _nvidia(
        "NVIDIA H100 SXM",
        ("nvidia h100*",),
        494.7e12,
        989.4e12,
        3.35e12,
        _HOPPER,
        Source(("bandwidth",), "NVIDIA H100 Tensor Core GPU data sheet, SXM", "2023"),
    ),
    _nvidia(
        "NVIDIA H200 SXM",
        ("nvidia h200*",),
        494.7e12,
        989.4e12,
        4.8e12,
        _HOPPER,
        Source(("bandwidth",), "NVIDIA H200 Tensor Core GPU data sheet", "2023-11"),
    ),
    _accelerator(
        "AMD Instinct MI300X",
        "gpu",
        ("amd instinct mi300x*",),
        163.4e12,
        1307.4e12,
        5.3e12,
        Source(
            (*_PRODUCTS, "bandwidth"),
            "AMD Instinct MI300X Accelerator data sheet; f32 by its matrix cores",
            "2023-12",
        ),
    ),
    _tpu("TPU v4", ("tpu v4*",), 275e12, 1.2e12, "Google Cloud documentation: TPU v4", "2026-11"),
    _tpu(
        "TPU v5e",
        ("tpu v5 lite*", "tpu v5e*"),
        197e12,
        819e9,
        "Google Cloud documentation: TPU v5e",
        "2026-11",
    ),
    _tpu(
        "TPU v5p",
        ("tpu v5", "tpu v5p*"),
        459e12,
        2.765e12,
        "Google Cloud documentation: TPU v5p",
        "2026-11",
    ),
    _tpu(
        "TPU v6e",
        ("tpu v6 lite*", "tpu v6e*"),
        918e12,
        1.638e12,
        "Google Cloud documentation: TPU v6e",
        "2026-11",
    ),
)
"""Of each platform the first row whose glob matches counts."""

_DEFAULTS = {"cpu": "CPU without bfloat16 instructions", "tpu": "TPU v5e"}
_OTHERWISE = "NVIDIA A100, 80 GB"


def device_named(platform: str, kind: str) -> Device:
    """The device of a kind; one that is not in the table has the figures of a stated one.

    Args:
        platform: JAX's; "cuda" and "rocm" are "gpu".
        kind: JAX's `device_kind`; of a CPU, the text of `precpass.processor`.

    Example:
        >>> device_named("gpu", "NVIDIA H200").name
        'NVIDIA H200 SXM'
        >>> print(device_named("gpu", "Quux 9000"))
        Quux 9000 (not in the table: figures of NVIDIA A100, 80 GB)
    """
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    for row in DEVICES:
        if row.platform == platform and any(fnmatch.fnmatch(kind.lower(), k) for k in row.kinds):
            return dataclasses.replace(row, kind=kind)
    name = _DEFAULTS.get(platform, _OTHERWISE)
    (row,) = (row for row in DEVICES if row.name == name)
    return dataclasses.replace(row, platform=platform, kind=kind, is_known=False)
