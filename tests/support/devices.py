"""Devices that are not here, as far as a plan asks for them."""

import dataclasses
from typing import Any, NamedTuple


class AbsentDevice(NamedTuple):
    """What planning reads of a device, by default of an H100."""

    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"


def for_a_gpu(inspection: Any) -> Any:
    """The explanation of an inspection, as if it were planned for a GPU."""
    return dataclasses.replace(inspection, device=AbsentDevice().device_kind).explain()
