"""Targets: devices that are not there, whose compilers run on any Linux machine.

XLA's GPU compiler comes with JAX's CUDA plugin and needs no GPU (`pip install
precpass[gpu-target]`), XLA's TPU compiler comes with libtpu and needs no TPU
(`precpass[tpu-target]`). What they compile can be read and not run.

The files in `gpu_targets/` are target configurations of XLA (openxla/xla,
`xla/backends/gpu/target_config/specs`, Apache-2.0), with a CUDA runtime's version.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import importlib.util
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

__all__ = ["TARGETS", "Target", "abstract_on", "target_of"]


@dataclasses.dataclass(frozen=True)
class Target:
    """A device that need not be there. A program can be planned for it without its compiler.

    Attributes:
        name: as the user gives it.
        platform: JAX's name, "gpu" or "tpu".
        device_kind: JAX's name for the kind of device.
        topology: the name of the smallest topology that has one.
    """

    name: str
    platform: str
    device_kind: str
    topology: str

    @functools.cached_property
    def device(self) -> Any:
        """A device of a JAX topology, for which XLA compiles.

        Raises:
            ModuleNotFoundError: without the compiler; the text has the line that installs it.
            RuntimeError: if JAX does not load the compiler.
        """
        return _topology(self).devices[0]


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("h100", "gpu", "NVIDIA H100 80GB HBM3", "1x1x1"),
        Target("a100", "gpu", "NVIDIA A100-SXM4-80GB", "1x1x1"),
        Target("tpu v4", "tpu", "TPU v4", "v4:2x2x1"),
        Target("tpu v5e", "tpu", "TPU v5 lite", "v5e:2x2"),
        Target("tpu v5p", "tpu", "TPU v5", "v5p:2x2x1"),
        Target("tpu v6e", "tpu", "TPU v6 lite", "v6e:2x2"),
    )
}
"""The known targets by name."""


def target_of(value: Any) -> Any:
    """A target by its name, or a JAX device as it is; None stays None.

    Args:
        value: a name in `TARGETS`, in any case, with or without a hyphen ("TPU-v5e"), or a JAX
            device, which may be one of a topology.

    Raises:
        ValueError: for an unknown name; the text lists the known ones.

    Example:
        >>> target_of("H100").device_kind, target_of("TPU-v5e").platform
        ('NVIDIA H100 80GB HBM3', 'tpu')
    """
    if value is None or hasattr(value, "device_kind"):
        return value
    name = str(value).lower().replace("-", " ").strip()
    known = ", ".join(map(repr, TARGETS))
    if ":" in name and name.partition(":")[0] in TARGETS:
        raise ValueError(
            f"target {value!r} is a topology of several devices, and a program without shardings "
            f"runs on one: give {name.partition(':')[0]!r}, or arguments that are "
            "jax.ShapeDtypeStructs with shardings over the topology's devices and no target"
        )
    if name not in TARGETS:
        raise ValueError(f"unknown target {value!r}: known are {known}, and a JAX device")
    return TARGETS[name]


def abstract_on(device: Any, tree: Any) -> Any:
    """Arguments as shapes on a device, for which XLA can then compile without it.

    Args:
        device: a JAX device, which may be one of a topology, or a `Target`.
        tree: a tree of arguments. Shapes that have a sharding keep it, and what is neither an
            array nor a shape stays as it is.

    Raises:
        ModuleNotFoundError, RuntimeError: as `Target.device` does.
    """
    on_device = jax.sharding.SingleDeviceSharding(getattr(device, "device", device))

    def placed(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct) and x.sharding is not None:
            return x
        if isinstance(x, jax.ShapeDtypeStruct | jax.Array | np.ndarray):
            dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
            weak = getattr(x, "weak_type", False)
            return jax.ShapeDtypeStruct(x.shape, dtype, sharding=on_device, weak_type=weak)
        return x

    return jax.tree.map(placed, tree)


_MODULES = {"gpu": ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"), "tpu": ("libtpu",)}
# libtpu asks a cloud's metadata for its machine, and else allows one process at a time.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@functools.cache
def _topology(target: Target) -> Any:
    from jax.experimental import topologies

    if not any(map(_is_installed, _MODULES[target.platform])):
        raise ModuleNotFoundError(
            f"target {target.name!r} needs XLA's {target.platform.upper()} compiler: "
            f"{_install(target)}"
        )
    options: dict[str, Any] = {"platform": "tpu", "topology_name": target.topology}
    if target.platform == "gpu":
        folder = importlib.resources.files("precpass.devices") / "gpu_targets"
        config = (folder / f"{target.name}.txtpb").read_text()
        options = {
            "platform": "cuda",
            "topology_name": target.name,
            "target_config": config,
            "topology": target.topology,
        }
    try:
        with _environment(_TPU_ENVIRONMENT if target.platform == "tpu" else {}):
            return topologies.get_topology_desc(**options)
    except Exception as error:
        raise RuntimeError(
            f"jax {jax.__version__} does not load XLA's {target.platform.upper()} compiler for "
            f"target {target.name!r} ({str(error).partition(chr(10))[0]}). Start Python with "
            "JAX_PLATFORMS=cpu, without which JAX expects the device itself, and install the "
            f"compiler of jax's release: {_install(target)}"
        ) from error


def _install(target: Target) -> str:
    """The line that installs a target's compiler, of the installed release of JAX."""
    release = jax.__version__
    plugin = f" jax-cuda12-plugin=={release} jax-cuda12-pjrt=={release}"
    pins = plugin if target.platform == "gpu" else f" 'jax[tpu]=={release}'"
    return f"pip install 'precpass[{target.platform}-target]'{pins}"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not there
        return False


@contextmanager
def _environment(variables: Mapping[str, str]) -> Generator[None]:
    """A context in which environment variables are set that the user did not set."""
    mine = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)
