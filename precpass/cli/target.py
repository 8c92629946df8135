"""The user's function and its arguments, as the command line names them."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from precpass.cli.specs import parse_args

__all__ = ["Refused", "arguments", "load"]


class Refused(Exception):
    """What was given cannot be used; the text says what to give instead."""


def load(target: str) -> tuple[Callable[..., Any], ModuleType]:
    """The function that `module:function` or `file.py:function` names, and its module.

    Raises:
        Refused: where there is none. What the module itself raises comes as it is.
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
    # as Python runs a script: its neighbours can be imported
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _module(where: str) -> ModuleType:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise
        raise Refused(f"there is no module {where!r}: name one, or a file by its path") from None


def _attribute(module: ModuleType, name: str, where: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [n for n, x in vars(found).items() if callable(x) and not n.startswith("_")]
            close = difflib.get_close_matches(part, names, n=3) or sorted(names)[:6]
            raise Refused(f"{where} has no {part!r}; it has {', '.join(close) or 'no functions'}")
        found = getattr(found, part)
    if not callable(found):
        raise Refused(f"{where}:{name} is no function: it is {type(found).__name__}")
    return found


def arguments(
    text: str | None, example: str | None, module: ModuleType
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments that a text stands for, or that a function of the module returns.

    Such a function returns a tuple of the positional arguments, a dict of keyword arguments,
    or the only argument.

    Raises:
        Refused: where they cannot be had.
    """
    if example is not None:
        made = _attribute(module, example, module.__name__)()
        if isinstance(made, dict) and all(isinstance(key, str) for key in made):
            return [], dict(made)
        return list(made) if isinstance(made, tuple) else [made], {}
    try:
        return parse_args(text or "")
    except ValueError as error:
        raise Refused(str(error)) from None
