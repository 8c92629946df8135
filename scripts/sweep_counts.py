"""Counts the products of every program of the tests (`scripts/sweep counts`).

Those that the pass knows of must be those that JAX lowers, without JAX's flags that make
hi-primitives and with each of them; what is counted stands in tests/support/count_checks.py. For
that it runs most of the tests, and watches what they give to the pass.
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
COLUMNS = ("lowered", "graph", "warned", "dead", "hi")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = sweeping.parser("counts", __doc__)
    parser.add_argument("--only", metavar="TEXT", help="the programs whose names contain TEXT")
    parser.add_argument("--flag", metavar="NAME", help="without a flag, and with this one alone")
    return parser.parse_args(argv)


def start(flag: str | None, folder: str) -> None:
    """Sets up a worker; those of all flags share what they compile, in a folder."""
    cache = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    sweeping.set_up(**cache, **{flag: True} if flag else {})
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


def reports(flag: str | None, options: argparse.Namespace) -> Iterator[tuple[Any, float, str]]:
    """(report, processor seconds, how far it is) of each task."""
    with sweeping.pool(options.workers, start, flag, options.folder) as workers:
        files = workers.submit(file_names, options.only).result()
        tables = workers.submit(table_names, options.only).result()
        # neighbours are alike: each task gets some of every kind
        stride = max(1, -(-len(tables) // CHUNK))
        pending = [workers.submit(run, "count_file", name, options.only, flag) for name in files]
        pending += [
            workers.submit(run, "count_tables", tables[i::stride])
            for i in range(stride)
            if tables[i::stride]
        ]
        for done, future in enumerate(as_completed(pending), 1):
            report, seconds = future.result()
            yield report, seconds, f"{done} of {len(pending)} parts"


def counted(flag: str | None, plain: Any, options: argparse.Namespace) -> tuple[Any, float]:
    """What is found under a flag, said as it is known, and the processor time that it took."""
    from tests.support.count_checks import Report

    total, seconds, progress = Report(), 0.0, sweeping.Progress()
    for report, spent, done in reports(flag, options):
        total.add(report)
        seconds += spent
        progress.say(f"{flag or 'no flag'}: {done}, {len(total.failures)} failures")
    total.settle(plain)
    if plain and not options.only:
        total.must_hold_more(plain)
    for name, text in sorted(total.failures.items()):
        again = f"scripts/sweep counts --only {name!r}" + (f" --flag {flag}" if flag else "")
        say(f"FAILED {flag or 'no flag'}: {name}: {text}\n  again: {again}")
    for name, text in sorted(total.refused.items()):
        say(f"not lowered by JAX, {flag or 'no flag'}: {name}: {text[:120]}")
    return total, seconds


def table(rows: dict[str, tuple[Any, float]]) -> Iterator[str]:
    """The totals of each flag in a line."""
    heads = ("tests", "stopped", "given", "programs", "compared", "refused", "failures")
    heads += (*COLUMNS, "CPU s")
    yield " ".join(["flag".ljust(16), *heads])
    for flag, (report, seconds) in rows.items():
        numbers = [len(report.given), len(report.stopped)]
        numbers += [sum(report.given.values()), len(report.names)]
        numbers += [len(report.counted), len(report.refused)]
        numbers += [len(report.failures), *map(report.total, COLUMNS), round(seconds)]
        cells = [str(n).rjust(len(head)) for n, head in zip(numbers, heads, strict=True)]
        yield " ".join([flag.ljust(16), *cells])


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    with tempfile.TemporaryDirectory() as options.folder:
        return sweep(options)


def sweep(options: argparse.Namespace) -> int:
    """Counts without a flag and with each; the exit status."""
    start(None, options.folder)
    import jax

    from tests.support.counting import FLAGS
    from tests.support.given_programs import LEFT_OUT, WITH_A_BROKEN_PASS

    if options.flag and options.flag not in FLAGS:
        say(f"jax {jax.__version__} has the flags {', '.join(FLAGS)}")
        return 2
    plain, seconds = counted(None, None, options)
    rows = {"no flag": (plain, seconds)}
    for flag in [options.flag] if options.flag else FLAGS:
        rows[flag] = counted(flag, plain, options)
    say(f"jax {jax.__version__}: numbers of programs, and of their products")
    for name, why in {**LEFT_OUT, **WITH_A_BROKEN_PASS}.items():
        say(f"left out: {name} {why}")
    for line in table(rows):
        say(line)
    failures = sum(len(report.failures) for report, _ in rows.values())
    say(f"counts: {failures} failures, {sum(s for _, s in rows.values()):.0f} processor seconds")
    if not plain.total("lowered"):
        say("no product was counted")
        return 2
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
