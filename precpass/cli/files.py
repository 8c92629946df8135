"""Files that the command line reads and writes, and their errors in words."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

from precpass.cli.target import Refused

__all__ = ["in_words", "opened", "refusing"]


def in_words(error: OSError) -> str:
    """What an error of the operating system says, without its number.

    Examples:
        >>> in_words(FileNotFoundError(2, "No such file or directory", "a.json"))
        'there is no file a.json'
        >>> in_words(OSError(28, "No space left on device"))
        'no space left on device'
    """
    file, reason = error.filename, (error.strerror or str(error)).lower()
    match error:
        case FileNotFoundError() if file:
            return f"there is no file {file}"
        case IsADirectoryError() if file:
            return f"{file} is a folder, and a file is needed"
        case NotADirectoryError() if file:
            return f"{file} leads through a file as if it were a folder"
        case PermissionError() if file:
            return f"this user has no permission to open {file}"
        case _:
            return f"{file}: {reason}" if file else reason


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


@contextlib.contextmanager
def opened(path: str | None) -> Generator[None]:
    """A context around the work whose result is written to a file.

    The file is opened first, so that nobody waits for a result that cannot be written. If the
    work fails, an existing file has its old content, and a file that was not there is not made.

    Raises:
        Refused: if the file cannot be written.
    """
    if path is None:
        yield
        return
    is_new = not os.path.lexists(path)
    with refusing(f"--output {path}"):
        folder = os.path.dirname(path)
        if folder and not os.path.isdir(folder):
            raise ValueError(f"there is no folder {folder}")
        # Appending makes a file that is not there, and leaves the content of one that is.
        open(path, "ab").close()
    try:
        yield
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):
                os.unlink(path)
        raise
