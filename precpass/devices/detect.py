"""Find the device that a program is planned for. Nothing here adds an equation to a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import jax
import jax.core

from precpass.devices.cpu_info import cpu_info
from precpass.devices.peaks import Device, device_named

__all__ = [
    "committed_device",
    "device_for",
    "device_of_call",
    "is_present",
    "kind_of",
    "planned_for",
]

# It is part of jit's cache key, so a program planned for one device is not compiled for another.
_target: Any = jax.make_user_context(None)


@contextlib.contextmanager
def planned_for(device: Any) -> Generator[None]:
    """Plan the programs inside this context for a device, which need not be present.

    Args:
        device: a JAX device, also of a topology, or a `Target`. Nothing changes for None, or for
            a device of the kind planned for anyway, so that jit's cache is shared.
    """
    changes = device is not None and _kind(device) != _kind(device_of_call())
    with _target(device) if changes else contextlib.nullcontext():
        yield


def _kind(device: Any) -> tuple[str, str]:
    return device.platform, device.device_kind


def committed_device(args: Any) -> Any:
    """Return the device of the first argument that is committed to one; None if none is.

    Of several devices it is the first that this process has: those of other processes cannot be
    told from absent ones.

    Args:
        args: a tree of arguments. A `jax.ShapeDtypeStruct` is committed by its sharding. The
            tree may contain shardings, such as the option `in_shardings` of `jax.jit`, and avals.
            A tracer or an aval is committed by the mesh of its type, which only says what kind of
            device it is: the result is then a device of this process, or JAX's `AbstractDevice`.
    """
    for x in jax.tree.leaves(args):
        devices: Any = ()
        sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else x
        if isinstance(sharding, jax.sharding.Sharding):
            with contextlib.suppress(ValueError):  # an abstract mesh has no devices
                devices = sharding.device_set
        elif isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            devices = x.devices() if getattr(x, "committed", False) else ()
        if devices:
            own = [device for device in devices if is_present(device)]
            return min(own or devices, key=lambda device: device.id)
        if (kind := _kind_in_type(x)) is not None:
            return _local_of(kind) or kind
    return None


def _kind_in_type(x: Any) -> Any:
    """The kind of device in the type of a tracer, or in an aval; None if it has none."""
    aval = jax.typeof(x) if isinstance(x, jax.core.Tracer) else x
    sharding = aval.sharding if isinstance(aval, jax.core.ShapedArray) else None
    return None if sharding is None else sharding.mesh.abstract_device


def _local_of(kind: Any) -> Any:
    """A device of this process of a kind; None if it has none."""
    try:
        found = jax.local_devices(backend=kind.platform)
    except RuntimeError:  # JAX has no such platform
        return None
    return next((device for device in found if _kind(device) == _kind(kind)), None)


def _of_mesh_in_force() -> Any:
    kind = jax.sharding.get_abstract_mesh().abstract_device
    local = None if kind is None else _local_of(kind)
    if kind is None or local is not None:
        return local
    try:
        return jax.sharding.get_mesh().devices.flat[0] or kind  # None under an abstract mesh
    except ValueError:  # JAX traces
        return kind


def device_of_call(args: Any = ()) -> Any:
    """Return the JAX device on which a call with some arguments runs, the first of several.

    It is that of `planned_for`; else the one that the arguments are committed to; else one of the
    mesh of `jax.set_mesh`, of which only the kind is known while JAX traces; else that of
    `jax.default_device`; else the default backend's.

    Args:
        args: a tree of arguments.

    Raises:
        RuntimeError: if JAX has no device at all.
    """
    device = _target.value if _target.value is not None else committed_device(args)
    device = _of_mesh_in_force() if device is None else device
    if device is not None:
        return device
    # `jax.config` has no type for this option.
    default: Any = getattr(jax.config, "jax_default_device", None)
    if default is None or isinstance(default, str):
        try:
            return jax.local_devices(backend=default)[0]
        except AssertionError as error:  # JAX's own, without a text
            platforms = getattr(jax.config, "jax_platforms", None)
            raise RuntimeError(
                "JAX finds no device of the platforms that JAX_PLATFORMS or jax_platforms names "
                f"({platforms!r}): start Python with JAX_PLATFORMS=cpu"
            ) from error
    return default


def is_present(device: Any) -> bool:
    """Return whether this process can run programs on a device: not on a target or a topology's."""
    try:
        return any(device is there for there in jax.local_devices(backend=device.platform))
    except RuntimeError:  # JAX has no such platform
        return False


def device_for(place: Any = None) -> Device:
    """Return the figures of a JAX device or a `Target`; by default those of `device_of_call()`."""
    device = device_of_call() if place is None else place
    return device_named(device.platform, kind_of(device))


def kind_of(device: Any) -> str:
    """Return JAX's name for a kind of device; for a CPU, the name of its processor."""
    return str(cpu_info()) if device.platform == "cpu" else device.device_kind
