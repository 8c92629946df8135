"""The command line: its options, and a command's way from its options to its exit status.

Nothing here imports JAX before the options are parsed, so that `--help` is quick.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import platform
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from precpass.policy.policy import OPTIONS as POLICY_OPTIONS
from precpass.policy.presets import preset_titles
from precpass.version import __version__

__all__ = ["COMMANDS", "OPTIONS", "main"]

_EPILOG = """\
FUNCTION is module:function or file.py:function. Its arguments are shapes and
  numbers, --args "f32[8,128], {w: i32[8]}, scale=0.5", or what --example NAME,
  a function, returns: a tuple, a dict of keyword arguments, or one argument.
Exit status: 0 fine; 1 not as expected (audit, bisect, check); 2 refused: bad
  input; 3 the function raised an error; 4 precpass failed, which is a bug.
Example: precpass explain model.py:loss --args "f32[64,32], f32[128,64]"
precpass --version says which release this is, and of which JAX.
"""
_ABOUT_EXAMPLES = """\
examples, where model.py has loss(w, x), and arguments(), which returns (w, x):
"""
_COMMANDS = """\
explain: what runs in low precision, what does not and why, and what to change
  model.py:loss --args "f32[64,32], f32[128,64]"
  model.py:loss --example arguments --target h100
diff: what a policy changes, by module and line
  model.py:loss --args "f32[64,32], f32[128,64]" --level lines
  model:loss --example arguments --between AutoMixedF16
compare: policies side by side: products, memory, time, error
  model.py:loss --example arguments --policies "c=bf16; c=f16"
  model.py:loss --args "f32[64,32], f32[128,64]" --rounds 0
  model.py:loss --example arguments --columns flops,temp,moved
audit: what XLA runs in another precision than planned
  model.py:loss --args "f32[64,32], f32[128,64]"
  model.py:loss --example arguments --output audit.txt
bisect: what must stay in float32 for an error below a tolerance
  model.py:loss --example arguments --tolerance 1e-4
draw: a picture (SVG), coloured by precision
  model.py:loss --example arguments --output loss.svg
lock: write the plan to a file, for --plan
  model.py:loss --example arguments
  model.py:loss --example arguments --output loss.json
check: fail where the plan is not the saved or the expected one
  model.py:loss --example arguments --plan loss.json
  model.py:loss --example arguments --expect dot_general=bf16
"""
"""Each command with its description, and the examples in its help."""
COMMANDS = re.findall(r"^(\w+): (.*)\n((?:  .*\n)+)", _COMMANDS, re.M)

_PROFILE = (
    'compare --policies "AlwaysF32; AutoMixedBf16" --columns '
    "formats,temp,kernels,moved,cast_kernels,cycles,roofline,time,ratio"
)
"""What the former command `profile` is now."""

_ALL = tuple(name for name, *_ in COMMANDS)
_PLANS = ("explain", "diff")
_WRITES = {"draw": "program.svg", "lock": "plan.precision.json"}
"""The commands whose result is a file, with the name that it has by default."""


def _option(name: str, of: Collection[str], says: str, **how: Any) -> tuple[str, Any, Any]:
    """An option with its metavar, the commands that have it, and what argparse is told of it."""
    name, _, metavar = name.partition(" ")
    return name, of, {"help": says, **({"metavar": metavar} if metavar else {}), **how}


_PAYS = f"{{{','.join(POLICY_OPTIONS['profitability'].metadata['legal'])}}}"
_FLAG = {"action": "store_true"}
OPTIONS = (
    _option("target FUNCTION", _ALL, "module:function or file.py:function; model.py:Model.step"),
    _option("--args TEXT", _ALL, 'its arguments: "f32[8,128], i32[8], {w: bf16[4]}, scale=0.5"'),
    _option("--example NAME", _ALL, "a function of the module that returns the arguments"),
    _option("--static NAMES", _ALL, "the arguments that are static, such as n,mode"),
    _option(
        "--policy",
        tuple(name for name in _ALL if name != "compare"),
        f"a preset ({', '.join(preset_titles())}), a text such as c=bf16, or a .toml file "
        "(default: that of the function, or AutoMixedBf16)",
    ),
    # Rows have policies of their own, so `_conflicts` refuses it.
    _option("--policy", ("compare",), argparse.SUPPRESS),
    _option("--policies A;B;C", ("compare",), "the rows: presets, or strings such as c=bf16"),
    _option("--columns A,B,C", ("compare",), "what it shows, such as flops,temp,roofline,error"),
    _option("--plan FILE", _ALL, "a plan of precpass lock, to follow, check or compare"),
    _option(f"--profitability {_PAYS}", _ALL, "lower all, or take the form that costs least"),
    _option(
        "--target DEVICE",
        tuple(name for name in _ALL if name != "bisect"),
        "plan and compile for this device, such as h100 or 'tpu v5e', which need not be there "
        "(default: the device of this machine)",
        dest="device",
    ),
    _option("--no-compile", _PLANS, "with --target: show the plan alone, at once", **_FLAG),
    _option("--json", _ALL, "give the result as JSON, for programs", **_FLAG),
    _option(
        "--output FILE",
        _ALL,
        "write the result to this file (default: print it; draw writes program.svg, and lock "
        "plan.precision.json)",
    ),
    _option(
        "--color",
        (*_PLANS, "audit"),
        "colour the text (default: auto, which is on a terminal)",
        choices=("auto", "always", "never"),
    ),
    _option("--seed N", ("compare", "bisect"), "the seed of drawn arrays (default: 0)", type=int),
    _option("--all", ("explain",), "list all that stays in float32, and all advice", **_FLAG),
    _option(
        "--level",
        ("diff",),
        "by source line, by equation, or as jaxprs (default: equations)",
        choices=("lines", "equations", "jaxpr"),
    ),
    _option("--between POLICY", ("diff",), "compare with this policy, not with float32"),
    _option(
        "--bookkeeping",
        ("diff",),
        "with --level jaxpr: also the primitives by which the pass keeps derivatives wide",
        **_FLAG,
    ),
    _option(
        "--rounds N", ("compare",), "how often each row is timed (default: 10); 0: never", type=int
    ),
    _option(
        "--reference",
        ("compare",),
        "the precision that errors are taken against (default: f64)",
        choices=("f64", "f32"),
        default="f64",
    ),
    _option(
        "--tolerance ERROR",
        ("bisect",),
        "the largest error that passes, relative to float32 in the Euclidean norm",
        type=float,
        required=True,
    ),
    _option("--budget N", ("bisect",), "the most runs (default: 100)", type=int, default=100),
    _option("--boxes N", ("draw",), "the most boxes (default: 60)", type=int, default=60),
    _option(
        "--expect PATTERN=PRECISION",
        ("check",),
        "expect it of all equations of a pattern, as dot_general=bf16, or of so many, as "
        "*/head=f32*2,bf16*1; can be repeated",
        action="append",
    ),
)
"""The options, and the argument that all commands have."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; its exit status.

    Args:
        argv: the command line without the program's name; that of the process by default.
    """
    options = _parsed(argv)
    for why in _conflicts(options):
        print(f"precpass: {why}", file=sys.stderr)
        return 2
    from precpass.cli.run import run

    return run(options)


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["profile"]:
        print(f"precpass: profile goes away in 0.2: write precpass {_PROFILE}", file=sys.stderr)
        words[:1] = shlex.split(_PROFILE)
    top = _parser()
    options, more = top.parse_known_args(words)
    if more:
        name = more[0].partition("=")[0]
        others = [command for option, of, _ in OPTIONS for command in of if option == name]
        elsewhere = f": {name} is of {', '.join(others)}" if others else ""
        if name == "--devices":
            elsewhere = ": give --columns roofline,moved and --target h100, once for each device"
        elif not name.startswith("-"):
            elsewhere = ": arguments of the function are given by --args or --example"
        top.error(f"{options.command} has no {' '.join(more)}{elsewhere}")
    # Each option is there, also for the commands that do not have it.
    names = (how.get("dest", name.strip("-").replace("-", "_")) for name, _, how in OPTIONS)
    options = argparse.Namespace(**dict.fromkeys(names) | vars(options))
    if options.output is None:
        options.output = _WRITES.get(options.command)
    return options


def _parser() -> argparse.ArgumentParser:
    as_written = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        "precpass",
        usage="precpass COMMAND FUNCTION [options]  (precpass COMMAND --help lists them)",
        description="See and check what precision a JAX program runs in.",
        epilog=_EPILOG,
        formatter_class=as_written,
        allow_abbrev=False,
        add_help=False,
    )
    # The help fits on one screen, without a section for the option --help.
    top.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    jax = importlib.metadata.version("jax")
    version = f"precpass {__version__} (jax {jax}, Python {platform.python_version()})"
    top.add_argument("--version", action="version", version=version, help=argparse.SUPPRESS)
    # Before Python 3.13 argparse leaves no more room for the name of a command than this.
    commands = top.add_subparsers(
        dest="command", required=True, metavar="COMMAND ...", title="commands", prog="precpass"
    )
    for command, what, examples in COMMANDS:
        one = commands.add_parser(
            command,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=_ABOUT_EXAMPLES + examples.replace("  ", f"  precpass {command} "),
            formatter_class=as_written,
            allow_abbrev=False,
        )
        for name, of, how in OPTIONS:
            if command in of:
                one.add_argument(name, *(("-o",) if name == "--output" else ()), **how)
    return top


def _conflicts(o: argparse.Namespace) -> Iterator[str]:
    """Why options have no effect or make no sense, before anything is imported."""
    name = o.command
    if name == "compare" and o.policy is not None:
        yield f"{name} takes --policies {o.policy!r}, not --policy: a row for each"
    if name not in ("compare", "check") and None not in (o.policy, o.plan):
        yield f"--plan {o.plan} has the policy that it was saved under: leave --policy out"
    if None not in (o.args, o.example):
        yield "--args and --example both give the arguments: leave one of them out"
    if o.json and o.color == "always":
        yield "--json has no colours: leave --color always out"
    if o.no_compile and o.device is None:
        yield "--no-compile is for a --target, and without one nothing is compiled: leave it out"
    if None not in (o.seed, o.example):
        yield "--seed is of what is drawn for shapes, and --example gives arrays: leave it out"
    if o.output in ("", "-"):
        yield f"--output {o.output!r} names no file"
    if name == "check" and not o.plan and not o.expect:
        yield "check needs --plan FILE or --expect PATTERN=PRECISION"
    yield from _conflicts_of_diff(o) if name == "diff" else _bad_numbers(o)


def _conflicts_of_diff(o: argparse.Namespace) -> Iterator[str]:
    if o.json and o.between is not None:
        yield "--between has no JSON: take the diff of each policy"
    if o.json and o.level not in (None, "equations"):
        yield f"--json has an entry for each equation, at no other level: not {o.level}"
    if o.between is not None and o.level == "jaxpr":
        yield "--between compares plans: give --level lines or --level equations"
    if o.bookkeeping and o.level != "jaxpr":
        yield "--bookkeeping is of jaxprs: give --level jaxpr too"


def _bad_numbers(o: argparse.Namespace) -> Iterator[str]:
    if o.tolerance is not None and not 0 <= o.tolerance < math.inf:
        yield f"--tolerance {o.tolerance}: an error is a finite number, 0 or above"
    if o.budget is not None and o.budget < 1:
        yield f"--budget {o.budget}: bisect makes at least one run"
    if o.rounds is not None and o.rounds < 0:
        yield f"--rounds {o.rounds}: a whole number, 0 for no times"
    if o.boxes is not None and o.boxes < 1:
        yield f"--boxes {o.boxes}: at least one box is drawn"
    if o.command == "draw" and (ending := Path(o.output).suffix) not in ("", ".svg"):
        yield f"--output {o.output}: a picture is SVG, not {ending}: name it .svg"
