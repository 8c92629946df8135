"""Work that must not see the trace or the settings of the thread that asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["all_apart"]

T = TypeVar("T")

_one_at_a_time = threading.Lock()


def all_apart(works: Sequence[Callable[[], T]]) -> list[T | Exception]:
    """The result of each of `works`, or what it raised, all at once in threads of their own."""
    results: dict[int, T | Exception] = {}

    def run(index: int, work: Callable[[], T]) -> None:
        try:
            results[index] = work()
        except Exception as error:
            results[index] = error

    with _one_at_a_time:
        threads = [
            threading.Thread(target=run, args=each, name="precpass probe", daemon=True)
            for each in enumerate(works)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [results[index] for index in range(len(works))]
