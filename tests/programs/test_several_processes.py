"""Several processes, each with its part of one mesh, and several that share a file of choices."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import precpass as pp
from tests.support.several_processes import DEADLINE, RUN

pytestmark = pytest.mark.programs

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = DEADLINE + 60
"""Seconds after which all processes are killed: they wait for one that has failed."""


def ended(commands: list[list[str]], **variables: str) -> list[tuple[int, str, str]]:
    """The exit status, output and errors of processes that run at once."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **variables}
    environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([sys.executable, *command], env=environment, cwd=ROOT, **pipes)
        for command in commands
    ]
    end = time.monotonic() + TIMEOUT
    try:
        texts = [p.communicate(timeout=max(0.1, end - time.monotonic())) for p in started]
    except subprocess.TimeoutExpired:
        for process in started:
            process.kill()
        errors = "\n".join(process.communicate()[1][-2000:] for process in started)
        pytest.fail(f"the processes did not end in {TIMEOUT} seconds:\n{errors}")
    return [(p.returncode, *text) for p, text in zip(started, texts, strict=True)]


# ---------------------------------------------------------------- one program in all


def checked(processes: int) -> list[dict[str, Any]]:
    """What each process found, by check."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = ["-m", "tests.support.several_processes", str(port), str(processes)]
    found: list[dict[str, Any]] = []
    for status, out, errors in ended([[*program, str(process)] for process in range(processes)]):
        assert status == 0, errors
        found.append(json.loads(out.splitlines()[-1]))  # gloo tells of its connections before
    return found


def check_plans(plans: dict[str, Any]):
    assert len(plans) > 10


def check_steps(steps: dict[str, Any]):
    assert len(steps) == 2 * len(RUN)
    bound = 8 * pp.AutoMixedBf16.low.unit_roundoff
    for name, step in steps.items():
        assert 0 < step["error"] < bound, name


def check_best(best: dict[str, Any]):
    """Nothing is compiled that processes could choose differently."""
    for program in best.values():
        assert program["costs"].startswith("not compiled, because several processes run it")


def check_monitored(health: dict[str, Any]):
    """The NaNs that are born in the part of one process."""
    assert health["born"] == [["log", 14, 0]] and "2 of 3 calls" in health["looked"]


def check_reports(reports: dict[str, Any]):
    wide, low = reports["errors"]
    assert 0 < wide < 1e-6 < low < 2**-6
    assert reports["timed"] and reports["devices"] == [4, 4] and reports["refused"] == ["", ""]
    assert not reports["compiled"]  # the devices of other processes are not absent ones


def check_callbacks(callbacks: dict[str, Any]):
    assert callbacks["low"] == 2


def check_scaled(scaled: dict[str, Any]):
    """The second step is skipped everywhere, because one part overflows."""
    for scale in scaled.values():
        assert scale["finite"] == [True, False, True] and scale["scale"] == 4.0


def check_fallen_back(fallen_back: dict[str, Any]):
    """All take the higher rung where one part overflows."""
    assert [each["rung"] for each in fallen_back.values()] == [0, 1, 0, 1]


def check_agreed(agreed: dict[str, Any]):
    assert agreed == {"same": "equal", "other": "other program"}


CHECKS: tuple[Callable[[dict[str, Any]], None], ...] = (
    *(check_plans, check_steps, check_best, check_monitored, check_reports),
    *(check_callbacks, check_scaled, check_fallen_back, check_agreed),
)


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.release)])
def test_processes_find_the_same(processes: int):
    """One test, because starting the processes takes most of the time."""
    first, *others = checked(processes)
    assert [f"check_{name}" for name in first] == [check.__name__ for check in CHECKS]
    for (name, found), check in zip(first.items(), CHECKS, strict=True):
        assert "failed" not in found, f"{name}: {found['failed']}"
        for other in others:
            assert other[name] == found, f"{name}: {other[name].get('failed')}"
        check(found)


# ---------------------------------------------------------------- one file of choices

CHOOSES = """
import os, signal, sys
import jax, jax.numpy as jnp, precpass as pp
from precpass.autotune import cache, compiled

size, dies = map(int, sys.argv[1:])

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if dies:
    cache.os.replace = killed
compiled_here, figures_of = [], compiled.figures_of
compiled.figures_of = lambda *args: compiled_here.append(args) or figures_of(*args)

def loss(w, x):
    return jnp.tanh(x @ w).sum()

for n in (8, size):
    plan = pp.inspect(jax.grad(loss), profitability="best")(jnp.ones((n, n)), jnp.ones((n, n))).plan
    print(plan.form, plan.costs, plan.notes)
print(len(compiled_here))
"""


def test_writers_at_once_and_one_that_is_killed_leave_a_file_to_read(tmp_path: Path):
    sizes, folder = (16, 24, 32), str(tmp_path)
    commands = [["-c", CHOOSES, str(size), "0"] for size in sizes]
    killed = ["-c", CHOOSES, "40", "1"]
    *wrote, died = ended([*commands, killed], PRECPASS_CACHE_DIR=folder)
    assert died[0] == -signal.SIGKILL
    (file,) = tmp_path.glob("*.json")
    assert len(json.loads(file.read_text())["products"]) == 1 + len(sizes)
    read = ended(commands, PRECPASS_CACHE_DIR=folder)
    for before, after in zip(wrote, read, strict=True):
        assert (before[0], after[0]) == (0, 0), before[2] + after[2]
        *plans, compiled = before[1].splitlines()
        assert int(compiled) > 0 and after[1].splitlines() == [*plans, "0"]
        assert all(plan.endswith("()") for plan in plans)
    (left,) = tmp_path.glob("*.tmp")
    os.utime(left, (0, 0))
    assert ended([["-c", CHOOSES, "48", "0"]], PRECPASS_CACHE_DIR=folder)[0][0] == 0
    assert not list(tmp_path.glob("*.tmp"))
