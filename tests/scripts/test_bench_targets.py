"""How the benchmark by target compares what was compiled."""

import dataclasses

import bench_targets
import pytest
from bench_targets import TargetCell

from precpass.measure.traffic import Traffic

HAND = [
    TargetCell(name, "gradient", "hand", cycles=100, moved=6.0, temp=10)
    for name in ("cnn", "lstm", "mlp")
]
FOUND = [
    TargetCell("cnn", "gradient", "auto-grad", cycles=200, temp=5),
    TargetCell("lstm", "gradient", "auto-grad", temp=10),
    TargetCell("mlp", "gradient", "auto-grad", cycles=50, moved=3.0, temp=20),
]
TRAFFIC = Traffic(6.0, (), 0, 0.0, 0, cycles=70, without_cycles=0, guesses=False)


def test_an_estimate_that_leaves_out_kernels_is_no_figure():
    """It leaves out the products of a mixture of experts, which are most of the work."""
    assert bench_targets.figures(TRAFFIC)["cycles"] == 70
    without = dataclasses.replace(TRAFFIC, without_cycles=16)
    assert bench_targets.figures(without)["cycles"] is None


def test_a_mean_is_of_most_programs_or_none():
    row, *_ = bench_targets.means([*HAND, *FOUND])
    shown = dict(zip(bench_targets.MEANS, row, strict=True))
    assert shown["program"] == "auto-grad" and shown["programs"] == 3
    assert shown["cycles"] == pytest.approx(1.0) and shown["cycles, worst"] == 2.0
    assert shown["temp"] == pytest.approx(1.0) and shown["temp, worst"] == 2.0
    moved = bench_targets.ratio([*HAND, *FOUND], FOUND[2], "hand", "moved")
    assert moved == 0.5 and shown["moved"] is None
