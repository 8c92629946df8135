"""What the command line says while it works: on a terminal and in a log, not among its results."""

import codecs
import functools
import json
import os
import re
import subprocess
import sys
import threading
import time

import pytest

from precpass.cli import commands, run
from precpass.view.progress import Progress
from tests.support.command_line import SHAPES, command, environment, ran, written

pty = pytest.importorskip("pty", reason="pseudo-terminals are POSIX's")

SLOW = """
import time
import jax.numpy as jnp


def f(x, w):
    time.sleep({seconds})
    return jnp.exp(8 * (x @ w))
"""
BISECT = ("bisect", "slow.py:f", "--args", "f32[4,8], f32[8,4]", "--tolerance", "1e-6")


@pytest.fixture
def model(tmp_path, monkeypatch):
    yield from written(tmp_path, monkeypatch)


@pytest.fixture
def at_once(monkeypatch):
    """Things are said before the first second, and long runs are not needed."""
    monkeypatch.setattr(run, "Progress", functools.partial(Progress, patience=0.02))


class Terminal:
    """A pseudo-terminal; all that is written is read at once, as its buffer is small."""

    def __init__(self):
        reader, self.writer = pty.openpty()
        self.said = ""
        self._thread = threading.Thread(target=self._read, args=(reader,), daemon=True)
        self._thread.start()

    def _read(self, reader):
        decode = codecs.getincrementaldecoder("utf-8")().decode
        try:
            while piece := os.read(reader, 65536):
                self.said += decode(piece)
        except OSError:
            pass  # Linux ends it so
        os.close(reader)

    def shows(self, text):
        """Waits for a text."""
        wait_for(lambda: text in self.said)

    def text(self):
        """All that was written, when nobody writes any more."""
        os.close(self.writer)
        self._thread.join()
        return self.said


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


# ---------------------------------------------------------------- a terminal


def test_a_terminal_has_a_bar_and_standard_output_the_report(
    model, capsys, monkeypatch, terminal, at_once
):
    bisect = commands.bisect

    def waiting(*args, progress, **options):
        def shown(run):
            progress(run)
            terminal.shows(
                f"run {run.number} of at most 100: {'passes' if run.passed else 'fails'}"
            )

        return bisect(*args, progress=shown, **options)

    monkeypatch.setattr(commands, "bisect", waiting)
    given = ["a_model.py:ranged", "--args", "f32[4,8], f32[8,4]", "--tolerance", "1e-6"]
    with os.fdopen(os.dup(terminal.writer), "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        status, out, _ = ran(capsys, "bisect", *given, "--json")
    said = terminal.text()
    assert status == 0 and len(json.loads(out)["runs"]) == 2
    assert "precpass: bisect of a_model.py:ranged" in said and re.search(r"\(\d+ s\)", said)
    assert "run 1 of at most 100: passes" in said
    assert "\u2501" in said  # a bar
    assert "verdict" not in said


def test_the_bar_goes_as_far_as_the_work(terminal, monkeypatch):
    with os.fdopen(os.dup(terminal.writer), "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with Progress("it", patience=0.02) as progress:
            progress.say("half", 5, 10)
            terminal.shows("half (")
            # ten of its twenty pieces in one colour
            wait_for(lambda: "\u2501" * 10 + "\x1b" in terminal.said)
    assert "\u2501" * 11 not in terminal.text()


# ---------------------------------------------------------------- a pipe


def test_a_pipe_has_a_line_for_each_thing_that_is_said(capsys):
    said = []

    def shows(text):
        said.append(capsys.readouterr())
        return text in "".join(err for _, err in said)

    with Progress("it", patience=0.02) as progress:
        for text in ("one", "two"):
            progress.say(text)
            wait_for(functools.partial(shows, f"precpass: it: {text} ...\n"))
    assert "".join(out for out, _ in said) == ""
    assert "".join(err for _, err in said).count("...") <= 3


def test_what_is_quick_is_not_said(model, capsys):
    status, _, err = ran(capsys, "explain", "a_model.py:loss", "--args", SHAPES)
    assert (status, err) == (0, "")


@pytest.mark.release(keep=1)
@pytest.mark.parametrize(
    "name, more, said",
    [
        ("explain", (), "tracing"),
        ("audit", (), "tracing and compiling"),
        ("compare", ("--policies", "c=bf16", "--rounds", "1"), "the reference, step 1 of 3"),
        ("compare", ("--policies", "c=bf16", "--columns", "temp"), "the function, step 1 of 2"),
        ("check", ("--expect", "dot_general=bf16"), "tracing"),
    ],
)
def test_every_command_says_what_it_does(name, more, said, model, capsys, at_once):
    (model.parent / "slow.py").write_text(SLOW.format(seconds=0.3))
    status, out, err = ran(capsys, name, "slow.py:f", "--args", "f32[4,8], f32[8,4]", *more)
    assert status == 0 and "precpass:" not in out
    assert f"precpass: {name} of slow.py:f: {said} ...\n" in err


@pytest.mark.release
def test_a_process_that_takes_long_says_so_on_a_terminal_and_in_a_log(model, terminal):
    """The two seconds themselves, and the streams of a process."""
    (model.parent / "slow.py").write_text(SLOW.format(seconds=2.5))
    start = functools.partial(
        subprocess.Popen,
        command(*BISECT),
        stdout=subprocess.PIPE,
        text=True,
        cwd=model.parent,
        env=environment(TERM="xterm"),
    )
    on_terminal, in_log = start(stderr=terminal.writer), start(stderr=subprocess.PIPE)
    out, (log_out, log) = on_terminal.communicate()[0], in_log.communicate()
    assert (on_terminal.returncode, in_log.returncode) == (0, 0)
    assert out == log_out and "it passes" in out and "precpass:" not in out
    assert re.search(r"tracing \([2-9]\d* s\)", terminal.text())
    assert "precpass: bisect of slow.py:f: tracing ...\n" in log and "\x1b" not in log
