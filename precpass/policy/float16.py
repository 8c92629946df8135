"""The warning of a gradient in float16 without a loss scale."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import types
import warnings
from collections.abc import Generator
from typing import Any

from precpass.policy.caller import user_stacklevel
from precpass.policy.warned import PrecisionWarning

__all__ = ["unscaled_on_purpose", "warn_of_unscaled_gradient"]

_UNSCALED = (
    "a gradient is taken in float16 without a loss scale: cotangents below 6e-08 become zero. Take "
    "it by precpass.loss_scale.scaled_value_and_grad, or in bfloat16 (AutoMixedBf16), which needs "
    "no scale; to do without one on purpose, give scaled_value_and_grad a NoOpLossScale()"
)
_MOST = 1000
"""The largest number of objects in which a loss scale is looked for."""


def warn_of_unscaled_gradient() -> None:
    """Warns, unless the function whose gradient is being taken reads a loss scale."""
    if not _reads_scale():
        warnings.warn(_UNSCALED, PrecisionWarning, stacklevel=user_stacklevel())


def _reads_scale() -> bool:
    """Whether the function that `jax.grad` is being taken of, or an argument, holds a loss scale.

    What the cotangent of a product has been multiplied by is not seen where JAX transposes it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "value_and_grad_f":  # of jax.grad and jax.value_and_grad
            held = (frame.f_locals.get(name) for name in ("fun", "args", "kwargs"))
            return _holds_scale(list(held))
        frame = frame.f_back
    return False


def _holds_scale(todo: list[Any]) -> bool:
    seen = set[int]()
    while todo and len(seen) < _MOST:
        x = todo.pop()
        # this package's, jmp's, flax's: LossScale, DynamicLossScale, DynamicScale
        if type(x).__name__.endswith("Scale"):
            return True
        if id(x) in seen or isinstance(x, type | types.ModuleType):
            continue
        seen.add(id(x))
        if isinstance(x, types.FunctionType):
            todo += [x.__globals__.get(name) for name in x.__code__.co_names]
            for cell in x.__closure__ or ():
                with contextlib.suppress(ValueError):  # a variable may have no value yet
                    todo.append(cell.cell_contents)
        elif isinstance(x, functools.partial):
            todo += [x.func, x.args, x.keywords]
        elif isinstance(x, list | tuple):
            todo += x
        elif isinstance(x, dict):
            todo += x.values()
        else:
            todo += [getattr(x, name, None) for name in ("__wrapped__", "__func__", "__self__")]
            todo += getattr(x, "__dict__", {}).values()
    return False


@contextlib.contextmanager
def unscaled_on_purpose() -> Generator[None]:
    """A context without the warning, for reports, which show what float16 does to the gradient."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", re.escape(_UNSCALED), PrecisionWarning)
        yield
