"""A compiled program's time by published peaks: an estimate, and no measurement."""

from __future__ import annotations

from collections.abc import Callable

from precpass.measure.counts import Counts
from precpass.measure.traffic import Traffic

__all__ = ["roofline"]


def roofline(
    traffic: Traffic, counts: Counts, bandwidth: float, flops: Callable[[str, str], float | None]
) -> float | None:
    """The seconds of a program's bytes and of its products' arithmetic on one device.

    Both are added, as if nothing was computed while memory is read or written. The bytes are those
    of the compiled program, the FLOPs those of the matrix products in the traced one.

    Args:
        traffic: what the compiled program does.
        counts: what the traced program computes.
        bandwidth: of the device's memory, in bytes/s.
        flops: the device's FLOP/s for a format of operands and the precision that the program asks
            for; None if it is not known.

    Returns:
        The seconds; None if the FLOP/s of a format are not known.
    """
    seconds = traffic.moved / bandwidth
    for name, operations in counts.product_flops.items():
        dtype, _, asked = name.partition(" ")
        peak = flops(dtype, asked or "default")
        if peak is None:
            return None
        seconds += operations / peak
    return seconds
