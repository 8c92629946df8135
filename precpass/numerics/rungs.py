"""Rungs: the precisions in which a function runs, each finer than the one before."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from precpass.api import auto_mixed
from precpass.jit.region import keep
from precpass.policy.policy import PrecisionPolicy
from precpass.policy.precision import FORMATS, Precision
from precpass.policy.presets import OTHER_NAMES, PRESETS, AlwaysF32, AutoMixedBf16, AutoMixedF16
from precpass.policy.primitives import OpKind
from precpass.policy.warned import quietly
from precpass.units import counted

__all__ = ["Rung", "check_rising", "parse_ladder"]


@dataclasses.dataclass(frozen=True)
class Rung:
    """One precision of a ladder.

    Attributes:
        name: its name in reports.
        policy: the policy under which the function runs.
        precision: the precision of its matrix products.
    """

    name: str
    policy: PrecisionPolicy
    precision: Precision

    def __str__(self) -> str:
        return self.name

    @property
    def unit_roundoff(self) -> float:
        """The unit roundoff of the precision of its matrix products."""
        return self.precision.unit_roundoff

    def applied(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`fn` on this rung, with options of `jax.jit`; its results keep the dtypes of `fn`."""
        if self.precision is Precision.F64:
            return auto_mixed(keep("f64")(fn), policy=self.policy, **options)
        mixed = auto_mixed(fn, policy=self.policy, **options)
        # A float32 program does not change in float32, so a warning of that would be wrong.
        return mixed if self.precision.is_low else quietly()(mixed)


_POLICIES = {
    Precision.BF16: AutoMixedBf16.with_retypes(*FORMATS),
    Precision.F16: AutoMixedF16.with_retypes(*FORMATS),
    # This also runs products of a float64 program in float32, beside AlwaysF32's widening.
    Precision.F32: dataclasses.replace(
        AlwaysF32.with_retypes(*FORMATS), orders=frozenset({OpKind.COMPUTE})
    ),
    Precision.F64: AlwaysF32,
}


def parse_ladder(owner: str, ladder: Any) -> tuple[Rung, ...]:
    """Return the rungs of a ladder that a user gave.

    Args:
        owner: the name of the function that takes the ladder, for errors.
        ladder: from the coarsest to the finest rung, each a precision ("bf16", "f16", "f32", "f64",
            a `Precision`, a dtype) or a policy.

    Raises:
        ValueError: for an unknown rung, fewer than two, a repeated one, or one that is coarser than
            the one before.
        TypeError: if it is not a sequence.

    Examples:
        >>> [rung.name for rung in parse_ladder("f", ("bf16", "f32"))]
        ['bf16', 'f32']
    """
    if isinstance(ladder, str | PrecisionPolicy) or not isinstance(ladder, Sequence):
        raise TypeError(f"{owner}: ladder={ladder!r} is to be a tuple such as ('bf16', 'f32')")
    rungs = tuple(_rung(owner, value) for value in ladder)
    if len(rungs) < 2:
        raise ValueError(
            f"{owner}: ladder={ladder!r} has {counted(len(rungs), 'rung')}, and takes two or "
            "more, such as ('bf16', 'f32', 'f64'); auto_mixed(fn, policy=...) runs on one"
        )
    check_rising(f"{owner}: ladder={ladder!r}", rungs)
    return rungs


def check_rising(ladder: str, rungs: Sequence[Rung | Precision]) -> None:
    """Raises ValueError for a rung that is not finer than those before it.

    Args:
        ladder: what was given, for errors.
        rungs: its rungs.
    """
    for i, (low, high) in enumerate(itertools.pairwise(rungs)):
        if high in rungs[: i + 1]:
            raise ValueError(f"{ladder} has {str(high)!r} twice")
        if high.unit_roundoff > low.unit_roundoff:
            raise ValueError(
                f"{ladder} does not rise: {str(high)!r} (unit roundoff {high.unit_roundoff:.2g}) "
                f"comes after {str(low)!r} ({low.unit_roundoff:.2g}). The order is bf16, f16, f32, "
                "f64"
            )


def _rung(owner: str, given: Any) -> Rung:
    names = map(str.lower, PRESETS | OTHER_NAMES)
    names_policy = isinstance(given, str) and ("=" in given or given.lower() in names)
    if isinstance(given, PrecisionPolicy) or names_policy:
        policy = PrecisionPolicy.parse(given)
        if policy.output is not None:
            raise ValueError(
                f"{owner}: the rung {given!r} has an output format, and all rungs return what fn "
                "does: leave it out (policy.with_output(None))"
            )
        name = policy.title if policy == PRESETS.get(policy.name) else repr(policy)
        return Rung(name, policy, policy.precision_for(OpKind.COMPUTE))
    try:
        precision = Precision.parse_format(given)
    except ValueError as error:
        others = (preset.title for preset in OTHER_NAMES.values())
        raise ValueError(
            f"{owner}: unknown rung {given!r}: legal are 'bf16', 'f16', 'f32', 'f64', a "
            f"PrecisionPolicy, and the names of presets ({', '.join([*PRESETS, *others])})"
        ) from error
    return Rung(precision.value, _POLICIES[precision], precision)
