"""The dated figures in scripts/results/, and what shows them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
FILES = sorted((SCRIPTS / "results").glob("*.json"))


def shown(*names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "render_results.py"), *names]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_says_when_and_what_and_is_shown_whole(path: Path):
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["title"] and result["text"] and result["measured"].startswith("20")
    tables = [table for part in result["parts"] for table in part["tables"]]
    rows = [row for table in tables for row in table["rows"]]
    assert rows
    for table in tables:
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}
    lines = shown(path.stem).stdout.splitlines()
    assert sum(line.startswith("|") for line in lines) == len(rows) + 2 * len(tables)


DOCUMENTS = sorted((SCRIPTS.parent / "docs" / "pages").glob("*/*.md"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_a_document_shows_the_results_as_they_are(path: Path, tmp_path: Path):
    written = path.read_text(encoding="utf-8")
    stale = re.sub(
        r"(<!-- results: \w+ -->\n).*?(<!-- end of results -->)", r"\1\2", written, flags=re.S
    )
    (tmp_path / path.name).write_text(stale, encoding="utf-8")
    assert shown("--into", str(tmp_path / path.name)).returncode == 0
    assert (tmp_path / path.name).read_text(encoding="utf-8") == written, (
        f"scripts/render_results --into {path.relative_to(SCRIPTS.parent)}"
    )


def test_without_a_name_all_are_listed():
    assert FILES
    assert [line.split(":")[0] for line in shown().stdout.splitlines()] == [f.stem for f in FILES]


def test_a_name_that_is_none_is_named_with_the_legal_ones():
    done = shown("bench_moon")
    assert done.returncode == 2
    assert "bench_moon" in done.stderr and FILES[0].stem in done.stderr


def test_the_scripts_page_is_short():
    assert len((SCRIPTS / "README.md").read_text(encoding="utf-8").splitlines()) < 120
