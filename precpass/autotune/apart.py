"""Work that must not see the trace or the settings of the thread that asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["apart"]

T = TypeVar("T")

_one_at_a_time = threading.Lock()


def apart(work: Callable[[], T]) -> T:
    """The result of `work`, run in a thread of its own, one at a time in this process.

    Raises:
        Whatever `work` raises.
    """
    results: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            failed.append(error)

    with _one_at_a_time:
        thread = threading.Thread(target=run, name="precpass probe", daemon=True)
        thread.start()
        thread.join()
    for error in failed:
        raise error
    return results[0]
