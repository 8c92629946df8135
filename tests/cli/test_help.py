"""The help of the command line: complete, and with examples that run; the release."""

import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import jax
import pytest

import precpass
from precpass.cli import main
from precpass.cli.commands import COMMANDS
from tests.support.command_line import ran, written

cli = import_module("precpass.cli.main")
PAGE = Path(__file__).parents[2] / "docs" / "pages" / "reference" / "command-line.md"


@pytest.fixture
def model(tmp_path, monkeypatch):
    yield from written(tmp_path, monkeypatch)


def page_model():
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    return code


def help_of(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


def runs(capsys, words):
    status, out, err = ran(capsys, *words)
    # A busy machine takes longer than the two seconds after which progress is said.
    other = [line for line in err.splitlines() if not line.endswith(" ...")]
    assert (status, other) == (0, []) and out, words


def test_the_help_of_each_command_has_its_options_and_needs_no_jax():
    code = (
        "import sys; from precpass.cli.main import _parser; _parser(); "
        "print([name for name in sys.modules if name.partition('.')[0] in ('jax', 'jaxlib')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
    assert [name for name, *_ in cli.COMMANDS] == list(COMMANDS)
    for name, *_ in cli.COMMANDS:
        options = {option: how for option, of, how in cli.OPTIONS if name in of}
        assert {"target", "--plan", "--output", "--json"} <= options.keys() and len(options) > 6
        assert all(how["help"] for how in options.values())
        words = [how["metavar"] for how in options.values() if "metavar" in how]
        # a function was called TARGET, and `--target` is a device
        assert len(set(words) - {"FILE", "N"}) == len([w for w in words if w not in ("FILE", "N")])
        assert "TARGET" not in words


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_in_the_help_run(name, model, capsys, monkeypatch):
    (model.parent / "model.py").write_text(page_model())
    text = help_of(name, capsys, monkeypatch)
    assert max(map(len, text.splitlines())) <= 80
    examples = re.findall(r"^  precpass (.*)$", text, re.M)
    assert examples
    if name == "check":  # whose plan is that of an example of `lock`
        given = ["lock", "model.py:loss", "--example", "arguments", "--output", "loss.json"]
        assert main(given) == 0
    for example in examples:
        words = shlex.split(example)
        assert words[0] == name
        runs(capsys, words)


def test_the_lines_of_the_documentation_run(model, capsys):
    (model.parent / "model.py").write_text(page_model())
    lines = re.findall(r"^    precpass (.*)$", PAGE.read_text(encoding="utf-8"), re.M)
    assert {shlex.split(line)[0] for line in lines} == COMMANDS.keys()
    for line in lines:
        runs(capsys, shlex.split(line))


def test_the_release_is_said_once(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    out = capsys.readouterr().out
    assert left.value.code == 0
    assert out.startswith(f"precpass {precpass.__version__} (jax {jax.__version__}, Python 3.")
    assert re.fullmatch(r"\d+\.\d+\.\d+", precpass.__version__)
    # The metadata is read from the module: pyproject.toml has no release of its own.
    project = (PAGE.parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in project and not re.search(r"^version = ", project, re.M)
