"""What is known of one value, and when that forbids a narrower format."""

from __future__ import annotations

import functools
import math
import weakref
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from precpass import reasons
from precpass.precision import Precision

__all__ = ["ANY", "Fact", "guard", "of_array", "of_aval", "of_dtype"]


class Fact(NamedTuple):
    """What is known of a value's elements.

    Attributes:
        lo, hi: bounds of the finite elements.
        reaches: a magnitude that an element may well have, since a constant with
            it was selected into the value or added to it; 0 where none is known.
        scale: the magnitude of a multiple of a constant, or of a sum, where what is unknown
            counts as 1; 0 for what is neither.
        tiny: a nonzero magnitude, the smallest known, that an element may well have:
            of a constant, or of what `x + eps` and `max(x, eps)` are at least; else 0.
        integer: every element is an integer.
        constant: the elements themselves are known.
        random: made from random bits and constants alone.
    """

    lo: float = -math.inf
    hi: float = math.inf
    tiny: float = 0.0
    integer: bool = False
    constant: bool = False
    random: bool = False
    reaches: float = 0.0
    scale: float = 0.0

    @property
    def magnitude(self) -> float:
        """That of the value as a whole; 0 where it is unknown."""
        return self.reaches if self.constant else self.scale


ANY = Fact()
_BOOL = Fact(0.0, 1.0, integer=True)


def guard(fact: Fact, target: Precision, what: str = "it") -> str | None:
    """Why a value with this fact must not be held in `target`, or None; `what` names it."""
    bound = max(abs(fact.lo), abs(fact.hi))
    # an infinity is as good in the low format; what it must not do is make new ones
    largest = bound if math.isfinite(bound) else fact.reaches
    if largest > target.max:
        return reasons.REACHES(what, f"{largest:.3g}", target, f"{target.max:.3g}")
    if 0.0 < fact.tiny < target.smallest_normal:
        tiny, smallest = f"{fact.tiny:.3g}", f"{target.smallest_normal:.3g}"
        return reasons.VANISHES(what, tiny, target, smallest)
    if fact.integer and bound > target.exact_integers:
        return reasons.INTEGERS(what, f"{bound:.3g}", target, target.exact_integers)
    return None


def of_aval(aval: Any) -> Fact:
    """What a value's dtype says of it."""
    return of_dtype(getattr(aval, "dtype", None))


@functools.cache
def of_dtype(dtype: Any) -> Fact:
    """What a dtype says of a value; None is that of no array."""
    if dtype == np.bool_:
        return _BOOL
    if dtype is not None and jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return Fact(float(info.min), float(info.max), integer=True)
    return ANY


_LARGE = 1 << 20
_known: dict[int, tuple[weakref.ref[Any], Fact]] = {}


def of_array(value: Any) -> Fact:
    """The fact of a constant. Large device arrays are reduced on their device, once per buffer.

    A constant that is a tracer of an outer transform is unknown.
    """
    if isinstance(value, jax.core.Tracer) or not hasattr(value, "dtype"):
        is_number = isinstance(value, (int, float, bool))
        return _of_scalar(np.result_type(value), value) if is_number else ANY
    if not _is_real(value.dtype):
        return ANY
    size = np.size(value)
    if size == 1:
        return _of_scalar(value.dtype, np.asarray(value).item())
    if size < _LARGE:
        return _of_numpy(np.asarray(value))
    key = id(value)
    held = _known.get(key)
    if held is not None and held[0]() is value:
        return held[1]
    fact = _of_large(value)
    # weak, so that no buffer lives longer for having been looked at
    _known[key] = (weakref.ref(value, lambda _: _known.pop(key, None)), fact)
    return fact


@functools.cache
def _is_real(dtype: Any) -> bool:
    is_number = jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_
    return bool(is_number and not jnp.issubdtype(dtype, jnp.complexfloating))


@functools.lru_cache(maxsize=4096)
def _of_scalar(dtype: Any, value: Any) -> Fact:
    return _of_numpy(np.asarray(value, dtype))


def _of_numpy(value: np.ndarray[Any, Any]) -> Fact:
    wide = value.astype(np.float64)
    wide = wide[~np.isnan(wide)]
    if wide.size == 0:
        return Fact(0.0, 0.0, constant=True)
    magnitudes = np.abs(wide[np.isfinite(wide) & (wide != 0)])
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    # a lone 1000.0 is a scale, not a count; a whole table of integers is positions
    whole = value.size > 1 and bool((wide == np.rint(wide)).all())
    return Fact(
        float(wide.min()),
        float(wide.max()),
        float(magnitudes.min(initial=math.inf)) if magnitudes.size else 0.0,
        whole or not is_float,
        constant=True,
        reaches=float(magnitudes.max(initial=0.0)),
    )


def _of_large(value: Any) -> Fact:
    def reduce(x: Any) -> Any:
        x = x.astype(jnp.float32)
        number = ~jnp.isnan(x)
        magnitude = jnp.where(jnp.isfinite(x) & (x != 0), jnp.abs(x), jnp.nan)
        low, high = jnp.where(number, x, jnp.inf), jnp.where(number, x, -jnp.inf)
        whole = jnp.all(jnp.where(number, x == jnp.round(x), True))
        return low.min(), high.max(), jnp.nanmin(magnitude), jnp.nanmax(magnitude), whole

    # compiled ahead of time: a plain call would be staged into the trace around it
    with jax.numpy_dtype_promotion("standard"):
        reduced = jax.jit(reduce).lower(jax.ShapeDtypeStruct(value.shape, value.dtype)).compile()
    lo, hi, tiny, reaches, whole = (float(x) for x in reduced(value))
    if lo > hi:
        return Fact(0.0, 0.0, constant=True)
    tiny, reaches = (0.0 if math.isnan(x) else x for x in (tiny, reaches))
    return Fact(lo, hi, tiny, bool(whole), constant=True, reaches=reaches)
