"""The options of the command line, and what becomes of errors."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import jax

from precpass.cli.commands import COMMANDS, Task, policy_of
from precpass.cli.progress import Progress
from precpass.cli.target import Refused, arguments, load
from precpass.policy import PrecisionWarning
from precpass.view.diff import LEVELS

__all__ = ["main"]

_REFUSED, _RAISED = 2, 3

_DESCRIPTION = "See and check what precision a JAX program runs in."
_EPILOG = """\
TARGET is module:function or file.py:function; its arguments are given as shapes,
  --args "f32[8,128], {w: i32[8]}, scale=0.5", or by --example FUNCTION of the same
  module, which returns a tuple of arguments, a dict of keywords, or one argument.
exit status: 0 fine; 1 not as expected (audit, bisect, check); 2 bad input;
  3 the function raised an error.
example: precpass explain model.py:loss --args "f32[64,32], f32[128,64]"
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    top = argparse.ArgumentParser(
        "precpass",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, what) in COMMANDS.items():
        one = commands.add_parser(name, help=what, description=what)
        _common(one)
        _own(name, one)
    return top


def _common(one: argparse.ArgumentParser) -> None:
    one.add_argument("target", metavar="TARGET", help="module:function or file.py:function")
    given = one.add_mutually_exclusive_group()
    given.add_argument("--args", metavar="TEXT", help='such as "f32[8,128], i32[8], scale=0.5"')
    given.add_argument("--example", metavar="FUNCTION", help="of the module: returns the arguments")
    one.add_argument(
        "--policy", help="a preset, a string such as c=bf16, or a saved plan's file (.json)"
    )
    one.add_argument("--json", action="store_true", help="for machines")
    one.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    one.add_argument("--seed", type=int, default=0, help="of what is drawn for shapes")


def _own(name: str, one: argparse.ArgumentParser) -> None:
    if name == "diff":
        one.add_argument("--level", choices=LEVELS, default="equations")
        one.add_argument("--between", metavar="POLICY", help="another policy to compare with")
    elif name == "compare":
        one.add_argument("--policies", metavar="A;B;C", help="all presets by default")
        one.add_argument("--reference", choices=("f64", "f32"), default="f64")
        one.add_argument("--rounds", type=int, default=10, help="0: take no times")
    elif name == "bisect":
        one.add_argument("--tolerance", type=float, required=True, help="normwise relative error")
        one.add_argument("--budget", type=int, default=100, help="of runs")
    elif name == "draw":
        one.add_argument("--output", "-o", default="program.svg", metavar="FILE")
        one.add_argument("--boxes", type=int, default=60, help="the most that are drawn")
    elif name == "lock":
        one.add_argument("--output", "-o", default="plan.precision.json", metavar="FILE")
    elif name == "check":
        one.add_argument("--plan", metavar="FILE", help="a saved plan")
        one.add_argument(
            "--expect", action="append", metavar="PATTERN=PRECISION", help="can be repeated"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; its exit status.

    Args:
        argv: the command line without the program's name; that of the process by default.
    """
    options = parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", PrecisionWarning)
            warnings.showwarning = _warn
            return _run(options)
    except Refused as error:
        return _refuse(error)
    except Exception as error:
        frames = _of_the_user(error)
        if not frames:
            return _refuse(error)
        # those of this package and of JAX say nothing about the user's code
        lines = ["Traceback, the user's lines:\n", *traceback.format_list(frames)]
        lines += traceback.format_exception_only(error)
        print("".join(lines).rstrip(), file=sys.stderr)
        return _RAISED


def _run(options: argparse.Namespace) -> int:
    command, _ = COMMANDS[options.command]
    with Progress(f"{options.command} of {options.target}") as progress:
        policy = None if options.policy is None else policy_of(options.policy)
        fn, module = load(options.target)
        args, kwargs = arguments(options.args, options.example, module)
        color = {"auto": None, "always": True, "never": False}[options.color]
        return command(Task(options, fn, args, kwargs, policy, color, progress))


def _refuse(error: Exception) -> int:
    print(f"precpass: {error}", file=sys.stderr)
    return _REFUSED


_OWN = os.path.dirname(os.path.dirname(__file__))
_FOREIGN = (_OWN, os.path.dirname(jax.__file__), os.path.dirname(argparse.__file__), "<frozen")


def _of_the_user(error: BaseException) -> list[traceback.FrameSummary]:
    """The lines of the user's code in the traceback of an error; none where it is our own."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith(_FOREIGN)]


def _warn(message: Any, *_: Any, **__: Any) -> None:
    print(f"precpass: {message}", file=sys.stderr)
