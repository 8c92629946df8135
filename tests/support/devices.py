"""Devices that are not here, as far as a plan asks for them."""

from typing import NamedTuple


class AbsentDevice(NamedTuple):
    """What planning reads of a device, by default of an H100."""

    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"
