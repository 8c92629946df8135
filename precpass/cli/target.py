"""Loads the user's function and its arguments, which the command line names."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from precpass.cli.specs import parse_args
from precpass.units import listed

__all__ = ["Raised", "Refused", "arguments", "load", "parameters", "unbound"]

_CANDIDATES = 8
"""The most functions that a message names."""


class Refused(Exception):
    """The input cannot be used; the text says what to give instead."""


class Raised(Exception):
    """The user's code raised an error outside a trace, for instance when it was imported.

    Attributes:
        error: the user's error.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def _users_code() -> Generator[None]:
    """A context whose errors are the user's; a `SystemExit` in it must not end this process."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise Raised(error) from error


def load(target: str) -> tuple[Callable[..., Any], ModuleType]:
    """The function that `module:function` or `file.py:function` names, and its module.

    Raises:
        Refused: if there is no such function.
        Raised: if the module raises an error.
    """
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise Refused(f"{target!r} names no function: write module:function or file.py:function")
    module = _file(where) if where.endswith(".py") else _module(where)
    return _attribute(module, name, where), module


def _file(where: str) -> ModuleType:
    path = Path(where).resolve()
    if not path.is_file():
        raise Refused(f"there is no file {where}")
    if not os.access(path, os.R_OK):
        raise Refused(f"this user has no permission to open {where}")
    folder, name = path.parent, path.stem
    while (folder / "__init__.py").is_file():
        # A file in a package is imported as its module, so that its relative imports work.
        folder, name = folder.parent, f"{folder.name}.{name}"
    # as Python runs a script: its neighbours can be imported
    sys.path.insert(0, str(folder))
    if "." in name:
        with _users_code():
            module = importlib.import_module(name.removesuffix(".__init__"))
        if module.__file__ is None or Path(module.__file__).resolve() != path:
            raise Refused(f"{where} is {name}, and another package of that name is imported")
        return module
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) != str(path):
        name = str(path)  # another module, perhaps of Python, has the name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _users_code():
        spec.loader.exec_module(module)
    return module


def _module(where: str) -> ModuleType:
    sys.path.insert(0, "")
    if where.startswith("."):
        raise Refused(f"{where!r} is relative: name the module from its package on")
    try:
        with _users_code():
            return importlib.import_module(where)
    except Raised as raised:
        error = raised.error
        name = error.name if isinstance(error, ModuleNotFoundError) else None
        # The module may exist and lack another one that it imports.
        if name is None or not f"{where}.".startswith(f"{name}."):
            raise
        raise Refused(f"there is no module {where!r}: name one, or a file by its path") from None


def _attribute(module: ModuleType, name: str, where: str) -> Any:
    target: Any = module
    for part in name.split("."):
        with _users_code():
            has = hasattr(target, part)
        if not has:
            names = [n for n in dir(target) if not n.startswith("_") and _is_function(target, n)]
            close = difflib.get_close_matches(part, names, n=3)
            rest = [n for n in sorted(names) if n not in close]
            known = listed([*close, *rest], _CANDIDATES) or "no functions"
            raise Refused(f"{where} has no {part!r}; it has {known}")
        target = getattr(target, part)
    if not callable(target):
        raise Refused(f"{where}:{name} is not a function: it is {type(target).__name__}")
    return target


def _is_function(holder: Any, name: str) -> bool:
    # An attribute's error here must not replace the one that is being worded.
    with contextlib.suppress(Exception):
        return callable(getattr(holder, name))
    return False


def arguments(
    text: str | None, example: str | None, module: ModuleType
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments that a text describes, or that a function of the module returns.

    Such a function returns a tuple of the positional arguments, a dict of keyword arguments,
    or the only argument.

    Raises:
        Refused: if there are no such arguments.
        Raised: if the function raises an error.
    """
    if example is not None:
        function = _attribute(module, example, module.__name__)
        if unbound(function, [], {}):
            called = f"{example}{parameters(function)}"
            raise Refused(
                f"--example {example}: it is called without arguments, and it is {called}"
            )
        with _users_code():
            result = function()
        if isinstance(result, dict) and all(isinstance(key, str) for key in result):
            return [], dict(result)
        # A NamedTuple is one argument, such as the state of an optimizer.
        return list(result) if type(result) is tuple else [result], {}
    try:
        return parse_args(text or "")
    except ValueError as error:
        raise Refused(str(error)) from None


def parameters(fn: Callable[..., Any]) -> inspect.Signature | None:
    """The parameters of a function, as far as Python knows them."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


def unbound(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Why a function does not take some arguments; "" if it does, or if that is unknown."""
    if (signature := parameters(fn)) is None:
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        passed = [*map(_shown, args), *(f"{name}={_shown(x)}" for name, x in kwargs.items())]
        name = getattr(fn, "__name__", "the function")
        what = "Give its arguments by --args or --example, which returns a tuple of arguments or a "
        what += "dict of keyword arguments"
        if next(iter(signature.parameters), "") == "self":
            what = f"It is a method: name it by an instance, as in model.py:MODEL.{name}"
        return f"{name}{signature} was given ({', '.join(passed)}): {error}. {what}"
    return ""


def _shown(x: Any) -> str:
    if isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return jax.typeof(x).str_short(short_dtypes=True)
    return repr(x) if isinstance(x, bool | int | float | str) else type(x).__name__
