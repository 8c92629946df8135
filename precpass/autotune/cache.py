"""The files with what was found out of programs, one per device kind and JAX version.

They are a cache: losing one costs compilations and never a result. Processes merge their entries
under a lock file and replace the file as a whole, so a reader always sees a complete one. If two
processes have compiled a program, the choice that was written first counts, so that all processes
make the same plan.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import filelock
import platformdirs

__all__ = ["FORMAT", "Cache", "cache_folder", "file_name"]

FORMAT = 5
"""The version of the files and of the form of a lowered product; raise it if that form changes. A
file of another version is rebuilt."""

WAIT = 5.0
"""Seconds for which a writer waits for the lock."""


def cache_folder() -> Path:
    """The folder of the files: PRECPASS_CACHE_DIR, or the user's cache folder."""
    folder = os.environ.get("PRECPASS_CACHE_DIR") or platformdirs.user_cache_dir("precpass", False)
    folder = os.path.expanduser(folder)
    # A user without a home, as in containers.
    return Path(tempfile.gettempdir(), "precpass") if folder.startswith("~") else Path(folder)


def file_name(device: str, jax_version: str) -> str:
    """The name of a device kind's file."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-")[:80]
    # Kinds may differ only in characters that a file name cannot have.
    digest = hashlib.sha256(device.encode()).hexdigest()[:8]
    return f"programs-{words}-{digest}-jax-{jax_version}.json"


Entry = TypeVar("Entry", bound=tuple[Any, ...])


class Cache(Generic[Entry]):
    """The choices for programs on one device kind, in memory and in a file.

    Args:
        path: the file's path; its folder is made when something is written.
        device: the kind of device, and whatever else the entries depend on.
        jax_version: the version of the JAX that made them.
        parsed: an entry from its JSON values, which are those of the tuple.
    """

    def __init__(
        self, path: Path, device: str, jax_version: str, parsed: Callable[[Sequence[Any]], Entry]
    ) -> None:
        self.path = path
        self._entry = parsed
        self._head = {"format": FORMAT, "device": device, "jax": jax_version}
        self._known: dict[str, Entry] = {}
        self._state: tuple[int, int] | None = None
        self._said: list[str] = []
        self._writes = True
        self._lock = threading.RLock()

    def get(self, name: str) -> Entry | None:
        """The entry of a program; None if there is none."""
        with self._lock:
            if name not in self._known:
                self._read()
            return self._known.get(name)

    def put(self, name: str, entry: Entry) -> Entry:
        """Stores an entry; returns the one that counts."""
        with self._lock:
            self._read()
            kept = self._known.setdefault(name, entry)
            if self._writes:
                self._write()
            return self._known.get(name, kept)

    def new_warnings(self) -> tuple[str, ...]:
        """Warnings of what went wrong since this was last called."""
        with self._lock:
            said, self._said = tuple(self._said), []
            return said

    def _read(self) -> None:
        """Reads the file, whose entries win over those that are only in memory."""
        try:
            stat = self.path.stat()
            state = stat.st_mtime_ns, stat.st_size
            if state == self._state:
                return
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return
        except OSError as error:
            self._stop_writing(error)
            return
        self._state = state
        try:
            self._known.update(self._parsed(text))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._said.append(
                f"{self.path}, which holds the forms of compiled programs, is damaged or not "
                f"precpass's ({type(error).__name__}: {error}): it is rebuilt, and programs are "
                "compiled again"
            )

    def _parsed(self, text: str) -> dict[str, Entry]:
        whole = json.loads(text)
        for key, value in self._head.items():
            if whole[key] != value:
                raise ValueError(f"{key} is {whole[key]!r}, not {value!r}")
        return {str(name): self._entry(entry) for name, entry in whole["products"].items()}

    def _write(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _alone(self.path):
                # Read what other processes have written since.
                self._read()
                products = {name: list(self._known[name]) for name in sorted(self._known)}
                _replace(self.path, json.dumps({**self._head, "products": products}, indent=1))
        except OSError as error:
            self._stop_writing(error)

    def _stop_writing(self, error: OSError) -> None:
        if self._writes:
            self._writes = False
            self._said.append(
                f"the forms of compiled programs cannot be kept in {self.path} ({error}): they "
                "are kept for this process alone; PRECPASS_CACHE_DIR names another folder"
            )


@contextlib.contextmanager
def _alone(path: Path) -> Generator[None]:
    """A context in which only one process writes.

    A process that waits too long goes on without the lock; at worst a program is compiled twice.
    The system frees the lock of a process that ends.

    Raises:
        OSError: if the lock cannot be made.
    """
    lock = filelock.FileLock(path.with_name(path.name + ".lock"), timeout=WAIT)
    with contextlib.suppress(filelock.Timeout):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _replace(path: Path, text: str) -> None:
    for left in path.parent.glob(f"{path.name}*.tmp"):  # by processes that were killed
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < time.time() - 12 * WAIT:
                left.unlink()
    handle, name = tempfile.mkstemp(prefix=path.name, suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
