"""Where the tests keep compiled programs: found again, and harmless where they are damaged."""

from pathlib import Path

import pytest

from tests.support import compiled_programs
from tests.support.compiled_programs import CompiledPrograms


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
