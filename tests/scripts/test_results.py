"""The dated figures in scripts/results/, and the documents that show them."""

import json
import re
from pathlib import Path

import pytest
import render_results

FILES = {path.stem: path for path in sorted(render_results.RESULTS.glob("*.json"))}
DOCUMENTS = sorted(
    path
    for path in (Path(__file__).resolve().parents[2] / "docs" / "pages").glob("*/*.md")
    if "<!-- results: " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", FILES)
def test_a_file_says_when_and_what_and_is_shown_whole(name: str):
    result = json.loads(FILES[name].read_text(encoding="utf-8"))
    assert result["title"] and result["text"] and result["measured"].startswith("20")
    tables = [table for part in result["parts"] for table in part["tables"]]
    for table in tables:
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}
    lines = "\n".join(render_results.rendered(result)).splitlines()
    shown = sum(len(table["rows"]) + 2 for table in tables)
    assert sum(line.startswith("|") for line in lines) == shown


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_a_document_shows_the_results_as_they_are(path: Path):
    written = path.read_text(encoding="utf-8")
    stale = re.sub(r"(<!-- results: \w+ -->\n).*?(<!-- end of)", r"\1\2", written, flags=re.DOTALL)
    assert stale != written
    assert render_results.with_results(stale, FILES) == written, (
        f"scripts/run render_results --into {path}"
    )
