"""Loss scaling for float16: gradients that would vanish are computed from a larger loss.

The smallest normal number of float16 is 2^-14, and cotangents are often smaller. So the loss is
multiplied by a scale, and the gradient is divided by it in float32 (Micikevicius et al. 2018,
"Mixed precision training", https://arxiv.org/abs/1710.03740, section 3.2). A scale is a pytree: a
step takes it and returns it, it is saved with the parameters, and there is no other state.

    scale = pp.loss_scale.DynamicLossScale()
    grads_of = pp.loss_scale.scaled_value_and_grad(pp.auto_mixed(loss, policy="AutoMixedF16"))

    @jax.jit
    def step(params, opt_state, scale, batch):
        value, grads, finite = grads_of(scale, params, batch)
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state
        params, opt_state = pp.loss_scale.skip_nonfinite(finite, new, (params, opt_state))
        return params, opt_state, scale.adjusted(finite), value

bfloat16 has the exponents of float32 and does not need loss scaling.

You are warned, once, of a float16 gradient without a scale where the pass can see it. Inside an
`auto_mixed` function it sees the backward pass, and with it whether the loss was multiplied by
anything. Of `jax.grad(auto_mixed(loss))` it only sees that a matrix product is transposed: it
does not warn if the function that `jax.grad` is taken of reads a loss scale (of this module, of
jmp or of flax) from its arguments, its closure or a global.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from precpass.numerics.loss_scale.trees import scaled, unscaled

__all__ = ["DynamicLossScale", "LossScale", "NoOpLossScale", "StaticLossScale"]


@runtime_checkable
class LossScale(Protocol):
    """The interface of loss scales: the factor of the loss, and its value for the next step."""

    @property
    def value(self) -> Any:
        """The scale, a float32 scalar."""
        ...

    def adjusted(self, finite: Any) -> LossScale:
        """Return the scale of the next step.

        Args:
            finite: a boolean scalar, whether this step's gradient is finite.
        """
        ...


def _pytree(cls: type[Any]) -> type[Any]:
    """Registers a dataclass, whose static fields are a part of the structure.

    Only the constructor validates: JAX or a user may put anything in the place of a leaf (0 in
    `in_axes`, a tracer).
    """
    fields = dataclasses.fields(cls)
    data = [f.name for f in fields if not f.metadata.get("static")]
    meta = [f.name for f in fields if f.metadata.get("static")]

    def flatten(scale: Any) -> tuple[Any, Any]:
        keys = [(jax.tree_util.GetAttrKey(name), getattr(scale, name)) for name in data]
        return keys, tuple(getattr(scale, name) for name in meta)

    def unflatten(static: Any, leaves: Any) -> Any:
        scale = object.__new__(cls)
        for name, value in zip((*data, *meta), (*leaves, *static), strict=True):
            object.__setattr__(scale, name, value)
        return scale

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls


Tree = TypeVar("Tree")


class _Scale:
    """The base of loss scales: it has jmp's names."""

    value: Any

    def scale(self, tree: Tree) -> Tree:
        """Multiply a tree, such as a loss, by the scale; each leaf keeps its dtype.

        A float16 loss overflows above 65504, which `scaled_value_and_grad` avoids.
        """
        return scaled(tree, self.value)

    def unscale(self, tree: Tree) -> Tree:
        """Divide a tree, such as a gradient, by the scale in float32; each leaf keeps its dtype.

        Examples:
            >>> loss_scale = DynamicLossScale(8.0)
            >>> float(loss_scale.scale(2.0)), loss_scale.unscale(jnp.float16(16.0))
            (16.0, Array(2., dtype=float16))
        """
        return unscaled(tree, self.value)

    def adjust(self, finite: Any) -> Any:
        """Return the scale of the next step, like `adjusted`; this is jmp's name."""
        return self.adjusted(finite)

    def adjusted(self, finite: Any) -> Any:
        """Return the scale of the next step, given whether this step's gradient is finite."""
        raise NotImplementedError


@_pytree
@dataclasses.dataclass(frozen=True)
class NoOpLossScale(_Scale):
    """No loss scaling, for programs in bfloat16 or float32: a pytree without leaves.

    Examples:
        >>> NoOpLossScale().value
        1.0
    """

    @property
    def value(self) -> float:
        """One."""
        return 1.0

    def adjusted(self, finite: Any) -> NoOpLossScale:
        """Return the same scale."""
        return self


@_pytree
@dataclasses.dataclass(frozen=True)
class StaticLossScale(_Scale):
    """A loss scale that does not change.

    Attributes:
        value: the scale, a positive finite scalar.

    Examples:
        >>> float(StaticLossScale(1024.0).adjusted(False).value)
        1024.0
    """

    value: Any = 2.0**12

    def __post_init__(self) -> None:
        _checked(self)

    def adjusted(self, finite: Any) -> StaticLossScale:
        """Return the same scale."""
        return self


@_pytree
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(_Scale):
    """A loss scale that shrinks when the gradient overflows, and grows after many finite steps.

    The defaults and the steps are those of torch.amp.GradScaler (torch 2,
    https://docs.pytorch.org/docs/stable/amp.html), the ceiling is that of NVIDIA's apex
    (`max_loss_scale`). flax's `DynamicScale` has no ceiling and ends at infinity
    (google/flax#2547); a floor of one is too high where the gradient itself overflows
    (tensorflow/tensorflow#38357).

    Attributes:
        value: the scale, a float32 scalar.
        steps: finite steps since it last changed, an int32 scalar.
        growth: the factor after `interval` finite steps.
        backoff: the factor after a step that is not finite.
        interval: the number of finite steps in a row after which it grows.
        floor: its smallest value.
        ceiling: its largest value.

    Raises:
        ValueError: for a growth of less than one, a backoff that is not between zero and one, an
            interval of less than one, or a scale that is not between a positive floor and a finite
            ceiling.

    Examples:
        >>> scale = DynamicLossScale(interval=2)
        >>> [float(s.value) for s in (scale.adjusted(False), scale.adjusted(True).adjusted(True))]
        [32768.0, 131072.0]
    """

    value: Any = 2.0**16
    steps: Any = 0
    growth: float = dataclasses.field(default=2.0, metadata={"static": True})
    backoff: float = dataclasses.field(default=0.5, metadata={"static": True})
    interval: int = dataclasses.field(default=2000, metadata={"static": True})
    floor: float = dataclasses.field(default=2.0**-24, metadata={"static": True})
    ceiling: float = dataclasses.field(default=2.0**24, metadata={"static": True})

    def __post_init__(self) -> None:
        name = "DynamicLossScale"
        if not 1.0 <= self.growth < math.inf:
            raise ValueError(f"{name}(growth={self.growth!r}): it is to be finite, 1 or more")
        if not 0.0 < self.backoff <= 1.0:
            raise ValueError(f"{name}(backoff={self.backoff!r}): it is to be in (0, 1]")
        if not (self.interval >= 1 and self.interval % 1 == 0):
            raise ValueError(f"{name}(interval={self.interval!r}): it is to be a whole number >= 1")
        if not 0.0 < self.floor <= self.ceiling < math.inf:
            bounds = f"floor={self.floor!r}, ceiling={self.ceiling!r}"
            raise ValueError(f"{name}({bounds}): it takes 0 < floor <= ceiling < inf")
        _checked(self, self.floor, self.ceiling)

    def adjusted(self, finite: Any) -> DynamicLossScale:
        """Return the scale of the next step.

        Args:
            finite: a boolean scalar, whether this step's gradient is finite.
        """
        value, steps = jnp.asarray(self.value, jnp.float32), jnp.asarray(self.steps, jnp.int32) + 1
        grows = steps >= self.interval
        after = jnp.where(grows, value * self.growth, value)
        value = jnp.where(finite, after, value * self.backoff)
        steps = jnp.where(jnp.logical_and(finite, ~grows), steps, 0)
        value = jnp.clip(value, self.floor, self.ceiling)
        return dataclasses.replace(self, value=value, steps=steps)


def _checked(scale: Any, low: float = 0.0, high: float = math.inf) -> None:
    """Checks the bounds of a scale whose value is known, and converts numbers to arrays.

    Otherwise a step that is given Python's numbers would be compiled again for the arrays that it
    returns. orbax takes arrays alone, and no scalars of NumPy, as what a checkpoint is restored to.
    """
    value, owner = scale.value, type(scale).__name__
    if isinstance(value, int | float | np.number):
        if not (math.isfinite(value) and value > 0.0 and low <= value <= high):
            legal = f"from {low} to {high}" if low else "positive and finite"
            raise ValueError(f"{owner}(value={value!r}): it is to be {legal}")
        object.__setattr__(scale, "value", np.asarray(value, np.float32))
    if isinstance(getattr(scale, "steps", None), int):
        object.__setattr__(scale, "steps", np.asarray(scale.steps, np.int32))
