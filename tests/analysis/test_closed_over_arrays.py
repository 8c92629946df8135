"""Arrays that a function closes over: wherever they lie, and whatever is being debugged."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import precpass as pp
from precpass.analysis import ranges
from precpass.analysis.ranges import ANY, of_array
from precpass.jaxpr.weak import WeakIdMap
from tests.support.jaxprs import low_products
from tests.support.values import normal, rel_error

SIDE = 1024  # 2^20 elements


def mesh_of(axis_type=AxisType.Auto):
    return jax.make_mesh((4,), ("x",), axis_types=(axis_type,))


PLACES = {
    "default": lambda: None,
    "sharded": lambda: NamedSharding(mesh_of(), P("x")),
    "replicated": lambda: NamedSharding(mesh_of(), P()),
    "sharded explicitly": lambda: NamedSharding(mesh_of(AxisType.Explicit), P("x")),
    "another device": lambda: SingleDeviceSharding(jax.devices()[1]),
    "pinned_host": lambda: SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"),
}


def placed(value, name):
    place = PLACES[name]()
    return jnp.asarray(value) if place is None else jax.device_put(value, place)


def weights():
    values = normal(0, SIDE, SIDE)
    values[3, 5], values[4, 4], values[7, 7], values[9, 9] = np.nan, -np.inf, 0.0, -3e4
    return values


def close(found, expected):
    """Whether two facts are one but for the rounding of their numbers."""
    return bool(np.allclose(np.float64(found), np.float64(expected), rtol=1e-6, atol=0.0))


# ---------------------------------------------------------------- what is known of them


@pytest.mark.parametrize("where", PLACES)
def test_the_fact_of_an_array_is_the_same_wherever_it_lies(where):
    values = weights()
    expected = of_array(values)
    assert (expected.lo, expected.likely_max) == (-np.inf, 3e4)
    assert of_array(placed(values, where)) == expected


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("where", PLACES)
def test_an_accelerator_finds_the_fact_that_numpy_finds(where, monkeypatch):
    """The reduction that runs on devices whose memory NumPy cannot read, run on CPUs here."""
    array = placed(weights(), where)
    expected = of_array(weights())
    monkeypatch.setattr(ranges, "_is_host_memory", lambda _part: False)
    monkeypatch.setattr(ranges, "_LARGE_ARRAY", 2)
    assert close(of_array(array), expected)


def test_an_accelerator_keeps_the_range_of_64_bits_with_x64_off(monkeypatch):
    with jax.enable_x64(True):
        array = jnp.asarray([1e300, -1e-200, 0.0])
    monkeypatch.setattr(ranges, "_is_host_memory", lambda _part: False)
    monkeypatch.setattr(ranges, "_LARGE_ARRAY", 2)
    assert (of_array(array).hi, of_array(array).likely_min_nonzero) == (1e300, 1e-200)


def test_an_accelerator_asks_no_mesh_or_flag_of_the_users(monkeypatch):
    monkeypatch.setattr(ranges, "_is_host_memory", lambda _part: False)
    monkeypatch.setattr(ranges, "_LARGE_ARRAY", 2)
    mesh = mesh_of(AxisType.Explicit)
    array = jax.device_put(weights(), NamedSharding(mesh, P("x")))
    expected, seen = of_array(weights()), []

    def look(x):
        monkeypatch.setattr(ranges, "_known", WeakIdMap())
        seen.append(of_array(array))
        return x

    with jax.set_mesh(mesh):
        jax.jit(look)(jnp.ones(4))
        jax.vmap(look)(jnp.ones(4))
        jax.shard_map(look, mesh=mesh, in_specs=P(), out_specs=P())(jnp.ones(4))
    with jax.disable_jit(), jax.debug_nans(True), jax.debug_infs(True):
        look(None)
    with jax.transfer_guard("disallow"), jax.numpy_dtype_promotion("strict"):
        look(None)
    assert len(seen) == 5
    assert all(close(found, expected) for found in seen)


def test_nothing_is_known_of_what_cannot_be_read():
    donated = jnp.ones((SIDE, SIDE))
    donated.delete()
    assert of_array(donated) == ANY
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        terms = jax.jit(
            lambda x: jnp.dot(x, x.T, out_sharding=P(unreduced={"x"})),
        )(jax.device_put(normal(0, 8, 8), NamedSharding(mesh, P(None, "x"))))
    assert of_array(terms) == ANY
    assert of_array(jax.new_ref(jnp.ones(3))) == ANY


def test_what_was_known_of_an_array_goes_with_it():
    array = jnp.asarray(normal(0, 300, 300))
    before = len(ranges._known)
    assert of_array(array) is of_array(array)
    assert len(ranges._known) == before + 1
    del array
    assert len(ranges._known) == before


def test_an_array_of_numpys_is_looked_at_again_when_it_has_changed():
    table = np.zeros((SIDE, SIDE), np.float32)
    assert of_array(table).hi == 0
    table[5, 5] = 1e9
    assert of_array(table).hi == pytest.approx(1e9)


# ---------------------------------------------------------------- calls


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("where", [p for p in PLACES if p != "sharded explicitly"])
@pytest.mark.parametrize("around", ["nothing", "grad", "jit", "scan"])
def test_a_function_that_closes_over_one_runs(where, around):
    w = placed(normal(0, SIDE, SIDE) / 32, where)
    on_host = "host" in str(w.sharding.memory_kind)

    def loss(x):
        own = jax.device_put(w, jax.memory.Space.Device) if on_host else w
        if around == "scan":
            return jnp.sum(lax.scan(lambda c, _: (jnp.tanh(c @ own), None), x, length=2)[0])
        return jnp.sum(jnp.tanh(x @ own))

    x = normal(1, 4, SIDE)
    wrap = {"grad": jax.grad, "jit": jax.jit}.get(around, lambda f: f)
    assert low_products(pp.inspect(loss)(x).after)
    assert rel_error(wrap(pp.auto_mixed(loss))(x), wrap(loss)(x)) < 2e-2


def test_a_function_that_closes_over_explicitly_sharded_ones_runs():
    mesh = mesh_of(AxisType.Explicit)
    w = jax.device_put(normal(0, SIDE, SIDE) / 32, NamedSharding(mesh, P("x")))
    x = jax.device_put(normal(1, 4, SIDE), NamedSharding(mesh, P()))

    def loss(x):
        return jnp.sum(jnp.tanh(x @ jax.reshard(w, P())))

    with jax.set_mesh(mesh):
        value, gradient = jax.jit(jax.value_and_grad(loss))(x)
        assert rel_error(pp.auto_mixed(loss)(x), value) < 1e-2
        assert rel_error(jax.grad(pp.auto_mixed(loss))(x), gradient) < 2e-2


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("flag", ["disable_jit", "debug_infs", "debug_nans", "transfer_guard"])
def test_whatever_is_being_debugged(flag):
    mask = jnp.where(jnp.tri(SIDE, dtype=bool), 0.0, np.nan if flag == "debug_nans" else -np.inf)
    x = jnp.asarray(normal(0, 4, SIDE))
    settings = {
        "disable_jit": jax.disable_jit,
        "debug_infs": lambda: jax.debug_infs(True),
        "debug_nans": lambda: jax.debug_nans(True),
        "transfer_guard": lambda: jax.transfer_guard("disallow"),
    }

    def fn(x):
        column = lax.slice(mask, (0, 0), (4, 1))  # zeros: what is computed is finite
        return jnp.tanh(x @ x.T) @ (x + column)

    with settings[flag]():
        plain, mixed = jax.jit(fn)(x), pp.auto_mixed(fn)(x)
    assert rel_error(mixed, plain) < 1e-2


def test_looking_at_what_a_function_closes_over_compiles_nothing():
    """24 arrays of 4 MiB: the pass compiled a reduction for each, which took 0.1 s an array."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    weights = [jnp.asarray(normal(i, SIDE, SIDE)) for i in range(24)]

    def net(x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    x = jnp.ones((4, SIDE))
    compiled.clear()
    jaxpr = pp.auto_mixed(net).trace(x).jaxpr
    assert compiled == []
    assert len(low_products(jaxpr)) == 24
    assert all(of_array(w).likely_max > 3 for w in weights)


# ---------------------------------------------------------------- several processes

_TWO_PROCESSES = """
import sys
import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("localhost:" + sys.argv[2], num_processes=2, process_id=int(sys.argv[1]))
from jax.sharding import NamedSharding, PartitionSpec as P
import precpass as pp
from precpass.analysis.ranges import ANY, of_array

mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
values = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
def over(spec, values):
    return jax.make_array_from_callback(
        values.shape, NamedSharding(mesh, spec), lambda index: values[index]
    )
x = over(P(), np.ones((8, 1024), np.float32))
whole, sharded = over(P(), values), over(P("x"), values)
assert not whole.is_fully_addressable
assert of_array(whole) == of_array(sharded) == ANY
for fn, args in ((lambda x: x @ whole, (x,)), (lambda x, w: x @ w, (x, sharded))):
    text = pp.auto_mixed(fn).lower(*args).as_text()
    assert "bf16" in text
    got = pp.auto_mixed(fn)(*args).addressable_shards[0].data
    want = jax.jit(fn)(*args).addressable_shards[0].data
    assert float(jnp.abs(got - want).max()) < 0.5, (got, want)
def refused(jit):
    try:
        jit(lambda x: x @ sharded)(x)
    except RuntimeError as error:
        return str(error).partition("\\n")[0]
assert refused(pp.auto_mixed) == refused(jax.jit) is not None
plan = pp.inspect(lambda x: x @ whole)(x).plan
assert "unchecked" in str(plan.decisions[0].reason), plan
print("fine")
"""


@pytest.mark.programs
def test_arrays_of_several_processes_work_as_under_jit(tmp_path: Path):
    script = tmp_path / "two.py"
    script.write_text(_TWO_PROCESSES)
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = str(found.getsockname()[1])
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, str(script)]
    both = [
        subprocess.Popen(
            [*command, str(i), port],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for i in (0, 1)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], "\n".join(outputs)
    assert all("fine" in text for text in outputs)
