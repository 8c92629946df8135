"""Files that the command line writes, and mistakes that are found before anything is imported."""

import json
import os

import pytest

from precpass.cli.errors import in_words
from tests.support.command_line import SHAPES, ran, written

IMPORTED = """
from pathlib import Path

Path("imported").touch()


def f(x):
    return x @ x


def broken(x):
    raise KeyError("the user's own")
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    for path in written(tmp_path, monkeypatch):
        (tmp_path / "seen.py").write_text(IMPORTED)
        yield path


# ---------------------------------------------------------------- before the import


@pytest.mark.parametrize(
    "line, why",
    [
        ("explain --args f33[3]", "no dtype 'f33'"),
        ("explain --args (f32[3]", "was never closed"),
        ("explain --policy AutoMixd", "Did you mean 'AutoMixed'?"),
        ("explain --plan none.json", "file none.json does not exist"),
        ("explain --target b300", "unknown target 'b300'"),
        ("explain --plan x --policy c=bf16", "leave --policy out"),
        ("explain --output no/x.txt", "--output no/x.txt: there is no folder no"),
        ("lock --output .", "--output .: . is a folder"),
        ("draw --output x.png", "a picture is SVG, not .png: name it .svg"),
        ("diff --between c=f7", "f7"),
        ("compare --policies c=bf16;c=f7", "f7"),
        ("compare --policies c=bf16;c=bf16", "is given twice"),
        ("compare --rounds -1", "--rounds -1: a whole number"),
        ("compare --rounds 3 --target h100", "rounds"),
        ("bisect --tolerance -1", "--tolerance -1.0: an error is a finite number"),
        ("bisect --tolerance 1 --budget 0", "--budget 0: "),
        ("check --expect dot_general=f7", "--expect dot_general: unknown precision 'f7'"),
        ("check --expect dot_general", "write PATTERN=PRECISION"),
        ("check --plan none.json", "file none.json does not exist"),
    ],
)
def test_a_mistake_is_found_before_the_module_is_imported(line, why, model, capsys, tmp_path):
    name, *more = line.replace("--plan x ", "--plan x.json ").split()
    if "--args" not in more:
        more += ["--args", "f32[3,3]"]
    status, out, err = ran(capsys, name, "seen.py:f", *more)
    assert (status, out) == (2, "") and why in err and "Errno" not in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "imported").exists()


def test_a_module_may_switch_64_bits_on(model, capsys, tmp_path):
    """So what --args says of dtypes is judged after the import."""
    status, _, err = ran(capsys, "explain", "seen.py:f", "--args", "f64[3,3]")
    assert status == 2 and "x64 is off: set JAX_ENABLE_X64=1" in err
    assert (tmp_path / "imported").exists()


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["explain", "lock", "draw"])
@pytest.mark.parametrize("old", [None, "what was there"], ids=["new", "existing"])
@pytest.mark.parametrize("function", ["broken", "missing"])
def test_a_run_that_fails_leaves_the_file_as_it_was(name, old, function, model, capsys, tmp_path):
    path = tmp_path / "out.svg"
    if old is not None:
        path.write_text(old)
    given = [f"seen.py:{function}", "--args", "f32[3,3]", "-o", path.name]
    status, out, _ = ran(capsys, name, *given)
    assert status in (2, 3) and out == ""
    assert (tmp_path / "imported").exists()
    assert (path.read_text() if path.exists() else None) == old


def test_every_report_goes_to_a_file(model, capsys, tmp_path):
    given = ["a_model.py:loss", "--args", SHAPES]
    _, printed, _ = ran(capsys, "explain", *given)
    path = tmp_path / "explained.txt"
    path.write_text("longer than the report " * 1000)
    status, out, err = ran(capsys, "explain", *given, "--output", path.name)
    assert (status, out, err) == (0, "wrote explained.txt\n", "")
    assert path.read_text() == printed
    status, out, _ = ran(capsys, "explain", *given, "--output", "explained.json", "--json")
    assert status == 0 and json.loads(out) == {"written": "explained.json"}
    assert json.loads((tmp_path / "explained.json").read_text())["name"] == "loss"
    # The exit status is that of the report.
    given += ["--expect", "dot_general=f32", "-o", "check.txt"]
    assert ran(capsys, "check", *given)[:2] == (1, "wrote check.txt\n")
    assert "not f32 as 'dot_general' asks" in (tmp_path / "check.txt").read_text()


def test_a_file_has_colours_only_if_they_are_asked_for(model, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    given = ["diff", "a_model.py:loss", "--args", SHAPES, "-o", "diff.txt"]
    ran(capsys, *given)
    assert "\x1b[" not in (tmp_path / "diff.txt").read_text()
    ran(capsys, *given, "--color", "always")
    assert "\x1b[" in (tmp_path / "diff.txt").read_text()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that Linux has")
def test_a_full_disk_is_said_in_words(model, capsys):
    given = ["a_model.py:loss", "--args", SHAPES, "--output", "/dev/full"]
    status, out, err = ran(capsys, "explain", *given)
    assert (status, out) == (2, "")
    assert err == "precpass: --output /dev/full: no space left on device\n"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write all")
def test_a_file_that_may_not_be_written_is_said_before_the_import(model, capsys, tmp_path):
    (tmp_path / "out.json").touch(mode=0o400)
    given = ["seen.py:f", "--args", "f32[3,3]", "-o", "out.json"]
    status, _, err = ran(capsys, "lock", *given)
    assert status == 2 and "this user has no permission to open out.json" in err
    assert not (tmp_path / "imported").exists()


def test_an_error_of_the_system_has_words_and_no_number():
    for error in (
        FileNotFoundError(2, "No such file or directory", "a"),
        IsADirectoryError(21, "Is a directory", "a"),
        NotADirectoryError(20, "Not a directory", "a/b"),
        PermissionError(13, "Permission denied", "a"),
        OSError(28, "No space left on device", "a"),
        OSError(28, "No space left on device"),
        OSError("only a text"),
    ):
        text = in_words(error)
        assert text and "rrno" not in text and str(error.errno) not in text
        assert error.filename is None or error.filename in text


# ---------------------------------------------------------------- plans


def test_a_saved_plan_is_a_row_of_compare(model, capsys):
    given = ["a_model.py:loss", "--args", SHAPES]
    assert ran(capsys, "lock", *given, "--policy", "AlwaysF32", "-o", "wide.json")[0] == 0
    more = ["--policies", "c=bf16", "--plan", "wide.json", "--rounds", "0", "--json"]
    status, out, _ = ran(capsys, "compare", *given, *more)
    low, wide = json.loads(out)["rows"]
    assert status == 0 and (low["name"], wide["name"]) == ("c=bf16", "wide.json")
    assert wide["relative_error"] < low["relative_error"]


def test_a_saved_plan_is_followed(model, capsys):
    given = ["a_model.py:loss", "--args", SHAPES]
    assert ran(capsys, "lock", *given, "--policy", "AlwaysF32", "-o", "wide.json")[0] == 0
    for name, says in (("explain", "0 of 1 matrix product runs in low"), ("diff", "0 of ")):
        status, out, _ = ran(capsys, name, *given, "--plan", "wide.json")
        assert status == 0 and says in out, out
    assert ran(capsys, "check", *given, "--plan", "wide.json")[0] == 1
