"""The table of devices, and which one a program is planned for."""

import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

import precpass as pp
from precpass.devices import cpu_info, detect
from precpass.devices.peaks import CPUS, PEAKS, Device, device_named
from precpass.policy.precision import Precision
from tests.support.jaxprs import named

DEVICES = [Device(peaks.platform, "", peaks) for peaks in (*CPUS, *PEAKS)]
XEON = "Intel(R) Xeon(R) CpuInfo with avx512_bf16, amx_bf16, 2 cores"


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.peaks.name)
def test_low_products_are_never_slower_than_wide_ones_by_the_table(device: Device):
    wide, *low = map(device.flops, (Precision.F32, Precision.BF16, Precision.F16))
    assert min(low) >= wide > 0
    assert device.flops(Precision.F8E4M3) > 0 and device.flops(Precision.INT8) > 0
    assert device.peaks.bandwidth > 0


@pytest.mark.parametrize(
    "platform, kind, name",
    [
        ("cpu", XEON, "CPU with bfloat16 instructions"),
        ("cpu", "ARMv8 with bf16, svebf16, 4 cores", "CPU with bfloat16 instructions"),
        ("cpu", "unknown CPU, 4 cores", "CPU without bfloat16 instructions"),
        ("gpu", "NVIDIA A100-SXM4-40GB", "NVIDIA A100, 40 GB"),
        ("gpu", "NVIDIA A100-SXM4-80GB", "NVIDIA A100, 80 GB"),
        ("cuda", "NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM"),
        ("gpu", "NVIDIA H200", "NVIDIA H200 SXM"),
        ("rocm", "AMD Instinct MI300X", "AMD Instinct MI300X"),
        ("tpu", "TPU v4", "TPU v4"),
        ("tpu", "TPU v5 lite", "TPU v5e"),
        ("tpu", "TPU v5", "TPU v5p"),
        ("tpu", "TPU v6 lite", "TPU v6e"),
        ("tpu", "TPU7x", "TPU 7x"),
    ],
)
def test_a_kind_is_found_as_jax_names_it(platform: str, kind: str, name: str):
    found = device_named(platform, kind)
    assert found.peaks.name == name
    assert found.kind == str(found) == kind
    assert found.is_known


@pytest.mark.parametrize("platform", ["gpu", "tpu", "neuron"])
def test_an_unknown_device_says_whose_figures_it_has(platform: str):
    found = device_named(platform, "Quux 9000")
    assert not found.is_known
    assert found.platform == platform
    assert str(found) == f"Quux 9000 (not in the table: figures of {found.peaks.name})"


def test_published_figures():
    h200 = device_named("gpu", "NVIDIA H200")
    assert (h200.flops(Precision.BF16), h200.flops(Precision.F32)) == (989.4e12, 494.7e12)
    v5e = device_named("tpu", "TPU v5 lite")
    # one pass in bfloat16 either way
    assert v5e.flops(Precision.F32) == v5e.flops(Precision.BF16) == 197e12


def test_float64_has_no_figure():
    with pytest.raises(ValueError, match="not for f64"):
        DEVICES[0].flops(Precision.F64)


# ---------------------------------------------------------------- which device


def test_a_committed_argument_tells_its_device():
    here, there = jax.devices()[:2]
    x = jax.device_put(jnp.ones(3), there)
    assert detect.device_of_call((np.ones(3), {"x": x})) is there
    # where it is not committed it may go anywhere
    assert detect.device_of_call(jnp.ones(3)) is here


def test_without_one_it_is_the_default_device():
    there = jax.devices()[2]
    with jax.default_device(there):
        assert detect.device_of_call(jnp.ones(3)) is there
    with jax.default_device("cpu"):
        assert detect.device_of_call() is jax.devices("cpu")[0]


def test_under_a_trace_it_is_that_of_the_context_and_no_equation_is_added():
    there = jax.devices()[1]
    found = []

    def f(x):
        found.append(detect.device_of_call(x))
        return x

    with jax.default_device(there):
        jaxpr = jax.make_jaxpr(jax.grad(lambda x: f(x).sum()))(jnp.ones(3))
    assert found == [there]
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    assert names <= {"reduce_sum", "broadcast_in_dim"}


@pytest.mark.parametrize("wrapped", [False, True], ids=["the call", "a step around it"])
def test_a_step_for_a_mesh_of_other_devices_is_planned_for_these(wrapped: bool):
    kind = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    mesh = AbstractMesh((4,), ("d",), axis_types=(AxisType.Auto,), abstract_device=kind)
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    x, w = (jax.ShapeDtypeStruct((n, 32), jnp.float32, sharding=sharding) for n in (64, 32))
    for profitability in ("always", "best"):
        mixed = pp.auto_mixed(lambda x, w: jnp.tanh(x @ w) @ w, profitability=profitability)
        step = jax.jit(lambda x, w, mixed=mixed: mixed(x, w)) if wrapped else mixed
        made = [e.outvars[0].aval.dtype for e in named(step.trace(x, w).jaxpr, "dot_general")]
        # the first product's result is rounded by the kernels of a GPU, and not of this CPU
        assert made == [jnp.bfloat16, jnp.float32]
    placed = jax.lax.with_sharding_constraint
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, w)]
    for form in (mixed, pp.auto_mixed(lambda x, w: jnp.tanh(placed(x, sharding) @ w) @ w)):
        step = jax.jit(lambda x, w, form=form: form(x, w)) if wrapped else form
        in_force = jax.sharding.use_abstract_mesh(mesh) if form is mixed else nullcontext()
        with in_force:
            jaxpr = step.trace(*shapes).jaxpr
            assert "H100" in pp.inspect(form)(*shapes).device
        made = [e.outvars[0].aval.dtype for e in named(jaxpr, "dot_general")]
        assert made == [jnp.bfloat16, jnp.float32]
    here = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(here):
        found: list[Any] = []
        jax.jit(lambda x: found.append(detect.device_of_call(x))).trace(jnp.ones(4))
    assert found == [jax.devices()[0]]


def test_a_cpu_is_named_by_its_processor():
    found = detect.device_for()
    assert found.kind == str(cpu_info.cpu_info())
    assert found.platform == "cpu"


def test_facts_start_no_backend():
    code = (
        "from precpass.devices import detect, peaks\n"
        "assert peaks.device_named('gpu', 'NVIDIA H200').is_known\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, xla_bridge._backends\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------- the processor


LINUX = """processor\t: 0
model name\t: Some CPU
flags\t\t: fpu avx2 avx512_bf16 amx_bf16

processor\t: 1
model name\t: Some CPU
flags\t\t: fpu avx2 avx512_bf16 amx_bf16
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16 svebf16\nCPU part\t: 0xd40\n"


def test_flags_are_read_as_linux_writes_them():
    assert cpu_info._of_linux(LINUX) == ("Some CPU", ("avx512_bf16", "amx_bf16"))
    assert cpu_info._of_linux(ARM) == ("", ("bf16", "svebf16"))
    assert cpu_info._of_linux("") == ("", ())


def test_a_machine_without_cpuinfo_still_has_a_name(monkeypatch: pytest.MonkeyPatch):
    def missing(*_args: object, **_kwargs: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(cpu_info.Path, "read_text", missing)
    monkeypatch.setattr(cpu_info.platform, "processor", lambda: "")
    monkeypatch.setattr(cpu_info.platform, "machine", lambda: "")
    monkeypatch.setattr(cpu_info.platform, "system", lambda: "Plan9")
    found = cpu_info.cpu_info.__wrapped__()
    assert found.model == cpu_info.UNKNOWN
    assert not found.bf16 and found.cores >= 1


def test_a_mac_is_asked_by_sysctl(monkeypatch: pytest.MonkeyPatch):
    said = {"machdep.cpu.brand_string": "Apple M9\n", "hw.optional.arm.FEAT_BF16": "1\n"}

    def run(command: list[str], **_kwargs: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, said[command[-1]], "")

    monkeypatch.setattr(cpu_info.subprocess, "run", run)
    assert cpu_info._of_mac() == ("Apple M9", ("bf16",))

    def missing(*_args: object, **_kwargs: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(cpu_info.subprocess, "run", missing)
    assert cpu_info._of_mac() == ("", ())
