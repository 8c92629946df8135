"""Where the tests keep what XLA compiled, so that who runs them again waits half as long."""

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import filelock
import jax
import platformdirs

LARGEST = 2**29
"""Bytes above which a folder is emptied; a run of all tests writes about a fifth of it."""


class CompiledPrograms:
    """A folder for JAX's persistent cache that no other process writes to.

    It lies in the user's cache folder. Each release of JAX and each worker of pytest-xdist has its
    own, since a worker could read a file that another one has half written. If another run of the
    tests uses it, the folder is a temporary one.

    Attributes:
        folder: where it is.
    """

    def __init__(self) -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        kept = platformdirs.user_cache_path("precpass-tests") / f"jax-{jax.__version__}-{worker}"
        # The lock is held until the process ends.
        self._lock = filelock.FileLock(f"{kept}.lock")
        try:
            kept.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except (filelock.Timeout, OSError):
            self._temporary = TemporaryDirectory(prefix="precpass-tests-")
            self.folder = Path(self._temporary.name)
            return
        if sum(file.stat().st_size for file in kept.iterdir()) > LARGEST:
            shutil.rmtree(kept)
        self.folder = kept
