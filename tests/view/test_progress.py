"""A report that takes long shows a bar to somebody who waits, and nothing in a log."""

from typing import Any, ClassVar

import jax.numpy as jnp
import nbclient
import nbformat.v4
import pytest

import precpass as pp
from precpass.view import progress
from precpass.view.progress import telling


class Bar:
    """In the place of the bar: what it was told."""

    said: ClassVar[list[Any]] = []

    def __init__(self, what: str) -> None:
        self.said.append(what)

    is_interactive = True

    def say(self, *step: Any) -> None:
        self.said.append(step)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self.said.append("over")


def test_a_bar_at_a_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "Progress", Bar)
    monkeypatch.setattr(Bar, "said", [])
    with telling(None, "compare f") as tell:
        tell("AlwaysF32", 1, 3)
    assert Bar.said == ["compare f", ("AlwaysF32", 1, 3), "over"]


def test_nothing_elsewhere(capsys: pytest.CaptureFixture[str]):
    with telling(None, "compare f") as tell:
        tell("AlwaysF32", 1, 3)
    assert capsys.readouterr() == ("", "")


def test_what_the_user_gave_is_called_instead():
    said: ClassVar[list[Any]] = []
    with telling(lambda *step: said.append(step), "compare f") as tell:
        tell("AlwaysF32", 1, 3)
    assert said == [("AlwaysF32", 1, 3)]


def test_a_bisection_has_a_bar(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "Progress", Bar)
    monkeypatch.setattr(Bar, "said", [])
    x = jnp.full((8, 8), 0.37)
    pp.bisect(lambda x: x @ x, "AutoMixedBf16", 1e-6)(x)
    assert Bar.said[0] == "bisect <lambda>" and Bar.said[-1] == "over"
    assert [step[1:] for step in Bar.said[1:-1]] == [(n, 100) for n in range(1, len(Bar.said) - 1)]


IN_A_NOTEBOOK = """
import time
from precpass.view import progress
progress._PATIENCE = 0.0
with progress.telling(None, "compare f") as tell:
    tell("AlwaysF32", 1, 3)
    time.sleep(2.0)
"""


@pytest.mark.programs
def test_a_notebook_shows_a_line_and_is_empty_afterwards():
    said: list[str] = []

    class Client(nbclient.NotebookClient):
        def process_message(self, msg: Any, *args: Any) -> Any:
            if "data" in msg["content"]:
                said.append(msg["content"]["data"]["text/plain"])
            return super().process_message(msg, *args)

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(IN_A_NOTEBOOK)])
    Client(notebook, kernel_name="python3").execute()
    assert any(text.startswith("precpass: compare f: AlwaysF32, step 1 of 3 (") for text in said)
    assert [output["data"] for output in notebook.cells[0].outputs] == [{"text/plain": ""}]
