"""How far results are from a reference, and the reference: the function in float64."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from precpass import context
from precpass import jaxpr as ir
from precpass.leaves import Declared, arguments, dynamic_leaves, unwrapped
from precpass.planner import make_plan
from precpass.policy import AlwaysF32, PrecisionWarning
from precpass.precision import Precision
from precpass.program import rewritten
from precpass.rules import keep_scope
from precpass.stateful import has_nodes

__all__ = [
    "Errors",
    "Leaf",
    "Written",
    "as_written",
    "error_of",
    "fetched",
    "in_float64",
    "leaves_of",
    "ulp",
]

Array = npt.NDArray[Any]

# ---------------------------------------------------------------- figures


@dataclasses.dataclass(frozen=True)
class Errors:
    """How far floating results are from a reference.

    With d the difference of all elements and r the reference, as vectors over the
    elements that are finite in the reference:

    Attributes:
        relative: |d| / |r| in the 2-norm. Where r is zero: 0 if d is zero too, else inf.
        max_ulp: the largest |d_i| in units in the last place, each as large as the
            spacing at r_i of the format that the function as written gives.
        sqnr: 20 log10(|r| / |d|), the ratio of signal to quantization noise in dB; inf
            where d is zero.
        cosine: that of the angle between the result and r; 1 where both are zero, 0
            where one is.
        nonfinite: elements that are not finite where the reference is. With any of them
            `relative` and `max_ulp` are inf, `sqnr` is -inf and `cosine` nan.
        differing: elements that are no floating numbers (integers, booleans, keys) and differ.

    The first four are None where the reference has no finite floating elements. An element at
    which the reference overflows the output's format counts as not finite there. Complex
    numbers count as pairs.
    """

    relative: float | None
    max_ulp: float | None
    sqnr: float | None
    cosine: float | None
    nonfinite: int
    differing: int


class Leaf(NamedTuple):
    """One array of the results: its path in their tree, its value, and its format in `fn`."""

    path: str
    value: Any
    dtype: Any


def ulp(x: Array, dtype: Any) -> Array:
    """The unit in the last place of a floating format at each number, as float64.

    It is the distance from |x| to the next larger number of the format where x is one
    (Goldberg 1991, https://doi.org/10.1145/103162.103163); below the smallest normal number
    it is that of the subnormal ones.

    Example:
        >>> ulp(np.asarray([1.0, 3.0]), jnp.bfloat16)
        array([0.0078125, 0.015625 ])
    """
    facts = ml_dtypes.finfo(dtype)
    _, exponent = np.frexp(np.maximum(np.abs(x), float(facts.smallest_normal)))
    return np.ldexp(float(facts.eps), exponent - 1)


def error_of(results: Sequence[Leaf], reference: Sequence[Leaf]) -> Errors:
    """The errors of all leaves together, in the formats that the reference's leaves name."""
    sums = _Sums()
    for got, want in zip(results, reference, strict=True):
        sums.add(got.value, want.value, want.dtype)
    return sums.errors()


class _Sums:
    """Sums over leaves; `scale` keeps the squares of large and small numbers in float64's range."""

    def __init__(self) -> None:
        self.nonfinite = self.differing = 0
        self.parts: list[tuple[Array, Array]] = []
        self.max_ulp = 0.0

    def add(self, got: Any, want: Any, dtype: Any) -> None:
        if not jnp.issubdtype(dtype, jnp.inexact):
            self.differing += int(np.count_nonzero(got != want))
            return
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        parts = np.zeros((), dtype).real.dtype if is_complex else dtype
        x, r = _float64(np.asarray(got)), _float64(np.asarray(want))
        with np.errstate(over="ignore"):
            finite = np.isfinite(r.astype(parts))
        x, r = x[finite], r[finite]
        self.nonfinite += int(np.count_nonzero(~np.isfinite(x)))
        if self.nonfinite or not r.size:
            return
        with np.errstate(over="ignore"):
            units = np.abs(x - r) / ulp(r, parts)
        self.max_ulp = max(self.max_ulp, float(units.max()))
        self.parts.append((x, r))

    def errors(self) -> Errors:
        if not self.parts and not self.nonfinite:
            # there is nothing finite to compare with
            return Errors(None, None, None, None, self.nonfinite, self.differing)
        if self.nonfinite:
            inf = math.inf
            return Errors(inf, inf, -inf, math.nan, self.nonfinite, self.differing)
        scale = max((float(np.abs(a).max()) for pair in self.parts for a in pair), default=0.0)
        scale = scale or 1.0
        scaled = [(x / scale, r / scale) for x, r in self.parts]
        d2 = sum(float(np.vdot(x - r, x - r)) for x, r in scaled)
        r2 = sum(float(np.vdot(r, r)) for _, r in scaled)
        x2 = sum(float(np.vdot(x, x)) for x, _ in scaled)
        dot = sum(float(np.vdot(x, r)) for x, r in scaled)
        relative = math.sqrt(d2 / r2) if r2 else (math.inf if d2 else 0.0)
        sqnr = math.inf if not d2 else (10 * math.log10(r2 / d2) if r2 else -math.inf)
        if x2 and r2:
            cosine = max(-1.0, min(1.0, dot / math.sqrt(x2) / math.sqrt(r2)))
        else:
            cosine = float(x2 == r2)
        return Errors(relative, self.max_ulp, sqnr, cosine, 0, self.differing)


def _float64(x: Array) -> Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = np.stack([np.real(x), np.imag(x)])
    return x.astype(np.float64).ravel()


def fetched(x: Any) -> Array:
    """An array on the host; of keys, their data."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


# ---------------------------------------------------------------- results


def leaves_of(declared: Declared, out: Any, args: Any, kwargs: Any) -> list[Leaf]:
    """The arrays of a call's results, and those of the modules that it was given and updated.

    Args:
        declared: which of the arguments are static.
        out: the results.
        args: the positional arguments.
        kwargs: the others.
    """
    found: list[Leaf] = []

    def collect(tree: Any, name: str) -> None:
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
            if isinstance(x, _ARRAYS) and getattr(x, "dtype", None) != jax.dtypes.float0:
                dtype = jax.dtypes.result_type(x) if isinstance(x, _NUMBERS) else x.dtype
                found.append(Leaf(f"{name}{jax.tree_util.keystr(path)}", x, dtype))

    collect(out, "output")
    declared.map(lambda x, name: collect(x, name) if has_nodes(x) else None, args, kwargs)
    return found


_NUMBERS = (bool, int, float, complex)
_ARRAYS = (jax.Array, np.ndarray, np.generic, *_NUMBERS)


@dataclasses.dataclass(frozen=True, eq=False)
class Written:
    """A function as it is written, at some arguments.

    Attributes:
        jaxpr: its trace, of functions inside that `auto_mixed` made too as they are written.
        operands: the arrays among the arguments.
        results: a leaf per result, whose value is its aval.
    """

    jaxpr: Any
    operands: list[Any]
    results: list[Leaf]


def as_written(
    fn: Callable[..., Any], declared: Declared, name: str, args: Any, kwargs: Any
) -> Written:
    """The trace of a function with the pass switched off.

    Args:
        fn: what `auto_mixed` made of it.
        declared: its static arguments.
        name: the user's name for it.
        args: the positional arguments.
        kwargs: the others.
    """
    wrapped = arguments(declared, name, args, kwargs)
    operands, put = dynamic_leaves(declared, *wrapped, keeps_numbers=False)
    found: list[Leaf] = []

    def call(*xs: Any) -> list[Any]:
        args, kwargs = declared.map(lambda x, _: unwrapped(x), *put(xs))
        found[:] = leaves_of(declared, fn(*args, **kwargs), args, kwargs)
        return [leaf.value for leaf in found]

    with context.use_policy(None):
        jaxpr = ir.trace(call, *operands)
    avals = ir.out_avals(jaxpr)
    results = [leaf._replace(value=a) for leaf, a in zip(found, avals, strict=True)]
    return Written(jaxpr, operands, results)


def in_float64(written: Written) -> list[Leaf]:
    """The results of a function evaluated in float64, whether or not x64 is on.

    What runs is the program as it was traced, its equations and operands widened and
    its casts to lower formats left out, not a second trace with x64 on: that would
    draw other random numbers, and keep the float32 that the code spells out. As in a
    `keep("f64")` region, samplers' bits, complex arithmetic, references (`jax.new_ref`)
    and what opaque primitives compute stay as they are.

    Raises:
        RuntimeError: when that fails; the text names what else there is.
    """
    scope = keep_scope(Precision.F64)
    border = tuple((p, Precision.F64) for p in Precision if p is not Precision.F64)
    try:
        with jax.enable_x64(True), warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecisionWarning)
            plan = make_plan(written.jaxpr, AlwaysF32, scope, border=border)
            wide, _ = rewritten(written.jaxpr, plan, context.current(), AlwaysF32, scope)
            # a Python number first as the program reads it, rounded
            read = zip(written.operands, ir.in_avals(written.jaxpr), strict=True)
            given = [x if hasattr(x, "dtype") else np.asarray(x, a.dtype) for x, a in read]
            pairs = zip(given, ir.in_avals(wide), strict=True)
            operands = [x if x.dtype == a.dtype else x.astype(a.dtype) for x, a in pairs]
            values = jax.jit(lambda *xs: ir.evaluate(wide, xs))(*operands)
    except Exception as error:
        raise RuntimeError(
            "the function could not be evaluated in float64 for the reference "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0]}): compare with "
            "reference='f32', which runs it under AlwaysF32"
        ) from error
    named = zip(written.results, values, strict=True)
    return [leaf._replace(value=fetched(x)) for leaf, x in named]
