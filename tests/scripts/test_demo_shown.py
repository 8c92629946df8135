"""What the demo shows: a table of 80 columns, its progress, a short diff and one conclusion."""

import io
import re
import time

import pytest
from demo import DIFF_LINES, MATMUL, PRESETS, UNDER_GRAD, Row, conclusion, cut, make_table
from demo_progress import Steps, left
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
        ({"seconds": 1.24}, "takes 0.99 of float32's time for a step (no gain on this processor)"),
        ({"temp": 66_000_000}, "and 0.50 of its temporary memory"),
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


# ---------------------------------------------------------------- progress


@pytest.mark.parametrize(
    "done, seconds, says",
    [(0, 20, "no estimate yet"), (10, 20, "about 60 s left"), (1, 20, "about 13 min left")],
)
def test_the_rest_is_as_fast_as_what_is_done(done, seconds, says):
    assert left(done, 40, seconds) == says


def wait_for(out: io.StringIO, text: str) -> None:
    deadline = time.monotonic() + 30
    while text not in out.getvalue():
        assert time.monotonic() < deadline, out.getvalue()
        time.sleep(0.01)


def test_a_pipe_has_a_line_again_and_again_also_while_a_step_lasts():
    out, console = on_80_columns()
    with Steps("train", 40, console, seconds=0.02) as steps:
        steps.say(0, "the first")
        wait_for(out, "train 0 of 40: the first, no estimate yet\n" * 2)
        steps.say(39, "with a loss of 2.000")
        wait_for(out, "train 39 of 40: with a loss of 2.000, about 0 s left\n")
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_what_is_quick_prints_no_line_in_a_pipe():
    out, console = on_80_columns()
    with Steps("train", 2, console) as steps:
        steps.say(2, "done")
    assert out.getvalue() == ""


def test_a_terminal_has_a_bar_with_what_is_left():
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, legacy_windows=False)
    with Steps("train", 40, console) as steps:
        steps.say(10, "with a loss of 2.000")
        wait_for(out, "s left")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "train with a loss of 2.000" in text and "10/40" in text
