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

@pytest.mark.enumerated
@pytest.mark.parametrize(("x", "y"), [(x, y) for x in range(3) for y in range(2)])
def test_of_a_list(x, y): ...

@pytest.mark.parametrize("x", [[], {}, [1]])
def test_of_one(x): ...

@pytest.fixture(params=["a", "b"])
def kind(request): ...

@pytest.mark.parametrize("x", range(4))
def test_of_a_fixture(x, kind): ...

@pytest.mark.release
def test_of_a_release(): ...

@pytest.mark.release(keep=2)
@pytest.mark.parametrize("x", range(5))
@pytest.mark.parametrize("y", range(5))
def test_mostly_of_a_release(x, y): ...

@pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.release), 3])
def test_but_for_one_case(x): ...

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
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  release: .\n  enumerated: .\n")
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
    assert len([name for name in names if name.startswith("test_of_a_list")]) == 3
    assert "test_plain" in names and "test_of_a_release" not in names
    assert len([name for name in names if name.startswith("test_mostly_of_a_release")]) == 2
    but_for_one = {"test_but_for_one_case[1]", "test_but_for_one_case[3]"}
    assert {name for name in names if "but_for" in name} == but_for_one
