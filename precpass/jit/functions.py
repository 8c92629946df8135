"""Which functions can be called, with which options, and what they are named."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterable
from typing import Any

import jax

from precpass import jaxpr as ir
from precpass.policy.policy import PrecisionPolicy
from precpass.policy.presets import is_precision

__all__ = ["check_function", "check_options", "name_of", "shown_name"]


def check_function(fn: Any) -> None:
    """Checks that a function can be traced.

    Raises:
        TypeError: if it cannot; the text says what to do.
    """
    if isinstance(fn, (staticmethod, classmethod, property)):
        kind = type(fn).__name__
        raise TypeError(f"auto_mixed takes a function, not a {kind}: put @{kind} above @auto_mixed")
    is_policy = isinstance(fn, (str, PrecisionPolicy)) or is_precision(fn)
    if is_policy or not callable(fn):
        name = getattr(fn, "__name__", repr(fn))
        hint = f": as a decorator, auto_mixed(policy={name})" if is_policy else ""
        raise TypeError(f"auto_mixed takes a function, not {name}{hint}")
    called = fn if inspect.isroutine(fn) or isinstance(fn, type) else getattr(fn, "__call__", fn)  # noqa: B004 -- the method itself
    suspends = (
        inspect.iscoroutinefunction,
        inspect.isgeneratorfunction,
        inspect.isasyncgenfunction,
    )
    if any(test(f) for test in suspends for f in (fn, called)):
        raise TypeError(
            f"auto_mixed takes a function that returns arrays, not {fn!r}, whose body runs after "
            "its trace has ended: wrap the function that it calls"
        )


# Read when the package is imported: a library or a test may put something else in the place of
# `jax.jit` later, whose signature says nothing.
JIT_OPTIONS = tuple(name for name in inspect.signature(jax.jit).parameters if name != "fun")


def check_options(options: Iterable[str]) -> None:
    """Checks the names of the options of `jax.jit`.

    Raises:
        TypeError: for an unknown one; the text lists the legal ones.
    """
    legal = ["policy", "profitability", *JIT_OPTIONS]
    for name in options:
        if name not in legal:
            close = difflib.get_close_matches(name, legal, n=1)
            hint = f"Did you mean {close[0]!r}? " if close else ""
            raise TypeError(
                f"auto_mixed has no option {name!r}. {hint}Legal are {', '.join(legal)}"
            )


def name_of(fn: Any) -> str:
    """The name that `jax.jit` gives a function in the program's text and in profiles."""
    while isinstance(fn, functools.partial) and not hasattr(fn, "__name__"):
        fn = fn.func
    return getattr(fn, "__name__", "<unnamed function>")


def shown_name(fn: Any) -> str:
    """The name of a function as it is written, such as "grad(loss)"; JAX names that "loss".

    Examples:
        >>> shown_name(jax.value_and_grad(jax.vmap(shown_name)))
        'value_and_grad(vmap(shown_name))'
    """
    code = getattr(fn, "__code__", None)
    if type(fn).__name__ in _OF_EQUINOX:
        return f"{_OF_EQUINOX[type(fn).__name__]}({shown_name(getattr(fn, '__wrapped__', fn))})"
    if code is None:
        return name_of(fn)
    cells = {name: _content(fn, i) for i, name in enumerate(code.co_freevars)}
    maker = code.co_qualname.partition(".")[0]
    if maker == "UpdateContextManager":  # of flax nnx, around the next
        return shown_name(cells.get("f"))
    if maker == "_grad_general":
        kind = "value_and_grad" if cells.get("return_value") else "grad"
        return f"nnx.{kind}({shown_name(cells.get('f'))})"
    if maker == "api_boundary":
        made = getattr(cells.get("fun"), "__code__", None)
        maker = made.co_qualname.partition(".")[0] if made else ""
    inner = getattr(fn, "__wrapped__", None)
    is_jaxs = ir.is_foreign(code.co_filename) and maker in _TRANSFORMS and inner is not None
    return f"{maker}({shown_name(inner)})" if is_jaxs else name_of(fn)


_TRANSFORMS = frozenset(("grad", "value_and_grad", "vmap", "jacfwd", "jacrev", "checkpoint"))
_OF_EQUINOX = {"_GradWrapper": "filter_grad", "_ValueAndGradWrapper": "filter_value_and_grad"}


def _content(fn: Any, i: int) -> Any:
    try:
        return fn.__closure__[i].cell_contents
    except ValueError:  # not assigned yet
        return None
