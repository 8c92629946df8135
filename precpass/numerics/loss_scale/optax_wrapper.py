"""Loss scaling as a wrapper around an optax optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from precpass.numerics.loss_scale.gradients import Axes, all_finite, skip_nonfinite
from precpass.numerics.loss_scale.scale import DynamicLossScale, LossScale
from precpass.numerics.loss_scale.trees import unscaled

if TYPE_CHECKING:
    import optax

__all__ = ["ScaledState", "scaled_optimizer"]


class ScaledState(NamedTuple):
    """The state of an optimizer of gradients of scaled losses.

    Attributes:
        scale: the scale of the next loss.
        inner: the optimizer's own state.
        skipped: the number of skipped steps, an int32 scalar.
    """

    scale: Any
    inner: Any
    skipped: Any


def scaled_optimizer(
    optimizer: optax.GradientTransformation,
    scale: LossScale | None = None,
    *,
    axis_name: Axes = None,
) -> optax.GradientTransformationExtraArgs:
    """An optax optimizer that takes gradients of a scaled loss, and skips steps that overflow.

    If a gradient is not finite, the updates are zeros, and of the state only the scale and the
    number of skipped steps change.

    Args:
        optimizer: an optax optimizer.
        scale: the first scale; `DynamicLossScale()` by default.
        axis_name: as for `precpass.all_finite`.

    Raises:
        ModuleNotFoundError: if optax is not installed.

    Examples:
        >>> import optax
        >>> optimizer = scaled_optimizer(optax.sgd(1.0), DynamicLossScale(8.0))
        >>> state = optimizer.init(jnp.float32(3.0))
        >>> gradient = jax.grad(lambda x: x**2 * state.scale.value)(jnp.float32(3.0))
        >>> updates, state = optimizer.update(gradient, state)
        >>> float(gradient), float(updates)
        (48.0, -6.0)
    """
    import optax

    first = DynamicLossScale() if scale is None else scale
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> ScaledState:
        arrays = jax.tree.map(jnp.asarray, first)
        return ScaledState(arrays, inner.init(params), jnp.zeros((), jnp.int32))

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, ScaledState]:
        gradient = unscaled(updates, state.scale.value)
        finite = all_finite(gradient, axis_name)
        new, after = inner.update(gradient, state.inner, params, **extra)
        nothing = jax.tree.map(jnp.zeros_like, new)
        new, after = skip_nonfinite(finite, (new, after), (nothing, state.inner))
        skipped = jnp.where(finite, state.skipped, state.skipped + 1)
        return new, ScaledState(state.scale.adjusted(finite), after, skipped)

    return optax.GradientTransformationExtraArgs(init, update)
