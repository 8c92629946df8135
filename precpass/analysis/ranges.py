"""`ValueRange`: what is known of one value's elements, and how it is found for a constant."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from precpass.jaxpr.weak import WeakIdMap

__all__ = [
    "ANY",
    "FINEST_STEP",
    "LARGE_RATIO",
    "ValueRange",
    "is_readable",
    "of_array",
    "of_aval",
    "of_dtype",
]


class ValueRange(NamedTuple):
    """What is known of a value's elements.

    Attributes:
        lo, hi: bounds of the finite elements.
        likely_max: the magnitude of a constant that was selected into the value or added to it,
            so that an element may well be as large; 0 if there is none.
        magnitude: the magnitude of a constant's multiple, or of a sum, in which an unknown factor
            or term counts as 1; 0 for any other value.
        likely_min_nonzero: the smallest known nonzero magnitude that an element may well have: of
            a constant, or the lower bound in `x + eps` and `max(x, eps)`; 0 if there is none.
        integer: whether every element is an integer.
        constant: whether the elements themselves are known.
        random: whether it is made from random bits and constants only.
        step: the step of a grid, such as 0.5 for `i + 0.5`, if the elements are integers that were
            shifted or scaled; 0 if no such grid is known, if it is finer than `FINEST_STEP`, and
            for integers themselves.
        uneven: whether it is a constant whose largest elements are far above most others
            (`LARGE_RATIO`): where they cancel in a sum, it has few of their digits.
    """

    lo: float = -math.inf
    hi: float = math.inf
    likely_min_nonzero: float = 0.0
    integer: bool = False
    constant: bool = False
    random: bool = False
    likely_max: float = 0.0
    magnitude: float = 0.0
    step: float = 0.0
    uneven: bool = False

    @property
    def grid(self) -> float:
        """The step of the grid that all elements are on, 1 for integers; 0 if none is known."""
        return 1.0 if self.integer else self.step

    @property
    def overall_magnitude(self) -> float:
        """The magnitude of the value as a whole; 0 if it is unknown."""
        return self.likely_max if self.constant else self.magnitude


FINEST_STEP = 0.125
"""Coordinates between 0 and 1 are on a grid too, and lose nothing that their readers would miss."""
LARGE_RATIO = 2.0**12
"""Weights of a network stay below this ratio of the largest magnitude to the median one."""
ANY = ValueRange()
_BOOL = ValueRange(0.0, 1.0, integer=True)


def of_aval(aval: Any) -> ValueRange:
    """The range that a value's dtype implies."""
    return of_dtype(getattr(aval, "dtype", None))


@functools.cache
def of_dtype(dtype: Any) -> ValueRange:
    """The range that a dtype implies; None is the dtype of a value that is no array."""
    if dtype == np.bool_:
        return _BOOL
    if dtype is not None and jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return ValueRange(float(info.min), float(info.max), integer=True)
    return ANY


# ---------------------------------------------------------------- constants

_LARGE_ARRAY = 1 << 20
"""The accelerator reduces arrays of at least this many elements; for fewer no compilation pays."""
# It is weak, so that it keeps no buffer alive.
_known = WeakIdMap[ValueRange]()


def is_readable(value: Any) -> bool:
    """Whether a constant's elements can be read.

    They cannot if the constant is a tracer of an outer transform, if a part of it is on another
    process's devices, if each device holds one term of a sum, or if it was donated.
    """
    if isinstance(value, jax.core.Tracer):
        return False
    if not isinstance(value, jax.Array):
        return isinstance(jax.typeof(value), jax.core.ShapedArray)  # no value of hijax
    spec = getattr(value.sharding, "spec", None)
    return (
        value.is_fully_addressable
        and not value.is_deleted()
        and not getattr(spec, "unreduced", None)
    )


def of_array(value: Any) -> ValueRange:
    """The range of a constant; ANY if its elements cannot be read.

    An array on an accelerator is reduced there, once in its life.
    """
    if isinstance(value, (int, float, bool)):  # a number in a literal has its dtype
        return _of_scalar(getattr(value, "dtype", np.result_type(value)), value)
    # a reference is no array: what it holds may change
    if not (hasattr(value, "__array__") and is_readable(value) and is_real(value.dtype)):
        return ANY
    if not isinstance(value, jax.Array):
        array = np.asarray(value)  # its owner may still change it, so it is not cached
        return _of_scalar(array.dtype, array.item()) if array.size == 1 else _of_parts([array])
    if (known := _known.get(value)) is not None:
        return known
    with jax.transfer_guard("allow"):
        if value.size == 1:
            return _of_scalar(value.dtype, np.asarray(value).item())
        parts = [shard.data for shard in value.addressable_shards if shard.replica_id == 0]
        return _known.setdefault(value, _of_parts(parts))


@functools.cache
def is_real(dtype: Any) -> bool:
    """Whether a dtype is that of real or whole numbers, or of booleans."""
    is_number = jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_
    return bool(is_number and not jnp.issubdtype(dtype, jnp.complexfloating))


@functools.lru_cache(maxsize=4096)
def _of_scalar(dtype: Any, value: Any) -> ValueRange:
    return _of_parts([np.asarray(value, dtype)])


class _Summary(NamedTuple):
    """A summary of a part of a constant's elements, without its NaNs.

    Attributes:
        lo, hi: the bounds; NaN if there is no number.
        likely_min_nonzero: the smallest magnitude that is neither zero nor infinite; 0 if there
            is none.
        likely_max: the largest magnitude that is not infinite; 0 if there is none.
        step: the largest of `_STEPS` that all are multiples of, but for those that are infinite; 0
            if there is none.
    """

    lo: float
    hi: float
    likely_min_nonzero: float
    likely_max: float
    step: float

    def joined(self, other: _Summary) -> _Summary:
        """The summary of both parts."""
        likely_min_nonzero = min(
            self.likely_min_nonzero or math.inf, other.likely_min_nonzero or math.inf
        )
        return _Summary(
            float(np.fmin(self.lo, other.lo)),
            float(np.fmax(self.hi, other.hi)),
            likely_min_nonzero if likely_min_nonzero < math.inf else 0.0,
            max(self.likely_max, other.likely_max),
            min(self.step, other.step),
        )


_STEPS = (1.0, 0.5, 0.25, FINEST_STEP)
_NO_NUMBER = _Summary(math.nan, math.nan, 0.0, 0.0, 1.0)


def _of_parts(parts: Sequence[Any]) -> ValueRange:
    """The range of a constant that is given as parts, which together hold all of its elements."""
    size, is_float = sum(part.size for part in parts), False
    summary_of_all = _NO_NUMBER
    for part in parts:
        is_float = jnp.issubdtype(part.dtype, jnp.floating)
        on_host = part.size < _LARGE_ARRAY or _is_host_memory(part)
        summary = _on_host(np.asarray(part)) if on_host else _on_device(part)
        summary_of_all = summary_of_all.joined(summary)
    if math.isnan(summary_of_all.lo):
        return ValueRange(0.0, 0.0, constant=True)
    lo, hi, likely_min_nonzero, likely_max, step = summary_of_all
    # A lone 1000.0 is a scale and no count; a table of whole numbers holds positions.
    is_table = size > 1
    return ValueRange(
        lo,
        hi,
        likely_min_nonzero,
        (step == 1.0 and is_table) or not is_float,
        constant=True,
        likely_max=likely_max,
        step=step if step < 1.0 and is_table else 0.0,
        uneven=is_table and size <= _LONGEST_TABLE and _is_uneven(parts, likely_max),
    )


_LONGEST_TABLE = 1 << 16
"""A table of larger size holds weights."""


def _is_uneven(parts: Sequence[Any], likely_max: float) -> bool:
    """Whether the largest magnitude of some arrays is far above the median one that is not zero."""
    magnitudes = np.abs(np.concatenate([np.asarray(p, np.float64).ravel() for p in parts]))
    magnitudes = magnitudes[magnitudes > 0]
    return magnitudes.size > 0 and bool(likely_max > LARGE_RATIO * np.median(magnitudes))


def _is_host_memory(part: Any) -> bool:
    """Whether NumPy sees the elements of an array on one device without a copy."""
    if not isinstance(part, jax.Array):
        return True
    (device,) = part.devices()
    return device.platform == "cpu" or "host" in str(part.sharding.memory_kind)


_CHUNK = 1 << 16
"""This many elements stay in a core's cache while they are read several times."""


def _on_host(values: np.ndarray[Any, Any]) -> _Summary:
    values = values.ravel(order="K")
    summary_of_all = _NO_NUMBER
    for start in range(0, values.size, _CHUNK):
        summary_of_all = summary_of_all.joined(_of_chunk(values[start : start + _CHUNK]))
    return summary_of_all


def _of_chunk(values: np.ndarray[Any, Any]) -> _Summary:
    if values.dtype not in (np.float32, np.float64):
        is_short = jnp.issubdtype(values.dtype, jnp.floating) and values.dtype.itemsize < 4
        values = values.astype(np.float32 if is_short else np.float64)
    magnitudes = np.abs(values)
    if not np.isfinite(magnitudes.max()):
        values = values[~np.isnan(values)]
        if values.size == 0:
            return _NO_NUMBER
        magnitudes = magnitudes[np.isfinite(magnitudes)]
    likely_min_nonzero = likely_max = 0.0
    if magnitudes.size:
        # the order of positive numbers is that of their bits; with 1 subtracted, zero's wrap
        # around to the largest, and with 1 added to the smallest, back to zero
        bits = magnitudes.view(f"u{magnitudes.dtype.itemsize}")
        smallest = np.subtract(bits, 1).min(keepdims=True) + bits.dtype.type(1)
        likely_min_nonzero, likely_max = (
            float(smallest.view(magnitudes.dtype)[0]),
            float(magnitudes.max()),
        )
    step = next((step for step in _STEPS if _is_on_grid(values, step)), 0.0)
    return _Summary(float(values.min()), float(values.max()), likely_min_nonzero, likely_max, step)


def _is_on_grid(values: np.ndarray[Any, Any], step: float) -> bool:
    # Few arrays are on a grid, and the first elements of the others show it.
    return all(
        bool((part == np.rint(part / step) * step).all()) for part in (values[:16], values[16:])
    )


def _on_device(part: Any) -> _Summary:
    # A new thread is under no trace and no mesh of the user's. Settings that hold for all threads
    # are overridden by name.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(_reduced_undisturbed, part).result()


def _reduced_undisturbed(part: Any) -> _Summary:
    with contextlib.ExitStack() as stack:
        for setting in (
            jax.disable_jit(False),
            jax.debug_nans(False),
            jax.debug_infs(False),
            jax.transfer_guard("allow"),
            jax.numpy_dtype_promotion("standard"),
            # With x64 off, JAX would narrow 64-bit elements.
            jax.enable_x64(part.dtype.itemsize == 8),
        ):
            stack.enter_context(setting)
        return _Summary(*(x.item() for x in jax.device_get(_reduced(part))))


@jax.jit
def _reduced(x: Any) -> tuple[Any, ...]:
    """The fields of a `_Summary`."""
    if not (jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize >= 4):
        x = x.astype(jnp.float32)
    number, finite, overall_magnitude = ~jnp.isnan(x), jnp.isfinite(x), jnp.abs(x)
    likely_min_nonzero = jnp.min(overall_magnitude, where=finite & (x != 0), initial=jnp.inf)
    return (
        jnp.where(number.any(), jnp.min(x, where=number, initial=jnp.inf), jnp.nan),
        jnp.where(number.any(), jnp.max(x, where=number, initial=-jnp.inf), jnp.nan),
        jnp.where(likely_min_nonzero < jnp.inf, likely_min_nonzero, 0),
        jnp.max(overall_magnitude, where=finite, initial=0),
        jnp.max(jnp.stack([s * jnp.all(x == jnp.round(x / s) * s, where=number) for s in _STEPS])),
    )
