"""Runs a command from its options to its exit status: prints its report, and handles errors."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any

from precpass.api import auto_mixed
from precpass.cli.commands import COMMANDS, Report, Task, rehearse, write
from precpass.cli.errors import ExitStatus, said, status_of
from precpass.cli.files import in_words, opened
from precpass.cli.inputs import read
from precpass.cli.options import WRITES, check, parsed
from precpass.cli.target import Refused, arguments, load, parameters, unbound
from precpass.jit.region import configured
from precpass.policy.warned import PrecisionWarning
from precpass.report.compare.tables import for_json
from precpass.view.progress import Progress

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; its exit status.

    Args:
        argv: the command line without the program's name; that of the process by default.
    """
    options = parsed(argv)
    try:
        # JAX's own frames in a traceback show where an error comes from.
        with _warnings_as_lines(), configured("jax_traceback_filtering", "off"):
            check(options)
            with opened(options.output):
                # The output of the user's code is not part of the report.
                with contextlib.redirect_stdout(sys.stderr):
                    report = _run(options)
                report = _in_file(report, options)
            text = _json(report.data) if options.json else report.text()
        return _printed(text) or report.status
    except KeyboardInterrupt:
        print("precpass: interrupted", file=sys.stderr)
        return ExitStatus.INTERRUPTED
    except Exception as error:
        status = status_of(error)
        print(said(error, status, options.target), end="", file=sys.stderr)
        return status


def _run(options: argparse.Namespace) -> Report:
    command, _ = COMMANDS[options.command]
    with Progress(f"{options.command} of {options.target}") as progress:
        inputs = read(options)
        rehearse(options, inputs, progress)
        progress.say("importing")
        fn, module = load(options.target)
        args, kwargs = arguments(options.args, options.example, module)
        if options.static is not None:
            fn = auto_mixed(fn, static_argnames=_static(options.static, fn, args, kwargs))
        if options.profitability is not None:
            fn = auto_mixed(fn, profitability=options.profitability)
        return command(Task(options, inputs, fn, args, kwargs, progress))


def _in_file(report: Report, options: argparse.Namespace) -> Report:
    """The report that is printed: of a report that goes to a file, where it is."""
    path = options.output
    if path is None or options.command in WRITES:
        return report
    write(_json(report.data) if options.json else report.text(), path)
    return Report(lambda: f"wrote {path}", {"written": path}, report.status)


def _static(
    text: str, fn: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
) -> tuple[str, ...]:
    """The names of the static arguments."""
    names = tuple(filter(None, map(str.strip, text.split(","))))
    if (signature := parameters(fn)) is None:
        return names
    if why := unbound(fn, args, kwargs):
        raise Refused(why)
    bound = signature.bind(*args, **kwargs).arguments
    for name in names:
        if name not in signature.parameters:
            known = ", ".join(signature.parameters) or "none"
            raise Refused(f"--static {text!r}: there is no argument {name!r}, but {known}")
        try:
            hash(bound.get(name))
        except TypeError:
            raise Refused(
                f"--static {text!r}: {name} is not a constant, but {bound[name]!r}"
            ) from None
    return names


def _json(data: Any) -> str:
    return json.dumps(for_json(data), indent=1, allow_nan=False)


def _printed(text: str) -> int:
    """Prints a report; returns the exit status, which tells if the reader has closed the pipe."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A line of the user's code may have characters that the terminal cannot show.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python flushes standard output once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitStatus.PIPE_CLOSED
    except OSError as error:
        print(f"precpass: the report cannot be written: {in_words(error)}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitStatus.REFUSED
    return 0


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
