"""`profile`: time, memory, FLOPs and bytes of each row, and the estimates."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import precpass as pp
from precpass.report.compare.profile import DEVICES
from tests.support.passes import quiet

BOTH = ("AlwaysF32", "AutoMixedBf16")
X = jnp.ones((16, 16)) / 16


def product(x, w):
    return x @ w


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def profiled(fn, policies, *args, **options):
    with quiet():
        return pp.report.profile(fn, policies, **{"rounds": 0, **options})(*args)


@pytest.fixture(scope="module")
def timed() -> pp.report.Profile:
    def layers(x, ws):
        return lax.scan(lambda x, w: (x @ w, None), x, ws)[0]

    rows = {"<b>&wide": "AlwaysF32", "low": "AutoMixedBf16", "as written": layers}
    return pp.report.profile(layers, rows, devices=("H100", "v5e"), rounds=3)(
        X, jnp.ones((5, 16, 16))
    )


# ---------------------------------------------------------------- figures


def test_a_profile_that_names_no_policies_has_two_rows():
    found = pp.report.profile(jnp.dot, rounds=0)(*[jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2)
    assert [row.name for row in found.rows] == ["AlwaysF32", "AutoMixedBf16"]


def test_there_is_a_row_for_each_in_order(timed):
    assert timed.function == "layers"
    assert [row.name for row in timed.rows] == ["<b>&wide", "low", "as written"]
    assert [row.policy for row in timed.rows] == [pp.AlwaysF32, pp.AutoMixedBf16, None]
    assert [str(peaks) for peaks in timed.peaks] == ["NVIDIA H100 SXM", "TPU v5e"]


def test_times_are_interleaved_and_ratios_taken_within_a_round(timed):
    first = np.asarray(timed.rows[0].timing.seconds)
    assert len(timed.rows) == 3
    for row in timed.rows:
        assert len(row.timing.seconds) == timed.rounds == 3
        assert row.ratio == pytest.approx(np.median(np.asarray(row.timing.seconds) / first))


def test_flops_have_the_trips_of_a_scan(timed):
    for row in timed.rows:
        assert row.flops == 5 * 2 * 16**3
    assert timed.rows[0].counts.flops == timed.rows[2].counts.flops == {"f32": 40960.0}
    assert timed.rows[1].counts.flops == {"bf16": 40960.0}
    assert timed.rows[0].moved == timed.rows[2].moved == 5 * 3 * 4 * 256


def test_memory_is_that_of_the_compiled_program(timed):
    assert len(timed.rows) == 3
    for row in timed.rows:
        assert row.memory.arguments == 4 * 256 * 6
        assert row.memory.outputs == 4 * 256
        assert row.memory.temp >= 0


def test_memory_that_is_donated_is_aliased():
    donating = pp.auto_mixed(lambda x, w: x @ w, donate_argnums=0)
    x, w = jnp.ones((8, 8)), jnp.ones((8, 8))
    (row,) = profiled(donating, "AlwaysF32", x, w, rounds=2).rows
    assert row.memory.aliased == 256
    assert not x.is_deleted()


def test_the_gain_is_that_of_the_peaks_in_a_large_product():
    n = 2**16
    found = profiled(product, BOTH, shape(n, n), shape(n, n))
    wide, low = found.rows
    assert [e.device for e in low.estimates] == list(DEVICES)
    assert {e.gain for e in wide.estimates} == {1.0}
    gains = {e.device: e.gain for e in low.estimates}
    for device in ("a100", "h100", "h200"):
        assert gains[device] == pytest.approx(2.0, rel=0.06)
    assert gains["mi300x"] == pytest.approx(8.0, rel=0.06)
    assert gains["v5e"] == pytest.approx(1.0, rel=0.06)
    assert wide.memory.arguments == 2 * 4 * n**2
    assert wide.estimates[1].seconds == pytest.approx(2.0 * n**3 / 494.7e12)


def test_the_float32_program_is_the_base_whatever_the_rows_are():
    def by_hand(x, w):
        return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)

    n = 2**14
    found = profiled(by_hand, ["AutoMixedBf16"], shape(n, n), shape(n, n), devices="h100")
    assert found.rows[0].estimates[0].gain > 1.4


def test_a_format_that_a_device_has_no_peak_for_has_no_estimate():
    found = profiled(product, ["AlwaysF32", "AutoMixed"], X, X, devices=("v4", "h100"))
    on_v4, on_h100 = found.rows[1].estimates
    assert on_v4.seconds is on_v4.gain is None and on_v4.without_peak == ("f16",)
    assert on_h100.gain is not None
    assert "-: no peak is published for f16 on v4." in found.notes
    assert found.rows[0].estimates[0].gain == 1.0
    assert found.to_frame()["gain_v4"].isna().tolist() == [False, True]


# ---------------------------------------------------------------- arguments


def test_modules_strings_and_no_arguments():
    def fn(model, x, kind):
        return model(x) if kind == "own" else x

    found = profiled(fn, BOTH, nnx.Linear(16, 16, rngs=nnx.Rngs(0)), X, "own", rounds=1)
    assert found.rows[1].counts.low == 1
    (row,) = profiled(lambda: jnp.zeros(3), "AlwaysF32", rounds=1).rows
    assert row.flops == 0 and row.memory.arguments == 0
    (row,) = profiled(lambda: (), "AlwaysF32").rows
    assert row.moved == 0 and {e.gain for e in row.estimates} == {1.0}


def test_empty_arrays_integers_and_keys():
    def fn(x, i, key):
        return x @ x.T, i + 1, jax.random.normal(key, (2,))

    with jax.numpy_dtype_promotion("standard"):
        found = profiled(fn, BOTH, jnp.ones((0, 4)), jnp.arange(3), jax.random.key(0), rounds=1)
    assert all(e.gain is not None for row in found.rows for e in row.estimates)


def test_shapes_among_strings_and_trees_will_do_where_nothing_runs():
    def fn(p, x, kind):
        return x @ p["w"] if kind == "own" else x

    (row,) = profiled(fn, "AutoMixedBf16", {"w": shape(4, 8), "n": 3}, shape(2, 4), "own").rows
    assert row.counts.low == 1
    other = profiled(product, [("own", product)], shape(2, 4), shape(4, 8)).rows[0]
    assert other.flops == 2 * 2 * 4 * 8


def test_a_static_argument():
    def fn(x, n):
        return lax.fori_loop(0, n, lambda _, x: x @ x, x)

    found = profiled(pp.auto_mixed(fn, static_argnums=1), BOTH, X, 4)
    assert found.rows[0].flops == 4 * 2 * 16**3
    options = {"static_argnums": 1}
    (row,) = profiled(pp.auto_mixed(fn, **options), [("own", fn)], shape(16, 16), 4).rows
    assert row.flops == 4 * 2 * 16**3
    assert not any("run time knows" in note for note in found.notes)


@pytest.mark.parametrize("report", [pp.report.profile, pp.compare])
def test_of_several_devices_the_memory_is_that_of_each(report):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x, w = jax.device_put(jnp.ones((64, 16)), by_rows), jax.device_put(jnp.ones((16, 16)), whole)
    found = report(product, BOTH, rounds=0)(x, w)
    assert {(row.memory.devices, row.memory.arguments) for row in found.rows} == {(4, 2048)}
    assert {sum(row.counts.flops.values()) for row in found.rows} == {2.0 * 64 * 16 * 16}
    assert "divided over 4 devices: memory, kernels, their bytes" in str(found)
    assert "divided over" not in str(report(product, BOTH, rounds=0)(X, X))


def test_what_is_not_counted_is_said():
    def fn(x):
        return lax.while_loop(lambda x: x[0, 0] < 1, lambda x: jnp.linalg.cholesky(x @ x), x)

    found = profiled(fn, "AutoMixedBf16", shape(8, 8))
    notes = " ".join(found.notes)
    assert "count as 128 of them" in notes
    assert "arithmetic not counted: cholesky: by their bytes alone" in notes
    assert "left out" in notes
    assert not any("run time knows" in note for note in profiled(product, BOTH, X, X).notes)


def test_none_for_the_devices_is_the_default():
    found = profiled(product, BOTH, X, X, devices=None)
    assert found == profiled(product, BOTH, X, X)
    assert [e.device for e in found.rows[0].estimates] == list(DEVICES)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "policies, options, error, why",
    [
        ([], {}, ValueError, "profile: no rows; give at least one policy or function"),
        ("AutoMixedB16", {}, ValueError, "AutoMixedB16"),
        (3, {}, (TypeError, ValueError), "3"),
        ([("a", "c=bf16"), ("a", "c=f16")], {}, ValueError, "profile: the name 'a' is given twice"),
        ({1: "c=bf16"}, {}, TypeError, "profile: a dict has the rows' names as its keys, not 1"),
        (BOTH, {"devices": "b300"}, ValueError, "unknown device 'b300': legal are 'a100-40gb'"),
        (BOTH, {"devices": ("h100", "x")}, ValueError, "unknown device 'x': legal are"),
        (BOTH, {"rounds": -1}, ValueError, "rounds=-1: a whole number"),
        (BOTH, {"rounds": True}, ValueError, "rounds=True: a whole number"),
    ],
)
def test_what_is_refused_before_anything_is_traced(policies, options, error, why):
    with pytest.raises(error, match="(?s)" + why):
        pp.report.profile(product, policies, **options)


def test_shapes_are_refused_where_rows_are_timed():
    with pytest.raises(TypeError, match=r"x must hold arrays.*with rounds=0 nothing runs"):
        pp.report.profile(product, BOTH)(shape(2, 2), X)
    with pytest.raises(TypeError, match=r"must hold arrays, not .*Tracer"):
        jax.jit(lambda x: pp.report.profile(product, BOTH, rounds=0)(x, X) and x)(X)


@pytest.mark.parametrize("report", [pp.report.profile, pp.compare])
@pytest.mark.parametrize("static", [{"static_argnums": 1}, {"static_argnames": "n"}])
def test_static_arguments_of_its_own_are_to_be_declared(report, static):
    @functools.partial(jax.jit, **static)
    def power(x, n):
        return x if n == 0 else x @ x

    with pytest.raises(ValueError, match="Non-hashable static arguments") as found:
        report(power, "AutoMixedBf16", rounds=0)(X, n=2)
    (note,) = (note for note in found.value.__notes__ if "made with static arguments" in note)
    assert "auto_mixed(power, static_argnums=...) or static_argnames=..." in note
    (row,) = report(pp.auto_mixed(power, **static), "AutoMixedBf16", rounds=0)(X, 2).rows
    assert row.counts.low == 1


def test_an_error_says_in_which_row_it_was():
    def other(x, w):
        raise KeyError("no")

    with pytest.raises(KeyError) as found:
        profiled(product, ["AlwaysF32", other], X, X)
    assert "in the row 'other' of profile" in found.value.__notes__


# ---------------------------------------------------------------- shown


def test_the_text_has_two_aligned_tables(timed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # a narrow terminal folds a table
    lines = str(timed).splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith("program")]
    assert len(heads) == 2
    for head, count in zip(heads, (9, 3), strict=True):
        table = lines[head : head + 2 + len(timed.rows)]
        assert len({len(line) for line in table}) == 1
        assert [line.split("  ")[0] for line in table[2:]] == [row.name for row in timed.rows]
        assert len([cell for cell in table[2].split("  ") if cell]) == count
    assert "an upper estimate, no measurement" in str(timed)
    assert "TF32 on NVIDIA's" in str(timed)
    assert "estimated" not in str(profiled(product, BOTH, X, X, devices=()))


def test_the_html_has_two_tables_and_escaped_names(timed):
    text = timed._repr_html_()
    assert text.count("<table") == 2 and "&lt;b&gt;&amp;wide" in text and "<script" not in text


def test_the_dict_is_json_with_the_source_of_each_figure(timed):
    data = json.loads(json.dumps(timed.to_dict(), allow_nan=False))
    low = data["rows"][1]
    assert low["flops_bf16"] == low["flops"] == 40960
    assert low["argument_bytes"] == 4 * 256 * 6
    assert low["seconds"] == timed.rows[1].timing.median
    assert low["gain_h100"] == timed.rows[1].estimates[0].gain
    for peaks in data["peaks"]:
        sourced = {name for source in peaks["sources"] for name in source["figures"]}
        assert {"bf16", "bandwidth"} <= sourced
        assert all(source["url"].startswith("https://") for source in peaks["sources"])


def test_the_frame_has_a_row_for_each(timed):
    frame = timed.to_frame()
    assert list(frame.index) == [row.name for row in timed.rows]
    assert frame.loc["low", "flops_f32"] == 0
    assert frame.loc["low", "moved_bytes"] == timed.rows[1].moved
    assert list(frame["gain_v5e"]) == [row.estimates[1].gain for row in timed.rows]
