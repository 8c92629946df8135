"""Where the tests keep compiled programs: found again, and harmless where they are damaged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import compiled_programs
from tests.support.compiled_programs import CompiledPrograms

ROOT = Path(__file__).resolve().parents[2]


def test_a_folder_is_found_again_and_no_two_runs_share_it(tmp_path: Path):
    first = CompiledPrograms(tmp_path)
    (first.folder / "program").write_bytes(b"code")
    beside = CompiledPrograms(tmp_path)
    assert first.folder.parent == tmp_path and beside.folder != first.folder
    beside.close()
    first.close()
    again = CompiledPrograms(tmp_path)
    assert again.folder == first.folder
    assert (again.folder / "program").read_bytes() == b"code"
    again.close()


@pytest.mark.release
def test_a_damaged_file_fails_no_test(tmp_path: Path):
    """A process that is killed, or a full disk, leaves half a file, of which JAX warns."""
    test = tmp_path / "test_it.py"
    test.write_text("import jax\ndef test_it(): assert jax.jit(lambda x: x + 1)(2.0) == 3.0\n")
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(ROOT), "-c", "pyproject.toml"]
    env = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "kept"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    for _ in range(2):
        run = subprocess.run(
            [*command, str(test)], cwd=ROOT, env=env, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stdout
        files = list((tmp_path / "kept").glob("*-cache"))
        assert files
        for file in files:
            file.write_bytes(file.read_bytes()[:20])


def test_a_folder_that_has_grown_large_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled_programs, "LARGEST", 3)
    first = CompiledPrograms(tmp_path)
    (first.folder / "program").write_bytes(b"code")
    first.close()
    again = CompiledPrograms(tmp_path)
    assert list(again.folder.parent.glob("*/program")) == []
    again.close()


def test_a_folder_that_cannot_be_made_is_a_temporary_one(tmp_path: Path):
    (tmp_path / "file").write_text("")
    found = CompiledPrograms(tmp_path / "file")
    assert found.folder.is_dir() and tmp_path not in found.folder.parents
    found.close()
    assert not found.folder.exists()
