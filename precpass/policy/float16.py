"""The warning of a gradient in float16 without a loss scale in sight."""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Generator

from precpass.policy.caller import user_stacklevel
from precpass.policy.warned import PrecisionWarning

__all__ = ["note_loss_scale", "unscaled_on_purpose", "warn_of_unscaled_gradient"]

_UNSCALED = (
    "a gradient is taken in float16 without a loss scale: cotangents below 6e-08 become zero. Take "
    "it by scaled_value_and_grad, or in bfloat16 (AutoMixedBf16), which needs no scale; see "
    "NoOpLossScale if it is as you want it"
)
_is_seen = False


def note_loss_scale() -> None:
    """Notes that this process has made a loss scale."""
    global _is_seen
    _is_seen = True


def warn_of_unscaled_gradient() -> None:
    """Warns, unless this process has made a loss scale of this package or has imported jmp."""
    if not (_is_seen or "jmp" in sys.modules):
        warnings.warn(_UNSCALED, PrecisionWarning, stacklevel=user_stacklevel())


@contextlib.contextmanager
def unscaled_on_purpose() -> Generator[None]:
    """A context without the warning, for reports, which show what float16 does to the gradient."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", re.escape(_UNSCALED), PrecisionWarning)
        yield
