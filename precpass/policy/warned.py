"""The warning of this package, and how a report that says the same itself drops it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator

__all__ = ["PrecisionWarning", "quietly"]


class PrecisionWarning(UserWarning):
    """A warning about precision that you should read.

    For example, nothing was lowered, a rule never matched, or a primitive could not be entered.
    """


@contextlib.contextmanager
def quietly() -> Generator[None]:
    """A context that drops `PrecisionWarning`s that the user has seen, or reads in a report."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        yield
