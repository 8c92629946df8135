"""A line on standard error that says what is going on, once it has taken two seconds."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from rich.console import Console

__all__ = ["Progress"]

_PATIENCE = 2.0
"""Seconds."""


class Progress:
    """While it is entered, says what is done and for how long.

    On a terminal the line is renewed and taken away at the end; elsewhere it is written
    once, so that a log shows that something runs.

    Args:
        what: is going on.
        patience: seconds until it is said.
    """

    def __init__(self, what: str, patience: float = _PATIENCE) -> None:
        self._what = what
        self._patience = patience
        self._console = Console(stderr=True)
        self._done = threading.Event()
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def say(self, what: str) -> None:
        """Says what is going on now."""
        self._what = what

    def _run(self) -> None:
        if self._done.wait(self._patience):
            return
        if not self._console.is_terminal:
            self._console.print(f"precpass: {self._what} ...", markup=False, highlight=False)
            return
        with self._console.status(self._text()) as status:
            while not self._done.wait(0.2):
                status.update(self._text())

    def _text(self) -> str:
        return f"precpass: {self._what} ({time.monotonic() - self._begun:.0f} s)"

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()
