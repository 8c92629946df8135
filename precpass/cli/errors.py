"""Classifies errors: of the user's code, of the user's input, or a bug in this package."""

from __future__ import annotations

import dis
import enum
import functools
import importlib.util
import os
import sysconfig
import traceback
import types
from collections.abc import Iterator

from precpass.cli.target import Raised, Refused
from precpass.jit.program import NEEDS_VALUES
from precpass.jit.programs import calls_users_code

__all__ = ["ExitStatus", "has_users_lines", "said", "status_of"]


class ExitStatus(enum.IntEnum):
    """The exit statuses of a command that does not succeed."""

    REFUSED = 2
    """The input was refused."""
    RAISED = 3
    """The user's code raised."""
    FAILED = 4
    """A bug in precpass, JAX or XLA."""
    INTERRUPTED = 130
    """128 + SIGINT, as in a shell."""
    PIPE_CLOSED = 141
    """128 + SIGPIPE."""


_STATIC = "precpass: an argument whose value the function needs is named by --static NAME\n"

_BUG = """\
precpass: this is neither a refusal of what was given nor an error of {target}: a bug in precpass,
  or one in JAX or XLA. Please report it with the lines above.
"""


def status_of(error: BaseException) -> int:
    """The exit status for an error. Its traceback must have all frames, also those of JAX."""
    if isinstance(error, Refused):
        return ExitStatus.REFUSED
    if isinstance(error, Raised):
        return ExitStatus.RAISED
    codes = [frame.tb_frame.f_code for frame in _frames(error)]
    deepest = next((side for side in map(_side, reversed(codes)) if side), "")
    if deepest == "user":
        return ExitStatus.RAISED
    if _is_refusal(error):
        # An error of this package in a call by the user's code belongs to that code.
        return ExitStatus.RAISED if any(map(calls_users_code, codes)) else ExitStatus.REFUSED
    return ExitStatus.FAILED


def has_users_lines(error: BaseException) -> bool:
    """Whether the traceback of an error has lines of the user's files."""
    return any(_whose(frame.tb_frame.f_code.co_filename) == "user" for frame in _frames(error))


def said(error: BaseException, status: int, target: str) -> str:
    """The message for an error with this exit status."""
    if status == ExitStatus.REFUSED:
        return f"precpass: {error}\n"
    if status == ExitStatus.FAILED:
        return "".join(traceback.format_exception(error)) + _BUG.format(target=target)
    users_error = error.error if isinstance(error, Raised) else error
    whole = traceback.TracebackException.from_exception(users_error)
    _keep_users_lines(whole)
    return "".join(whole.format()) + (_STATIC if isinstance(users_error, NEEDS_VALUES) else "")


def _keep_users_lines(error: traceback.TracebackException) -> None:
    """Removes the lines of this package and of JAX, which say nothing about the user's code."""
    kept = [frame for frame in error.stack if _whose(frame.filename) == "user"]
    error.stack = traceback.StackSummary.from_list(kept)
    for other in (error.__cause__, error.__context__, *(error.exceptions or ())):
        if other is not None:
            _keep_users_lines(other)


def _is_refusal(error: BaseException) -> bool:
    """Whether a `raise` of this package made an error, in words for the user.

    The same types come out of bugs too: out of `zip(strict=True)`, an unpacking, a lookup.
    """
    frames = list(_frames(error))
    if not frames or not isinstance(error, ValueError | TypeError | RuntimeError | ImportError):
        return False
    code, at = frames[-1].tb_frame.f_code, frames[-1].tb_lasti
    is_raise = code.co_code[at] == dis.opmap["RAISE_VARARGS"]
    return is_raise and _whose(code.co_filename) == "own"


def _frames(error: BaseException) -> Iterator[types.TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _side(code: types.CodeType) -> str:
    # From there on it is the user's function, which may be one that `jax.grad` returned.
    return "user" if calls_users_code(code) else _whose(code.co_filename)


# ---------------------------------------------------------------- files

_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARIES = ("jax", "jaxlib", "ml_dtypes", "networkx", "numpy", "rich", "scipy")


@functools.cache
def _whose(file: str) -> str:
    """The owner of a file: "own" for this package, "" for Python, JAX and the like, else "user"."""
    if file.startswith(_OWN):
        return "own"
    # No file has this name: <frozen runpy>, for instance, or <string>.
    if file.startswith("<") or file.startswith(tuple(_library_folders())):
        return ""
    for folder in {os.path.dirname(os.__file__), *map(sysconfig.get_path, _PYTHONS)}:
        inside = file.removeprefix(folder + os.sep)
        # Without a venv, packages are installed inside Python's own folder.
        if inside != file and not inside.startswith(("site-packages", "dist-packages")):
            return ""
    return "user"


_PYTHONS = ("stdlib", "platstdlib")


@functools.cache
def _library_folders() -> list[str]:
    specs = filter(None, map(importlib.util.find_spec, _LIBRARIES))
    return [
        os.path.join(place, "") for spec in specs for place in spec.submodule_search_locations or ()
    ]
