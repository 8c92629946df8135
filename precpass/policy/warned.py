"""The warning of this package, and how a report that says the same itself drops it."""

from __future__ import annotations

import contextlib
import contextvars
import re
import warnings
from collections.abc import Generator

__all__ = ["PrecisionWarning", "are_dropped", "quietly"]

_DROPPED: contextvars.ContextVar[str | None] = contextvars.ContextVar("_DROPPED", default=None)
"""How the warnings begin that a context drops; None if there is no such context."""


class PrecisionWarning(UserWarning):
    """A warning about precision that you should read.

    For example, nothing was lowered, a rule never matched, or a primitive could not be entered.
    """


@contextlib.contextmanager
def quietly(beginning: str = "") -> Generator[None]:
    """A context that drops `PrecisionWarning`s that the user has seen, or reads in a report.

    Args:
        beginning: how they begin; by default all are dropped.
    """
    token = _DROPPED.set("" if _DROPPED.get() == "" else beginning)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", re.escape(beginning), PrecisionWarning)
            yield
    finally:
        _DROPPED.reset(token)


def are_dropped(beginning: str) -> bool:
    """Whether `quietly` drops the warnings that begin so here."""
    dropped = _DROPPED.get()
    return dropped is not None and beginning.startswith(dropped)
