"""What JAX's primitives compute on numpy values: the semantics that programs are held against.

Nothing here comes from the package. A sum or product of many float32 terms is taken in float64 and
rounded once, so that it does not depend on the order of its terms; one whose operands are low is
taken in their own format, term by term, so that it loses what such a sum loses. A function
of low elements is computed in float32 and rounded once; all else is JAX's own kernel. Where numpy
knows an operation, nothing is compiled.
"""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from tests.support.jaxprs import LOW

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)

Array = Any
Rule = Callable[..., Any]


def leaf(eqn: Any, args: Sequence[Array]) -> list[Array]:
    """The results of an equation without a body; `args` are numpy arrays and keys."""
    rule = RULES.get(eqn.primitive.name)
    if rule is None or any(isinstance(x, jax.Array) or np.iscomplexobj(x) for x in args):
        return bind(eqn, args)
    out = rule(eqn, *args)
    # numpy makes scalars of arrays without dimensions
    return [np.asarray(x) for x in (out if eqn.primitive.multiple_results else [out])]


def bind(eqn: Any, args: Sequence[Array]) -> list[Array]:
    """The same from JAX itself, by the primitive's kernel."""
    with eqn.ctx.manager:
        given = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in args]
        out = eqn.primitive.bind(*given, **eqn.primitive.get_bind_params(eqn.params))
    return [to_numpy(x) for x in (out if eqn.primitive.multiple_results else [out])]


def to_numpy(x: Any) -> Array:
    """Arrays as numpy's, but for keys."""
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)


def is_float(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and (dtype in LOW or dtype in (F32, F64))


def cast(x: Array, dtype: Any) -> Array:
    """A floating numpy array in another format; anything else as it is."""
    if isinstance(x, np.ndarray) and x.dtype != dtype and is_float(x):
        return x.astype(dtype)
    return x


def retyped(eqn: Any, dtype: Any) -> Any:
    """An equation whose floating values have another dtype."""
    params = dict(eqn.params)
    for name in ("new_dtype", "preferred_element_type", "out_dtype"):
        if params.get(name) is not None:
            params[name] = dtype
    if (combiner := params.get("update_jaxpr")) is not None:
        adds = {"scatter-add": jnp.add, "scatter-mul": jnp.multiply}
        adds |= {"scatter-max": jnp.maximum, "scatter-min": jnp.minimum}
        scalar = np.zeros((), dtype)
        with jax.enable_x64(True):
            new = jax.make_jaxpr(adds[eqn.primitive.name])(scalar, scalar)
        params["update_jaxpr"] = new if hasattr(combiner, "consts") else new.jaxpr

    def as_dtype(v: Any) -> Any:
        aval = jax.core.ShapedArray(v.aval.shape, dtype)
        return SimpleNamespace(aval=aval) if is_float(v.aval) else v

    wide = SimpleNamespace(manager=jax.enable_x64(True))
    return SimpleNamespace(
        primitive=eqn.primitive,
        params=params,
        invars=eqn.invars,
        outvars=[as_dtype(v) for v in eqn.outvars],
        effects=eqn.effects,
        ctx=wide if dtype == F64 else eqn.ctx,
    )


# ---------------------------------------------------------------- rules


def in_float64(eqn: Any, *args: Array) -> Any:
    """By JAX's kernel in float64, and rounded once; low results by way of float32's sums."""
    out = bind(retyped(eqn, F64), [cast(x, F64) for x in args])
    if eqn.outvars[0].aval.dtype in LOW:
        out = [cast(x, F32) for x in out]
    return _one(eqn, [cast(x, v.aval.dtype) for x, v in zip(out, eqn.outvars, strict=True)])


def _one(eqn: Any, out: list[Array]) -> Any:
    return out if eqn.primitive.multiple_results else out[0]


def _bound(eqn: Any, *args: Array) -> Any:
    return _one(eqn, bind(eqn, args))


def accumulated(eqn: Any, *args: Array) -> Any:
    """By JAX's own kernel, in the format that the operands have unless that is float32."""
    return (in_float64 if args[0].dtype == F32 else _bound)(eqn, *args)


def _product(eqn: Any, *args: Array) -> Any:
    return (in_float64 if is_float(eqn.outvars[0].aval) else _bound)(eqn, *args)


def _elementwise(fn: Callable[..., Array]) -> Rule:
    def rule(eqn: Any, *args: Array) -> Array:
        out = fn(*(x.astype(F32) if x.dtype in LOW else x for x in args))
        return np.asarray(out).astype(eqn.outvars[0].aval.dtype)

    return rule


_divide = _elementwise(np.divide)


def _in_float32(eqn: Any, *args: Array) -> Any:
    """By JAX's own kernel; in float32 what is low."""
    low = any(v.aval.dtype in LOW for v in eqn.outvars)
    low |= any(isinstance(x, np.ndarray) and x.dtype in LOW for x in args)
    out = bind(retyped(eqn, F32), [cast(x, F32) for x in args]) if low else bind(eqn, args)
    return _one(eqn, [cast(x, v.aval.dtype) for x, v in zip(out, eqn.outvars, strict=True)])


def _convert(eqn: Any, x: Array) -> Array:
    dtype = eqn.outvars[0].aval.dtype
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    if jnp.issubdtype(dtype, jnp.integer) or is_complex or not is_float(x):
        return bind(eqn, [x])[0]
    return x.astype(dtype)


def _reduced(combine: np.ufunc, start: float) -> Rule:
    """In float64; of low terms after each one in their format."""

    def rule(eqn: Any, x: Array, *_: Array) -> Array:
        axes = tuple(eqn.params["axes"])
        if x.dtype not in LOW:
            wide = x.astype(F64) if x.dtype == F32 else x
            return np.asarray(combine.reduce(wide, axis=axes)).astype(x.dtype)
        kept = [d for d in range(x.ndim) if d not in axes]
        terms = x.transpose(*axes, *kept).reshape(-1, *(x.shape[d] for d in kept))
        out = np.full(terms.shape[1:], start, x.dtype)
        for term in terms:
            out = combine(out.astype(F32), term.astype(F32)).astype(x.dtype)
        return out

    return rule


def _reduce(eqn: Any, x: Array, start: Array) -> list[Array]:
    inner = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])

    def combine(a: Array, b: Array) -> Array:
        env = dict(zip(inner.invars, (a, b), strict=True))
        for e in inner.eqns:
            read = [
                np.asarray(v.val, v.aval.dtype) if hasattr(v, "val") else env[v] for v in e.invars
            ]
            (env[e.outvars[0]],) = leaf(e, read)
        return env[inner.outvars[0]]

    axes = eqn.params["dimensions"]
    kept = [d for d in range(x.ndim) if d not in axes]
    terms = x.transpose(*axes, *kept).reshape(-1, *(x.shape[d] for d in kept))
    return [functools.reduce(combine, terms, np.broadcast_to(start, terms.shape[1:]))]


def _undefined(eqn: Any, *_: Array) -> list[Array]:
    """The tangent of a custom VJP, which JAX refuses to lower unless nobody reads it."""
    return [np.full(v.aval.shape, np.nan, v.aval.dtype) for v in eqn.outvars]


def _select_n(eqn: Any, which: Array, *cases: Array) -> Array:
    out = np.broadcast_to(cases[0], eqn.outvars[0].aval.shape)
    for i, case in enumerate(cases[1:], 1):
        out = np.where(which == i, case, out)
    return out.astype(cases[0].dtype)


def _broadcast_in_dim(eqn: Any, x: Array, *_: Array) -> Array:
    shape, kept = eqn.params["shape"], [1] * len(eqn.params["shape"])
    for size, d in zip(x.shape, eqn.params["broadcast_dimensions"], strict=True):
        kept[d] = size
    return np.broadcast_to(x.reshape(kept), shape)


def _slice(eqn: Any, x: Array) -> Array:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * x.ndim
    return x[tuple(slice(*s) for s in zip(starts, limits, strides, strict=True))]


def _reshaped(eqn: Any, x: Array, *_: Array) -> Array:
    dims = eqn.params.get("dimensions") if eqn.primitive.name == "reshape" else None
    return (x if dims is None else x.transpose(dims)).reshape(eqn.outvars[0].aval.shape)


def _same(eqn: Any, x: Array, *_: Array) -> Array:
    return x


_ELEMENTWISE = {
    **{"neg": np.negative, "abs": np.abs, "sign": np.sign, "square": np.square},
    **{"exp": np.exp, "log": np.log, "log1p": np.log1p, "expm1": np.expm1, "tanh": np.tanh},
    **{"sin": np.sin, "cos": np.cos, "sqrt": np.sqrt, "cbrt": np.cbrt, "atan": np.arctan},
    **{"floor": np.floor, "logistic": scipy.special.expit, "erf": scipy.special.erf},
    **{"rsqrt": lambda x: 1 / np.sqrt(x), "is_finite": np.isfinite, "not": np.invert},
    **{"add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply},
    **{"max": np.maximum, "min": np.minimum, "pow": np.power, "rem": np.fmod, "atan2": np.arctan2},
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal},
    **{"gt": np.greater, "ge": np.greater_equal},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
}
_ACCUMULATING = ("cumsum", "cumprod", "cumlogsumexp", "scatter-add", "scatter-mul")
_ACCUMULATING += ("reduce_window_sum", "select_and_scatter_add")
_SAME = ("copy", "copy_p", "name", "stop_gradient")
_SAME += ("precpass_carrier", "precpass_detach", "precpass_pin")
_IN_FLOAT32 = ("integer_pow", "round", "ceil", "clamp", "exp2", "log2", "erfc", "erf_inv", "tan")
_IN_FLOAT32 += ("acos", "asin", "sinh", "cosh", "acosh", "asinh", "atanh", "lgamma", "digamma")
_IN_FLOAT32 += ("igamma", "igammac", "igamma_grad_a", "random_gamma_grad", "polygamma", "zeta")
_IN_FLOAT32 += ("bessel_i0e", "bessel_i1e", "regularized_incomplete_beta")

RULES: dict[str, Rule] = {
    **{name: _elementwise(fn) for name, fn in _ELEMENTWISE.items()},
    **dict.fromkeys(_IN_FLOAT32, _in_float32),
    **dict.fromkeys(_ACCUMULATING, accumulated),
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(("reshape", "squeeze"), _reshaped),
    **dict.fromkeys(("dot_general", "conv_general_dilated", "ragged_dot_general"), _product),
    "div": lambda eqn, x, y: (_divide if is_float(x) else _bound)(eqn, x, y),
    "convert_element_type": _convert,
    "select_n": _select_n,
    "broadcast_in_dim": _broadcast_in_dim,
    "slice": _slice,
    "transpose": lambda eqn, x: x.transpose(eqn.params["permutation"]),
    "rev": lambda eqn, x: np.flip(x, eqn.params["dimensions"]),
    "concatenate": lambda eqn, *xs: np.concatenate(xs, eqn.params["dimension"]),
    "stack": lambda eqn, *xs: np.stack(xs, eqn.params["axis"]),
    "optimization_barrier": lambda eqn, *xs: list(xs),
    "reduce_sum": _reduced(np.add, 0.0),
    "reduce_prod": _reduced(np.multiply, 1.0),
    "reduce": lambda eqn, *xs: (_reduce if len(xs) == 2 else _bound)(eqn, *xs),
    "custom_lin": _undefined,
}
