"""The options of the command line, and the combinations that are refused."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from precpass.cli.commands import COMMANDS
from precpass.cli.target import Refused
from precpass.policy.policy import PROFITABILITY
from precpass.view.diff import LEVELS

__all__ = ["check", "parsed"]

_DESCRIPTION = "See and check what precision a JAX program runs in."
_EPILOG = """\
TARGET is module:function or file.py:function. Its arguments are shapes and
  numbers, --args "f32[8,128], {w: i32[8]}, scale=0.5", or what --example NAME,
  a function, returns: a tuple, a dict of keyword arguments, or one argument.
Exit status: 0 fine; 1 not as expected (audit, bisect, check); 2 refused: bad
  input; 3 the function raised an error; 4 precpass failed, which is a bug.
Example: precpass explain model.py:loss --args "f32[64,32], f32[128,64]"
"""

_ROWS = ("compare", "profile")
_DRAWS = (*_ROWS, "bisect")
_COLORS = ("explain", "diff", "audit")
_PLANS = (*_ROWS, "explain", "diff", "audit", "draw", "lock", "check")


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of a command line; the process exits if it cannot be parsed."""
    top, commands = _parsers()
    options, more = top.parse_known_args(argv)
    if more:
        command_parser = commands[options.command]
        name = more[0].partition("=")[0]
        others = [n for n, one in commands.items() if name in _options_of(one)]
        elsewhere = f": {name} is of {', '.join(others)}" if others else ""
        command_parser.error(f"{options.command} has no {' '.join(more)}{elsewhere}")
    return options


def _options_of(one: argparse.ArgumentParser) -> set[str]:
    return set(re.findall(r"--[a-z]+", one.format_usage()))


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    top = argparse.ArgumentParser(
        "precpass",
        usage="precpass COMMAND TARGET [options]  (precpass COMMAND --help lists them)",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    # The help fits on one screen, without a section for the option --help.
    top.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    # Before Python 3.13 argparse leaves no more room for the name of a command than this.
    commands = top.add_subparsers(
        dest="command", required=True, metavar="COMMAND ...", title="commands", prog="precpass"
    )
    for name, (_, what) in COMMANDS.items():
        one = commands.add_parser(name, help=what, description=what, allow_abbrev=False)
        _common(name, one)
        _own(name, one)
    return top, dict(commands.choices)


def _common(name: str, one: argparse.ArgumentParser) -> None:
    one.add_argument("target", metavar="TARGET", help="module:function or file.py:function")
    arguments = one.add_mutually_exclusive_group()
    arguments.add_argument("--args", metavar="TEXT", help='such as "f32[8,128], i32[8], scale=0.5"')
    arguments.add_argument(
        "--example", metavar="FUNCTION", help="of the module: returns the arguments"
    )
    one.add_argument(
        "--static", metavar="NAMES", help="the arguments that are static, such as n,mode"
    )
    # Rows have policies of their own, so `check` refuses it.
    policy = "a preset, a string such as c=bf16, or the path of a saved plan (.json)"
    hidden = name in _ROWS
    one.add_argument("--policy", help=argparse.SUPPRESS if hidden else policy)
    one.add_argument(
        "--profitability",
        choices=PROFITABILITY,
        help="which products are lowered (default: always)",
    )
    if name in _PLANS:
        device = "a device that need not be there: h100, a100, tpu v5e, ..."
        one.add_argument("--target", metavar="DEVICE", dest="device", help=device)
    one.add_argument("--json", action="store_true", help="for machines")
    if name in _COLORS:
        one.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    if name in _DRAWS:
        one.add_argument("--seed", type=int, help="of what is drawn for shapes (default: 0)")


def _own(name: str, one: argparse.ArgumentParser) -> None:
    if name == "diff":
        one.add_argument("--level", choices=LEVELS, help="how fine (default: equations)")
        one.add_argument("--between", metavar="POLICY", help="another policy to compare with")
        own = "with --level jaxpr: also the primitives by which the pass keeps derivatives wide"
        one.add_argument("--bookkeeping", action="store_true", help=own)
    elif name in _ROWS:
        one.add_argument("--policies", metavar="A;B;C", help="the rows (default: all presets)")
        one.add_argument("--rounds", type=int, help="of timing (default: 10); 0: take no times")
        if name == "compare":
            one.add_argument("--reference", choices=("f64", "f32"), default="f64")
        else:
            one.add_argument("--devices", metavar="A,B,C", help="such as h100,v5e (default: all)")
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
            "--expect",
            action="append",
            metavar="PATTERN=PRECISION",
            help="such as dot_general=bf16 or */head=f32*2,bf16*1; can be repeated",
        )


def check(options: argparse.Namespace) -> None:
    """Refuses options that would have no effect, before anything is imported.

    Raises:
        Refused: the text says what to give instead.
    """
    for why in filter(None, (_conflict(options), _missing(options))):
        raise Refused(why)


def _conflict(options: argparse.Namespace) -> str:
    name = options.command
    if name in _ROWS and options.policy is not None:
        return f"{name} takes --policies {options.policy!r}, not --policy: a row for each"
    if options.json and getattr(options, "color", "") == "always":
        return "--json has no colours: leave --color always out"
    if name == "diff" and options.json and options.between is not None:
        return "--between has no JSON: take the diff of each policy"
    if name == "diff" and options.json and options.level not in (None, "equations"):
        return f"--json has an entry for each equation, at no other level: not {options.level}"
    if name == "diff" and options.between is not None and options.level == "jaxpr":
        return "--between compares plans: give --level lines or --level equations"
    if name == "diff" and options.bookkeeping and options.level != "jaxpr":
        return "--bookkeeping is of jaxprs: give --level jaxpr too"
    if getattr(options, "seed", None) is not None and options.example is not None:
        return "--seed is of what is drawn for shapes, and --example gives arrays: leave it out"
    return ""


def _missing(options: argparse.Namespace) -> str:
    name = options.command
    if name == "check" and not options.plan and not options.expect:
        return "check needs --plan FILE or --expect PATTERN=PRECISION"
    if name == "draw" and options.boxes < 1:
        return f"--boxes {options.boxes}: at least one box is drawn"
    folder = Path(getattr(options, "output", ".")).parent
    if not folder.is_dir():
        return f"--output {options.output}: there is no folder {folder}"
    return ""
