"""The warning of this package: the user's line that it is of, and reports that drop it."""

from __future__ import annotations

import contextlib
import contextvars
import importlib.util
import inspect
import os
import re
import types
import warnings
from collections.abc import Generator

__all__ = [
    "OWN_FOLDER",
    "PrecisionWarning",
    "are_dropped",
    "is_users",
    "quietly",
    "user_stacklevel",
]

OWN_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep
_JAX_FOLDER = os.path.dirname(str(getattr(importlib.util.find_spec("jax"), "origin", ""))) + os.sep
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


def is_users(file: str) -> bool:
    """Whether a source file belongs to neither this package nor JAX."""
    return not file.startswith((OWN_FOLDER, _JAX_FOLDER))


def user_stacklevel(above: types.FrameType | None = None) -> int:
    """The `stacklevel` with which the caller's warning points at the user's call.

    Args:
        above: a frame that the user's call has made; by default their last call.
    """
    frame, level = inspect.currentframe(), 0
    while above is not None and frame is not None and frame is not above:
        frame, level = frame.f_back, level + 1
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level
