"""What the demo shows: a table of 80 columns, a short diff and one conclusion."""

import io
import re

import pytest
from demo import DIFF_LINES, MATMUL, PRESETS, UNDER_GRAD, Row, conclusion, cut, make_table
from rich.console import Console


def row(name: str, *, loss: float = 2.0, seconds: float = 1.25, temp: int = 132_000_000) -> Row:
    return Row(name, None, ((), ()), "23/23", temp, 64.4e6, [5.5] + [loss] * 39, [seconds] * 40)


def on_80_columns() -> tuple[io.StringIO, Console]:
    out = io.StringIO()
    return out, Console(file=out, width=80)


def test_the_table_of_all_rows_fits_80_columns_and_nothing_is_cut():
    out, console = on_80_columns()
    names = [*PRESETS, UNDER_GRAD, "jmp", MATMUL]
    console.print(make_table([row(name, seconds=12.345, temp=9_999_000_000) for name in names]))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in out.getvalue()
    assert sum("23/23" in line for line in lines) == len(names)
    for name in PRESETS:
        assert any(line.split()[:1] == [name] for line in lines)
    # No line of the legend is wrapped: each begins with its name or is indented.
    legend = lines[next(i for i, line in enumerate(lines) if line.startswith("loss:")) :]
    assert [line.partition(":")[0] for line in legend if not line.startswith("  ")] == [
        "loss",
        "step",
        "low products",
        "temp",
        "kept",
    ]


@pytest.mark.parametrize(
    "low, says",
    [
        ({"seconds": 0.5}, "takes 0.40 of float32's time for a step and 1.00 of its temporary"),
        (
            {"seconds": 1.24},
            "AutoMixedBf16 runs 23/23 matrix products in 16 bits and takes 1.00 of",
        ),
        ({"seconds": 1.24}, "gains nothing, it takes 0.99 of float32's time for a step."),
        ({"seconds": 0.5, "temp": 66_000_000}, "and 0.50 of its temporary memory"),
        ({"loss": 2.001}, "after 40 steps is that of float32 within 0.05%, without a change"),
        ({"loss": 2.2}, "differs from float32's by 10.00%, so look at the losses"),
    ],
)
def test_the_conclusion_is_one_sentence_of_the_figures(low, says):
    text = conclusion([row("AlwaysF32"), row("AutoMixedBf16", **low)])
    assert text.startswith("Conclusion: AutoMixedBf16 ") and says in text
    assert len(re.findall(r"\.(?!\d)", text)) == 1 and text.endswith(".")


@pytest.mark.parametrize("names", [["AlwaysF32"], ["AutoMixedBf16"], ["AlwaysF32", "jmp"]])
def test_without_both_there_is_no_conclusion(names):
    assert "nothing to compare without" in conclusion([row(name) for name in names])


def test_a_diff_is_cut_to_the_terminal_and_says_what_is_left_out():
    lines = [f"{n} " + "x" * 100 for n in range(50)] + ["the totals, " + "which are long " * 8]
    shown = list(cut(lines, 80))
    assert max(map(len, shown)) <= 80 and all(line.endswith(" ...") for line in shown[:DIFF_LINES])
    assert shown[DIFF_LINES] == f"... and {50 - DIFF_LINES} more lines"
    assert " ".join(shown[DIFF_LINES + 1 :]) == lines[-1].strip()
    assert list(cut(["a", "b", "totals"], 80)) == ["a", "b", "totals"]
