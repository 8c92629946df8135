"""The errors of results against a reference, which is the function in float64 or float32."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
from jax.experimental import multihost_utils

from precpass import jaxpr as ir
from precpass.jit.arguments import Declared, copied, dynamic_leaves, unwrapped
from precpass.jit.nnx import has_nodes
from precpass.jit.region import current, use_policy
from precpass.jit.traced import rewritten
from precpass.planner.planner import make_plan
from precpass.policy.precision import FORMATS, Precision
from precpass.policy.presets import AlwaysF32
from precpass.policy.scopes import keep_scope
from precpass.policy.warned import quietly

__all__ = [
    "Errors",
    "Leaf",
    "Written",
    "as_written",
    "error_of",
    "errors_of",
    "evaluated",
    "fetched",
    "leaves_of",
    "normwise",
    "on_arrays",
    "ulp",
]

Array = npt.NDArray[Any]

# ---------------------------------------------------------------- figures


@dataclasses.dataclass(frozen=True)
class Errors:
    """The errors of floating-point results against a reference.

    With d the difference of all elements and r the reference, as vectors over the elements that are
    finite in the reference:

    Attributes:
        relative: |d| / |r| in the 2-norm. If r is zero it is 0 if d is zero too, else inf.
        max_ulp: the largest |d_i| in units in the last place: the spacing at r_i in the format of
            the unchanged function's result. It is at most 2 / eps of that format (1.7e7 in
            float32), where no digit is right; a larger figure would only say how small r_i is.
        sqnr: 20 log10(|r| / |d|), the ratio of signal to quantization noise in dB; inf if d is
            zero.
        cosine: the cosine of the angle between the result and r; 1 if both are zero, 0 if one is.
        nonfinite: the number of elements that are not finite although the reference's are. If there
            are any, `relative` and `max_ulp` are inf, `sqnr` is -inf and `cosine` nan.
        differing: the number of integers, booleans and keys that differ.

    The first four are None if the reference has no finite floating elements. An element at which
    the reference overflows the output's format counts as not finite there. Complex numbers count
    as pairs.
    """

    relative: float | None
    max_ulp: float | None
    sqnr: float | None
    cosine: float | None
    nonfinite: int
    differing: int


class Leaf(NamedTuple):
    """One array of the results: its path in the tree, its value, and its format in `fn`."""

    path: str
    value: Any
    dtype: Any


def ulp(x: Array, dtype: Any) -> Array:
    """The unit in the last place of a floating format at each number, as float64.

    It is the distance from |x| to the next larger number of the format where x is one
    (Goldberg 1991, https://doi.org/10.1145/103162.103163); below the smallest normal number
    it is that of the subnormal ones.

    Examples:
        >>> ulp(np.asarray([1.0, 3.0]), jnp.bfloat16)
        array([0.0078125, 0.015625 ])
    """
    facts = ml_dtypes.finfo(dtype)
    normal = np.maximum(np.abs(np.asarray(x, np.float64)), float(facts.smallest_normal))
    # the bits of the exponent alone are the power of two below, and `frexp` takes far longer
    power = (normal.view(np.int64) & np.int64(0x7FF0000000000000)).view(np.float64)
    return power * float(facts.eps)


def error_of(results: Sequence[Leaf], reference: Sequence[Leaf]) -> Errors:
    """The errors of all leaves together, in the formats that the reference's leaves name."""
    return errors_of(results, reference)[0]


def errors_of(results: Sequence[Leaf], reference: Sequence[Leaf]) -> tuple[Errors, list[Errors]]:
    """The errors of all leaves together, and those of each."""
    each = [_sums(got, want) for got, want in zip(results, reference, strict=True)]
    return _together(each), [_together([sums]) for sums in each]


def normwise(found: Leaf, reference: Leaf) -> float:
    """`|y - r| / |r|` in 2-norms; inf if elements that are not finite differ."""
    y, r = found.value, reference.value
    same = (y == r) | (np.isnan(y) & np.isnan(r))
    if not (same | np.isfinite(r)).all():
        return math.inf
    return error_of([found], [reference]).relative or 0.0


class _Sums(NamedTuple):
    """The sums from which the errors of a leaf, or of several, are computed.

    Squares are taken of numbers divided by `scale`, a power of two, so that those of large and of
    small numbers stay in float64's range.
    """

    nonfinite: int = 0
    differing: int = 0
    max_ulp: float = 0.0
    scale: float = 1.0
    # |d|^2, |r|^2, |x|^2 and the product of x and r; None if there is nothing to compare with.
    squares: Array | None = None


def _sums(got: Leaf, want: Leaf) -> _Sums:
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        return _Sums(differing=int(np.count_nonzero(got.value != want.value)))
    is_complex = jnp.issubdtype(want.dtype, jnp.complexfloating)
    parts = np.zeros((), want.dtype).real.dtype if is_complex else want.dtype
    x, r = _float64(np.asarray(got.value)), _float64(np.asarray(want.value))
    with np.errstate(over="ignore"):
        finite = np.isfinite(r.astype(parts, copy=False))
    if not finite.all():
        x, r = x[finite], r[finite]
    nonfinite = x.size - int(np.count_nonzero(np.isfinite(x)))
    if nonfinite or not r.size:
        return _Sums(nonfinite)
    with np.errstate(over="ignore"):
        d = x - r
        in_ulps = float((np.abs(d) / ulp(r, parts)).max())
    max_ulp = min(in_ulps, 2 / float(ml_dtypes.finfo(parts).eps))
    scale = 2.0 ** (math.frexp(max(x.max(), -x.min(), r.max(), -r.min()))[1] - 1)
    x, r = x / scale, r / scale
    d = x - r
    squares = np.asarray([np.vdot(d, d), np.vdot(r, r), np.vdot(x, x), np.vdot(x, r)])
    return _Sums(0, 0, max_ulp, scale, squares)


def _together(each: Sequence[_Sums]) -> Errors:
    nonfinite, differing = sum(s.nonfinite for s in each), sum(s.differing for s in each)
    if nonfinite:
        return Errors(math.inf, math.inf, -math.inf, math.nan, nonfinite, differing)
    floats = [(s.scale, s.squares) for s in each if s.squares is not None]
    if not floats:
        # there is nothing finite to compare with
        return Errors(None, None, None, None, 0, differing)
    scale = max(leaf_scale for leaf_scale, _ in floats)
    d2, r2, x2, dot = np.sum(
        [(leaf_scale / scale) ** 2 * squares for leaf_scale, squares in floats], 0
    ).tolist()
    relative = math.sqrt(d2 / r2) if r2 else (math.inf if d2 else 0.0)
    sqnr = math.inf if not d2 else (10 * math.log10(r2 / d2) if r2 else -math.inf)
    if x2 and r2:
        cosine = max(-1.0, min(1.0, dot / math.sqrt(x2) / math.sqrt(r2)))
    else:
        cosine = float(x2 == r2)
    return Errors(relative, max(s.max_ulp for s in each), sqnr, cosine, 0, differing)


def _float64(x: Array) -> Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = np.stack([np.real(x), np.imag(x)])
    return x.astype(np.float64, copy=False).ravel()


def fetched(x: Any) -> Array:
    """An array on the host, whole in each process; for keys their data."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return multihost_utils.process_allgather(x, tiled=True)
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
    leaves: list[Leaf] = []

    def collect(tree: Any, name: str) -> None:
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
            if isinstance(x, _ARRAYS) and getattr(x, "dtype", None) != jax.dtypes.float0:
                dtype = jax.dtypes.result_type(x) if isinstance(x, _NUMBERS) else x.dtype
                leaves.append(Leaf(f"{name}{jax.tree_util.keystr(path)}", x, dtype))

    collect(out, "output")
    declared.map(lambda x, name: collect(x, name) if has_nodes(x) else None, args, kwargs)
    return leaves


_NUMBERS = (bool, int, float, complex)
_ARRAYS = (jax.Array, np.ndarray, np.generic, *_NUMBERS)


def on_arrays(
    fn: Callable[..., Any], declared: Declared, name: str, args: Any, kwargs: Any
) -> tuple[Callable[..., list[Any]], list[Any], list[Leaf]]:
    """A function as a function of the arrays among its arguments, which returns arrays.

    Static leaves are closed over.

    Args:
        fn: the function.
        declared: its static arguments.
        name: the user's name for it.
        args: the positional arguments.
        kwargs: the others.

    Returns:
        The function, its operands, and a list of the leaves of its results, which is filled when
        the function is traced.
    """
    operands, put = dynamic_leaves(declared, name, args, kwargs, keeps_numbers=False)
    result_leaves: list[Leaf] = []

    def call(*xs: Any) -> list[Any]:
        args, kwargs = declared.map(lambda x, _: unwrapped(x), *put(xs), static=unwrapped)
        leaves = leaves_of(declared, fn(*args, **kwargs), args, kwargs)
        result_leaves[:] = [
            leaf._replace(value=None) for leaf in leaves
        ]  # tracers end with their trace
        return [leaf.value for leaf in leaves]

    call.__name__ = name
    return call, operands, result_leaves


@dataclasses.dataclass(frozen=True, eq=False)
class Written:
    """A function at some arguments, traced with the pass switched off.

    Attributes:
        jaxpr: its jaxpr, in which inner `auto_mixed` functions are unchanged too.
        operands: the arrays among the arguments.
        results: a leaf per result, whose value is its aval.
    """

    jaxpr: ir.Jaxpr
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
    call, operands, leaves = on_arrays(fn, declared, name, args, kwargs)
    with use_policy(None):
        jaxpr = ir.trace(call, *operands)
    avals = ir.out_avals(jaxpr)
    results = [leaf._replace(value=a) for leaf, a in zip(leaves, avals, strict=True)]
    return Written(jaxpr, operands, results)


def evaluated(written: Written, precision: Precision) -> list[Leaf]:
    """The results of a function evaluated in float64, whether or not x64 is on, or in float32.

    The traced program runs with its equations and operands widened and its casts to lower
    formats left out. A second trace with x64 on would draw other random numbers, and keep
    the float32 that the code spells out. As in a `keep("f64")` region, samplers' bits,
    references (`jax.new_ref`) and what opaque primitives compute stay as they are, and so do
    formats that are no `Precision`, such as float8.

    Args:
        written: its trace.
        precision: F64 or F32, in which float64 values stay float64.

    Raises:
        RuntimeError: if the evaluation fails; for float64 the text names the alternative.
    """
    widest = precision is Precision.F64
    scope = keep_scope(precision) if widest else ""
    border = tuple((p, precision) for p in FORMATS if p.is_narrower_than(precision))
    try:
        with jax.enable_x64(True) if widest else contextlib.nullcontext(), quietly():
            plan = make_plan(written.jaxpr, AlwaysF32, scope, border=border)
            wide, _ = rewritten(written.jaxpr, plan, current(), AlwaysF32, scope)
            # A Python number is first rounded as the program reads it.
            read = zip(written.operands, ir.in_avals(written.jaxpr), strict=True)
            arrays = [x if hasattr(x, "dtype") else np.asarray(x, a.dtype) for x, a in read]
            arrays = copied(arrays, arrays=False)

            def whole(*xs: Any) -> list[Any]:
                pairs = zip(xs, ir.in_avals(wide), strict=True)
                own = [x if x.dtype == a.dtype else x.astype(a.dtype) for x, a in pairs]
                return ir.evaluate(wide, own)

            values = jax.jit(whole)(*arrays)
    except Exception as error:
        first = str(error).partition(chr(10))[0]
        other = ": compare with reference='f32', which evaluates it in float32" if widest else ""
        raise RuntimeError(
            f"the function could not be evaluated in {precision.dtype} for the reference "
            f"({type(error).__name__}: {first}){other}"
        ) from error
    named = zip(written.results, values, strict=True)
    return [leaf._replace(value=fetched(x)) for leaf, x in named]
