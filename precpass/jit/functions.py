"""Which functions can be called, with which options, and what they are named."""

from __future__ import annotations

import difflib
import functools
import inspect
import types
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
    inner, made = getattr(fn, "__wrapped__", None), fn
    if inner is None or not isinstance(fn, types.FunctionType):
        return name_of(fn)
    if fn.__code__.co_qualname.startswith("api_boundary"):  # JAX's, around what a transform made
        closed_over = inspect.getclosurevars(fn).nonlocals
        made = closed_over.get("fun", fn)
    code = made.__code__
    maker = code.co_qualname.partition(".")[0]
    is_jaxs = ir.is_foreign(code.co_filename) and maker in _TRANSFORMS
    return f"{maker}({shown_name(inner)})" if is_jaxs else name_of(fn)


_TRANSFORMS = frozenset(("grad", "value_and_grad", "vmap", "jacfwd", "jacrev", "checkpoint"))
