"""Put single faults into the package, and say which ones no test finds.

A mutant is the package with one operator, number or condition changed by cosmic-ray. The tests of
its folder and of the contract run until one fails, as `scripts/test` runs them. The same seed draws
the same mutants from the same files. A mutant that survives is either a fault that no test finds or
a change that makes no difference: read its diff, which is printed.

    scripts/mutants                        # 60 mutants
    scripts/mutants --only 3 17 --whole    # two of them against every case
"""

import argparse
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from rich.console import Console
from rich.progress import Progress
from rich.syntax import Syntax

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("analysis", "backends", "eight_bits", "planner", "rewrite")
# one change for each kind of expression: more of one position are found or missed together
OPERATORS = (
    *(
        f"ReplaceComparisonOperator_{pair}"
        for pair in ("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")
    ),
    *(f"ReplaceComparisonOperator_{pair}" for pair in ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt")),
    *(f"ReplaceBinaryOperator_{pair}" for pair in ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul")),
    *("ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue"),
    *("AddNot", "ReplaceUnaryOperator_Delete_Not", "NumberReplacer", "ReplaceBreakWithContinue"),
    "ZeroIterationForLoop",
)
LONGEST = 1800
"""Seconds after which the tests of a mutant count as never ending, which is a failure."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    number: int
    file: str
    operator: str
    occurrence: int

    def code(self) -> str | None:
        """The text of the changed file; None if nothing is changed."""
        operator = get_operator(f"core/{self.operator}")()
        return mutate_code((ROOT / self.file).read_text(), operator, self.occurrence)

    def diff(self) -> str:
        old, new = (ROOT / self.file).read_text(), self.code() or ""
        lines = difflib.unified_diff(
            old.splitlines(), new.splitlines(), self.file, self.file, n=2, lineterm=""
        )
        return "\n".join(lines)


def mutants(count: int, seed: int) -> list[Mutant]:
    """A sample of all changes of the folders' files, drawn with a seed."""
    found: list[tuple[str, str, int]] = []
    for path in sorted(p for folder in FOLDERS for p in (ROOT / "precpass" / folder).rglob("*.py")):
        nodes = list(ast_nodes(get_ast(path.read_text())))
        for name in OPERATORS:
            operator = get_operator(f"core/{name}")()
            places = sum(len(list(operator.mutation_positions(node))) for node in nodes)
            found += [(path.relative_to(ROOT).as_posix(), name, i) for i in range(places)]
    drawn = random.Random(seed).sample(found, count)
    return [Mutant(number, *place) for number, place in enumerate(drawn)]


def caught_by(mutant: Mutant, tree: Path, options: list[str]) -> str:
    """The test that fails for a mutant, in a copy of the repository; "" if none does."""
    path = tree / mutant.file
    path.write_text(mutant.code() or "")
    folder = mutant.file.split("/")[1]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
    command += ["-m", "not programs and not targets", f"tests/{folder}", "tests/contract", *options]
    try:
        env = {
            **os.environ,
            "PYTHONPATH": str(tree),
            "JAX_COMPILATION_CACHE_DIR": str(tree / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
        }
        run = subprocess.run(
            command, cwd=tree, env=env, capture_output=True, text=True, timeout=LONGEST
        )
    except subprocess.TimeoutExpired:
        return "never ends"
    finally:
        shutil.copy(ROOT / mutant.file, path)
    if run.returncode == 0:
        return ""
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0][:200] if failed else run.stdout[-200:] + run.stderr[-200:]


def outcomes(
    chosen: list[Mutant], workers: int, options: list[str]
) -> Iterator[tuple[Mutant, str, float]]:
    """Each mutant, what caught it, and the seconds that its tests took."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        trees: Queue[Path] = Queue()
        for i in range(workers):
            tree = Path(folder) / str(i)
            for part in ("precpass", "tests", "scripts"):
                shutil.copytree(ROOT / part, tree / part)
            for file in ROOT.glob("*.*"):
                if file.is_file():
                    shutil.copy(file, tree)
            trees.put(tree)

        def outcome(mutant: Mutant) -> tuple[Mutant, str, float]:
            tree, start = trees.get(), time.monotonic()
            try:
                return mutant, caught_by(mutant, tree, options), time.monotonic() - start
            finally:
                trees.put(tree)

        yield from pool.map(outcome, chosen)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60, help="how many are drawn (60)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--only", type=int, nargs="+", help="the numbers of some of those drawn")
    parser.add_argument(
        "--whole", action="store_true", help="against every case, as before a release"
    )
    parser.add_argument("--workers", type=int, default=2, help="how many at once (2)")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args()
    console = Console()
    drawn = mutants(options.count, options.seed)
    chosen = [m for m in drawn if not options.only or m.number in options.only]
    found = []
    with Progress(console=console) as progress:
        task = progress.add_task("mutants", total=len(chosen))
        for mutant, test, seconds in outcomes(chosen, options.workers, ["--whole"] * options.whole):
            progress.advance(task)
            found.append({**asdict(mutant), "caught_by": test, "seconds": round(seconds)})
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
            if not test:
                console.print(f"mutant {mutant.number} survives", Syntax(mutant.diff(), "diff"))
    caught = sum(bool(row["caught_by"]) for row in found)
    console.print(f"{caught} of {len(found)} mutants are caught")
    return 0


if __name__ == "__main__":
    sys.exit(main())
