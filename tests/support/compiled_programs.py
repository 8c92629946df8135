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
    tests uses it, or it cannot be written, the folder is a temporary one.

    Args:
        parent: where the folders of all releases and workers are; the user's cache folder if it is
            None.

    Attributes:
        folder: where it is.
    """

    def __init__(self, parent: Path | None = None) -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        parent = parent or platformdirs.user_cache_path("precpass-tests")
        kept = parent / f"jax-{jax.__version__}-{worker}"
        self._lock = filelock.FileLock(f"{kept}.lock")
        self._temporary: TemporaryDirectory[str] | None = None
        try:
            kept.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            if sum(file.stat().st_size for file in kept.iterdir()) > LARGEST:
                shutil.rmtree(kept)
                kept.mkdir()
            self.folder = kept
        except (filelock.Timeout, OSError):
            self._temporary = TemporaryDirectory(prefix="precpass-tests-")
            self.folder = Path(self._temporary.name)

    def close(self) -> None:
        """Let another run use the folder."""
        self._lock.release()
        if self._temporary is not None:
            self._temporary.cleanup()
