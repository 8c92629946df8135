"""A function with copies of the float64 numpy arrays that it reads, to be traced with x64 on.

As long as a program holds a numpy array, JAX gives every program the form of it that the first one
was given: rounded to float32, if that was traced with x64 off. A copy has no such form yet.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

__all__ = ["with_own_arrays"]

_INSTALLED = (
    *(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")),
    *(os.path.dirname(os.path.dirname(__file__)) + os.sep, "<frozen"),
)
SEARCH_LIMIT = 10_000
"""The largest number of objects that are looked at."""


def with_own_arrays(fn: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
    """A copy of a function and of what it calls, with copies of their arrays; and the arrays.

    The arrays are those in closures, globals, defaults, containers and attributes. Installed
    packages are not searched. Functions that a library wraps (`jax.jit`) are called unwrapped.
    """
    copies = _Copies()
    return copies.of(fn), copies.arrays


class _Copies:
    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self._known: dict[int, tuple[Any, Any]] = {}
        self._replaced = 0  # how often a copy was given in the place of an object

    def of(self, x: Any) -> Any:
        """The copy of an object, or the object, if it holds none of the arrays."""
        if id(x) not in self._known and len(self._known) < SEARCH_LIMIT:
            self._known[id(x)] = x, x
            before, copied = self._replaced, self._copy(x)
            holds_copies = self._replaced > before or isinstance(x, np.ndarray)
            self._known[id(x)] = copied if holds_copies else x, x
        copied = self._known.get(id(x), (x,))[0]
        self._replaced += copied is not x
        return copied

    def _copy(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):
            self.arrays.append(x)
            return x.copy() if x.dtype in (np.float64, np.complex128) else x
        if isinstance(x, functools.partial):
            named = {key: self.of(value) for key, value in x.keywords.items()}
            return functools.partial(self.of(x.func), *map(self.of, x.args), **named)
        if isinstance(x, types.MethodType):
            return types.MethodType(self.of(x.__func__), self.of(x.__self__))
        if type(x) in (list, tuple):
            return type(x)(map(self.of, x))
        if type(x) is dict:
            return {key: self.of(value) for key, value in x.items()}
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if hasattr(x, "__wrapped__"):
            inner = self.of(x.__wrapped__)
            return inner if callable(x) else types.SimpleNamespace(__wrapped__=inner)
        return self._instance(x) if _is_own(type(x)) else x

    def _function(self, fn: types.FunctionType) -> Any:
        cells = tuple(types.CellType() for _ in fn.__closure__ or ())
        named = dict(fn.__globals__)
        new = types.FunctionType(fn.__code__, named, fn.__name__, fn.__defaults__, cells)
        self._known[id(fn)] = new, fn  # a function may call itself
        new.__kwdefaults__, new.__defaults__ = self.of(fn.__kwdefaults__), self.of(fn.__defaults__)
        new.__dict__.update(fn.__dict__)
        for cell, old in zip(cells, fn.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a variable may have no value yet
                cell.cell_contents = self.of(old.cell_contents)
        # Of a library's wrapper the closure alone leads to the user's function.
        names = set(_names(fn.__code__)) if _is_users(fn.__code__.co_filename) else set[str]()
        for name in names & named.keys():
            value, before = named[name], self._replaced
            if not isinstance(value, types.ModuleType):
                named[name] = self.of(value)
            elif _is_own(value):
                parts = {key: self.of(part) for key, part in vars(value).items() if key in names}
                if self._replaced > before:
                    named[name] = types.SimpleNamespace(**{**vars(value), **parts})
        return new

    def _instance(self, x: Any) -> Any:
        for method in vars(type(x)).values():
            self.of(method)  # for the arrays that it names
        held, before = getattr(x, "__dict__", {}), self._replaced
        copies = {name: self.of(value) for name, value in held.items()}
        if self._replaced == before:
            return x
        new = copy.copy(x)
        for name, value in copies.items():
            object.__setattr__(new, name, value)
        return new


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _names(part)


def _is_own(x: Any) -> bool:
    """Whether a class or module is the user's own, and not an installed package's."""
    name = x.__name__ if isinstance(x, types.ModuleType) else x.__module__
    return name != "builtins" and _is_users(getattr(sys.modules.get(name), "__file__", None))


def _is_users(file: str | None) -> bool:
    return not (file or "").startswith(_INSTALLED)
