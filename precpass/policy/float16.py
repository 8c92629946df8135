"""The warning of a gradient in float16 without a loss scale."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import warnings
import weakref
from typing import Any

from precpass.policy.warned import PrecisionWarning, are_dropped, quietly, user_stacklevel

__all__ = ["unscaled_on_purpose", "warn_of_unscaled_gradient"]

_BEGINNING = "a gradient is taken in float16 without a loss scale"
_REMEDY = (
    "cotangents below 6e-08 become zero. Use precpass.loss_scale.scaled_value_and_grad, or "
    "AutoMixedBf16; to go without a scale on purpose, pass a NoOpLossScale()"
)
SEARCH_LIMIT = 1000
"""The largest number of objects in which a loss scale is looked for."""
_warned_of: weakref.WeakSet[Any] = weakref.WeakSet()
"""The functions whose gradient was warned of."""


def warn_of_unscaled_gradient(name: str = "", *, only_by_grad: bool = False) -> None:
    """Warns, unless the function whose gradient is being taken reads a loss scale.

    `jax.grad` of one function object is warned of once.

    Args:
        name: the function's, where `jax.grad` is not on the stack.
        only_by_grad: whether only functions that `jax.grad` or `jax.value_and_grad` is being taken
            of are warned of.
    """
    frame = _gradient()
    if are_dropped(_BEGINNING) or (only_by_grad and frame is None):
        return
    if frame is not None:
        # Where JAX transposes a product, it is not seen what its cotangent was multiplied by.
        if _holds_scale([frame.f_locals.get(name) for name in ("fun", "args", "kwargs")]):
            return
        fn = frame.f_locals.get("fun")
        with contextlib.suppress(TypeError):  # an object that takes no weak reference, or no hash
            if fn in _warned_of:
                return
            _warned_of.add(fn)
        name = getattr(fn, "__name__", name)
    whose = f", that of {name}" if name else ""
    text = f"{_BEGINNING}{whose}: {_REMEDY}"
    warnings.warn(text, PrecisionWarning, stacklevel=user_stacklevel(frame))


def _gradient() -> types.FrameType | None:
    """The call of `jax.grad`'s or `jax.value_and_grad`'s result that is under way."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "value_and_grad_f":
        frame = frame.f_back
    return frame


def _holds_scale(todo: list[Any]) -> bool:
    seen = set[int]()
    while todo and len(seen) < SEARCH_LIMIT:
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


def unscaled_on_purpose() -> contextlib.AbstractContextManager[None]:
    """A context without the warning, for reports, which show what float16 does to the gradient."""
    return quietly(_BEGINNING)
