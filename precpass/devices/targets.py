"""Targets: devices that need not be present; their compilers run on any Linux machine.

XLA's GPU compiler comes with JAX's CUDA plugin and needs no GPU (the extra `gpu-target`), XLA's TPU
compiler comes with libtpu and needs no TPU (the extra `tpu-target`). You can read what they
compile, but not run it.

The files in `gpu_targets/` are target configurations of XLA (openxla/xla,
`xla/backends/gpu/target_config/specs`, Apache-2.0), with a CUDA runtime's version.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.resources
import importlib.util
import os
import re
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from precpass.devices.detect import is_present

__all__ = ["TARGETS", "Target", "abstract_on", "check_places", "memory_of", "target_of"]


@dataclasses.dataclass(frozen=True)
class Target:
    """A device that need not be present. Planning a program for it does not need its compiler.

    Attributes:
        name: as the user gives it.
        platform: JAX's name, "gpu" or "tpu".
        device_kind: JAX's name for the kind of device.
        topology: the compiler's name for the devices that it is part of; the smallest ones unless
            the user named others ("tpu v5e:4x4", "h100:8").
        is_one: whether a program runs on one of its devices, not on all of them.
    """

    name: str
    platform: str
    device_kind: str
    topology: str
    is_one: bool = True

    @property
    def devices(self) -> Sequence[Any]:
        """The devices of a JAX topology that a program runs on, for which XLA compiles.

        Raises:
            ModuleNotFoundError: without the compiler; the message has the command that installs it.
            RuntimeError: if JAX does not load the compiler, or it is of another release.
            ValueError: if the compiler does not know the topology.
        """
        return _topology(self).devices[: 1 if self.is_one else None]

    @property
    def device(self) -> Any:
        """The first of `devices`."""
        return self.devices[0]


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("h100", "gpu", "NVIDIA H100 80GB HBM3", "1x1x1"),
        Target("a100", "gpu", "NVIDIA A100-SXM4-80GB", "1x1x1"),
        Target("b200", "gpu", "NVIDIA B200", "1x1x1"),
        Target("tpu v4", "tpu", "TPU v4", "v4:2x2x1"),
        Target("tpu v5e", "tpu", "TPU v5 lite", "v5e:2x2"),
        Target("tpu v5p", "tpu", "TPU v5", "v5p:2x2x1"),
        Target("tpu v6e", "tpu", "TPU v6 lite", "v6e:2x2"),
        Target("tpu 7x", "tpu", "TPU7x", "tpu7x:2x2x1"),
    )
}
"""The known targets by name."""


def memory_of(device_kind: str) -> int | None:
    """Return the bytes of a GPU's memory, by its target configuration; None for other devices.

    A TPU's compiler refuses a program that needs more memory than the TPU has; a GPU's does not.

    Args:
        device_kind: JAX's name for the kind of device.

    Examples:
        >>> memory_of("NVIDIA H100 80GB HBM3") > 80e9, memory_of("TPU v5 lite")
        (True, None)
    """
    for target in TARGETS.values():
        if target.device_kind == device_kind and target.platform == "gpu":
            (size,) = re.findall(r"device_memory_size: (\d+)", _configuration(target))
            return int(size)
    return None


def target_of(value: Any) -> Any:
    """Return the target with a name; a JAX device or None is returned unchanged.

    Args:
        value: a name in `TARGETS`, in any case, with or without a hyphen ("TPU-v5e"); such a name
            with a topology after a colon ("tpu v5e:4x4", "h100:8" for eight on one host, "h100:2x8"
            for eight on each of two); or a JAX device, also one of a topology.

    Raises:
        ValueError: for an unknown name; the message lists the known ones.

    Examples:
        >>> target_of("H100").device_kind, target_of("TPU-v5e:4x4").topology
        ('NVIDIA H100 80GB HBM3', 'v5e:4x4')
    """
    if value is None or hasattr(value, "device_kind"):
        return value
    name = str(value).lower().replace("-", " ").strip()
    one, colon, shape = name.partition(":")
    sizes = shape.split("x")
    target = TARGETS.get(one)
    if target is None or (colon and not all(size.isdecimal() and int(size) for size in sizes)):
        known = ", ".join(map(repr, TARGETS))
        raise ValueError(
            f"unknown target {value!r}: known are {known}, these with a topology ('tpu v5e:4x4', "
            "'h100:8'), and a JAX device"
        )
    if not colon or all(int(size) == 1 for size in sizes):
        return target
    # A GPU's topology counts slices, hosts of a slice and GPUs of a host.
    gpus = "x".join(["1"] * (3 - len(sizes)) + sizes)
    topology = gpus if target.platform == "gpu" else f"{target.topology.partition(':')[0]}:{shape}"
    return dataclasses.replace(target, name=name, topology=topology, is_one=False)


def check_places(target: Any, tree: Any) -> None:
    """Refuse arguments that are on another device than a target, or on another number of them.

    Args:
        target: a JAX device, on which any sharding is allowed, a `Target` or None.
        tree: the arguments of a program. On which device of this machine they are does not matter,
            because only their shapes are used.

    Raises:
        ValueError: naming the target, and the other device or the numbers.
    """
    if target is None:
        return
    leaves = jax.tree.leaves(tree)
    for device in filter(None, map(_absent_device, leaves)):
        if (device.platform, device.device_kind) != (target.platform, target.device_kind):
            name = getattr(target, "name", target.device_kind)
            raise ValueError(
                f"target {name!r} is another device than the {device.device_kind} of the "
                "arguments' shardings: leave out one of them"
            )
    if not isinstance(target, Target):
        return
    sizes = {mesh.size for mesh in map(_mesh_of, leaves) if mesh is not None}
    if target.is_one and sizes - {1}:
        raise ValueError(
            f"target {target.name!r} is one device, and the arguments are sharded over "
            f"{max(sizes)}: name a topology of as many, such as 'h100:8' or 'tpu v5e:4x4'"
        )
    if not target.is_one and not sizes:
        raise ValueError(
            f"target {target.name!r} is a topology of several devices, and a program without "
            f"shardings runs on one: give {target.name.partition(':')[0]!r}, or arguments with a "
            "jax.sharding.NamedSharding: jax.ShapeDtypeStructs over an AbstractMesh or, where "
            "arrays are needed, arrays over as many CPU devices (the option jax_num_cpu_devices)"
        )


def abstract_on(device: Any, tree: Any) -> Any:
    """Return arguments as shapes on a device, for which XLA can then compile without it.

    Args:
        device: a JAX device, which may be one of a topology, or a `Target`.
        tree: a tree of arguments. A `jax.sharding.NamedSharding` becomes the same one over the
            devices of a target that has several. Shapes that are spread over several devices in
            another way, and leaves that are neither arrays nor shapes, do not change.

    Raises:
        ValueError: if a mesh has another number of devices than the target.
        ModuleNotFoundError, RuntimeError: as for `Target.device`.
    """
    on_device = jax.sharding.SingleDeviceSharding(getattr(device, "device", device))
    sharded = isinstance(device, Target) and not device.is_one

    def sharding(x: Any) -> Any:
        mesh = _mesh_of(x)
        if sharded:
            return None if mesh is None else _over(device, mesh, x.sharding.spec)
        is_spread = isinstance(x, jax.ShapeDtypeStruct) and len(_devices_of(x)) != 1
        return x.sharding if is_spread and x.sharding is not None else on_device

    def placed(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct | jax.Array | np.ndarray):
            dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
            weak = getattr(x, "weak_type", False)
            return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding(x), weak_type=weak)
        return x

    return jax.tree.map(placed, tree)


def _mesh_of(x: Any) -> Any:
    """The mesh that an array or a shape is sharded over; None for what is on one device."""
    given = getattr(x, "sharding", None)
    return given.mesh if isinstance(given, jax.sharding.NamedSharding) else None


def _devices_of(x: Any) -> Collection[Any]:
    """The devices of a shape's or an array's sharding; none without one, and of abstract ones."""
    sharding = getattr(x, "sharding", None)
    try:
        return () if sharding is None else sharding.device_set
    except ValueError:  # an abstract mesh has no devices
        return ()


def _absent_device(x: Any) -> Any:
    """The device of a shape, if this machine does not have it."""
    devices = _devices_of(x) if isinstance(x, jax.ShapeDtypeStruct) else ()
    return next((device for device in devices if not is_present(device)), None)


def _over(target: Target, mesh: Any, spec: jax.sharding.PartitionSpec) -> Any:
    """A sharding over the devices of a target that has as many as a mesh."""
    if mesh.size != len(target.devices):
        raise ValueError(
            f"target {target.name!r} has {len(target.devices)} devices, and the arguments are "
            f"sharded over {mesh.size} ({dict(mesh.shape)}): give a mesh and a topology of the "
            "same number"
        )
    devices = np.array(target.devices).reshape(tuple(mesh.shape.values()))
    here = jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
    return jax.sharding.NamedSharding(here, spec)


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
            f"{_install(target)}. Then start Python with JAX_PLATFORMS=cpu"
        )
    if target.platform == "gpu":
        _check_release(target)
    options: dict[str, Any] = {"platform": "tpu", "topology_name": target.topology}
    if target.platform == "gpu":
        options = {
            "platform": "cuda",
            "topology_name": target.name,
            "target_config": _configuration(target),
            "topology": target.topology,
        }
    try:
        with _environment(_TPU_ENVIRONMENT if target.platform == "tpu" else {}):
            return topologies.get_topology_desc(**options)
    except Exception as error:
        if not target.is_one and _topology(TARGETS[target.name.partition(":")[0]]):
            raise ValueError(
                f"the compiler has no topology {target.topology!r} for target {target.name!r} "
                f"({str(error).partition(chr(10))[0]}): name a grid of chips that is sold, such as "
                "'tpu v5e:2x4', 'tpu v6e:4x4' or 'tpu v5p:2x2x2'"
            ) from error
        raise RuntimeError(
            f"jax {jax.__version__} does not load XLA's {target.platform.upper()} compiler for "
            f"target {target.name!r} ({str(error).partition(chr(10))[0]}). Start Python with "
            "JAX_PLATFORMS=cpu, without which JAX expects the device itself, and install the "
            f"compiler of jax's release: {_install(target)}"
        ) from error


def _configuration(target: Target) -> str:
    """The target configuration of a GPU, as XLA reads it."""
    folder = importlib.resources.files("precpass.devices") / "gpu_targets"
    return (folder / f"{target.name.partition(':')[0]}.txtpb").read_text()


def _check_release(target: Target) -> None:
    """Refuses a CUDA plugin of another release than jaxlib, of which JAX uses a part silently."""
    for name in ("jax-cuda12-plugin", "jax-cuda13-plugin"):
        try:
            plugin = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if plugin.split(".")[:2] != jax.__version__.split(".")[:2]:
            raise RuntimeError(
                f"{name} {plugin} is not of the release of jax {jax.__version__}, so its compiler "
                f"cannot be used for target {target.name!r}: {_install(target)}"
            )


def _install(target: Target) -> str:
    """The line that installs a target's compiler, of the installed release of JAX."""
    release = jax.__version__
    plugin = f"jax-cuda12-plugin=={release} jax-cuda12-pjrt=={release}"
    packages = plugin if target.platform == "gpu" else f"'jax[tpu]=={release}'"
    return f"pip install {packages}"


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
