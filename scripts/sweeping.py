"""What the parts of `scripts/sweep` share: their options, processes and settings."""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROGRESS_SECONDS = 15.0


def parser(part: str, doc: str | None) -> argparse.ArgumentParser:
    """The options that every part knows."""
    made = argparse.ArgumentParser(f"scripts/sweep {part}", description=doc)
    made.add_argument("--workers", type=int, default=2, help="processes (%(default)s)")
    return made


def set_up(**settings: Any) -> None:
    """The path, the settings of tests/conftest.py, and others of JAX's."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    # code generation without optimization, which takes most of the time; XLA's own passes run
    jax.config.update("jax_disable_most_optimizations", True)
    for name, value in settings.items():
        jax.config.update(name, value)


def pool(workers: int, start: Callable[..., None], *args: Any) -> ProcessPoolExecutor:
    """Processes that begin with `start(*args)`, and know nothing of this one."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, start, args)


def say(text: str) -> None:
    print(text, flush=True)


class Progress:
    """Says how far it is, now and then."""

    def __init__(self) -> None:
        self.said = time.monotonic()

    def say(self, text: str) -> None:
        if time.monotonic() - self.said > PROGRESS_SECONDS:
            self.said = time.monotonic()
            say(text)
