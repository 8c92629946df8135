"""How far the demo is: a bar on a terminal, and elsewhere a line every ten seconds.

The command line's progress (`precpass.cli.progress`) differs: it estimates nothing, because the
budget of `bisect` is a maximum, and prints no line while nothing new is said.
"""

import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

SECONDS = 10.0
"""Between two lines where no terminal is."""


def left(done: int, total: int, seconds: float) -> str:
    """How long the rest takes if it is as fast as what is done.

    Examples:
        >>> left(10, 40, 20), left(0, 40, 20), left(1, 3, 100)
        ('about 60 s left', 'no estimate yet', 'about 3 min left')
    """
    if not done:
        return "no estimate yet"
    rest = seconds / done * (total - done)
    return f"about {rest:.0f} s left" if rest < 120 else f"about {rest / 60:.0f} min left"


class Steps:
    """A context in which a number of equal steps is done.

    Args:
        what: what a step does, such as "compile".
        total: the number of steps.
        console: where it is shown.
        seconds: the time between two lines where no terminal is.
    """

    def __init__(self, what: str, total: int, console: Console, seconds: float = SECONDS) -> None:
        self._what, self._total, self._console, self._seconds = what, total, console, seconds
        self._now = (0, "")
        self._begun = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def say(self, done: int, text: str) -> None:
        """Sets the number of steps that are done, and what the present one is."""
        # A single assignment, so that the other thread sees all of it or none.
        self._now = done, text

    def _rest(self) -> str:
        return left(self._now[0], self._total, time.monotonic() - self._begun)

    def _show(self) -> None:
        if self._console.is_terminal:
            self._draw()
            return
        while not self._over.wait(self._seconds):
            done, text = self._now
            line = f"{self._what} {done} of {self._total}: {text}, {self._rest()}"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _draw(self) -> None:
        columns = TextColumn("{task.description}", markup=False), BarColumn(12)
        rest = TextColumn("{task.fields[rest]}")
        with Progress(*columns, MofNCompleteColumn(), rest, console=self._console) as bar:
            task = bar.add_task(self._what, total=self._total, rest="")
            while True:
                over = self._over.wait(0.2)
                done, text = self._now
                rest = "" if over else self._rest()
                bar.update(task, completed=done, description=f"{self._what} {text}"[:34], rest=rest)
                if over:
                    return

    def __enter__(self) -> Self:
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
