"""Reads what the options say: policies, saved plans, devices, expectations and arguments.

All of it is read before the user's module is imported, so that a mistake in a command line costs
no import.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax

from precpass.cli.errors import Refused, refusing
from precpass.cli.target import parse_args
from precpass.devices.targets import target_of
from precpass.plan.plan import Plan
from precpass.policy.policy import SUFFIX, PrecisionPolicy, parse_option
from precpass.policy.presets import PRESETS, shown
from precpass.report.compare.rows import columns_of
from precpass.testing.patterns import Pattern

__all__ = ["names_in", "read"]


def read(options: argparse.Namespace) -> dict[str, Any]:
    """The attributes of a `Task` that the options say.

    Raises:
        Refused: for an option that says nothing legal; the text names it.
    """
    with refusing():
        saved = None if options.plan is None else Plan.load(options.plan)
        target = target_of(options.device)
        # The user's module may switch x64 on, so 64-bit dtypes are judged after its import.
        with jax.enable_x64(True):
            parse_args(options.args or "")
        if options.profitability is not None:
            parse_option("profitability", options.profitability)
    with refusing("--columns"):
        columns = None if options.columns is None else columns_of(names_in(options.columns))
    texts = PRESETS
    if options.policies is not None:
        texts = [text.strip() for text in options.policies.split(";")]
    rows = [(shown(text), _policy("--policies", text)) for text in texts]
    return {
        "policy": saved if options.policy is None else _policy("--policy", options.policy),
        "between": None if options.between is None else _policy("--between", options.between),
        "rows": rows if saved is None else [*rows, (options.plan, saved)],
        "columns": columns,
        "expected": _expected(options.expect or []),
        "target": target,
    }


def names_in(text: str) -> tuple[str, ...]:
    """The names in a text that commas separate."""
    return tuple(filter(None, map(str.strip, text.split(","))))


def _policy(option: str, text: str) -> PrecisionPolicy:
    if text.endswith(".json"):
        raise Refused(f"{option} {text}: a saved plan is given by --plan {text}, not as a policy")
    with refusing():
        is_file = text.endswith((SUFFIX, ".yaml", ".yml"))  # the latter are refused, with advice
        return PrecisionPolicy.load(text) if is_file else PrecisionPolicy.parse(text)


def _expected(texts: list[str]) -> dict[str, Any]:
    pairs = list(map(_expectation, texts))
    if len(pairs) != len(dict(pairs)):
        raise Refused(f"--expect {' '.join(texts)}: a pattern is given twice")
    for pattern, wanted in pairs:
        with refusing(f"--expect {pattern}"):
            Pattern.parse(pattern, wanted)
    return dict(pairs)


def _expectation(text: str) -> tuple[str, Any]:
    pattern, equals, wanted = text.rpartition("=")
    if not equals or not pattern or not wanted:
        raise Refused(
            f"--expect {text!r}: write PATTERN=PRECISION, such as dot_general=bf16, or with "
            "numbers, dot_general=bf16*23,f32*1"
        )
    if "*" not in wanted:
        return pattern, wanted
    counts = [part.partition("*") for part in wanted.replace(" ", "").split(",")]
    if not all(number.isdecimal() for _, _, number in counts):
        raise Refused(f"--expect {text!r}: write a number for each precision, bf16*23,f32*1")
    return pattern, {precision: int(number) for precision, _, number in counts}
