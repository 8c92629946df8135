"""A sample of other libraries' own tests, plain and with `jax.jit` replaced by `auto_mixed`.

Give it folders of unpacked sdists; it fetches nothing by itself:

    pip download --no-binary :all: --no-deps optax flax blackjax chex
    for file in *.tar.gz; do tar xzf "$file"; done
    scripts/suites optax-* flax-* blackjax-* chex-*

What fails plain counts nowhere. Of what passes plain, it lists what fails under AlwaysF32, whose
results are to be the same, and under AutoMixedBf16, where comparisons are as wide as bfloat16 is.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
POLICIES = ("AlwaysF32", "AutoMixedBf16")


def sample(folder: Path, count: int, only: str) -> list[Path]:
    """Files of tests, evenly spaced among all that a folder has."""
    found = sorted({*folder.rglob("*_test.py"), *folder.rglob("test_*.py")})
    found = [path for path in found if only in path.as_posix()]
    step = max(1.0, len(found) / count) if count else 1.0
    return [found[int(i * step)] for i in range(int(len(found) / step))]


def outcomes(folder: Path, files: list[Path], policy: str, seconds: int) -> dict[str, str]:
    """Test -> "" where it passes, or the first line of its error; skipped ones are left out."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "suites_plugin"]
        command += ["-p", "no:cacheprovider", "-o", "addopts=", "--continue-on-collection-errors"]
        command += [f"--timeout={seconds}", f"--junitxml={report}", *map(str, files)]
        paths = [str(HERE), str(HERE.parent), str(folder), os.environ.get("PYTHONPATH", "")]
        env = {
            **os.environ,
            "PRECPASS_SUITE": policy,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "JAX_PLATFORMS": "cpu",
        }
        run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        if not report.exists():
            raise SystemExit(f"pytest did not run in {folder}:\n{run.stdout[-2000:]}{run.stderr}")
        cases = ET.parse(report).getroot().iter("testcase")
        return {name: text for name, text in map(outcome, cases) if text != "skipped"}


def outcome(case: ET.Element) -> tuple[str, str]:
    name = f"{case.get('classname')}::{case.get('name')}"
    for kind in ("failure", "error"):
        if (found := case.find(kind)) is not None:
            return name, (found.get("message") or kind).strip().partition("\n")[0][:160]
    return name, "skipped" if case.find("skipped") is not None else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="unpacked sdists that carry tests")
    parser.add_argument(
        "--files", type=int, default=12, help="files of tests of each folder; 0 for all (12)"
    )
    parser.add_argument("--only", default="", help="only files whose path holds this text")
    parser.add_argument("--seconds", type=int, default=180, help="the longest that a test may take")
    parser.add_argument("--json", type=Path, help="where to write all that was found")
    options = parser.parse_args()
    found: list[dict[str, object]] = []
    console = Console(width=120)
    for folder in map(Path.resolve, options.folders):
        files = sample(folder, options.files, options.only)
        if not files:
            console.print(f"{folder.name} carries no tests")
            continue
        plain = outcomes(folder, files, "plain", options.seconds)
        passing = {name for name, error in plain.items() if not error}
        row = {"suite": folder.name, "files": len(files), "passing": len(passing), "only": {}}
        for policy in POLICIES:
            under = outcomes(folder, files, policy, options.seconds)
            missing = "was not collected"
            failed = {n: under.get(n, missing) for n in sorted(passing) if under.get(n, missing)}
            row["only"][policy] = failed
            for name, error in failed.items():
                console.print(f"{policy}: {name}\n    {error}", markup=False, highlight=False)
        found.append(row)
    show(console, found)
    if options.json:
        versions = {"python": platform.python_version(), "jax": jax.__version__}
        options.json.write_text(json.dumps({**versions, "suites": found}, indent=1) + "\n")
    return 0


def show(console: Console, found: list[dict[str, object]]) -> None:
    table = Table("suite", "files", "pass plain", *(f"fail only under {p}" for p in POLICIES))
    for row in found:
        failed = (str(len(row["only"][policy])) for policy in POLICIES)
        table.add_row(row["suite"], str(row["files"]), str(row["passing"]), *failed)
    console.print(f"Python {platform.python_version()}, jax {jax.__version__}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
