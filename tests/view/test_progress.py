"""A report that takes long shows a bar to somebody who waits, and nothing in a log."""

from typing import Any, ClassVar

import pytest

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
