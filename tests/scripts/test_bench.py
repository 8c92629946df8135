"""The benchmark, small: its models, its columns, what it writes and how it averages."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import bench
import bench_cells
import bench_columns
import bench_table
import jax
import jax.numpy as jnp
import optax
import pytest
from bench_cells import Cell, Effort
from bench_columns import COLUMNS, MODES, Column
from bench_models import MODELS, Model

from precpass.autotune.compiled import Figures
from precpass.measure.counts import count
from precpass.measure.execute import Timing

pytestmark = pytest.mark.programs

OWN = [key for key, column in COLUMNS.items() if not column.missing]


@pytest.fixture(scope="module", autouse=True)
def as_the_libraries_expect():
    # the models, optax and jmp are written for JAX's own promotion
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@cache
def small(name: str) -> Model:
    return MODELS[name]("small")


def traced(name: str, mode: str, key: str) -> Any:
    model = small(name)
    args = bench_columns.arguments(model, mode)
    with COLUMNS[key].context():
        return bench_cells.traced(model, mode, key).trace(*args)


def dtypes(tree: Any) -> set[Any]:
    return {x.dtype for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)}


# ---------------------------------------------------------------- models and columns


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_gradient_in_every_column(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PRECPASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        "precpass.autotune.compiled.figures_of",
        lambda jaxpr, *_: Figures(0.0, 1.0 + ("bf16" not in str(jaxpr)), 0.0),
    )
    traces = {key: traced(name, "gradient", key) for key in OWN}
    counts = {key: count(trace.jaxpr) for key, trace in traces.items()}
    assert all(dtypes(trace.out_info) == {jnp.dtype("float32")} for trace in traces.values())
    plain = counts.pop("float32")
    assert plain.flops.keys() == {"f32"} and plain.low == plain.casts == 0 < plain.products
    assert counts.pop("matmul").marked == plain.products
    swapped = counts.pop("swapped")
    assert swapped.low == swapped.casts == 0 and swapped.flops == plain.flops
    assert swapped.products == plain.products
    assert counts.pop("jmp").low > 0
    # what stays wide by hand: the router's products, and those that make the matrices of physics
    assert counts["hand"].low >= 0.75 * counts["hand"].products
    assert counts["grad-auto"].low > 0.9 * plain.products
    assert counts["auto-grad"].low > 0.9 * plain.products
    assert counts["auto-best"].low == counts["auto-grad"].low
    assert counts["float16"].low > 0.9 * plain.products
    assert {"bf16"} <= counts["auto-grad"].flops.keys() and "f16" in counts["float16"].flops


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", MODELS)
def test_both_forms_of_a_model_agree_as_far_as_bfloat16_does(name: str):
    model = small(name)

    def both(*args: Any) -> Any:
        return model.forward(*args), model.by_hand(*args)

    plain, hand = jax.jit(both)(model.params, model.state, model.batch(0))
    assert dtypes(plain) == dtypes(hand) == {jnp.dtype("float32")}
    for x, y in zip(jax.tree.leaves(plain), jax.tree.leaves(hand), strict=True):
        # a few roundings by 2**-9 each in sequence, but not the same numbers
        assert 0 < jnp.linalg.norm(x - y) <= 0.02 * jnp.linalg.norm(x)


@pytest.mark.parametrize("name", ["cnn", "physics"])
@pytest.mark.parametrize("key", ["float32", "hand", "auto-grad", "float16"])
def test_a_step_keeps_parameters_and_states_in_float32(name: str, key: str):
    trace = traced(name, "step", key)
    assert dtypes(trace.out_info) == {jnp.dtype("float32")}
    donated = [info.donated for info in jax.tree.leaves(trace.lower().args_info[0][:3])]
    assert donated and all(donated)


def test_the_loss_scale_is_in_the_step_alone_and_cancels():
    model, args = small("mlp"), (small("mlp").params, (), small("mlp").batch(0))
    loss, column = model.loss(model.forward), Column("", "", scale=8.0)
    scaled = column._scaled(loss, "step")
    assert column._scaled(loss, "gradient") is loss
    assert jax.jit(scaled)(*args)[0] == 8 * jax.jit(loss)(*args)[0]
    sgd = optax.sgd(1.0)

    @jax.jit
    def steps(*args: Any) -> Any:
        made = ((loss, 1.0), (scaled, 8.0))
        return [bench_columns.train_step(sgd, model.differentiate(f), s, *args) for f, s in made]

    plain, unscaled = steps(*args[:2], sgd.init(args[0]), args[2])
    assert jax.tree.all(jax.tree.map(jnp.allclose, plain, unscaled))
    assert not jax.tree.all(jax.tree.map(jnp.allclose, plain[0], args[0]))


# ---------------------------------------------------------------- a run


@pytest.mark.release
def test_a_run_measures_its_columns_and_writes_them_as_json(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(COLUMNS, "none", Column("none", "", missing="nobody has made this one"))
    file, tables = tmp_path / "bench.json", tmp_path / "bench.md"
    keys = ["float32", "swapped", "hand", "auto-grad", "none"]
    options = f"--models mlp --modes gradient --columns {','.join(keys)} --size small"
    written = ["--rounds", "1", "--json", str(file), "--markdown", str(tables)]
    bench.main([*options.split(), *written])
    found = json.loads(file.read_text())
    assert found.keys() == {
        *("schema", "date", "machine", "device", "versions", "size", "rounds", "steps"),
        *("columns", "missing", "cells", "geometric_means"),
    }
    assert found["versions"]["jax"] == jax.__version__ and found["machine"]["processor"]
    assert found["missing"].keys() == {"none"}
    cells = {(cell["mode"], cell["column"]): cell for cell in found["cells"]}
    assert cells.keys() == {("gradient", key) for key in keys if key in OWN}
    for cell in cells.values():
        assert cell["failure"] is None and len(cell["seconds"]["rounds"]) == 1
        assert cell["temp_bytes"] > 0 and cell["counts"]["products"] > 0
        assert cell["kept_bytes"] > 0
        assert cell["ratios"].keys() == {"to_float32", "to_hand"}
    for key in ("counts", "kept_bytes"):
        assert cells["gradient", "swapped"][key] != cells["gradient", "auto-grad"][key]
    assert cells["gradient", "swapped"]["counts"]["low"] == 0
    assert cells["gradient", "swapped"]["error"] < 1e-6
    assert cells["gradient", "float32"]["error"] < 1e-6 < 1e-4 < cells["gradient", "hand"]["error"]
    assert cells["gradient", "float32"]["ratios"]["to_float32"]["median"] == 1.0
    shown = capsys.readouterr()
    assert "mlp, gradient" in shown.out and "nobody has made this one" in shown.out
    again = tmp_path / "again.md"
    bench.main(["--read", str(file), "--markdown", str(again)])
    assert "| **mlp** | float32 |" in tables.read_text() == again.read_text()
    assert capsys.readouterr().out == shown.out


def test_a_column_that_fails_is_an_error_cell(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: Any) -> Any:
        raise NotImplementedError("no such kernel\nand more")

    def fails_late(fn: Any) -> Any:
        return lambda *args: jax.pure_callback(refuse, jax.eval_shape(fn, *args), *args)

    monkeypatch.setitem(COLUMNS, "traces", Column("traces", "", forward=lambda _: refuse))
    monkeypatch.setitem(COLUMNS, "runs", Column("runs", "", outer=fails_late))
    done: list[int] = []
    monkeypatch.setitem(COLUMNS, "none", Column("none", "", missing="nobody has made this one"))
    keys = ["float32", "traces", "runs", "none", "grad-auto"]
    cells = bench_cells.measured(
        small("mlp"), "forward", keys, Effort(2, 1), lambda _text, advance: done.append(advance)
    )
    assert [cell.column for cell in cells] == ["float32", "traces", "runs"]
    plain, traces, runs = cells
    assert plain.failure is None and plain.timing and plain.timing.median > 0
    assert traces.failure == "NotImplementedError: no such kernel"
    assert plain.kept_bytes is None and plain.error and plain.error < 1e-6
    assert runs.failure and runs.counts and runs.timing is None
    assert sum(done) == 3 + 2  # as many as the progress bar is long
    assert bench_table.failures(cells)[0].startswith("mlp, forward, traces: NotImplementedError")
    assert "no such kernel" in bench_table.markdown(cells)


def test_a_step_trains_and_what_is_short_is_measured_in_more_rounds():
    def trained(steps: int) -> Cell:
        effort = Effort(rounds=2, steps=steps, seconds=1e6)
        (cell,) = bench_cells.measured(small("mlp"), "step", ["auto-grad"], effort, lambda *_: None)
        return cell

    first, later = trained(1), trained(33)  # the 33rd batch is the first again
    assert first.loss and later.loss and first.error is None
    assert later.loss < first.loss
    assert first.timing and len(first.timing.seconds) == bench_cells.MOST_ROUNDS


@pytest.mark.parametrize(
    "option, legal", [("--models", MODELS), ("--modes", MODES), ("--columns", COLUMNS)]
)
def test_an_unknown_name_is_refused_with_the_legal_ones(option: str, legal: Any, capsys: Any):
    with pytest.raises(SystemExit):
        bench.arguments([option, "nothing"])
    text = " ".join(capsys.readouterr().err.split())
    assert f"{option}: unknown 'nothing'; legal: {', '.join(legal)}" in text


def test_names_keep_the_order_of_the_table():
    assert bench.arguments(["--columns", "hand, float32"]).columns == ["float32", "hand"]


# ---------------------------------------------------------------- means


def cell(model: str, mode: str, column: str, *seconds: float) -> Cell:
    timing = Timing(seconds) if seconds else None
    failure = None if seconds else "Error: made up"
    return Cell(model, mode, column, failure, timing)


def test_geometric_means_are_over_ratios_within_rounds_of_the_models_that_ran():
    cells = [
        cell("mlp", "forward", "float32", 1.0, 10.0, 1.0),
        cell("mlp", "forward", "hand", 2.0, 20.0, 2.0),
        cell("mlp", "forward", "auto-grad", 0.5, 5.0, 9.0),  # ratios 0.5, 0.5, 9
        cell("cnn", "forward", "float32", 4.0),
        cell("cnn", "forward", "hand"),
        cell("cnn", "forward", "auto-grad", 32.0),  # 8
        cell("cnn", "step", "float32", 1.0),
        cell("cnn", "step", "auto-grad", 2.0),
    ]
    means = {
        (m["mode"], m["column"], m["to"]): (m["mean"], m["models"])
        for m in bench_table.geometric_means(cells)
    }
    assert means["forward", "auto-grad", "float32"] == (pytest.approx(2.0), ["cnn", "mlp"])
    assert means["step", "auto-grad", "float32"] == (pytest.approx(2.0), ["cnn"])
    assert means["all", "auto-grad", "float32"] == (pytest.approx(2.0), ["cnn", "mlp"])
    assert means["forward", "auto-grad", "hand"] == (pytest.approx(0.25), ["mlp"])
    assert means["forward", "hand", "float32"] == (pytest.approx(2.0), ["mlp"])
    assert means["forward", "float32", "hand"] == (pytest.approx(0.5), ["mlp"])
    assert ("step", "auto-grad", "hand") not in means
    shown = bench_table.markdown(cells)  # one model has no step
    assert "| auto(grad) | 2.00 / 0.25 | 2.00 / - | 2.00 / 0.25 |" in shown
    assert shown.count("**mlp**") == 1 and shown.count("**cnn**") == 2
    assert ("forward", "float32", "float32") not in means
    assert math.isclose(math.prod(m["mean"] for m in bench_table.geometric_means(cells[:2])), 1.0)
