"""Gradients of scaled losses, and steps that are skipped if a gradient overflows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precpass.numerics.loss_scale.scale import LossScale
from precpass.numerics.loss_scale.trees import is_inexact, unscaled, wide

__all__ = ["Axes", "all_finite", "scaled_value_and_grad", "skip_nonfinite"]

Axes = str | tuple[str, ...] | None
Tree = Any
P = ParamSpec("P")


def scaled_value_and_grad(
    fn: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    axis_name: Axes = None,
) -> Callable[Concatenate[LossScale, P], tuple[Any, Any, jax.Array]]:
    """Like `jax.value_and_grad`, with the loss scaled; `fn`'s in-place updates take effect.

    Args:
        fn: returns the loss, a real floating scalar, or with `has_aux` a pair of it and anything.
            As under `jax.grad`, a flax nnx module among its arguments is a tree, which the loss
            cannot update: pass the state (`nnx.split`) and return what changes.
        argnums: as for `jax.value_and_grad`, counted in the arguments of `fn`.
        has_aux: as for `jax.value_and_grad`.
        axis_name: axes of an enclosing `jax.shard_map` or `jax.vmap` along which all must agree
            whether the gradient is finite. Pass it if each has a gradient of its own.

    Returns:
        `(scale, *args, **kwargs) -> (value, gradient, finite)`. The value is `fn`'s, unscaled, in
        its dtype. The gradient has the tree and the dtypes of `jax.value_and_grad`'s, and is
        divided by the scale that it was computed with. `finite` is a boolean scalar. A loss in
        float16 is multiplied in float32, and its cotangent by no more than float16 can represent.

    Raises:
        TypeError: if `scale` is not a loss scale.

    Examples:
        >>> from precpass.loss_scale import StaticLossScale
        >>> grads_of = scaled_value_and_grad(lambda x: x**2)
        >>> [float(x) for x in grads_of(StaticLossScale(8.0), 3.0)]
        [9.0, 6.0, 1.0]
    """

    def scaled(scale: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        if not isinstance(scale, LossScale):
            raise TypeError(
                f"the first argument is a {type(scale).__name__}, and is to be a loss scale of "
                "precpass.loss_scale: NoOpLossScale(), StaticLossScale(...), DynamicLossScale(...)"
            )

        def scaled_loss(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            result = fn(*args, **kwargs)
            loss, aux = result if has_aux else (result, None)
            if not _is_loss(loss):
                raise TypeError(
                    f"{getattr(fn, '__name__', fn)} returned {_shown(loss)}, and a loss is a real "
                    "floating scalar" + ("" if has_aux else " (has_aux=True takes a pair)")
                )
            used = _usable(scale.value, jnp.result_type(loss))
            larger = jnp.asarray(loss, wide(loss))
            return larger * used.astype(larger.dtype), (loss, aux, used)

        differentiated = jax.grad(scaled_loss, argnums, has_aux=True)
        gradient, (loss, aux, used) = differentiated(*args, **kwargs)
        gradient = unscaled(gradient, used)
        value = (loss, aux) if has_aux else loss
        return value, gradient, all_finite(gradient, axis_name)

    return scaled


def all_finite(tree: Tree, axis_name: Axes = None) -> jax.Array:
    """Return whether a tree has neither infinities nor NaNs, as a boolean scalar.

    Args:
        tree: a pytree. An empty tree is finite, and so are leaves that are not floating or complex.
        axis_name: axes of an enclosing `jax.shard_map` or `jax.vmap` along which all must agree.

    Examples:
        >>> bool(all_finite({"w": jnp.ones(3), "n": 1})), bool(all_finite([jnp.inf]))
        (True, False)
    """
    leaves = [x for x in jax.tree.leaves(tree) if is_inexact(x)]
    finite = jnp.asarray(True)
    for x in leaves:
        finite = jnp.logical_and(finite, jnp.all(jnp.isfinite(x)))
    if axis_name is not None:
        finite = lax.pmin(finite.astype(jnp.int32), axis_name) > 0
    return finite


def skip_nonfinite(finite: Any, new: Tree, old: Tree) -> Tree:
    """Return the new state if the step is finite, and the old one otherwise.

    Put parameters, the optimizer's state and counters into one tree, so that a step is taken or
    skipped as a whole.

    Args:
        finite: a boolean scalar.
        new: a pytree of arrays and anything else that jit takes as an argument.
        old: a pytree with the same structure, shapes and dtypes.

    Raises:
        ValueError: if the structures differ, or the shape or dtype of a leaf.

    Examples:
        >>> new, old = (jnp.float32(2.0), jnp.int32(5)), (jnp.float32(1.0), jnp.int32(4))
        >>> [x.item() for x in skip_nonfinite(False, new, old)]
        [1.0, 4]
    """

    def chosen(path: Any, ours: Any, theirs: Any) -> Any:
        pair = [(jnp.shape(x), jnp.result_type(x)) for x in (ours, theirs)]
        if pair[0] != pair[1]:
            at = jax.tree_util.keystr(path) or "the state"
            raise ValueError(
                f"skip_nonfinite: {at} is {_shown(ours)} after the step and was {_shown(theirs)}"
            )
        return lax.select(jnp.asarray(finite, bool), jnp.asarray(ours), jnp.asarray(theirs))

    return jax.tree_util.tree_map_with_path(chosen, new, old)


def _is_loss(x: Any) -> bool:
    is_array = isinstance(x, jax.Array | np.ndarray | np.generic | float)
    return is_array and not jnp.shape(x) and jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _usable(scale: Any, dtype: Any) -> jax.Array:
    """The scale, limited to what the cotangent of a loss of this dtype can hold."""
    largest = 2.0 ** (jnp.finfo(dtype).maxexp - 1)
    return jnp.minimum(jnp.asarray(scale, jnp.float32), np.float32(min(largest, 2.0**127)))


def _shown(x: Any) -> str:
    try:
        return f"{jnp.result_type(x)}[{','.join(map(str, jnp.shape(x)))}]"
    except TypeError:
        return f"a {type(x).__name__}"
