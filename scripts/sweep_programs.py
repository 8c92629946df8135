"""Checks random programs under every policy: tests/support/policy_checks.py says what must hold.

Each program is traced, planned and rewritten by JAX and the package, and run by the tests' own
interpreters; one in 250 is compiled and run by XLA too. Hypothesis makes a program that fails
smaller, and shows it in a form that can be run again.
"""

import collections
import gc
import multiprocessing
import os
import sys
import traceback
import warnings
from typing import Any

import sweeping

CHUNK = 250
"""Programs of a process: it keeps its compiled kernels, and what JAX never forgets."""


def set_up() -> None:
    """Sets up a process."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sweeping.set_up()
    # tracing makes many objects, and few cycles
    gc.set_threshold(200_000, 20, 1000)
    warnings.simplefilter("ignore", DeprecationWarning)


def run_chunk(chunk: tuple[int, int]) -> tuple[collections.Counter[str], str]:
    """The counts of the programs that a seed draws, and how one of them fails."""
    import hypothesis

    from tests.support.policy_checks import Case, cases
    from tests.support.random_programs import SETTINGS

    seed, number = chunk
    counts: collections.Counter[str] = collections.Counter()

    @hypothesis.seed(seed)
    @hypothesis.settings(SETTINGS, derandomize=False, max_examples=number)
    @hypothesis.given(cases())
    def check(case: Case) -> None:
        outcome = case.check()
        counts.update({"programs": 1, f"{case.form}, {'in' if case.inside else 'out'}side": 1})
        counts["refused by JAX"] += bool(outcome.skipped)
        counts["lowered products"] += outcome.lowered
        counts["compared with float32"] += outcome.compared

    try:
        check()
    except Exception:
        return counts, f"--seed {seed} --programs {number}\n{traceback.format_exc()}"
    return counts, ""


def main(argv: list[str] | None = None) -> int:
    parser = sweeping.parser("programs", __doc__)
    parser.add_argument("--programs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if options.programs < 1 or options.workers < 1:
        parser.error("--programs and --workers take a number of at least 1")
    starts = range(0, options.programs, CHUNK)
    chunks = [(options.seed + k, min(CHUNK, options.programs - at)) for k, at in enumerate(starts)]
    counts: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    progress = sweeping.Progress()
    context: Any = multiprocessing.get_context("spawn")
    with context.Pool(options.workers, set_up, maxtasksperchild=1) as pool:
        for counted, failure in pool.imap_unordered(run_chunk, chunks):
            counts.update(counted)
            if failure:
                failures.append(failure)
                sweeping.say(f"FAILED {failure}")
            progress.say(f"{counts['programs']} programs, {len(failures)} failures")
    import jax

    sweeping.say(f"jax {jax.__version__}: {counts['programs']} programs, {len(failures)} failures")
    for name, number in sorted(counts.items()):
        sweeping.say(f"  {name}: {number}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
