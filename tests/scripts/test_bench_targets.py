"""How the benchmark by target compares what was compiled."""

import bench_targets
import pytest
from bench_targets import TargetCell

HAND = [TargetCell(name, "gradient", "hand", cycles=100, temp=10) for name in ("cnn", "moe", "mlp")]
FOUND = [
    TargetCell("cnn", "gradient", "auto-grad", cycles=200, temp=5),
    TargetCell("moe", "gradient", "auto-grad", cycles=1, temp=10, without_cycles=16),
    TargetCell("mlp", "gradient", "auto-grad", cycles=50, temp=20, moved=3.0),
]


def test_cycles_that_leave_out_kernels_are_compared_with_none():
    """The kernels of a mixture of experts that a TPU's compiler leaves out are its products."""
    cells = [*HAND, *FOUND]
    found = [bench_targets.ratio(cells, cell, "hand", "cycles") for cell in FOUND]
    assert found == [2.0, None, 0.5]
    by_hand = TargetCell("cnn", "gradient", "hand", cycles=100, without_cycles=1)
    assert bench_targets.ratio([by_hand], FOUND[0], "hand", "cycles") is None


def test_a_mean_is_of_most_programs_or_none():
    row, *_ = bench_targets.means([*HAND, *FOUND])
    shown = dict(zip(bench_targets.MEANS, row, strict=True))
    assert shown["program"] == "auto-grad" and shown["programs"] == 3
    assert shown["cycles"] == pytest.approx(1.0) and shown["cycles, worst"] == 2.0
    assert shown["temp"] == pytest.approx(1.0) and shown["temp, worst"] == 2.0
    assert shown["moved"] is None  # one program has its bytes
