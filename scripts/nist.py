"""NIST's 27 nonlinear regression problems, from both starts, under each choice of roles.

The baseline is optimistix in float64 throughout. For each solve: the number of correct digits of
the worst parameter against the certified ones (LRE, at most 11), the steps, and the time of a call
that is compiled, as the ratio to the baseline's in the same round.
"""

import argparse
import json
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import precpass as pp  # noqa: E402
from tests.support.nist_problems import lre, problems  # noqa: E402 -- stands in tests/

BASELINE = "all f64"
ROLES = {
    BASELINE: pp.numerics.Roles.all("f64"),
    "jacobian f32": pp.numerics.Roles(),
    "jacobian, solve f32": pp.numerics.Roles(solve="f32"),
    "jacobian, gradient f32": pp.numerics.Roles(gradient="f32"),
    "jacobian bf16": pp.numerics.Roles(jacobian="bf16"),
    "jacobian bf16 to f64": pp.numerics.Roles(jacobian=("bf16", "f32", "f64")),
    "all f32": pp.numerics.Roles.all("f32"),
}
SOLVED = 6.0


def solved_by(problem: Any, start: int, names: list[str], arguments: Any) -> list[dict[str, Any]]:
    """A row for each choice of roles."""

    def call(name: str) -> tuple[Any, float]:
        begin = time.perf_counter()
        found = pp.numerics.least_squares(
            problem.residual,
            problem.starts[start],
            roles=ROLES[name],
            solver=arguments.solver,
            max_steps=arguments.max_steps,
        )
        float(found.step)
        return found, time.perf_counter() - begin

    found = {name: call(name)[0] for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            times[name].append(call(name)[1])
    return [
        {
            "problem": problem.name,
            "start": start + 1,
            "roles": name,
            "lre": round(lre(found[name].value, problem.certified), 2),
            "steps": int(found[name].steps),
            "converged": bool(found[name].converged),
            "next_step": float(found[name].step),
            "seconds": statistics.median(times[name]),
            "to_baseline": statistics.median(
                a / b for a, b in zip(times[name], times[BASELINE], strict=True)
            ),
        }
        for name in names
    ]


def each_problem(rows: list[dict[str, Any]], names: list[str]) -> Table:
    table = Table("problem", *names, title="digits / steps, from start 1 and start 2")
    for problem in dict.fromkeys(row["problem"] for row in rows):
        cells = []
        for name in names:
            own = [r for r in rows if (r["problem"], r["roles"]) == (problem, name)]
            cells.append("  ".join(f"{r['lre']:4.1f}/{r['steps']}" for r in own))
        table.add_row(problem, *cells)
    return table


def by_roles(rows: list[dict[str, Any]], names: list[str]) -> Table:
    title = f"problems with {SOLVED:.0f} digits or more; medians over problems and starts"
    table = Table("roles", "start 1", "start 2", "digits", "steps", "time to baseline", title=title)
    for name in names:
        own = [r for r in rows if r["roles"] == name]
        starts = [[r for r in own if r["start"] == start] for start in (1, 2)]
        middle = {key: statistics.median(r[key] for r in own) for key in ("lre", "steps")}
        table.add_row(
            name,
            *(f"{sum(r['lre'] >= SOLVED for r in rs)} of {len(rs)}" for rs in starts),
            f"{middle['lre']:.1f}",
            f"{middle['steps']:.0f}",
            f"{statistics.median(r['to_baseline'] for r in own):.2f}",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--solver", default="LevenbergMarquardt", help="or Dogleg, GaussNewton")
    parser.add_argument("--roles", nargs="*", choices=list(ROLES), default=list(ROLES))
    parser.add_argument("--problems", nargs="*", choices=list(problems()), default=list(problems()))
    parser.add_argument("--max-steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3, help="timed calls of each")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    arguments = parser.parse_args()
    names = list(dict.fromkeys([BASELINE, *arguments.roles]))
    console = Console(width=None if sys.stdout.isatty() else 160)
    rows: list[dict[str, Any]] = []
    shown = {"console": Console(stderr=True), "disable": not sys.stderr.isatty()}
    for name in track(arguments.problems, "solving", **shown):
        for start in (0, 1):
            rows += solved_by(problems()[name], start, names, arguments)
    console.print(each_problem(rows, names))
    console.print(by_roles(rows, names))
    libraries = {name: version(name) for name in ("jax", "optimistix", "lineax")}
    console.print(f"{arguments.solver}; {', '.join(f'{n} {v}' for n, v in libraries.items())}")
    if arguments.json:
        report = {"solver": arguments.solver, "libraries": libraries, "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
