"""Measure how long precpass's tools take, as ratios to plain JAX.

For each program: `explain` and `diff` to the trace that they begin with, `compare` of two policies
and `monitor` to the compilation and first run of the plain program, and `precpass --help` to the
import of JAX. Each is wall time in a process of its own, which has imported all that it needs but
for `--help`; the rounds are interleaved, and ratios are taken within a round.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import rich
from rich.table import Table

FOLDER = Path(__file__).resolve().parent
PROGRAMS = ("mlp", "unrolled")
PLAIN = ("trace", "call")
AIMS = {"explain": 2, "diff": 2, "compare": 4, "monitor": 3}
TRACED = ("explain", "diff")
"""Tools that are compared with the trace, and not with the plain program's first call."""

CHILD = """
import sys, time
import jax, precpass as pp
import precpass.report.compare.compare
import precpass.numerics.monitor.monitor, precpass.view.explain, precpass.view.diff
from bench_columns import COLUMNS, arguments
from bench_models import MODELS

what, name = sys.argv[1:]
model = MODELS[name]("medium")
fn, args = COLUMNS["float32"].program(model, "gradient"), arguments(model, "gradient")
fn = getattr(fn, "__wrapped__", fn)
start = time.perf_counter()
match what:
    case "trace":
        jax.make_jaxpr(fn)(*args)
    case "call":
        jax.block_until_ready(jax.jit(fn)(*args))
    case "explain":
        str(pp.explain(fn)(*args))
    case "diff":
        str(pp.inspect(fn)(*args).diff())
    case "compare":
        str(pp.compare(fn, ["AlwaysF32", "AutoMixedBf16"])(*args))
    case "monitor":
        jax.block_until_ready(pp.monitor(fn)(*args)[0])
print(time.perf_counter() - start)
"""


def seconds(what: str, program: str) -> float:
    """The time of one tool, or of plain JAX, in a process of its own."""
    command = [sys.executable, "-c", CHILD, what, program]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def seconds_of_process(*arguments: str) -> float:
    """The wall time of a Python process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=FOLDER, capture_output=True, check=True)
    return time.perf_counter() - start


def measured(program: str, rounds: int) -> list[dict[str, object]]:
    """A row for each tool: the medians of its seconds, of plain JAX's, and of their ratios."""
    each = [{what: seconds(what, program) for what in (*PLAIN, *AIMS)} for _ in range(rounds)]
    rows: list[dict[str, object]] = []
    for tool, aim in AIMS.items():
        plain = "trace" if tool in TRACED else "call"
        times, of = [r[tool] for r in each], [r[plain] for r in each]
        ratios = [a / b for a, b in zip(times, of, strict=True)]
        row = {"program": program, "tool": tool, "plain": plain, "aim": aim}
        figures = {"seconds": times, "plain seconds": of, "ratio": ratios}
        rows.append(row | {name: statistics.median(x) for name, x in figures.items()})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", nargs="+", default=PROGRAMS, help="models of the benchmark")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (3)")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    rows = [row for program in options.programs for row in measured(program, options.rounds)]
    helps = [
        (seconds_of_process("-m", "precpass", "--help"), seconds_of_process("-c", "import jax"))
        for _ in range(options.rounds)
    ]
    table = Table("program", "tool", "s", "plain JAX, s", "ratio", "aim")
    for row in rows:
        figures = [f"{row[name]:.2f}" for name in ("seconds", "plain seconds", "ratio")]
        table.add_row(str(row["program"]), str(row["tool"]), *figures, str(row["aim"]))
    beside = statistics.median(a - b for a, b in helps)
    rich.print(table, f"precpass --help takes {beside:.2f} s more than import jax (aim: 1 s)")
    if options.json:
        found = {"jax": jax.__version__, "machine": platform.processor() or platform.machine()}
        found |= {"rounds": options.rounds, "rows": rows, "help": beside}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
