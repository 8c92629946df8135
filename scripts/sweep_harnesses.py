"""Checks all of JAX's own primitive harnesses under every preset (`scripts/sweep harnesses`).

What is checked stands in tests/support/policy_checks.py.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import as_completed

import sweeping
from sweeping import say

CHUNK = 25
"""Harnesses per task: a task's compiled programs are forgotten at its end."""


def start(x64: bool) -> None:
    """Sets up a worker."""
    sweeping.set_up(jax_enable_x64=x64)


def names() -> dict[str, str]:
    """Of each harness its full name and a short one."""
    from tests.support.harness_programs import harnesses

    return {harness.fullname: name for name, harness in harnesses().items()}


def check(names: Sequence[str], derivatives: bool) -> tuple[Counter[str], list[str]]:
    """What was counted, and what fails."""
    import jax

    from tests.support.harness_programs import cases, runs

    counts, failures = Counter[str](), list[str]()
    for name in names:
        for case in cases(name, derivatives):
            try:
                outcome = case.check()
            except Exception as error:
                if runs(case):
                    where = (
                        f"{name}: {case.policy} {case.form} {'in' if case.inside else 'out'}side"
                    )
                    failures.append(f"{where}: {type(error).__name__}: {str(error)[:300]}")
                else:
                    counts["not run by JAX itself"] += 1
                continue
            counts["programs"] += not outcome.skipped
            counts["lowered products"] += outcome.lowered
            counts["compared with float32"] += outcome.compared
    jax.clear_caches()
    return counts, failures


def main(argv: Sequence[str] | None = None) -> int:
    parser = sweeping.parser("harnesses", __doc__)
    parser.add_argument("--grad", action="store_true", help="their derivatives too")
    parser.add_argument("--only", metavar="TEXT", default="", help="those whose name has TEXT")
    parser.add_argument("--every", metavar="N", type=int, default=1, help="one of N")
    options: argparse.Namespace = parser.parse_args(argv)
    counts, failures, known = Counter[str](), list[str](), set[str]()
    progress = sweeping.Progress()
    # with x64 on, those that exist only there
    for x64 in (False, True):
        with sweeping.pool(options.workers, start, x64) as workers:
            found = workers.submit(names).result()
            new = {full: name for full, name in found.items() if full not in known}
            ids = [n for full, n in new.items() if options.only in f"{n} {full}"][:: options.every]
            known |= found.keys()
            # neighbours are alike: each task gets some of every kind
            stride = max(1, -(-len(ids) // CHUNK))
            tasks = (ids[i::stride] for i in range(stride) if ids[i::stride])
            for future in as_completed([workers.submit(check, t, options.grad) for t in tasks]):
                counted, failed = future.result()
                counts += counted
                failures += failed
                for text in failed:
                    say(f"FAILED {text}")
                progress.say(f"x64 {'on' if x64 else 'off'}: {counts['programs']} programs")
    say(f"{', '.join(f'{n} {what}' for what, n in sorted(counts.items()))}")
    say(f"harnesses: {len(failures)} failures")
    return 1 if failures or not counts["programs"] else 0


if __name__ == "__main__":
    sys.exit(main())
