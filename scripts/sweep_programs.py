"""Checks random programs under every policy: tests/support/random_checks.py says what must hold.

Each program is traced, planned and rewritten by JAX and the package, and run by the
tests' own interpreters; one in 250 is compiled and run by XLA too.
"""

import collections
import dataclasses
import gc
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import sweeping

CHUNK = 50
CHUNKS_PER_PROCESS = 100
"""A process keeps its compiled kernels, and what JAX never forgets: several GB at the end."""


def set_up() -> None:
    """Sets up a process, this one or a worker."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sweeping.set_up()
    # tracing makes many objects, and few cycles
    gc.set_threshold(200_000, 20, 1000)
    warnings.simplefilter("ignore", DeprecationWarning)
    from tests.support import (
        random_flow,  # noqa: F401 -- registers its ingredients
        random_ops,  # noqa: F401 -- registers its ingredients
        random_pieces,  # noqa: F401 -- registers its ingredients
    )


def failure_of(case: Any) -> str | None:
    """What is wrong with a case, or None."""
    try:
        case.check()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def described(seed: int, index: int) -> str:
    """A failing case, made as small as it can be, and its traceback."""
    from tests.support.random_checks import swept_case
    from tests.support.random_shrink import shrunk

    case = swept_case(seed, index)
    kind = (failure_of(case) or "")[:30]

    def fails(program: Any) -> bool:
        return (failure_of(dataclasses.replace(case, program=program)) or "")[:30] == kind

    small = dataclasses.replace(case, program=shrunk(case.program, fails))
    try:
        small.check()
        trace = "it passes when it is run again"
    except Exception:
        trace = traceback.format_exc()
    return f"--seed {seed} --only {index}\n  {small!r}\n{trace}"


def run_chunk(chunk: tuple[int, int, int]) -> tuple[collections.Counter[str], list[str]]:
    """The counts of a stretch of programs, and its failures."""
    from tests.support.random_checks import swept_case

    seed, start, stop = chunk
    counts: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    began = time.process_time()
    for index in range(start, stop):
        case = swept_case(seed, index)
        counts.update({"programs": 1, f"{case.form}, {'in' if case.inside else 'out'}side": 1})
        counts["compiled"] += case.compiled
        try:
            outcome = case.check()
        except Exception:
            failures.append(described(seed, index))
            continue
        if outcome.skipped:
            counts["refused by JAX"] += 1
            continue
        counts["lowered products"] += outcome.lowered
        counts["with a lowered product"] += outcome.lowered > 0
        counts["compared with float32"] += outcome.compared
        counts["too near a discontinuity"] += not outcome.decided
        counts["not finite in float32"] += not outcome.finite
    counts["CPU ms"] = round(1000 * (time.process_time() - began))
    return counts, failures


def results(chunks: list[tuple[int, int, int]], workers: int) -> Iterator[Any]:
    """The results of all chunks, as they come."""
    if workers == 1:
        set_up()
        yield from map(run_chunk, chunks)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, set_up, maxtasksperchild=CHUNKS_PER_PROCESS) as pool:
        yield from pool.imap_unordered(run_chunk, chunks)


def main(argv: list[str] | None = None) -> int:
    parser = sweeping.parser("programs", __doc__)
    parser.add_argument("--programs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="INDEX", help="this program alone")
    options = parser.parse_args(argv)
    if options.programs < 1 or options.workers < 1:
        parser.error("--programs and --workers take a number of at least 1")
    first = options.only or 0
    stop = first + 1 if options.only is not None else options.programs
    starts = range(first, stop, CHUNK)
    chunks = [(options.seed, start, min(start + CHUNK, stop)) for start in starts]
    counts: collections.Counter[str] = collections.Counter()
    failures, began = 0, time.monotonic()
    for done, (counted, failed) in enumerate(results(chunks, options.workers), 1):
        counts.update(counted)
        failures += len(failed)
        for text in failed:
            print(f"FAILED {text}", flush=True)
        if done % 10 == 0 or done == len(chunks):
            minutes = (time.monotonic() - began) / 60
            print(
                f"{counts['programs']} programs, {failures} failures, {minutes:.1f} min, "
                f"{counts['CPU ms'] / counts['programs']:.0f} ms of CPU each",
                flush=True,
            )
    import jax

    print(f"jax {jax.__version__}, seed {options.seed}")
    for name, number in sorted(counts.items()):
        print(f"  {name}: {number}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
