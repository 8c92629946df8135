"""The code of README and of the documentation runs as it is written, and links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import precpass as pp
from tests.support.public import public_names

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "pages"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "ARCHITECTURE.md",
    *sorted(path for path in PAGES.rglob("*.md") if "tutorials" not in path.parts),
]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)(#[^)]*)?\)")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code_of(path: Path) -> list[str]:
    return BLOCK.findall(path.read_text(encoding="utf-8"))


@pytest.mark.release(keep=4)
@pytest.mark.programs
@pytest.mark.parametrize("path", [path for path in DOCUMENTS if code_of(path)], ids=name_of)
def test_the_code_runs_in_order_in_an_empty_folder(path: Path, tmp_path: Path):
    code = "\n\n".join(code_of(path))
    if 'target="h100"' in code:
        pytest.importorskip("jax_cuda12_plugin", reason="XLA's compiler for GPUs is not installed")
    script = tmp_path / "page.py"
    script.write_text(code, encoding="utf-8")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "PRECPASS_CACHE_DIR": str(tmp_path / "cache"),
    }
    for option in ("JAX_NUMPY_RANK_PROMOTION", "JAX_NUMPY_DTYPE_PROMOTION", "PRECPASS"):
        environment.pop(option, None)
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_to_files(path: Path):
    for target, _ in LINK.findall(path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


def test_readme_is_short_and_every_page_is_in_the_navigation():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 200
    navigation = (ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8")
    for path in DOCUMENTS[3:]:
        assert path.relative_to(PAGES).as_posix() in navigation, path


def test_the_changelog_is_short_and_grouped_as_keep_a_changelog_has_it():
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 150
    groups = [line.removeprefix("### ") for line in lines if line.startswith("### ")]
    every = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    assert groups == [group for group in every if group in groups]
    assert all(line == "## [Unreleased]" for line in lines if line.startswith("## "))


def test_the_picture_on_the_home_page_is_what_its_code_draws(tmp_path, monkeypatch):
    (code,) = code_of(PAGES / "index.md")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "network.py", "exec"), {})
    drawn = (tmp_path / "network.svg").read_text(encoding="utf-8")
    assert drawn == (PAGES / "network.svg").read_text(encoding="utf-8")


def test_the_reference_has_all_that_is_exported():
    pages = sorted((PAGES / "reference").glob("api*.md"))
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    names = public_names()
    presets = {name for name, x in names.items() if isinstance(x, pp.types.PrecisionPolicy)}
    entries = re.findall(r"^::: precpass\.([\w.]+)$", text, re.MULTILINE)
    assert sorted(entries) == sorted(names.keys() - presets - {"__version__"})
