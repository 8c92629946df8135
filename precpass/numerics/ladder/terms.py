"""Checks of the numbers given to a `Ladder`, and texts for its end and its switches."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from precpass.numerics.ladder.rungs import Rung
from precpass.units import counted

__all__ = [
    "Status",
    "Switch",
    "check_measure",
    "check_numbers",
    "check_scale",
    "summary",
    "switches",
]


class Switch(enum.IntEnum):
    """Why a solver goes to another rung; the numbers are those in the log."""

    STALLED = 1
    ROUNDOFF = 2
    NONFINITE = 3
    EASY = 4
    NEGATIVE = 5
    METHOD = 6

    @property
    def text(self) -> str:
        """The reason in words."""
        return _SWITCH_TEXTS[self]


_SWITCH_TEXTS = {
    Switch.STALLED: "stalled",
    Switch.ROUNDOFF: "at its roundoff",
    Switch.NONFINITE: "not finite",
    Switch.EASY: "easy progress",
    Switch.NEGATIVE: "negative",
    Switch.METHOD: "ended",
}


class Status(enum.IntEnum):
    """Whether a solver goes on."""

    RUNNING = 0
    CONVERGED = 1
    ENDED = 2

    @classmethod
    def of(cls, converged: Any, ended: Any) -> Any:
        """The status as an int32 array, of two arrays of bools."""
        return jnp.where(converged, cls.CONVERGED, jnp.where(ended, cls.ENDED, cls.RUNNING)).astype(
            jnp.int32
        )


def check_numbers(
    name: str,
    rungs: Sequence[Rung],
    tol: Any,
    patience: Any,
    factor: Any,
    lower_after: Any,
    log_size: Any,
) -> None:
    """Raises ValueError for a number of `Ladder.create` that is out of range."""
    for label, value, least in (
        ("patience", patience, 1),
        ("log_size", log_size, 0),
        ("lower_after", 1 if lower_after is None else lower_after, 1),
    ):
        if not (isinstance(value, int | np.integer) and value >= least):
            raise ValueError(f"{name}({label}={value!r}): it is to be a whole number >= {least}")
    if not (isinstance(factor, int | float | np.number) and 0 < factor < math.inf):
        raise ValueError(f"{name}(factor={factor!r}): it is to be positive and finite")
    if not (isinstance(tol, int | float | np.number) and 0 <= tol < 1):
        raise ValueError(
            f"{name}(tol={tol!r}): it is to be a number in [0, 1), relative to the scale"
        )
    least = factor * rungs[-1].unit_roundoff
    if 0 < tol <= least:
        raise ValueError(
            f"{name}(tol={tol!r}): {rungs[-1].name}, the last rung, tells no measure below "
            f"{least:.2g} of the scale (factor * its unit roundoff). Take a higher rung, a larger "
            "tolerance, or tol=0, which goes on until the last rung stalls"
        )


def check_scale(name: str, scale: Any) -> None:
    """Raises ValueError for a scale that is no real scalar, or is known and not positive."""
    if scale is None:
        return
    is_number = isinstance(scale, int | float | complex)
    if not (is_number or (hasattr(scale, "dtype") and hasattr(scale, "shape"))):
        raise ValueError(
            f"{name}(scale={scale!r}): it is to be a real scalar, such as jnp.linalg.norm(b)"
        )
    shape, dtype = jnp.shape(scale), jnp.result_type(scale)
    is_real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    if shape or not is_real:
        raise ValueError(
            f"{name}: scale is {dtype.name}[{','.join(map(str, shape))}], and it is to be a real "
            "scalar, such as jnp.linalg.norm(b)"
        )
    if isinstance(scale, jax.core.Tracer):
        return
    value = float(np.asarray(scale))
    if not 0 < value < math.inf:
        raise ValueError(
            f"{name}(scale={value!r}): it is to be positive and finite; leave it out for the first "
            "measure"
        )


def check_measure(name: str, measure: Any) -> None:
    """Raises ValueError for a negative measure whose value is known."""
    if not isinstance(measure, jax.core.Tracer) and bool(jnp.all(jnp.asarray(measure) < 0)):
        raise ValueError(
            f"{name}: the measure is {float(measure)!r}, and it is to be a magnitude that is zero "
            "at the solution, such as the norm of the residual"
        )


def summary(ladder: Any) -> str:
    """A summary of a `Ladder`: how it ended, the steps on each rung, and the switches."""
    names = [rung.name for rung in ladder.rungs]
    leaves = jax.tree.leaves((ladder.status, ladder.used, ladder.log, ladder.scale))
    if not all(isinstance(x, jax.Array | np.ndarray) for x in leaves) or any(
        isinstance(x, jax.core.Tracer) for x in leaves
    ):
        return f"on one of {', '.join(names)}: not known while it is traced"
    status, used = np.asarray(ladder.status), np.asarray(ladder.used)
    steps = _steps(used, names)
    if status.ndim:
        counts = [
            int(np.sum(status == one)) for one in (Status.CONVERGED, Status.ENDED, Status.RUNNING)
        ]
        ends = "{} converged, {} ended without, {} run".format(*counts)
        return f"of {status.size}: {ends}; {steps}"
    at = names[int(np.asarray(ladder.rung))]
    ended = "ended without convergence" if ladder.tol else "at its limit"
    end = ("running", "converged", ended)[int(status)]
    lines = [f"{end} in {at}, after {counted(int(np.asarray(ladder.steps)), 'step')}: {steps}"]
    if np.isnan(np.asarray(ladder.scale)):
        lines.append("  its scale was no positive number, and no measure is small beside that")
    return "\n".join([*lines, *_switch_lines(ladder, names)])


def switches(ladder: Any) -> str:
    """The steps on each rung, and the switches, of a ladder inside another method."""
    names = [rung.name for rung in ladder.rungs]
    steps = _steps(np.asarray(ladder.used), names)
    return "\n".join([steps, *_switch_lines(ladder, names)])


def _steps(used: Any, names: Sequence[str]) -> str:
    counts = used.reshape(-1, len(names)).sum(0)
    return ", ".join(f"{n} in {name}" for n, name in zip(counts, names, strict=True))


def _switch_lines(ladder: Any, names: Sequence[str]) -> list[str]:
    log = {key: np.asarray(x) for key, x in ladder.log.items()}
    shown = min(int(np.asarray(ladder.switches)), log["step"].size)
    known, lines = float(np.asarray(ladder.scale)), list[str]()
    scale = known if known > 0 else 1.0
    for step, to, why, f in zip(
        *(log[key][:shown] for key in ("step", "to", "why", "measure")), strict=True
    ):
        lines.append(f"  after {step}: to {names[to]}, {Switch(why).text} at {f / scale:.2g}")
    if (more := int(np.asarray(ladder.switches)) - shown) > 0:
        lines.append(f"  and {more} more")
    return lines
