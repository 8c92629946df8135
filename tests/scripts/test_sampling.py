"""The sample of cases that `scripts/test` runs leaves out no value of any parameter."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

from tests.support.sampling import each_choice

SUITE = """
import pytest

@pytest.mark.parametrize("x", range(6))
@pytest.mark.parametrize(("y", "z"), [(1, 2), (2, 1), (2, 2)])
def test_of_two_parameters(x, y, z): ...

@pytest.mark.parametrize("x", [[], {}, [1]])
def test_of_one(x): ...

@pytest.fixture(params=["a", "b"])
def kind(request): ...

@pytest.mark.parametrize("x", range(4))
def test_of_a_fixture(x, kind): ...

@pytest.mark.release
def test_of_a_release(): ...

def test_plain(): ...
"""
RUN = """
import sys, pytest
from tests.support.sampling import left_for_a_release

class Plugin:
    def pytest_collection_modifyitems(self, items):
        left = left_for_a_release(items)
        items[:] = [item for i, item in enumerate(items) if i not in left]

sys.exit(pytest.main([*sys.argv[1:], "-q", "--collect-only"], [Plugin()]))
"""


def test_every_value_of_every_parameter_is_drawn_and_the_same_each_time():
    cases = list(itertools.product("abc", range(7), [True, False]))
    drawn = each_choice(cases, "seed")
    for axis in range(3):
        assert {cases[i][axis] for i in drawn} == {case[axis] for case in cases}
    assert len(drawn) == 7
    assert drawn == each_choice(cases, "seed") != each_choice(cases, "another")


def test_what_runs_each_time(tmp_path: Path):
    (tmp_path / "test_it.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = release: of a release\n")
    command = [sys.executable, "-c", RUN, "test_it.py", "--rootdir", str(tmp_path)]
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    names = [line.partition("::")[2] for line in run.stdout.splitlines()]
    kept = {
        name: [n for n in names if n.startswith(name)] for name in ("test_of_two", "test_of_one")
    }
    assert len(kept["test_of_two"]) == 6 and len(kept["test_of_one"]) == 3
    pairs = [name.partition("[")[2][:-1].rsplit("-", 1) for name in kept["test_of_two"]]
    assert {pair for pair, _ in pairs} == {"1-2", "2-1", "2-2"}
    assert {x for _, x in pairs} == set("012345")
    assert len([name for name in names if name.startswith("test_of_a_fixture")]) == 4
    assert "test_plain" in names and "test_of_a_release" not in names
