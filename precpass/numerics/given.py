"""Checks of what users give to the functions of `numerics`, and words for it in messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.core
import numpy as np

from precpass.jit.nnx import has_nodes
from precpass.policy.precision import Precision

__all__ = [
    "check_positive",
    "check_whole",
    "is_known",
    "is_real",
    "parsed_precision",
    "refuse_modules",
    "shown",
]


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """Raises ValueError for anything but a whole number of at least `least`.

    Args:
        name: what the message begins with, such as "monitor(every".
        value: what was given.
        least: the smallest legal number.
    """
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not (is_whole and value >= least):
        raise ValueError(f"{_named(name, value)} it is to be a whole number of {least} or more")


def check_positive(name: str, value: Any) -> None:
    """Raises ValueError for anything but a positive finite number whose value is known."""
    if not (is_real(value) and 0 < value < math.inf):
        raise ValueError(f"{_named(name, value)} it is to be positive and finite")


def parsed_precision(name: str, value: Any, legal: Sequence[Precision]) -> Precision:
    """The precision that was given, one of the legal ones; raises ValueError for any other."""
    try:
        precision = Precision.parse(value)
    except ValueError as error:
        raise ValueError(f"{name}=...{')' if '(' in name else ''}: {error}") from None
    if precision not in legal:
        names = ", ".join(repr(str(p)) for p in legal)
        raise ValueError(f"{_named(name, str(precision))} legal are {names}")
    return precision


def _named(name: str, value: Any) -> str:
    return f"{name}={value!r}{')' if '(' in name else ''}:"


def is_real(x: Any) -> bool:
    """Whether it is a real number whose value is known, and not an array."""
    return isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool)


def shown(x: Any) -> str:
    """An array's type, such as "float32[8]"; anything else as Python shows it."""
    try:
        return jax.typeof(x).str_short()
    except TypeError:
        return repr(x)


def is_known(arrays: Iterable[Any]) -> bool:
    """Whether arrays have values, and are neither traced nor of an abstract pytree."""
    return all(
        isinstance(x, jax.Array | np.ndarray) and not isinstance(x, jax.core.Tracer) for x in arrays
    )


def refuse_modules(owner: str, args: Any) -> None:
    """Raises TypeError for arguments with a module of flax nnx.

    Args:
        owner: the name of the function that was given them.
        args: a pytree.
    """
    if has_nodes(args):
        raise TypeError(
            f"{owner} was given a module of flax nnx, whose state each rung would update: "
            "give the function the state (graphdef, state = nnx.split(module)) and merge inside"
        )
