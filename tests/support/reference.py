"""What JAX's primitives compute, in numpy: the semantics that random programs are held against.

Nothing here comes from the package, and nothing is compiled where numpy knows the
operation. A sum or product of many float32 terms is taken in float64 and rounded once, so
that it does not depend on the order of its terms; one whose operands are low is taken in
their own format, term by term, so that it loses what such a sum loses.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import scipy.special

from tests.support.kernels import F32, F64, LOW, Array, accumulated, bind, dot_general, in_float64

Rule = Callable[..., Array]


def leaf(eqn: Any, args: Sequence[Array]) -> list[Array]:
    """The results of an equation without a body; `args` are numpy arrays and keys."""
    rule = RULES.get(eqn.primitive.name)
    if rule is None or any(isinstance(x, jax.Array) for x in args):
        return bind(eqn, args)
    out = rule(eqn, *args)
    # numpy makes scalars of arrays without dimensions
    return [np.asarray(x) for x in (out if eqn.primitive.multiple_results else [out])]


# ---------------------------------------------------------------- elementwise


def _elementwise(fn: Callable[..., Array]) -> Rule:
    def rule(eqn: Any, *args: Array) -> Array:
        dtype = eqn.outvars[0].aval.dtype
        out = fn(*(x.astype(F32) if x.dtype in LOW else x for x in args))
        return np.asarray(out).astype(dtype)

    return rule


def _int_div(x: Array, y: Array) -> Array:
    if x.dtype.kind == "f":
        return np.divide(x, y)
    zero = y == 0
    quotient = np.where(zero, 0, np.abs(x) // np.where(zero, 1, np.abs(y)))
    return np.where(zero, -1, quotient * np.sign(x) * np.sign(y))


def _logistic(x: Array) -> Array:
    return scipy.special.expit(x)


def _round(eqn: Any, x: Array) -> Array:
    wide = x.astype(F32) if x.dtype in LOW else x
    if int(eqn.params["rounding_method"]) == 1:
        return np.rint(wide).astype(x.dtype)
    return (np.trunc(wide + np.copysign(0.5, wide))).astype(x.dtype)


def _integer_pow(eqn: Any, x: Array) -> Array:
    wide = x.astype(F32) if x.dtype in LOW else x
    power = np.asarray(eqn.params["y"], wide.dtype)
    return np.power(wide, power).astype(x.dtype)


def _clamp(eqn: Any, low: Array, x: Array, high: Array) -> Array:
    return np.minimum(np.maximum(x, low), high).astype(x.dtype)


def _select_n(eqn: Any, which: Array, *cases: Array) -> Array:
    out = np.broadcast_to(cases[0], eqn.outvars[0].aval.shape)
    for i, case in enumerate(cases[1:], 1):
        out = np.where(which == i, case, out)
    return out.astype(cases[0].dtype)


def _convert(eqn: Any, x: Array) -> Array:
    dtype = eqn.outvars[0].aval.dtype
    if jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(x.dtype, jnp.floating):
        info = np.iinfo(dtype)
        wide = np.nan_to_num(np.trunc(x.astype(F64)), nan=0.0)
        clipped = np.where(wide >= info.max, info.max, np.clip(wide, info.min, info.max - 1.0))
        exact = np.abs(wide) < 2.0**53
        return np.where(exact, np.clip(wide, info.min, info.max), clipped).astype(dtype)
    if np.issubdtype(x.dtype, np.complexfloating) and not jnp.issubdtype(
        dtype, jnp.complexfloating
    ):
        x = x.real
    return x.astype(dtype)


def _reduce_precision(eqn: Any, x: Array) -> Array:
    bits = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
    formats = {(5, 10): np.float16, (8, 7): ml_dtypes.bfloat16}
    return x.astype(formats[bits]).astype(x.dtype) if bits in formats else bind(eqn, [x])[0]


# ---------------------------------------------------------------- movement


def _broadcast_in_dim(eqn: Any, x: Array, *_: Array) -> Array:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    kept = [1] * len(shape)
    for size, d in zip(x.shape, dims, strict=True):
        kept[d] = size
    return np.broadcast_to(x.reshape(kept), shape)


def _slice(eqn: Any, x: Array) -> Array:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * x.ndim
    return x[tuple(slice(*s) for s in zip(starts, limits, strides, strict=True))]


def _pad(eqn: Any, x: Array, value: Array) -> Array:
    for axis, (low, high, interior) in enumerate(eqn.params["padding_config"]):
        size = x.shape[axis]
        spread = list(x.shape)
        spread[axis] = max(size + interior * (size - 1), 0)
        out = np.full(spread, value, x.dtype)
        at: list[Any] = [slice(None)] * x.ndim
        at[axis] = slice(None, None, interior + 1)
        out[tuple(at)] = x
        ends = [(0, 0)] * x.ndim
        ends[axis] = (max(low, 0), max(high, 0))
        x = np.pad(out, ends, constant_values=value)
        at[axis] = slice(max(-low, 0), x.shape[axis] - max(-high, 0))
        x = x[tuple(at)]
    return x


def _clamped(starts: Sequence[Array], shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
    return [int(np.clip(int(s), 0, n - k)) for s, n, k in zip(starts, shape, sizes, strict=True)]


def _dynamic_slice(eqn: Any, x: Array, *starts: Array) -> Array:
    sizes = eqn.params["slice_sizes"]
    at = _clamped(starts, x.shape, sizes)
    return x[tuple(slice(s, s + k) for s, k in zip(at, sizes, strict=True))]


def _dynamic_update_slice(eqn: Any, x: Array, update: Array, *starts: Array) -> Array:
    out, at = np.array(x), _clamped(starts, x.shape, update.shape)
    out[tuple(slice(s, s + k) for s, k in zip(at, update.shape, strict=True))] = update
    return out


def _split(eqn: Any, x: Array) -> list[Array]:
    return np.split(x, np.cumsum(eqn.params["sizes"])[:-1], axis=eqn.params["axis"])


def _iota(eqn: Any) -> Array:
    shape, dim = eqn.params["shape"], eqn.params["dimension"]
    kept = [1] * len(shape)
    kept[dim] = shape[dim]
    return np.broadcast_to(np.arange(shape[dim]).reshape(kept), shape).astype(eqn.params["dtype"])


# ---------------------------------------------------------------- accumulation


def _fold(combine: Callable[[Array, Array], Array], x: Array, axes: Any, start: Any) -> Array:
    """Term by term in the format of `x`, which rounds after each."""
    kept = [d for d in range(x.ndim) if d not in axes]
    terms = x.transpose(*axes, *kept).reshape(-1, *(x.shape[d] for d in kept))
    out = np.full(terms.shape[1:], start, x.dtype)
    for term in terms:
        out = combine(out.astype(F32), term.astype(F32)).astype(x.dtype)
    return out


def _reduced(combine: np.ufunc, start: float) -> Rule:
    def rule(eqn: Any, x: Array, *_: Array) -> Array:
        axes = tuple(eqn.params["axes"])
        if x.dtype in LOW:
            return _fold(combine, x, axes, start)
        wide = x.astype(F64) if x.dtype == F32 else x
        return np.asarray(combine.reduce(wide, axis=axes)).astype(x.dtype)

    return rule


def _selected(combine: np.ufunc) -> Rule:
    def rule(eqn: Any, x: Array, *_: Array) -> Array:
        axes = tuple(eqn.params["axes"])
        if 0 in x.shape:
            return bind(eqn, [x])[0]
        wide = x.astype(F32) if x.dtype in LOW else x
        return np.asarray(combine.reduce(wide, axis=axes)).astype(x.dtype)

    return rule


def _position(find: Callable[..., Array]) -> Rule:
    def rule(eqn: Any, x: Array) -> Array:
        (axis,) = eqn.params["axes"]
        if np.isnan(x.astype(F32)).any():
            return bind(eqn, [x])[0]
        return np.asarray(find(x, axis=axis)).astype(eqn.params["index_dtype"])

    return rule


def _cumulated(combine: Any) -> Rule:
    def rule(eqn: Any, x: Array) -> Array:
        axis, back = eqn.params["axis"], eqn.params["reverse"]
        turned = np.moveaxis(np.flip(x, axis) if back else x, axis, 0)
        out = np.array(turned)
        held = turned[:1].astype(F64 if x.dtype == F32 else x.dtype)
        for i in range(1, len(out)):
            term = turned[i : i + 1].astype(held.dtype)
            if x.dtype in LOW:
                held = combine(held.astype(F32), term.astype(F32)).astype(x.dtype)
            else:
                held = combine(held, term)
            out[i : i + 1] = held
        out = np.moveaxis(out, 0, axis)
        return np.flip(out, axis) if back else out

    return rule


def _undefined(eqn: Any, *_: Array) -> list[Array]:
    """The tangent of a custom VJP, which JAX refuses to lower unless nobody reads it."""
    return [np.full(v.aval.shape, np.nan, v.aval.dtype) for v in eqn.outvars]


def _reduce(eqn: Any, x: Array, start: Array) -> list[Array]:
    inner = eqn.params["jaxpr"]
    inner = getattr(inner, "jaxpr", inner)

    def combine(a: Array, b: Array) -> Array:
        env = dict(zip(inner.invars, (a, b), strict=True))
        for e in inner.eqns:
            read = (
                np.asarray(v.val, v.aval.dtype) if hasattr(v, "val") else env[v] for v in e.invars
            )
            (env[e.outvars[0]],) = leaf(e, [*read])
        return env[inner.outvars[0]]

    axes = eqn.params["dimensions"]
    kept = [d for d in range(x.ndim) if d not in axes]
    terms = x.transpose(*axes, *kept).reshape(-1, *(x.shape[d] for d in kept))
    return [functools.reduce(combine, terms, np.broadcast_to(start, terms.shape[1:]))]


_UNARY = {
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "tanh": np.tanh,
    "logistic": _logistic,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "cbrt": np.cbrt,
    "square": np.square,
    "one_minus_square": lambda x: 1 - x * x,
    "floor": np.floor,
    "ceil": np.ceil,
    "erf": scipy.special.erf,
    "erfc": scipy.special.erfc,
    "is_finite": np.isfinite,
    "not": np.invert,
    "real": np.real,
    "imag": np.imag,
    "conj": np.conj,
    "lgamma": scipy.special.gammaln,
    "digamma": scipy.special.digamma,
}
_BINARY = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _int_div,
    "max": np.maximum,
    "min": np.minimum,
    "pow": np.power,
    "atan2": np.arctan2,
    "rem": np.fmod,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}

RULES: dict[str, Rule] = {
    **{name: _elementwise(fn) for name, fn in (_UNARY | _BINARY).items()},
    "round": _round,
    "integer_pow": _integer_pow,
    "clamp": _clamp,
    "select_n": _select_n,
    "convert_element_type": _convert,
    "reduce_precision": _reduce_precision,
    "bitcast_convert_type": lambda eqn, x: bind(eqn, [x])[0],
    "copy": lambda eqn, x: x,
    "copy_p": lambda eqn, x: x,
    "name": lambda eqn, x: x,
    "stop_gradient": lambda eqn, x: x,
    "optimization_barrier": lambda eqn, *xs: list(xs),
    "precpass_carrier": lambda eqn, x, *_: x,
    "precpass_detach": lambda eqn, x: x,
    "precpass_pin": lambda eqn, x: x,
    "reshape": lambda eqn, x, *_: x.reshape(eqn.params["new_sizes"]),
    "squeeze": lambda eqn, x: x.reshape(eqn.outvars[0].aval.shape),
    "expand_dims": lambda eqn, x: x.reshape(eqn.outvars[0].aval.shape),
    "transpose": lambda eqn, x: x.transpose(eqn.params["permutation"]),
    "rev": lambda eqn, x: np.flip(x, eqn.params["dimensions"]),
    "concatenate": lambda eqn, *xs: np.concatenate(xs, eqn.params["dimension"]),
    "stack": lambda eqn, *xs: np.stack(xs, eqn.params["axis"]),
    "broadcast_in_dim": _broadcast_in_dim,
    "slice": _slice,
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "split": _split,
    "iota": _iota,
    "reduce_sum": _reduced(np.add, 0.0),
    "reduce_prod": _reduced(np.multiply, 1.0),
    "reduce_max": _selected(np.maximum),
    "reduce_min": _selected(np.minimum),
    "reduce_and": _selected(np.logical_and),
    "reduce_or": _selected(np.logical_or),
    "argmax": _position(np.argmax),
    "argmin": _position(np.argmin),
    "cumsum": _cumulated(np.add),
    "cumprod": _cumulated(np.multiply),
    "cummax": _cumulated(np.maximum),
    "cummin": _cumulated(np.minimum),
    "cumlogsumexp": _cumulated(np.logaddexp),
    "dot_general": dot_general,
    "conv_general_dilated": in_float64,
    "ragged_dot_general": in_float64,
    "scatter-add": accumulated,
    "scatter-mul": accumulated,
    "reduce_window_sum": accumulated,
    "select_and_scatter_add": accumulated,
    "reduce": _reduce,
    "custom_lin": _undefined,
}
