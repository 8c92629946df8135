"""Devices that are not there: their names, plans for them, and XLA's compilers for them."""

import html
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import precpass as pp
from precpass.devices import targets
from precpass.devices.detect import committed_device, device_of_call, planned_for
from precpass.devices.peaks import device_named
from precpass.devices.targets import TARGETS, target_of
from precpass.measure import execute

A = jnp.ones((8, 8))


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_is_in_the_table_of_devices(name: str):
    target = target_of(name.upper())
    assert target is TARGETS[name]
    assert device_named(target.platform, target.device_kind).is_known
    assert target_of(name.replace(" ", "-")) is target


def test_a_gpus_configuration_is_that_of_its_kind():
    folder = Path(targets.__file__).parent / "gpu_targets"
    gpus = [target for target in TARGETS.values() if target.platform == "gpu"]
    assert sorted(path.stem for path in folder.glob("*.txtpb")) == sorted(t.name for t in gpus)
    for target in gpus:
        assert f'"{target.device_kind}"' in (folder / f"{target.name}.txtpb").read_text()


@pytest.mark.parametrize("call", [pp.inspect, pp.explain, pp.audit])
def test_an_unknown_target_names_the_known_ones(call: object):
    with pytest.raises(ValueError, match=r"unknown target 'b300'.*'h100'.*'tpu v6e'"):
        call(jnp.sin, target="b300")  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(("name", "kind"), [("h100", "NVIDIA H100"), ("tpu v5e", "TPU v5 lite")])
def test_what_is_planned_for_a_target_says_so(name: str, kind: str):
    inspection = pp.inspect(jnp.dot, target=name)(A, A)
    explanation = pp.explain(jnp.dot, target=name)(A, A)
    here = pp.inspect(jnp.dot)(A, A)
    assert inspection.device.startswith(kind) and explanation.device == inspection.device
    where = f"planned for {inspection.device}"
    for text in (
        inspection.diff(color=False).splitlines()[0],
        repr(inspection),
        inspection._repr_html_(),
        explanation.text(color=False).splitlines()[0],
        explanation._repr_html_(),
    ):
        assert where in text
    # A program for this machine's CPU has no such words, so that its texts are as short as before.
    assert here.device == "" and "planned for" not in here.diff()


@pytest.mark.parametrize("name", ["h100", "tpu v5e"])
def test_a_plan_for_a_target_says_how_its_compiler_is_installed(
    monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.setattr(targets, "_is_installed", lambda _module: False)
    targets._topology.cache_clear()
    line = rf"not compiled  target '{name}' needs XLA's ... compiler: pip install .*jax.*=="
    inspection = pp.inspect(jnp.dot, target=name)(A, A)
    explanation = pp.explain(jnp.dot, target=name)(A, A)
    assert inspection.plan.lowers and inspection.compiled is None
    for text in (inspection.diff(color=False), explanation.text(color=False)):
        assert re.search(line, text)
    assert re.search(line, html.unescape(re.sub("<[^>]*>", "", explanation._repr_html_())))
    assert explanation.to_dict()["not_compiled"] == inspection.not_compiled
    for planned in (
        pp.inspect(jnp.dot, target=name, compiled=False)(A, A),
        pp.explain(jnp.dot, target=name, compiled=False)(A, A),
        pp.inspect(jnp.dot)(A, A),  # a device that is there is asked by `audit`
        pp.inspect(jnp.dot, target=jax.devices()[0])(A, A),
    ):
        assert planned.compiled is None and not planned.not_compiled
        assert "compiled" not in str(planned)


def sharded(*sizes: int, side: int = 16) -> jax.ShapeDtypeStruct:
    """A square matrix whose rows are sharded over the first axis of a mesh without devices."""
    mesh = jax.sharding.AbstractMesh(sizes, ("data", "model")[: len(sizes)])
    by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    return jax.ShapeDtypeStruct((side, side), jnp.float32, sharding=by_rows)


@pytest.mark.parametrize("report", [pp.audit, pp.inspect, pp.explain])
def test_a_topology_of_several_devices_is_refused_for_a_program_of_one(report: Callable[..., Any]):
    with pytest.raises(ValueError, match=r"several devices.*give 'tpu v5e'.*NamedSharding"):
        report(jnp.sin, target="tpu v5e:4x4")(A)
    with pytest.raises(ValueError, match=r"'h100' is one device.*sharded over 8.*'h100:8'"):
        report(jnp.sin, target="h100")(sharded(4, 2))


def test_a_topology_has_the_devices_that_its_name_says():
    names = {"tpu v5e:4x4": "v5e:4x4", "TPU-v5p:2x2x1": "v5p:2x2x1", "h100:8": "1x1x8"}
    assert {name: target_of(name).topology for name in names} == names
    assert target_of("a100:2x8").topology == "1x2x8"
    assert target_of("tpu v5e:4x4") == target_of("TPU-v5e:4x4")
    assert target_of("tpu v5e:4x4").device_kind == TARGETS["tpu v5e"].device_kind
    assert target_of("h100:1") is target_of("h100:1x1") is TARGETS["h100"]  # one device
    for unknown in ("h100:0", "h100:", "b300:8", "tpu v5e:4xx4", "h100:many"):
        with pytest.raises(ValueError, match=rf"unknown target '{unknown}'.*'tpu v5e:4x4'"):
            target_of(unknown)


def test_without_any_device_the_error_says_what_to_set():
    code = "import jax.numpy as jnp, precpass as pp; pp.inspect(jnp.sin, target='h100')(1.0)"
    environment = {**os.environ, "JAX_PLATFORMS": "cuda"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    # the package's text where JAX has found no backend, and JAX's own where it names the platform
    last = done.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: ") and "cuda" in last


def test_a_sharded_program_is_planned_for_a_topology():
    found = pp.inspect(lambda x: x @ x, target="h100:8", compiled=False)(sharded(8, side=8192))
    assert "H100" in found.device


@pytest.mark.skipif(find_spec("libtpu") is not None, reason="the compiler is installed")
def test_without_the_compiler_the_error_has_the_line_that_installs_it():
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jax\[tpu\]=="):
        pp.audit(lambda x: x @ x, target="tpu v5e")(A)
    assert pp.inspect(lambda x: x @ x, target="tpu v5e")(A).plan.lowers


def test_a_plugin_of_another_release_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(targets, "_is_installed", lambda _: True)
    monkeypatch.setattr(targets.importlib.metadata, "version", lambda _: "0.4.30")
    with pytest.raises(RuntimeError, match=r"jax-cuda12-plugin 0\.4\.30 is not .*pip install"):
        targets.Target("another", "gpu", "H100", "1x1x1").device  # noqa: B018


def test_a_programs_device_is_that_of_the_target_then_of_the_arguments():
    (cpu, *_) = jax.devices("cpu")
    shape = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(cpu))
    assert committed_device((shape, 1.0)) is cpu
    assert committed_device((jax.ShapeDtypeStruct((4,), jnp.float32), A)) is None
    with planned_for(TARGETS["h100"]):
        assert device_of_call((shape,)) is TARGETS["h100"]
    assert device_of_call((shape,)) is cpu


@pytest.mark.parametrize(
    "report", [pp.audit, lambda fn, target: pp.compare(fn, "AutoMixedBf16", target=target)]
)
def test_a_host_callback_is_refused_where_there_is_no_host(
    report: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    (cpu, *_) = jax.devices("cpu")
    monkeypatch.setattr(targets.Target, "device", cpu)
    monkeypatch.setattr(execute, "is_present", lambda _: False)

    calls: list[Any] = []

    def fn(x: jax.Array) -> jax.Array:
        return jax.pure_callback(lambda y: calls.append(y) or y, x, x @ x)

    with pytest.raises(ValueError, match=r"calls Python on the host \(pure_callback at .*:\d+"):
        report(fn, target="h100")(A)
    assert not calls


def test_nothing_is_timed_on_a_target():
    with pytest.raises(ValueError, match=r"rounds=3 with a target: .*leave rounds out"):
        pp.compare(jnp.sin, "AlwaysF32", target="h100", rounds=3)
    with pytest.raises(ValueError, match=r"unknown target 'b300'"):
        pp.compare(jnp.sin, "AlwaysF32", columns="temp", target="b300")
