"""Hold the rewritten jaxprs of one state of the package against those of another.

A change that moves or renames code must not change what the pass writes. Two kinds of programs are
rewritten under four policies each: the gradient and the training step of the benchmark's seven
models, and random programs in the form (value, gradient, jvp, ...) that the sweep gives them.

    scripts/rewritten_texts write FILE   writes the text of each rewritten jaxpr (gzip, JSON)
    scripts/rewritten_texts diff FILE    rewrites them again and shows what differs from FILE

To compare with another commit, check it out into a folder, run `write` there (an older commit
needs a copy of this file in its `scripts/`), and then `diff` here. The texts of two JAX releases
differ, so compare within one.
"""

import argparse
import difflib
import gzip
import itertools
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# as the tests have it, so that random programs with shards are the same
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import sweeping

POLICIES = ("AlwaysF32", "AlwaysBf16", "AutoMixedF16", "AutoMixedBf16")
RANDOM_PROGRAMS = 200
SEED = 0
SHOWN_LINES = 40
ADDRESS = re.compile(r"0x[0-9a-f]+")
"""Functions in the params of an equation are printed with their address."""


class Subject(NamedTuple):
    """A program to rewrite: its name, the function, its arguments, and what it is traced under."""

    name: str
    function: Any
    arguments: tuple[Any, ...]
    settings: Callable[[], AbstractContextManager[Any]] = nullcontext


def benchmark_subjects() -> Iterator[Subject]:
    """The gradient and the training step of each model of the benchmark."""
    from bench_columns import COLUMNS, arguments
    from bench_models import MODELS

    for name, make in MODELS.items():
        model = make("small")
        for mode in ("gradient", "step"):
            program = COLUMNS["float32"].program(model, mode)
            yield Subject(f"{name}, {mode}", program, arguments(model, mode))


def random_subjects(count: int) -> Iterator[Subject]:
    """The first random programs of the sweep, without those that plain JAX refuses."""
    from tests.support import (
        random_flow,  # noqa: F401 -- registers its ingredients
        random_ops,  # noqa: F401 -- registers its ingredients
        random_pieces,  # noqa: F401 -- registers its ingredients
    )
    from tests.support.random_checks import FORMS, swept_case
    from tests.support.random_programs import build

    for index in itertools.count():
        if not count:
            return
        case = swept_case(SEED, index)
        function = FORMS[case.form](build(case.program)[0])
        settings = partial(strictly, case.program.x64)
        with settings():
            arguments = case.program.args()
            try:
                jax.eval_shape(function, *arguments)
            except (NotImplementedError, TypeError, ValueError):
                continue
        yield Subject(f"random {index}, {case.form}", function, arguments, settings)
        count -= 1


@contextmanager
def strictly(x64: bool) -> Iterator[None]:
    """The settings that the random programs are written for."""
    with (
        jax.enable_x64(x64),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        yield


def texts(count: int) -> dict[str, str]:
    """The text of each rewritten jaxpr, by the names of the program and of the policy."""
    import precpass

    found: dict[str, str] = {}
    for subject in itertools.chain(benchmark_subjects(), random_subjects(count)):
        with subject.settings():
            for policy in POLICIES:
                found[f"{subject.name}, {policy}"] = rewritten_text(
                    subject, getattr(precpass, policy)
                )
    return found


def rewritten_text(subject: Subject, policy: Any) -> str:
    """The text of one rewritten jaxpr."""
    import precpass

    inspection = precpass.inspect(subject.function, policy)(*subject.arguments)
    return ADDRESS.sub("0x", str(inspection.after))


def differences(before: dict[str, str], after: dict[str, str]) -> Iterator[str]:
    """A unified diff of each text that differs, cut after some lines."""
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name, ""), after.get(name, "")
        if old != new:
            lines = difflib.unified_diff(
                old.splitlines(), new.splitlines(), name, name, lineterm="", n=1
            )
            yield "\n".join(itertools.islice(lines, SHOWN_LINES))


def main() -> int:
    """Runs the command."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("command", choices=("write", "diff"))
    options.add_argument("file", type=Path, help="where the texts are (gzip, JSON)")
    options.add_argument("--random", type=int, default=RANDOM_PROGRAMS, help="how many programs")
    given = options.parse_args()
    sweeping.set_up(jax_numpy_dtype_promotion="standard", jax_numpy_rank_promotion="allow")
    warnings.simplefilter("ignore")
    import precpass

    print(f"precpass of {Path(precpass.__file__).parent.name}, jax {jax.__version__}")
    found = texts(given.random)
    print(f"{len(found)} texts")
    if given.command == "write":
        given.file.write_bytes(gzip.compress(json.dumps(found).encode()))
        return 0
    before = json.loads(gzip.decompress(given.file.read_bytes()))
    shown = list(differences(before, found))
    print("\n\n".join(shown))
    print(f"{len(shown)} of {len(found)} texts differ")
    return bool(shown)


if __name__ == "__main__":
    sys.exit(main())
