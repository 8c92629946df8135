"""The columns of `compare`: what each shows, and that nothing else is computed."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import precpass as pp
from precpass.devices.peaks import peaks_of_kind
from precpass.measure.execute import compiled
from precpass.report.compare import compare as module
from precpass.report.compare.rows import COLUMNS, COSTS, DEFAULT, ERRORS, TIMES
from tests.support.passes import quiet

BOTH = ("AlwaysF32", "AutoMixedBf16")
X = jnp.ones((16, 16)) / 16
STATIC = tuple(name for name in COLUMNS if name not in ERRORS | TIMES)


def product(x, w):
    return x @ w


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def compared(fn, policies, *args, columns=STATIC, **options):
    with quiet():
        return pp.compare(fn, policies, columns=columns, **options)(*args)


def test_a_table_has_the_columns_in_the_order_of_their_names(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    columns = ("temp", "flops", "products", "cycles")
    found = compared(product, BOTH, X, X, columns=columns)
    head, _, wide, low = str(found).splitlines()[2:6]
    assert head.split() == ["program", "temp", "MB", "GFLOP", "products", "low", "Mcycles"]
    assert (wide.split()[0], wide.split()[-2:]) == ("AlwaysF32", ["0/1", "-"])
    assert (low.split()[0], low.split()[-2:]) == ("AutoMixedBf16", ["1/1", "-"])
    assert (found.columns, found.reference, found.rounds, found.conclusion) == (columns, "", 0, "")
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["columns"] == list(columns) and "relative_error" not in data["rows"][0]
    assert "<table" in found._repr_html_()
    with pytest.raises(ValueError, match="no row has floating results"):
        found.plot(x="memory")


def test_the_default_is_all_but_some():
    assert compared(product, BOTH, X, X, columns=None, rounds=0).columns == DEFAULT
    assert set(COLUMNS) - set(DEFAULT) == {"flops", "arguments", "outputs"}


def test_an_unknown_column_is_told_the_legal_ones():
    with pytest.raises(ValueError, match="unknown column 'speed': legal are products, casts"):
        pp.compare(product, BOTH, columns=["time", "speed"])
    assert compared(product, BOTH, X, X, columns="temp").columns == ("temp",)


def test_a_time_alone_is_measured_without_a_result():
    ran = []

    def counted(x):
        jax.debug.callback(lambda: ran.append(1))
        return x @ x

    (row,) = compared(counted, "AlwaysF32", X, columns="time", rounds=2).rows
    jax.effects_barrier()
    assert len(row.timing.seconds) == 2 and len(ran) == 3  # with the warm-up
    assert row.errors is None and row.leaves == () and row.traffic is None


def test_costs_are_those_of_the_compiled_program_and_of_the_traced_loops():
    def layers(x, ws):
        return lax.scan(lambda x, w: (x @ w, None), x, ws)[0]

    wide, low = compared(layers, BOTH, shape(16, 16), shape(5, 16, 16)).rows
    assert wide.counts.flops == {"f32": 5 * 2 * 16**3}
    assert low.counts.product_flops == {"bf16": 5 * 2 * 16**3}
    assert (wide.memory.arguments, wide.memory.outputs) == (4 * 256 * 6, 4 * 256)
    traffic = compiled(layers, X, jnp.ones((5, 16, 16))).traffic
    assert (wide.traffic.moved, wide.traffic.runs) == (traffic.moved, 5)
    assert wide.roofline is None  # a CPU has no published peaks


def test_the_roofline_is_that_of_the_peaks(monkeypatch):
    h100 = peaks_of_kind("gpu", "NVIDIA H100")
    monkeypatch.setattr(module, "peaks_of_kind", lambda *_: h100)
    wide, low = compared(product, BOTH, shape(512, 512), shape(512, 512)).rows
    for row, peak in ((wide, h100.tf32), (low, h100.bf16)):
        bytes_alone = row.traffic.moved / h100.bandwidth
        assert row.roofline == pytest.approx(bytes_alone + 2 * 512**3 / peak)
        assert row.figures()["roofline_seconds"] == row.roofline


def test_of_several_devices_the_memory_is_that_of_each():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x, w = jax.device_put(jnp.ones((64, 16)), by_rows), jax.device_put(jnp.ones((16, 16)), whole)
    found = compared(product, BOTH, x, w)
    assert {(row.memory.devices, row.memory.arguments) for row in found.rows} == {(4, 2048)}
    assert {sum(row.counts.flops.values()) for row in found.rows} == {2.0 * 64 * 16 * 16}
    assert "divided over 4 devices: memory, kernels, their bytes" in str(found)
    assert "divided over" not in str(compared(product, BOTH, X, X))


# ---------------------------------------------------------------- shapes


def test_shapes_will_do_where_nothing_runs():
    def fn(p, x, kind):
        return x @ p["w"] if kind == "own" else x

    (row,) = compared(fn, "AutoMixedBf16", {"w": shape(4, 8), "n": 3}, shape(2, 4), "own").rows
    assert row.counts.low == 1
    (row,) = compared(product, [("own", product)], shape(2, 4), shape(4, 8)).rows
    assert row.counts.flops == {"f32": 2 * 2 * 4 * 8}

    def power(x, n):
        return lax.fori_loop(0, n, lambda _, x: x @ x, x)

    mixed = pp.auto_mixed(power, static_argnums=1)
    for row in compared(mixed, [*BOTH, ("own", power)], shape(16, 16), 4).rows:
        assert sum(row.counts.flops.values()) == 4 * 2 * 16**3
    (row,) = compared(lambda: jnp.zeros(3), "AlwaysF32").rows
    assert row.counts.flops == {} and row.memory.arguments == 0
    with jax.numpy_dtype_promotion("standard"):
        found = compared(lambda x, i: (x @ x.T, i + 1), BOTH, shape(0, 4), jnp.arange(3))
    assert [row.memory.arguments for row in found.rows] == [12, 12]


def test_shapes_are_refused_where_something_runs():
    for columns in (None, ["temp", "error"], ["ratio"]):
        with pytest.raises(TypeError, match=r"x must hold arrays, not Shape.* it takes shapes"):
            compared(product, BOTH, shape(2, 2), X, columns=columns)
    with pytest.raises(TypeError, match=r"must hold arrays, not .*Tracer"):
        jax.jit(lambda x: compared(product, BOTH, x, X) and x)(X)


def test_modules_and_strings():
    def fn(model, x, kind):
        return model(x) if kind == "own" else x

    found = compared(fn, BOTH, nnx.Linear(16, 16, rngs=nnx.Rngs(0)), X, "own")
    assert found.rows[1].counts.low == 1


@pytest.mark.parametrize("static", [{"static_argnums": 1}, {"static_argnames": "n"}])
def test_static_arguments_of_its_own_are_to_be_declared(static):
    @functools.partial(jax.jit, **static)
    def power(x, n):
        return x if n == 0 else x @ x

    with pytest.raises(ValueError, match="Non-hashable static arguments") as found:
        pp.compare(power, "AutoMixedBf16", columns=STATIC)(X, n=2)
    (note,) = (note for note in found.value.__notes__ if "made with static arguments" in note)
    assert "auto_mixed(power, static_argnums=...) or static_argnames=..." in note
    (row,) = compared(pp.auto_mixed(power, **static), "AutoMixedBf16", X, 2).rows
    assert row.counts.low == 1


# ---------------------------------------------------------------- the former report


def test_the_former_report_of_costs_is_compare_with_columns():
    with pytest.warns(DeprecationWarning, match=r"write compare\(..., columns=\['flops', 'form"):
        waiting = pp.report.profile(product, rounds=0)
    with quiet():
        found = waiting(shape(8, 8), shape(8, 8))
    assert [row.name for row in found.rows] == ["AlwaysF32", "AutoMixedBf16"]
    assert found.columns == tuple(name for name in COSTS if name not in TIMES)
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match='target="h100"'):
        pp.report.profile(product, devices=("h100", "v5e"))
    with pytest.warns(DeprecationWarning, match="is Comparison now"):
        assert pp.report.Profile is pp.report.Comparison
    with pytest.warns(DeprecationWarning, match="profile is now precpass.report.profile"):
        assert pp.profile is pp.report.profile
