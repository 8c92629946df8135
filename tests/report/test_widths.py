"""No line of a report is longer than the terminal, whatever the program."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from flax import nnx

import precpass as pp
from precpass.report.compare.rows import COLUMNS
from tests.support.layered import TOKENS, loss, nnx_model, promoting

PROGRAMS: dict[str, Any] = {"forward": loss, "gradient": nnx.grad(loss)}
ROWS = ["AlwaysF32", "AutoMixedF16"]
LINEAR = pp.Rule(file="*/linear.py", precision="f32")
SOME = pp.AutoMixedBf16.with_rules(LINEAR, pp.Rule(scope="*/nowhere/at/all", precision="f32"))

REPORTS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "explain": lambda f: pp.explain(f),
    "explain, some in float32": lambda f: pp.explain(f, SOME),
    "diff": lambda f: lambda *xs: pp.inspect(f)(*xs).diff(),
    "diff of lines": lambda f: lambda *xs: pp.inspect(f)(*xs).diff("lines"),
    "explain, coloured": lambda f: lambda *xs: pp.inspect(f)(*xs).explain().text(color=True),
    "between": lambda f: (
        lambda *xs: pp.report.between(
            pp.inspect(f)(*xs).plan, pp.inspect(f, "AutoMixedF16")(*xs).plan
        )
    ),
    "compare": lambda f: pp.compare(f, ROWS, rounds=1),
    "compare, all columns": lambda f: pp.compare(f, ROWS, columns=COLUMNS, rounds=0),
    "audit": lambda f: pp.audit(f, "AutoMixedF16"),
    "bisect": lambda f: pp.bisect(f, "AutoMixedBf16", 1e-9, budget=3),
    "monitor": lambda f: lambda *xs: pp.monitor(f)(*xs)[1].summary(),
}


@pytest.mark.release(keep=5)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("report", REPORTS)
def test_no_line_of_a_report_is_longer_than_the_terminal(report, program, monkeypatch):
    with promoting(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monkeypatch.setenv("COLUMNS", "80")
        found = REPORTS[report](PROGRAMS[program])(nnx_model(), TOKENS)
    lines = re.sub(r"\x1b\[[\d;]*m", "", str(found)).splitlines()
    assert [line for line in lines if len(line) > 80] == []
