"""The benchmark, small: its models in every column, its tables, and the file that it writes."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import bench
import bench_cells
import bench_columns
import bench_targets
import jax
import jax.numpy as jnp
import pytest
import render_results
from bench_cells import Cell, Effort
from bench_columns import COLUMNS, Column
from bench_models import MODELS, Model
from bench_targets import TargetCell

from precpass.measure.counts import count
from precpass.measure.execute import Timing

pytestmark = pytest.mark.programs


@pytest.fixture(scope="module", autouse=True)
def as_the_libraries_expect():
    # the models and optax are written for JAX's own promotion
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@cache
def small(name: str) -> Model:
    return MODELS[name]("small")


def traced(name: str, mode: str, key: str) -> Any:
    model = small(name)
    return bench_cells.traced(model, mode, key).trace(*bench_columns.arguments(model, mode))


def dtypes(tree: Any) -> set[Any]:
    return {x.dtype for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)}


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_gradient_in_every_column(name: str):
    traces = {key: traced(name, "gradient", key) for key in COLUMNS}
    counts = {key: count(trace.jaxpr) for key, trace in traces.items()}
    assert all(dtypes(trace.out_info) == {jnp.dtype("float32")} for trace in traces.values())
    plain, swapped = counts["float32"], counts["swapped"]
    assert plain.low == plain.casts == swapped.low == swapped.casts == 0 < plain.products
    assert swapped.products == plain.products and swapped.flops == plain.flops
    # by hand the router's products, and those that make the matrices of physics, are float32
    assert counts["hand"].low >= 0.75 * counts["hand"].products
    assert counts["grad-auto"].low > 0.9 * plain.products
    assert counts["auto-grad"].low > 0.9 * plain.products


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


def test_a_run_measures_every_column_and_writes_a_file_of_results(tmp_path: Path):
    file = tmp_path / "bench.json"
    options = ["--models", "mlp", "--columns", "hand,float32,auto-grad", "--size", "small"]
    bench.main([*options, "--modes", "gradient,step", "--rounds", "1", "--json", str(file)])
    result = json.loads(file.read_text())
    gradient, step, means = result["parts"][0]["tables"]
    names = ["float32", "by hand", "auto(grad)"]
    assert [row[:2] for row in gradient["rows"]] == [["mlp", name] for name in names]
    assert [row[6] for row in gradient["rows"]] == ["0/3", "3/3", "3/3"]
    errors = [float(row[8]) for row in gradient["rows"]]
    assert errors[0] < 1e-6 < 1e-4 < errors[2] < errors[1]
    assert all(float(row[9]) > 0 for row in step["rows"]) and len(means["rows"]) == 3
    assert "| **mlp** | float32 |" in "\n".join(render_results.rendered(result))


def test_a_column_that_fails_is_an_error_cell(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: Any) -> Any:
        raise NotImplementedError("no such kernel\nand more")

    monkeypatch.setitem(COLUMNS, "fails", Column("fails", forward=lambda _: refuse))
    cells = bench_cells.measured(small("mlp"), "forward", ["float32", "fails"], Effort(2, 1))
    plain, failed = cells
    assert not plain.failure and plain.timing and plain.error is not None and plain.error < 1e-6
    assert failed.failure == "NotImplementedError: no such kernel" and failed.timing is None
    assert bench.table_of(cells, "forward")["rows"][1][2] == failed.failure


def test_an_unknown_name_is_refused_with_the_legal_ones(capsys: Any):
    assert bench.arguments(["--columns", "hand, float32"]).columns == ["float32", "hand"]
    with pytest.raises(SystemExit):
        bench.arguments(["--models", "nothing"])
    text = " ".join(capsys.readouterr().err.split())
    assert f"--models: unknown 'nothing'; legal: {', '.join(MODELS)}" in text


def test_means_are_of_ratios_within_rounds_and_of_the_models_that_ran():
    def cell(model: str, column: str, *seconds: float) -> Cell:
        return Cell(model, "step", column, timing=Timing(seconds) if seconds else None)

    cells = [
        *(cell("mlp", "float32", 1.0, 10.0, 1.0), cell("cnn", "float32", 4.0)),
        *(cell("mlp", "hand", 2.0, 20.0, 2.0), cell("cnn", "hand")),
        cell("mlp", "auto-grad", 0.5, 5.0, 9.0),  # ratios 0.5, 0.5, 9
        cell("cnn", "auto-grad", 32.0),  # 8
    ]
    assert bench.means_table(cells)["rows"] == [
        ["float32", "- / 0.50", "- / 0.50"],
        ["by hand", "2.00 / -", "2.00 / -"],
        ["auto(grad)", "2.00 / 0.25", "2.00 / 0.25"],
    ]


def test_a_target_has_the_columns_that_its_compiler_gives():
    cells = [
        TargetCell("cnn", "float32", cycles=400, temp=20, low=0, kernels=5, casts=0),
        TargetCell("cnn", "hand", cycles=100, temp=10, low=5, kernels=5, casts=2),
        TargetCell("cnn", "auto-grad", cycles=200, temp=5, low=5, kernels=5, casts=1),
    ]
    means, figures = bench_targets.tables(cells)
    assert means["columns"] == ["program", "cycles", "worst", "temp", "worst"]
    assert means["rows"] == [["float32", 4.0, 4.0, 2.0, 2.0], ["auto(grad)", 2.0, 2.0, 0.5, 0.5]]
    assert figures["rows"][2] == ["cnn", "auto(grad)", 0.5, 0.25, "5/5", 1]
