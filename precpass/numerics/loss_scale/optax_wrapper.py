"""Loss scaling, and float32 copies of low parameters, as wrappers around an optax optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from precpass.numerics.loss_scale.gradients import Axes, all_finite, skip_nonfinite
from precpass.numerics.loss_scale.scale import DynamicLossScale, LossScale
from precpass.numerics.loss_scale.trees import unscaled
from precpass.policy.policy import cast_leaves
from precpass.policy.precision import Precision

if TYPE_CHECKING:
    import optax

__all__ = ["MasterState", "ScaledState", "master_copies", "scaled_optimizer"]


class ScaledState(NamedTuple):
    """The optimizer state of `scaled_optimizer`.

    Attributes:
        scale: the scale of the next loss.
        inner: the wrapped optimizer's state.
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
    """Wrap an optax optimizer to take gradients of a scaled loss and skip steps that overflow.

    If a gradient is not finite, the updates are zeros, and only the scale and the number of skipped
    steps change in the state.

    Args:
        optimizer: an optax optimizer.
        scale: the first scale; `DynamicLossScale()` by default.
        axis_name: as for `precpass.loss_scale.all_finite`.

    Raises:
        ModuleNotFoundError: if optax is not installed.
        TypeError: for anything but an optax optimizer, such as `optax.adam` without a rate.

    Examples:
        >>> import optax
        >>> optimizer = scaled_optimizer(optax.sgd(1.0), DynamicLossScale(8.0))
        >>> state = optimizer.init(jnp.float32(3.0))
        >>> gradient = jax.grad(lambda x: x**2 * state.scale.value)(jnp.float32(3.0))
        >>> updates, state = optimizer.update(gradient, state)
        >>> float(gradient), float(updates)
        (48.0, -6.0)
    """
    optax = _optax("scaled_optimizer")
    first = DynamicLossScale() if scale is None else scale
    inner = optax.with_extra_args_support(_checked(optimizer, "scaled_optimizer"))

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


class MasterState(NamedTuple):
    """The optimizer state of `master_copies`.

    Attributes:
        master: the parameters in float32.
        inner: the wrapped optimizer's state, for the float32 parameters.
    """

    master: Any
    inner: Any


def master_copies(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optax optimizer of 16-bit parameters to add its updates up in float32.

    Most updates are smaller than half a unit in the last place of a bfloat16 parameter, and would
    be lost. So the state also has the parameters in float32. An update is the difference, in
    float32, between the new float32 parameters and the 16-bit ones, which `optax.apply_updates`
    rounds once.

    Args:
        optimizer: an optax optimizer; `scaled_optimizer(...)` for gradients of a scaled loss.

    Raises:
        ModuleNotFoundError: if optax is not installed.
        TypeError: for anything but an optax optimizer, such as `optax.adam` without a rate.
        ValueError: of `update`, without the parameters.

    Examples:
        >>> import optax
        >>> optimizer, weight = master_copies(optax.sgd(2.0**-10)), jnp.bfloat16(1.0)
        >>> state = optimizer.init(weight)
        >>> for _ in range(8):  # one step alone is lost to rounding
        ...     updates, state = optimizer.update(jnp.bfloat16(1.0), state, weight)
        ...     weight = (weight.astype(jnp.float32) + updates).astype(jnp.bfloat16)
        >>> float(state.master), float(weight)
        (0.9921875, 0.9921875)
    """
    optax = _optax("master_copies")
    wrapped = optax.with_extra_args_support(_checked(optimizer, "master_copies"))

    def init(params: Any) -> MasterState:
        master = cast_leaves(params, Precision.F32)
        return MasterState(master, wrapped.init(master))

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, MasterState]:
        if params is None:
            raise ValueError("master_copies: give the parameters, update(gradient, state, params)")
        gradient = cast_leaves(updates, Precision.F32)
        steps, inner = wrapped.update(gradient, state.inner, state.master, **extra)
        master = optax.apply_updates(state.master, steps)
        stored = cast_leaves(params, Precision.F32)
        differences = jax.tree.map(lambda new, old: new - old, master, stored)
        return differences, MasterState(master, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _checked(optimizer: Any, taker: str) -> Any:
    if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        return optimizer
    name = getattr(optimizer, "__name__", repr(optimizer))
    hint = f": call it, {name}(...)" if callable(optimizer) else ", such as optax.adam(1e-3)"
    raise TypeError(f"{taker} takes an optax optimizer, not {name}{hint}")


def _optax(caller: str) -> Any:
    try:
        import optax  # optax is optional
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{caller} needs {error.name}: pip install optax", name=error.name
        ) from error
    return optax
