"""JAX's own kernels on numpy values, an equation at a time, and products in float64."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

LOW = frozenset((np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)))
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)

Array = Any


def bind(eqn: Any, args: Sequence[Array]) -> list[Array]:
    """The same from JAX itself, by the primitive's kernel."""
    with eqn.ctx.manager:
        given = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in args]
        out = eqn.primitive.bind(*given, **eqn.primitive.get_bind_params(eqn.params))
    return [to_numpy(x) for x in (out if eqn.primitive.multiple_results else [out])]


def to_numpy(x: Any) -> Array:
    """Arrays as numpy's, but for keys."""
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)


def in_float64(eqn: Any, *args: Array) -> Any:
    """A kernel of JAX's run on float64 operands, its result rounded once."""
    wide = [x.astype(F64) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in args]
    with jax.enable_x64(True):
        params = params_at(eqn, F64)
        out = eqn.primitive.bind(*map(jnp.asarray, wide), **eqn.primitive.get_bind_params(params))
        return rounded(np.asarray(out), eqn.outvars[0].aval.dtype)


def rounded(x: Array, dtype: np.dtype) -> Array:
    """From float64 by way of float32, in which kernels accumulate."""
    return x.astype(F32).astype(dtype) if dtype in LOW else x.astype(dtype)


def params_at(eqn: Any, dtype: np.dtype) -> dict[str, Any]:
    """The params of an equation whose floating values have another dtype."""
    params = dict(eqn.params)
    for name in ("new_dtype", "preferred_element_type", "out_dtype"):
        if params.get(name) is not None:
            params[name] = dtype
    if (combiner := params.get("update_jaxpr")) is not None:
        adds = {"scatter-add": jnp.add, "scatter-mul": jnp.multiply, "scatter-max": jnp.maximum}
        scalar = np.zeros((), dtype)
        new = jax.make_jaxpr(adds[eqn.primitive.name])(scalar, scalar)
        params["update_jaxpr"] = new if hasattr(combiner, "consts") else new.jaxpr
    return params


def accumulated(eqn: Any, *args: Array) -> Any:
    """By JAX's own kernel, in the format that the operands have."""
    return bind(eqn, args)[0] if args[0].dtype in LOW else in_float64(eqn, *args)


def dot_general(eqn: Any, lhs: Array, rhs: Array) -> Array:
    (contracting, batch), dtype = eqn.params["dimension_numbers"], eqn.outvars[0].aval.dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        return bind(eqn, [lhs, rhs])[0]
    names = iter(range(52))
    left = [-1] * lhs.ndim
    right = [-1] * rhs.ndim
    for pairs in (batch, contracting):
        for a, b in zip(*pairs, strict=True):
            left[a] = right[b] = next(names)
    left = [n if n >= 0 else next(names) for n in left]
    right = [n if n >= 0 else next(names) for n in right]
    shared = [left[d] for d in batch[0]]
    summed = [left[d] for d in contracting[0]]
    free = [n for n in left + right if n not in shared and n not in summed]
    out = np.einsum(lhs.astype(F64), left, rhs.astype(F64), right, shared + free)
    return rounded(np.asarray(out), dtype)
