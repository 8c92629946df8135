"""Counts the products of every program of the tests (`scripts/sweep counts`).

Those that the pass knows of must be those that JAX lowers; what is counted stands in
tests/support/count_checks.py. For that it runs most of the tests, and watches what they give to the
pass.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from typing import Any

import sweeping
from sweeping import say

CHUNK = 25
"""Programs of the tables per task."""
COLUMNS = ("lowered", "graph", "warned", "dead")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = sweeping.parser("counts", __doc__)
    parser.add_argument("--only", metavar="TEXT", help="the programs whose names contain TEXT")
    return parser.parse_args(argv)


def start(folder: str) -> None:
    """Sets up a worker; all share what they compile, in a folder."""
    cache = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    sweeping.set_up(**cache)
    import tests.conftest  # noqa: F401 -- several devices, before JAX makes any


def table_names(only: str | None) -> list[str]:
    from tests.support.product_counts import PROGRAMS

    return [name for name in PROGRAMS if only is None or only in name]


def file_names(only: str | None) -> list[str]:
    from tests.support.count_checks import FILES

    # the name of a program begins with that of its file
    file, colon, _ = (only or "").partition(":")
    return [name for name in FILES if not colon or name.endswith(file)]


def run(what: str, *args: Any) -> tuple[Any, float]:
    """A report of `count_checks`, and the processor time that it took."""
    import jax

    from tests.support import count_checks

    begun = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        report = getattr(count_checks, what)(*args)
    jax.clear_caches()
    return report, time.process_time() - begun


def reports(options: argparse.Namespace) -> Iterator[tuple[Any, float, str]]:
    """(report, processor seconds, how far it is) of each task."""
    with sweeping.pool(options.workers, start, options.folder) as workers:
        files = workers.submit(file_names, options.only).result()
        tables = workers.submit(table_names, options.only).result()
        # neighbours are alike: each task gets some of every kind
        stride = max(1, -(-len(tables) // CHUNK))
        pending = [workers.submit(run, "count_file", name, options.only) for name in files]
        pending += [
            workers.submit(run, "count_tables", tables[i::stride])
            for i in range(stride)
            if tables[i::stride]
        ]
        for done, future in enumerate(as_completed(pending), 1):
            report, seconds = future.result()
            yield report, seconds, f"{done} of {len(pending)} parts"


def counted(options: argparse.Namespace) -> tuple[Any, float]:
    """What is found, said as it is known, and the processor time that it took."""
    from tests.support.count_checks import Report

    total, seconds, progress = Report(), 0.0, sweeping.Progress()
    for report, spent, done in reports(options):
        total.add(report)
        seconds += spent
        progress.say(f"{done}, {len(total.failures)} failures")
    total.settle()
    for name, text in sorted(total.failures.items()):
        say(f"FAILED {name}: {text}\n  again: scripts/sweep counts --only {name!r}")
    for name, text in sorted(total.refused.items()):
        say(f"not lowered by JAX: {name}: {text[:120]}")
    return total, seconds


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    with tempfile.TemporaryDirectory() as options.folder:
        return sweep(options)


def sweep(options: argparse.Namespace) -> int:
    """Counts; the exit status."""
    start(options.folder)
    import jax

    from tests.support.given_programs import LEFT_OUT

    report, seconds = counted(options)
    for name, why in LEFT_OUT.items():
        say(f"left out: {name} {why}")
    numbers = {"programs": len(report.counted), "not lowered": len(report.refused)}
    numbers |= {f"products {column}": report.total(column) for column in COLUMNS}
    say(f"jax {jax.__version__}: {', '.join(f'{n} {what}' for what, n in numbers.items())}")
    say(f"counts: {len(report.failures)} failures, {seconds:.0f} processor seconds")
    if not report.total("lowered"):
        say("no product was counted")
        return 2
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
