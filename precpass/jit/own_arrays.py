"""A function with copies of the float64 numpy arrays that it reads, to be traced with x64 on.

As long as a program holds a numpy array, JAX gives every program the form of it that the first one
was given: rounded to float32, if that was traced with x64 off. A copy has no such form yet.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator
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

    def of(self, x: Any) -> Any:
        """The copy of an object, or the object, if it holds none of the arrays."""
        if id(x) not in self._known and len(self._known) < SEARCH_LIMIT:
            self._known[id(x)] = x, x
            self._known[id(x)] = self._copy(x), x
        return self._known.get(id(x), (x,))[0]

    def _copy(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):
            self.arrays.append(x)
            return x.copy() if x.dtype in (np.float64, np.complex128) else x
        if isinstance(x, functools.partial):
            return self._made(functools.partial, x, (x.func, *x.args), x.keywords)
        if isinstance(x, types.MethodType):
            return self._made(types.MethodType, x, (x.__func__, x.__self__))
        if type(x) in (list, tuple):
            return self._made(lambda *items: type(x)(items), x, x)
        if type(x) is dict:
            return self._made(lambda *items: dict(zip(x, items, strict=True)), x, x.values())
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if hasattr(x, "__wrapped__"):
            inner = self.of(x.__wrapped__)
            if inner is x.__wrapped__:
                return x
            return inner if callable(x) else types.SimpleNamespace(__wrapped__=inner)
        return self._instance(x) if _is_own(type(x)) else x

    def _made(
        self, make: Any, x: Any, parts: Iterable[Any], named: Any = types.MappingProxyType({})
    ) -> Any:
        """What `make` makes of the copies of the parts of `x`; `x` if these are the parts."""
        parts = list(parts)
        copies, of_named = list(map(self.of, parts)), {key: self.of(named[key]) for key in named}
        pairs = [*zip(copies, parts, strict=True), *((of_named[key], named[key]) for key in named)]
        return x if all(a is b for a, b in pairs) else make(*copies, **of_named)

    def _function(self, fn: types.FunctionType) -> Any:
        cells = tuple(types.CellType() for _ in fn.__closure__ or ())
        named = dict(fn.__globals__)
        new = types.FunctionType(fn.__code__, named, fn.__name__, fn.__defaults__, cells)
        self._known[id(fn)] = new, fn  # a function may call itself
        new.__kwdefaults__, new.__defaults__ = self.of(fn.__kwdefaults__), self.of(fn.__defaults__)
        new.__dict__.update(fn.__dict__)
        for cell, old in zip(cells, fn.__closure__ or (), strict=True):
            if (content := _content(old)) is not _EMPTY:
                cell.cell_contents = self.of(content)
        # Of a library's wrapper the closure alone leads to the user's function.
        names = set(_names(fn.__code__)) if _is_users(fn.__code__.co_filename) else set[str]()
        for name in names & named.keys():
            value = named[name]
            if isinstance(value, types.ModuleType) and _is_own(value):
                parts = {key: self.of(part) for key, part in vars(value).items() if key in names}
                if any(part is not vars(value)[key] for key, part in parts.items()):
                    named[name] = types.SimpleNamespace(**{**vars(value), **parts})
            elif not isinstance(value, types.ModuleType):
                named[name] = self.of(value)
        pairs = [
            *((named[name], fn.__globals__[name]) for name in names & named.keys()),
            *zip(map(_content, cells), map(_content, fn.__closure__ or ()), strict=True),
            (new.__defaults__, fn.__defaults__),
            (new.__kwdefaults__, fn.__kwdefaults__),
        ]
        return fn if all(a is b or a is new for a, b in pairs) else new

    def _instance(self, x: Any) -> Any:
        for method in vars(type(x)).values():
            self.of(method)  # for the arrays that it names
        held = getattr(x, "__dict__", {})
        copies = {name: self.of(value) for name, value in held.items()}
        if all(copies[name] is held[name] for name in held):
            return x
        new = copy.copy(x)
        for name, value in copies.items():
            object.__setattr__(new, name, value)
        return new


_EMPTY = object()


def _content(cell: types.CellType) -> Any:
    """The value of a variable that a function closes over, which may have none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


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
