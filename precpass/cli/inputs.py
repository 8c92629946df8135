"""Reads what the options say: policies, saved plans, devices, expectations and arguments.

All of it is read before the user's module is imported, so that a mistake in a command line costs
no import.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax

from precpass.cli.files import refusing
from precpass.cli.specs import parse_args
from precpass.cli.target import Refused
from precpass.devices.targets import target_of
from precpass.plan.plan import Plan
from precpass.policy.config import SUFFIX
from precpass.policy.policy import PrecisionPolicy
from precpass.policy.presets import PRESETS
from precpass.policy.text import shown
from precpass.report.compare.rows import columns_of
from precpass.testing.patterns import Pattern

__all__ = ["Inputs", "read"]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What the options of a command line say.

    Attributes:
        policy: the policy of --policy or of --plan; None if neither is given.
        between: the other policy of `diff`.
        rows: the policies of `compare`, each with its name.
        columns: the names of its columns; None for those of the default.
        expected: the patterns of `check`, each with the expected precision or numbers.
        target: the device of --target, a `precpass.devices.targets.Target`.
    """

    policy: PrecisionPolicy | None = None
    between: PrecisionPolicy | None = None
    rows: tuple[tuple[str, PrecisionPolicy], ...] = ()
    columns: tuple[str, ...] | None = None
    expected: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    target: Any = None


def read(options: argparse.Namespace) -> Inputs:
    """Reads the options.

    Raises:
        Refused: for an option that says nothing legal; the text names it.
    """
    saved = _saved(options)
    with refusing():
        target = target_of(getattr(options, "device", None))
    if options.args is not None:
        # The user's module may switch x64 on, so 64-bit dtypes are judged after its import.
        with refusing(), jax.enable_x64(True):
            parse_args(options.args)
    return Inputs(
        policy=_policy("--policy", options.policy) or saved,
        between=_policy("--between", getattr(options, "between", None)),
        rows=_rows(options, saved) if hasattr(options, "policies") else (),
        columns=_columns(getattr(options, "columns", None)),
        expected=_expected(getattr(options, "expect", None) or []),
        target=target,
    )


def _saved(options: argparse.Namespace) -> PrecisionPolicy | None:
    if options.plan is None:
        return None
    with refusing():
        return Plan.load(options.plan)


def _policy(option: str, text: str | None) -> PrecisionPolicy | None:
    if text is None:
        return None
    if text.endswith(".json"):
        raise Refused(f"{option} {text}: a saved plan is given by --plan {text}, not as a policy")
    with refusing():
        is_file = text.endswith((SUFFIX, ".yaml", ".yml"))  # the latter are refused, with advice
        return PrecisionPolicy.load(text) if is_file else PrecisionPolicy.parse(text)


def _rows(
    options: argparse.Namespace, saved: PrecisionPolicy | None
) -> tuple[tuple[str, PrecisionPolicy], ...]:
    texts = PRESETS if options.policies is None else map(str.strip, options.policies.split(";"))
    rows = [
        (shown(text), policy)
        for text in texts
        if (policy := _policy("--policies", text)) is not None
    ]
    if saved is not None:
        rows.append((options.plan, saved))
    return tuple(rows)


def _columns(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    with refusing("--columns"):
        return columns_of(filter(None, map(str.strip, text.split(","))))


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
