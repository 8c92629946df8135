"""Progress on standard error, shown once something has taken two seconds."""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TextColumn

__all__ = ["Progress", "telling"]

_PATIENCE = 2.0
"""Seconds."""


class Progress:
    """A context that shows what is being done and for how long.

    On a terminal it is a bar and in a notebook a line, which are removed at the end. Elsewhere it
    is lines, at most one in two seconds, so that a log shows that something runs.

    Args:
        what: the whole task, in words.
        patience: seconds until the first message, and between two lines; two by default.
    """

    def __init__(self, what: str, patience: float | None = None) -> None:
        self._what = what
        self._patience = _PATIENCE if patience is None else patience
        self._now: tuple[str, int | None, int | None] = ("", None, None)
        self._console = Console(stderr=True)
        self._over = threading.Event()
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def is_interactive(self) -> bool:
        """Whether somebody waits in front of it, at a terminal or in a notebook."""
        return self._console.is_terminal or self._console.is_jupyter

    def say(self, what: str, done: int | None = None, total: int | None = None) -> None:
        """Sets the present step, and how much of it is done if that is known."""
        # A single assignment, so that the other thread sees all of it or none.
        self._now = what, done, total

    def _run(self) -> None:
        if self._over.wait(self._patience):
            return
        if self._console.is_jupyter:
            self._show_in_notebook()
        elif self._console.is_terminal:
            self._draw()
        else:
            self._log()

    def _log(self) -> None:
        last = ""
        while True:
            if (text := self._text()) != last:
                self._console.print(f"{text} ...", markup=False, highlight=False, soft_wrap=True)
                last = text
            if self._over.wait(self._patience):
                return

    def _draw(self) -> None:
        columns = TextColumn("{task.description}", markup=False), BarColumn(20)
        # Otherwise rich would redirect standard output to standard error.
        with Bar(*columns, console=self._console, transient=True, redirect_stdout=False) as bar:
            task = bar.add_task(self._text(), total=None)
            while not self._over.wait(0.1):
                _, done, total = self._now
                text = f"{self._text()} ({time.monotonic() - self._begun:.0f} s)"
                bar.update(task, description=text, completed=done, total=total)

    def _show_in_notebook(self) -> None:
        # IPython runs the notebook, so it is there; rich's bar would need ipywidgets, too.
        display = importlib.import_module("IPython.display").display
        shown: Any = display({"text/plain": self._text()}, raw=True, display_id=True)
        while not self._over.wait(0.5):
            _, done, total = self._now
            steps = f", step {done} of {total}" if done is not None and total else ""
            text = f"{self._text()}{steps} ({time.monotonic() - self._begun:.0f} s)"
            shown.update({"text/plain": text}, raw=True)
        shown.update({"text/plain": ""}, raw=True)

    def _text(self) -> str:
        what = self._now[0]
        return f"precpass: {self._what}{': ' if what else ''}{what}"

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()


@contextlib.contextmanager
def telling(
    given: Callable[[str, int, int], Any] | None, what: str
) -> Generator[Callable[[str, int, int], Any]]:
    """A context with what a report calls before each of its steps.

    Args:
        given: what the user passed; None shows a bar at a terminal, a line in a notebook, and
            nothing anywhere else.
        what: the whole task, in words.
    """
    bar = Progress(what)
    if given is not None:
        yield given
    elif bar.is_interactive:
        with bar:
            yield bar.say
    else:
        yield lambda _what, _done, _total: None
