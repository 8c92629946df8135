"""Errors: of the user's input, of the user's code, or a bug; and their words and exit statuses."""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import re
import sysconfig
import traceback
import types
from collections.abc import Generator, Iterator

from precpass.jit.program import NEEDS_VALUES, calls_users_code

__all__ = ["RAISED", "REFUSED", "Raised", "Refused", "refusing", "said", "status_of"]

REFUSED, RAISED, FAILED = 2, 3, 4
"""The exit statuses of refused input, of an error of the user's code, and of a bug."""


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
def refusing(option: str = "") -> Generator[None]:
    """A context in which every error is a refusal of the user's input.

    Args:
        option: what the user gave, which the text of a refusal begins with.
    """
    begin = f"{option}: " if option else ""
    try:
        yield
    except OSError as error:
        raise Refused(f"{begin}{in_words(error)}") from None
    except ValueError as error:
        raise Refused(f"{begin}{error}") from None


def in_words(error: OSError) -> str:
    """What an error of the operating system says, without its number.

    Examples:
        >>> in_words(FileNotFoundError(2, "No such file or directory", "a.json"))
        'file a.json does not exist'
        >>> in_words(OSError(28, "No space left on device"))
        'no space left on device'
    """
    file, reason = error.filename, (error.strerror or str(error)).lower()
    text = _WORDS.get(type(error), "{}: " + reason)
    return text.format(file) if file else reason


_WORDS: dict[type[OSError], str] = {
    FileNotFoundError: "file {} does not exist",
    IsADirectoryError: "{} is a folder, and a file is needed",
    NotADirectoryError: "{} leads through a file as if it were a folder",
    PermissionError: "this user has no permission to open {}",
}


# ---------------------------------------------------------------- whose an error is


def status_of(error: BaseException) -> int:
    """The exit status for an error. Its traceback must have all frames, also those of JAX."""
    if isinstance(error, Refused):
        return REFUSED
    if isinstance(error, Raised):
        return RAISED
    codes = [frame.tb_frame.f_code for frame in _frames(error)]
    # From the call of the user's function on, it is the user's, also one that `jax.grad` returned.
    sides = ("user" if calls_users_code(c) else _whose(c.co_filename) for c in reversed(codes))
    if next(filter(None, sides), "") == "user":
        return RAISED
    if _is_refusal(error):
        # An error of this package in a call by the user's code belongs to that code.
        return RAISED if any(map(calls_users_code, codes)) else REFUSED
    return FAILED


def said(error: BaseException, status: int, target: str) -> str:
    """The message for an error with this exit status."""
    if status == REFUSED:
        return f"precpass: {error}\n"
    if status == FAILED:
        return (
            f"{''.join(traceback.format_exception(error))}precpass: this is neither a refusal of "
            f"what was given nor an error of {target}: a bug in precpass,\n  or one in JAX or XLA. "
            "Please report it with the lines above.\n"
        )
    users_error = error.error if isinstance(error, Raised) else error
    whole = traceback.TracebackException.from_exception(users_error)
    _keep_users_lines(whole)
    text = "".join(whole.format())
    if isinstance(users_error, NEEDS_VALUES):
        text += "precpass: an argument whose value the function needs is named by --static NAME\n"
    return text


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


_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STDLIB = {os.path.dirname(os.__file__), *map(sysconfig.get_path, ("stdlib", "platstdlib"))}
_PYTHONS_OWN = tuple(folder + os.sep for folder in _STDLIB)
_LIBRARIES = ("jax", "jaxlib", "ml_dtypes", "networkx", "numpy", "rich", "scipy")
# Without a venv, packages are installed inside Python's own folder.
_PACKAGE = re.compile(r".*[/\\](?:site|dist)-packages[/\\](\w+)")


@functools.cache
def _whose(file: str) -> str:
    """The owner of a file: "own" for this package, "" for Python, JAX and the like, else "user"."""
    if file.startswith(_OWN):
        return "own"
    if package := _PACKAGE.match(file):
        return "" if package[1] in _LIBRARIES else "user"
    # No file has a name such as <frozen runpy> or <string>.
    return "" if file.startswith(("<", *_PYTHONS_OWN)) else "user"
