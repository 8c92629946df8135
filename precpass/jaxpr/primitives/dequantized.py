"""Arrays of 8 bits with a scale, and the primitive that makes a float32 array of them.

`dequantized(values, scale)` is `values * scale`. It is a primitive, so that a scaled product which
reads it finds the values of 8 bits; for every other reader it is a multiplication.

The values may be stored with their dimensions in another order than the array's. NVIDIA's
kernels for 8 bits take operands whose contracted dimensions are the last ones in memory (cuBLAS
documentation, "cublasLtMatmul": the TN format). For other operands XLA transposes all values in
every call, which can take longer than the product itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.interpreters import ad, batching, mlir

from precpass.jaxpr.types import Eqn

__all__ = ["QuantizedArray", "dequantized", "dequantized_from"]


@jax.tree_util.register_pytree_with_keys_class
class QuantizedArray:
    """An 8-bit array that stands for a float32 array, `values * scale`, possibly transposed.

    It is a pytree of two arrays, which you can save, shard and put on devices like others. Only a
    function of `auto_mixed` takes it in the place of the float32 array.

    Attributes:
        values: an int8 or float8 array.
        scale: a float32 array: a scalar, or of the same rank as `values`, with size 1 in the
            dimensions along which the scale does not change.
        order: for each of the last dimensions of `values`, which of the last dimensions of the
            float32 array it is; (1, 0) if matrices are stored transposed, () if nothing is.
    """

    __slots__ = ("order", "scale", "values")

    def __init__(self, values: Any, scale: Any, order: Sequence[int] = ()) -> None:
        self.values = values
        self.scale = scale
        self.order = tuple(order)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the float32 array."""
        return tuple(self.values.shape[d] for d in self._dimensions(len(self.values.shape)))

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the float32 array."""
        return np.dtype(np.float32)

    def array(self) -> Any:
        """Return the float32 array.

        Examples:
            >>> QuantizedArray(jnp.array([-127, 64], jnp.int8), jnp.float32(0.5)).array().tolist()
            [-63.5, 32.0]
        """
        array = dequantized(self.values, self.scale)
        return lax.transpose(array, self._dimensions(array.ndim)) if self.order else array

    def _dimensions(self, ndim: int) -> tuple[int, ...]:
        """For each dimension of the float32 array that of `values`."""
        first = ndim - len(self.order)
        return (*range(first), *(first + self.order.index(d) for d in range(len(self.order))))

    def tree_flatten_with_keys(
        self,
    ) -> tuple[tuple[tuple[Any, Any], ...], tuple[int, ...]]:
        """The two arrays, with their names, and the order."""
        keys = jax.tree_util.GetAttrKey("values"), jax.tree_util.GetAttrKey("scale")
        return ((keys[0], self.values), (keys[1], self.scale)), self.order

    @classmethod
    def tree_unflatten(cls, order: tuple[int, ...], children: Any) -> QuantizedArray:
        """The array of its children."""
        values, scale = children
        return cls(values, scale, order)

    def __repr__(self) -> str:
        order = f", {self.order}" if self.order else ""
        return f"QuantizedArray({self.values!r}, {self.scale!r}{order})"


export.register_pytree_node_serialization(
    QuantizedArray,
    serialized_name="precpass.QuantizedArray",
    serialize_auxdata=lambda order: json.dumps(order).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(data)),
)


def dequantized(values: Any, scale: Any) -> Any:
    """The float32 array of an array of 8 bits and its scale.

    Raises:
        ValueError: for a scale of another rank, or of a size that is neither 1 nor the array's.
    """
    sizes, given = jnp.shape(values), jnp.shape(scale)
    fits = len(given) == len(sizes) and all(s in (1, n) for s, n in zip(given, sizes, strict=True))
    if given and not fits:
        raise ValueError(
            f"a QuantizedArray of shape {sizes} has a scale of shape {given}: legal are () and "
            "shapes of the same rank with 1 or the array's size in each dimension"
        )
    return _dequantized_p.bind(values, scale)


def dequantized_from(eqn: Eqn) -> Any:
    """The operands of a `dequantized`: values and scale; None for any other equation."""
    return tuple(eqn.invars) if eqn.primitive is _dequantized_p else None


def _multiplied(values: Any, scale: Any) -> Any:
    wide = lax.convert_element_type(values, np.float32)
    return wide * jnp.broadcast_to(scale, wide.shape)


def _multiplied_in_batches(operands: Any, dims: Any) -> tuple[Any, int]:
    # A batch of scales that are scalars has a rank of its own.
    return jax.vmap(_multiplied, in_axes=dims)(*operands), 0


def _jvp(primals: Any, tangents: Any) -> Any:
    if not isinstance(tangents[0], ad.Zero):
        raise TypeError(
            "the values of a QuantizedArray have 8 bits, and no derivative with respect to them is "
            "of use: take it with respect to float32 arrays"
        )
    out = dequantized(*primals)
    if isinstance(tangents[1], ad.Zero):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, _multiplied(primals[0], tangents[1])


_dequantized_p = jex.Primitive("precpass_dequantized")
_dequantized_p.def_impl(_multiplied)
_dequantized_p.def_abstract_eval(lambda values, _scale: values.update(dtype=np.dtype(np.float32)))
mlir.register_lowering(_dequantized_p, mlir.lower_fun(_multiplied, multiple_results=False))
batching.primitive_batchers[_dequantized_p] = _multiplied_in_batches
ad.primitive_jvps[_dequantized_p] = _jvp
