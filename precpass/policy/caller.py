"""The user's line that a warning is of."""

from __future__ import annotations

import inspect
import os
import types

import jax

__all__ = ["user_stacklevel"]

_OWN_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep
_JAX_FOLDER = os.path.dirname(jax.__file__) + os.sep


def user_stacklevel(above: types.FrameType | None = None) -> int:
    """The `stacklevel` with which the caller's warning points at the user's call.

    Args:
        above: a frame that the user's call has made; by default their last call.
    """
    frame, level = inspect.currentframe(), 0
    while above is not None and frame is not None and frame is not above:
        frame, level = frame.f_back, level + 1
    while frame is not None and frame.f_code.co_filename.startswith((_OWN_FOLDER, _JAX_FOLDER)):
        frame, level = frame.f_back, level + 1
    return level
