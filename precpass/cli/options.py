"""The options of the command line, and the combinations that are refused."""

from __future__ import annotations

import argparse
import math
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from precpass.cli.commands import COMMANDS
from precpass.cli.examples import ABOUT, EXAMPLES
from precpass.cli.target import Refused
from precpass.devices.targets import TARGETS
from precpass.policy.profitability import PROFITABILITY, parse_profitability
from precpass.policy.text import preset_titles
from precpass.report.compare.rows import COLUMNS, COSTS
from precpass.version import __version__
from precpass.view.diff import LEVELS

__all__ = ["WRITES", "check", "parsed"]

_DESCRIPTION = "See and check what precision a JAX program runs in."
_EPILOG = """\
FUNCTION is module:function or file.py:function. Its arguments are shapes and
  numbers, --args "f32[8,128], {w: i32[8]}, scale=0.5", or what --example NAME,
  a function, returns: a tuple, a dict of keyword arguments, or one argument.
Exit status: 0 fine; 1 not as expected (audit, bisect, check); 2 refused: bad
  input; 3 the function raised an error; 4 precpass failed, which is a bug.
Example: precpass explain model.py:loss --args "f32[64,32], f32[128,64]"
precpass --version says which release this is, and of which JAX.
"""

_DRAWS = ("compare", "bisect")
_COLORS = ("explain", "diff", "audit")
_SHOWS_PLANS = ("explain", "diff")
_FOR_DEVICES = ("compare", "explain", "diff", "audit", "draw", "lock", "check")
WRITES = {"draw": "program.svg", "lock": "plan.precision.json"}
"""The commands whose result is a file, with the name that it has by default."""


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of a command line; the process exits if it cannot be parsed."""
    top, commands = _parsers()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["profile"]:
        columns = ",".join(COSTS)
        print(
            "precpass: profile goes away in 0.2: write precpass compare, with --columns for what "
            f"it shows, such as {columns}",
            file=sys.stderr,
        )
        rows = "--policies", "AlwaysF32; AutoMixedBf16"
        words = ["compare", *rows, "--columns", columns, *words[1:]]
    options, more = top.parse_known_args(words)
    if more:
        command_parser = commands[options.command]
        name = more[0].partition("=")[0]
        others = [n for n, one in commands.items() if name in _options_of(one)]
        elsewhere = f": {name} is of {', '.join(others)}" if others else ""
        if name == "--devices":
            elsewhere = ": give --columns roofline,moved and --target h100, once for each device"
        elif not name.startswith("-"):
            elsewhere = ": arguments of the function are given by --args or --example"
        command_parser.error(f"{options.command} has no {' '.join(more)}{elsewhere}")
    return options


def _options_of(one: argparse.ArgumentParser) -> set[str]:
    return set(re.findall(r"--[a-z]+", one.format_usage()))


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    top = argparse.ArgumentParser(
        "precpass",
        usage="precpass COMMAND FUNCTION [options]  (precpass COMMAND --help lists them)",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    # The help fits on one screen, without a section for the option --help.
    top.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    version = f"precpass {__version__} (jax {jax.__version__}, Python {platform.python_version()})"
    top.add_argument("--version", action="version", version=version, help=argparse.SUPPRESS)
    # Before Python 3.13 argparse leaves no more room for the name of a command than this.
    commands = top.add_subparsers(
        dest="command", required=True, metavar="COMMAND ...", title="commands", prog="precpass"
    )
    for name, (_, what) in COMMANDS.items():
        one = commands.add_parser(
            name,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=ABOUT + "".join(f"  {example}\n" for example in EXAMPLES[name]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        _common(name, one)
        _own(name, one)
    return top, dict(commands.choices)


def _common(name: str, one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "target",
        metavar="FUNCTION",
        help="the function, as module:function or file.py:function; it may be an attribute, "
        "model.py:Model.step",
    )
    arguments = one.add_mutually_exclusive_group()
    arguments.add_argument(
        "--args",
        metavar="TEXT",
        help="the function's arguments as shapes and numbers, such as "
        '"f32[8,128], i32[8], {w: bf16[4]}, scale=0.5"',
    )
    arguments.add_argument(
        "--example",
        metavar="NAME",
        help="a function of the same module that returns the arguments: a tuple, a dict of "
        "keyword arguments, or one argument",
    )
    one.add_argument(
        "--static",
        metavar="NAMES",
        help="the arguments that are static, as for jax.jit, such as n,mode",
    )
    _policies(name, one)
    if name in _FOR_DEVICES:
        one.add_argument(
            "--target",
            metavar="DEVICE",
            dest="device",
            help=f"plan and compile for this device, which need not be there: {', '.join(TARGETS)} "
            "(default: the device of this machine)",
        )
    if name in _SHOWS_PLANS:
        own = "with --target: do not compile, which may take minutes, and show the plan alone"
        one.add_argument("--no-compile", action="store_true", help=own)
    one.add_argument("--json", action="store_true", help="give the result as JSON, for programs")
    result = "the file that is written" if name in WRITES else "write the result to this file"
    default = WRITES.get(name, "print it")
    one.add_argument(
        "--output",
        "-o",
        metavar="FILE",
        default=WRITES.get(name),
        help=f"{result} (default: {default})",
    )
    if name in _COLORS:
        one.add_argument(
            "--color",
            choices=("auto", "always", "never"),
            default="auto",
            help="colour the text (default: auto, which is on a terminal)",
        )
    if name in _DRAWS:
        one.add_argument(
            "--seed",
            type=int,
            help="the seed of the random values that are drawn for shapes (default: 0)",
        )


def _policies(name: str, one: argparse.ArgumentParser) -> None:
    # Rows have policies of their own, so `check` refuses it.
    policy = (
        f"a preset ({', '.join(preset_titles())}), a text such as c=bf16, or a file of a policy "
        "(.toml) (default: that of the function, or AutoMixedBf16)"
    )
    one.add_argument("--policy", help=argparse.SUPPRESS if name == "compare" else policy)
    if name == "compare":
        one.add_argument(
            "--policies",
            metavar="A;B;C",
            help="the rows: presets, or strings such as c=bf16 (default: the presets of 16 and 32 "
            "bits)",
        )
        use = "one more row that follows it"
    else:
        use = "expect it" if name == "check" else "follow it in the place of a policy"
    one.add_argument("--plan", metavar="FILE", help=f"a plan that precpass lock wrote: {use}")
    one.add_argument(
        "--profitability",
        type=_profitability,
        metavar=f"{{{','.join(PROFITABILITY)}}}",
        help="lower every product (always, the default), or compile the program in several forms "
        "and take the cheapest (best)",
    )


def _profitability(text: str) -> str:
    try:
        return parse_profitability(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _own(name: str, one: argparse.ArgumentParser) -> None:
    if name == "explain":
        own = "list every equation that stays in float32 and all advice, not the summary alone"
        one.add_argument("--all", action="store_true", help=own)
    elif name == "diff":
        one.add_argument(
            "--level",
            choices=LEVELS,
            help="by source line, by equation, or as jaxprs (default: equations)",
        )
        one.add_argument(
            "--between", metavar="POLICY", help="compare with this policy, not with float32"
        )
        own = "with --level jaxpr: also the primitives by which the pass keeps derivatives wide"
        one.add_argument("--bookkeeping", action="store_true", help=own)
    elif name == "compare":
        one.add_argument(
            "--columns",
            metavar="A,B,C",
            help=f"the columns, of {', '.join(COLUMNS)} (default: all but flops, arguments, "
            "outputs and roofline)",
        )
        one.add_argument(
            "--rounds",
            type=int,
            help="the number of times that each row is timed, in turn (default: 10); 0 runs "
            "nothing for time",
        )
        one.add_argument(
            "--reference",
            choices=("f64", "f32"),
            default="f64",
            help="the precision that errors are taken against (default: f64)",
        )
    elif name == "bisect":
        one.add_argument(
            "--tolerance",
            type=float,
            required=True,
            help="the largest error that passes, relative to float32 in the Euclidean norm",
        )
        one.add_argument(
            "--budget", type=int, default=100, help="the most runs that it takes (default: 100)"
        )
    elif name == "draw":
        one.add_argument(
            "--boxes", type=int, default=60, help="the most boxes that are drawn (default: 60)"
        )
    elif name == "check":
        one.add_argument(
            "--expect",
            action="append",
            metavar="PATTERN=PRECISION",
            help="expect it of all equations of a pattern, as dot_general=bf16, or of so many, as "
            "*/head=f32*2,bf16*1; can be repeated",
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
    if name == "compare" and options.policy is not None:
        return f"compare takes --policies {options.policy!r}, not --policy: a row for each"
    if name not in ("compare", "check") and None not in (options.policy, options.plan):
        return f"--plan {options.plan} has the policy that it was saved under: leave --policy out"
    if options.json and getattr(options, "color", "") == "always":
        return "--json has no colours: leave --color always out"
    if getattr(options, "no_compile", False) and options.device is None:
        return "--no-compile is for a --target, and without one nothing is compiled: leave it out"
    if name == "diff" and (why := _conflict_of_diff(options)):
        return why
    if getattr(options, "seed", None) is not None and options.example is not None:
        return "--seed is of what is drawn for shapes, and --example gives arrays: leave it out"
    return ""


def _conflict_of_diff(options: argparse.Namespace) -> str:
    if options.json and options.between is not None:
        return "--between has no JSON: take the diff of each policy"
    if options.json and options.level not in (None, "equations"):
        return f"--json has an entry for each equation, at no other level: not {options.level}"
    if options.between is not None and options.level == "jaxpr":
        return "--between compares plans: give --level lines or --level equations"
    if options.bookkeeping and options.level != "jaxpr":
        return "--bookkeeping is of jaxprs: give --level jaxpr too"
    return ""


def _missing(options: argparse.Namespace) -> str:
    name = options.command
    if name == "check" and not options.plan and not options.expect:
        return "check needs --plan FILE or --expect PATTERN=PRECISION"
    if options.output in ("", "-"):
        return f"--output {options.output!r} names no file"
    if name == "bisect" and not 0 <= options.tolerance < math.inf:
        return f"--tolerance {options.tolerance}: an error is a finite number, 0 or above"
    if name == "bisect" and options.budget < 1:
        return f"--budget {options.budget}: bisect makes at least one run"
    if name == "compare" and options.rounds is not None and options.rounds < 0:
        return f"--rounds {options.rounds}: a whole number, 0 for no times"
    if name == "draw" and options.boxes < 1:
        return f"--boxes {options.boxes}: at least one box is drawn"
    if name == "draw" and (ending := Path(options.output).suffix) not in ("", ".svg"):
        return f"--output {options.output}: a picture is SVG, not {ending}: name it .svg"
    return ""
