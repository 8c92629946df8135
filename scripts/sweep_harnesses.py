"""Checks all of JAX's own primitive harnesses under every preset (`scripts/sweep harnesses`).

What is checked stands in tests/support/harness_checks.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from typing import Any

import sweeping
from sweeping import say

CHUNK = 25
"""Harnesses per task: a task's compiled programs are forgotten at its end."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = sweeping.parser("harnesses", __doc__)
    parser.add_argument("--grad", action="store_true", help="their derivatives too")
    parser.add_argument(
        "--x64",
        choices=("off", "on", "both"),
        default="both",
        help="with x64 on, those that exist only there (%(default)s)",
    )
    parser.add_argument("--only", metavar="TEXT", help="those whose id or full name contains TEXT")
    parser.add_argument("--every", metavar="N", type=int, default=1, help="one of N")
    return parser.parse_args(argv)


def start(x64: bool) -> None:
    """Sets up a worker."""
    sweeping.set_up(jax_enable_x64=x64)


def names() -> list[tuple[str, str]]:
    """Of each harness its id and full name."""
    from tests.support import harness_programs

    return [(harness_programs.short_id(h), h.fullname) for h in harness_programs.harnesses()]


def check(ids: Sequence[str], grad: bool) -> tuple[Any, float]:
    """The report on some harnesses, and the processor time that it took."""
    import jax

    from tests.support import harness_checks

    begun, report = time.process_time(), harness_checks.Report()
    for name in ids:
        try:
            report.add(harness_checks.check_harness(name, grad))
        except Exception as error:
            # the check's own fault, and the sweep goes on
            report.failures.append(f"{name}: cannot be checked: {error!r}"[:500])
    jax.clear_caches()
    return report, time.process_time() - begun


def chosen(found: Sequence[tuple[str, str]], known: set[str], options: Any) -> list[str]:
    return [
        name
        for name, full in found
        if full not in known and (options.only is None or options.only in (name + " " + full))
    ][:: options.every]


def sweep(options: argparse.Namespace) -> Iterator[tuple[bool, Any, float, int, int]]:
    """(whether x64 is on, report, processor seconds, harnesses done, of how many) per task."""
    known: set[str] = set()
    for x64 in (False, True):
        with sweeping.pool(options.workers, start, x64) as workers:
            found = workers.submit(names).result()
            ids = chosen(found, known, options)
            known = {full for _, full in found}
            if options.x64 not in ("both", "on" if x64 else "off"):
                continue
            # neighbours are alike: each task gets some of every kind
            stride = max(1, -(-len(ids) // CHUNK))
            tasks = [ids[i::stride] for i in range(stride) if ids[i::stride]]
            pending = {workers.submit(check, task, options.grad): len(task) for task in tasks}
            done = 0
            for future in as_completed(pending):
                done += pending[future]
                report, seconds = future.result()
                yield x64, report, seconds, done, len(ids)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    start(False)
    import jax

    from tests.support import harness_checks

    total, seconds, failed = harness_checks.Report(), 0.0, 0
    progress = sweeping.Progress()
    for x64, report, spent, done, count in sweep(options):
        total.add(report)
        seconds += spent
        for failure in report.failures:
            failed += 1
            name = failure.partition(":")[0]
            again = f"scripts/sweep harnesses --only {name} --x64 {'on' if x64 else 'off'}"
            say(f"FAILED {failure}\n  again: {again}{' --grad' if options.grad else ''}")
        progress.say(f"x64 {'on' if x64 else 'off'}: {done} of {count}, {failed} failures")
    counts = ", ".join(f"{n} {what}" for what, n in sorted(total.counts.items()))
    say(f"jax {jax.__version__}: {counts}")
    say(f"harnesses: {len(total.failures)} failures, {seconds:.0f} processor seconds")
    if not total.counts["programs"]:
        say("no harness was checked")
        return 2
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
