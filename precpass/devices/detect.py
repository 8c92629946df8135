"""The device that a program is planned for. Nothing here adds an equation to a trace."""

from __future__ import annotations

from typing import Any

import jax
import jax.core

from precpass.devices.cpu_info import cpu_info
from precpass.devices.devices import Device, device_named

__all__ = ["device_for", "device_of_call", "kind_of"]


def device_of_call(args: Any = ()) -> Any:
    """The JAX device on which a call at some arguments runs, the first of several.

    It is the device of the first argument that is committed to one; else that of
    `jax.default_device`; else the default backend's. A tracer has no device, so a
    program that is planned while it is traced is planned for one of the latter two.

    Args:
        args: a tree of arguments.
    """
    for x in jax.tree.leaves(args):
        is_array = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
        if is_array and getattr(x, "committed", False):
            return min(x.devices(), key=lambda device: device.id)
    # `jax.config` has no type for this option.
    default: Any = getattr(jax.config, "jax_default_device", None)
    if default is None or isinstance(default, str):
        return jax.local_devices(backend=default)[0]
    return default


def device_for(args: Any = (), device: Any = None) -> Device:
    """The `Device` that a program is planned for.

    Args:
        args: the arguments of the call (`device_of_call`).
        device: a JAX device or a `Device`, which then counts. A `Device` starts no backend.
    """
    if isinstance(device, Device):
        return device
    device = device_of_call(args) if device is None else device
    return device_named(device.platform, kind_of(device))


def kind_of(device: Any) -> str:
    """JAX's name for a kind of device; for a CPU, which JAX only calls "cpu", the processor."""
    return str(cpu_info()) if device.platform == "cpu" else device.device_kind
