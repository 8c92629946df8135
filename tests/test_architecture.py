"""ARCHITECTURE.md, held against the package: its files are there, and its example prints this."""

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_every_file_and_folder_that_it_names_is_there():
    named = re.findall(r"`([\w/]+/(?:\w+\.py)?|\w+\.py)`", TEXT)
    assert len(named) > 40
    places = [ROOT / "precpass", ROOT, *(ROOT / "precpass").iterdir()]
    places += [ROOT / "precpass" / "planner" / "storage"]
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    assert not missing


def test_it_names_every_folder_of_the_package():
    folders = {
        path.name for path in (ROOT / "precpass").iterdir() if (path / "__init__.py").exists()
    }
    assert not {name for name in folders if f"`{name}/`" not in TEXT}


def test_its_example_prints_what_it_says():
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (said,) = re.findall(r"It prints\n\n```\n(.*?)```", TEXT, re.DOTALL)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    assert out.getvalue() == said


def test_what_it_says_to_change_is_there():
    import precpass.planner.guards
    import precpass.planner.storage.vetoes
    from precpass import jaxpr

    assert precpass.planner.guards.GUARDS and precpass.planner.storage.vetoes.VETOES
    assert jaxpr.ENTERED and jaxpr.OPAQUE
