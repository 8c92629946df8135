"""Calls: which functions can be called, and how arguments and results cross into `jax.jit`."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
from collections.abc import Generator, Iterable
from typing import Any

import jax

from precpass import jaxpr as ir
from precpass.jit.arguments import Declared, arguments, copied, holds_static, unwrapped
from precpass.jit.nnx import cloned, nodes, split_modules, updated
from precpass.policy.policy import PrecisionPolicy
from precpass.policy.presets import is_precision

__all__ = [
    "Crossing",
    "NotDirect",
    "Stage",
    "check_function",
    "check_options",
    "name_of",
    "shown_name",
]


class NotDirect(Exception):
    """Raised by a trace that meets modules of flax nnx, or numbers of equinox modules.

    `jax.jit` traces these, but would lose the modules' updates, and the numbers' values. The call
    is made again, with its arguments in another form.
    """

    def __init__(self, *, splits: bool) -> None:
        super().__init__()
        self.splits = splits


class Crossing:
    """How the calls of one function cross into jit and back. A call that fails may change it.

    Attributes:
        direct: whether arguments and results need no conversion.
        splits: whether modules are split on the way in and updated on the way out.

    Args:
        name: the user's name for the function, for errors.
        declared: its static arguments.
        in_shardings: the option of `jax.jit`.
    """

    __slots__ = ("declared", "direct", "in_shardings", "name", "splits")

    def __init__(self, name: str, declared: Declared, in_shardings: Any = None) -> None:
        self.name = name
        self.declared = declared
        self.in_shardings = in_shardings
        self.direct = True
        self.splits = False

    def changes(self, was_direct: bool, error: Exception, args: Any, kwargs: Any) -> bool:
        """Whether a call that failed is to be made again, in another way.

        Args:
            was_direct: whether that call was direct; another thread may have changed `direct`
                since.
            error: the exception that it raised.
            args: its positional arguments.
            kwargs: the others.
        """
        if isinstance(error, NotDirect):
            splits = error.splits
        elif was_direct and isinstance(error, (TypeError, ValueError)):
            # jit refuses an argument before it traces: one that is static by itself, or a module
            # that holds one reference twice. Else the error comes from the function.
            splits = bool(nodes(self.declared.map, args, kwargs))
            static: list[bool] = []
            self.declared.map(lambda x, _: static.append(holds_static(x)), args, kwargs)
            if not splits and not any(static):
                return False
        else:
            return False
        self.direct, self.splits = False, self.splits or splits
        return True

    @contextlib.contextmanager
    def inward(
        self, splits: bool, args: Any, kwargs: Any, on_clones: bool = False
    ) -> Generator[tuple[Any, Any]]:
        """A context, around a call, that gives the arguments in the form that jit takes.

        Args:
            splits: whether modules are split.
            args: the positional arguments.
            kwargs: the others.
            on_clones: whether clones of the modules and references take the updates.
        """
        args, kwargs = arguments(self.declared, self.name, args, kwargs)
        if on_clones:
            args, kwargs = self.declared.map(lambda x, _: copied(x, arrays=False), args, kwargs)
        if not splits:
            yield args, kwargs
            return
        if on_clones:
            args, kwargs = cloned(self.declared.map, args, kwargs)
        split = split_modules(self.declared.map, args, kwargs, self.in_shardings)
        with split as inner:
            yield inner

    def outward(self, splits: bool, out: Any) -> Any:
        """The results in the form that the caller gets; modules are updated."""
        return unwrapped(updated(out) if splits else out)


class Stage:
    """A `Traced`, `Lowered` or `Compiled` of `jax.stages` with the crossing of the call itself."""

    def __init__(self, stage: Any, crossing: Crossing, splits: bool) -> None:
        self._stage = stage
        self._crossing = crossing
        self._splits = splits

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stage, name)
        if name in ("lower", "compile"):
            return lambda *args, **kwargs: Stage(
                value(*args, **kwargs), self._crossing, self._splits
            )
        return unwrapped(value) if name == "out_info" else value

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """The results of the compiled program."""
        with self._crossing.inward(self._splits, args, kwargs) as (args, kwargs):
            return self._crossing.outward(self._splits, self._stage(*args, **kwargs))

    def __repr__(self) -> str:
        return repr(self._stage)


# ---------------------------------------------------------------- functions


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
