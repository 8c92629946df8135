"""Runs a command from its options to its exit status: prints its report, and handles errors."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import sys
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

from precpass.api import auto_mixed
from precpass.cli.commands import COMMANDS, Report, Task, rehearse
from precpass.cli.errors import REFUSED, in_words, refusing, said, status_of
from precpass.cli.inputs import names_in, read
from precpass.cli.target import arguments, load, static_names
from precpass.jit.region import configured
from precpass.policy.warned import PrecisionWarning
from precpass.report.compare.tables import for_json
from precpass.view.progress import Progress

__all__ = ["run"]

NOT_AS_EXPECTED, INTERRUPTED, PIPE_CLOSED = 1, 130, 141
"""Exit statuses. The last two are 128 + SIGINT and 128 + SIGPIPE, as in a shell."""


def run(options: argparse.Namespace) -> int:
    """Runs a command; its exit status."""
    try:
        # JAX's own frames in a traceback show where an error comes from.
        with _warnings_as_lines(), configured("jax_traceback_filtering", "off"):
            # The output of the user's code is not part of the report.
            with contextlib.redirect_stdout(sys.stderr):
                report = _run(options)
            text = _json(report.data) if options.json else report.text()
            if options.output is not None and options.command not in ("draw", "lock"):
                with refusing(f"--output {options.output}"):
                    Path(options.output).write_text(text + "\n", encoding="utf-8")
                text = f"wrote {options.output}"
                text = _json({"written": options.output}) if options.json else text
        return _printed(text) or (0 if report.ok else NOT_AS_EXPECTED)
    except KeyboardInterrupt:
        print("precpass: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        status = status_of(error)
        print(said(error, status, options.target), end="", file=sys.stderr)
        return status


def _run(options: argparse.Namespace) -> Report:
    _check_writable(options.output)
    with Progress(f"{options.command} of {options.target}") as progress:
        task = Task(options, progress, **read(options), fn=_stand_in)
        rehearse(task)
        progress.say("importing")
        fn, module = load(options.target)
        args, kwargs = arguments(options.args, options.example, module)
        if options.static is not None:
            names = static_names(names_in(options.static), fn, args, kwargs)
            fn = auto_mixed(fn, static_argnames=names)
        if options.profitability is not None:
            fn = auto_mixed(fn, profitability=options.profitability)
        task = dataclasses.replace(task, fn=fn, args=args, kwargs=kwargs)
        return COMMANDS[options.command](task)


def _stand_in(*args: Any) -> Any:
    return args


def _check_writable(path: str | None) -> None:
    """Refuses a file that cannot be written, so that nobody waits for its result."""
    if path is None:
        return
    is_new = not os.path.lexists(path)
    with refusing(f"--output {path}"):
        folder = os.path.dirname(path)
        if folder and not os.path.isdir(folder):
            raise ValueError(f"there is no folder {folder}")
        # Appending makes a file that is not there, and leaves the content of one that is.
        open(path, "ab").close()
        if is_new:
            os.unlink(path)


def _json(data: Any) -> str:
    return json.dumps(for_json(data), indent=1, allow_nan=False)


def _printed(text: str) -> int:
    """Prints a report; returns the exit status, which tells if the reader has closed the pipe."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A line of the user's code may have characters that the terminal cannot show.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(text, flush=True)
        return 0
    except OSError as error:
        # Python flushes standard output once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return PIPE_CLOSED
        print(f"precpass: the report cannot be written: {in_words(error)}", file=sys.stderr)
        return REFUSED


@contextlib.contextmanager
def _warnings_as_lines() -> Generator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("always", PrecisionWarning)
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, PrecisionWarning):
                print(f"precpass: {message}", file=sys.stderr)
            else:
                others(message, category, *place, **more)

        warnings.showwarning = show
        yield
