"""The primitives that mask derivatives where a result is not chosen.

`masked(x, chosen)` is `x` where it is chosen, and zero elsewhere. `guarded(xs, chosen)` is `xs`,
with derivatives that are masked in this way.

They exist because of `jax.vmap`, under which `jnp.where` would copy what all elements share once
for each element. These primitives leave it shared, and mask it only if no element chooses it. Its
cotangent is a sum over the elements, and one infinity of an element that is not chosen would make
that sum NaN. So where they are differentiated, every element that is not chosen has the values of
one that is, and what a `jax.checkpoint` computes again from these is finite too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from precpass.jaxpr.binding import trace
from precpass.jaxpr.reading import out_avals

__all__ = ["guarded", "masked", "selected"]

# For each dimension of `chosen`, one per vmap around, whether an operand has it too, in front.
Has = tuple[bool, ...]


def selected(chosen: Any, x: Any, otherwise: Any) -> Any:
    """`jnp.where`; a value that devices share stays as it is if they do not choose alike."""
    return jnp.where(chosen, x, otherwise) if _keeps_type(chosen, x) else x


def masked(chosen: Any, x: Any) -> Any:
    """`x`, and zero where it is not chosen; linear in `x`."""
    return _masked_p.bind(x, chosen, has=()) if _keeps_type(chosen, x) else x


def guarded(chosen: Any, xs: Sequence[Any], *, filled: bool) -> list[Any]:
    """`xs`, whose derivatives are masked where they are not chosen.

    Args:
        chosen: a boolean scalar.
        xs: arrays, which may hold integers or keys.
        filled: whether elements of a batch that are not chosen are replaced by a chosen one at
            once, and not only when they are differentiated.
    """
    out = list(xs)
    at = [i for i, x in enumerate(xs) if _keeps_type(chosen, x)]
    masks = _guarded_p.bind(*(xs[i] for i in at), chosen, has=((),) * len(at), filled=filled)
    for i, x in zip(at, masks, strict=True):
        out[i] = x
    return out


def _keeps_type(chosen: Any, x: Any) -> bool:
    return out_avals(trace(lambda: jnp.where(chosen, x, x))) == [jax.typeof(x)]


def _where(x: Any, chosen: Any, has: Has, otherwise: Any) -> jax.Array:
    of_x = jnp.any(chosen, axis=tuple(i for i, of_x in enumerate(has) if not of_x))
    return jnp.where(jnp.expand_dims(of_x, range(of_x.ndim, x.ndim)), x, otherwise)


def _masked(x: Any, chosen: Any, *, has: Has) -> jax.Array:
    return _where(x, chosen, has, 0)


def _guarded(*operands: Any, has: Sequence[Has], filled: bool) -> list[Any]:
    *xs, chosen = operands
    if not (filled and chosen.ndim and chosen.size):
        return xs
    one = jnp.unravel_index(jnp.argmax(chosen), chosen.shape)

    def fill(x: Any, of_x: Has) -> jax.Array:
        at = tuple(i for i, batched in zip(one, of_x, strict=True) if batched)
        return _where(x, chosen, of_x, x[at]) if at else x

    return [fill(x, of_x) for x, of_x in zip(xs, has, strict=True)]


_masked_p = jex.Primitive("precpass_masked")
_masked_p.def_impl(_masked)
_masked_p.def_abstract_eval(lambda x, _chosen, **_params: x)
mlir.register_lowering(_masked_p, mlir.lower_fun(_masked, multiple_results=False))

_guarded_p = jex.Primitive("precpass_guarded")
_guarded_p.multiple_results = True
_guarded_p.def_impl(_guarded)
_guarded_p.def_abstract_eval(lambda *operands, **_params: list(operands[:-1]))
mlir.register_lowering(_guarded_p, mlir.lower_fun(_guarded, multiple_results=True))


def _masked_tangent(tangent: Any, chosen: Any, has: Has) -> Any:
    zero = isinstance(tangent, ad.Zero) or jax.typeof(tangent).dtype == jax.dtypes.float0
    return tangent if zero else _masked_p.bind(tangent, chosen, has=has)


def _masked_jvp(primals: Any, tangents: Any, *, has: Has) -> Any:
    return _masked_p.bind(*primals, has=has), _masked_tangent(tangents[0], primals[1], has)


def _guarded_jvp(primals: Any, tangents: Any, *, has: Any, filled: bool) -> Any:
    del filled
    pairs = zip(tangents[:-1], has, strict=True)
    return (
        _guarded_p.bind(*primals, has=has, filled=True),
        [_masked_tangent(tangent, primals[-1], of_x) for tangent, of_x in pairs],
    )


def _masked_transposed(cotangent: Any, _x: Any, chosen: Any, *, has: Has) -> list[Any]:
    return [_masked_tangent(cotangent, chosen, has), None]


def _moved(x: Any, dim: int | None, has: Has, is_chosen: bool) -> tuple[Any, int | None, Has]:
    """An operand under one more vmap, whose dimension `chosen` may or may not have."""
    place = 0 if is_chosen else sum(has)
    has = (dim is not None, *has) if is_chosen else has
    return (x, None, has) if dim is None else (jnp.moveaxis(x, dim, place), place, has)


def _masked_batched(args: Any, dims: Any, *, has: Has) -> tuple[Any, int | None]:
    x, dim, has = _moved(args[0], dims[0], has, dims[1] is not None)
    return _masked_p.bind(x, _in_front(args[1], dims[1]), has=has), dim


def _guarded_batched(args: Any, dims: Any, *, has: Any, filled: bool) -> tuple[Any, Any]:
    moved = [
        _moved(x, dim, of_x, dims[-1] is not None)
        for x, dim, of_x in zip(args[:-1], dims[:-1], has, strict=True)
    ]
    xs, out_dims, has = zip(*moved, strict=True) if moved else ((), (), ())
    return _guarded_p.bind(*xs, _in_front(args[-1], dims[-1]), has=has, filled=filled), out_dims


def _in_front(chosen: Any, dim: int | None) -> Any:
    return chosen if dim is None else jnp.moveaxis(chosen, dim, 0)


ad.primitive_jvps[_masked_p] = _masked_jvp
ad.primitive_jvps[_guarded_p] = _guarded_jvp
ad.primitive_transposes[_masked_p] = _masked_transposed
batching.primitive_batchers[_masked_p] = _masked_batched
batching.primitive_batchers[_guarded_p] = _guarded_batched
