"""Loss scaling, for gradients in float16: scales, scaled gradients and scaled optimizers.

The smallest normal number of float16 is 2^-14, and cotangents are often smaller. So the loss is
multiplied by a scale, and the gradient is divided by it in float32 (Micikevicius et al. 2018,
"Mixed precision training", https://arxiv.org/abs/1710.03740, section 3.2). A scale is a pytree: a
step takes it and returns it, it is saved with the parameters, and there is no other state.
`docs/pages/how-to/float16.md` has such a step. bfloat16 has the exponents of float32 and does not
need loss scaling.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeVar,
    runtime_checkable,
)

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precpass.policy.policy import cast_leaves
from precpass.policy.precision import Precision
from precpass.units import a_value

if TYPE_CHECKING:
    import optax

__all__ = [
    "DynamicLossScale",
    "LossScale",
    "MasterState",
    "NoOpLossScale",
    "ScaledState",
    "StaticLossScale",
    "all_finite",
    "master_copies",
    "scaled_optimizer",
    "scaled_value_and_grad",
    "skip_nonfinite",
]

Axes = str | tuple[str, ...] | None
Tree = TypeVar("Tree")
P = ParamSpec("P")


# ---------------------------------------------------------------- scales


@runtime_checkable
class LossScale(Protocol):
    """The interface of loss scales: the factor of the loss, and its value for the next step."""

    @property
    def value(self) -> Any:
        """The scale, a float32 scalar."""
        ...

    def adjusted(self, finite: Any) -> LossScale:
        """Return the scale of the next step, given whether this step's gradient is finite."""
        ...


def _pytree(cls: type[Any]) -> type[Any]:
    """Registers a dataclass, whose fields are static but for `value` and `steps`.

    Only the constructor validates: JAX or a user may put anything in the place of a leaf (0 in
    `in_axes`, a tracer).
    """
    names = [field.name for field in dataclasses.fields(cls)]
    data = [name for name in names if name in ("value", "steps")]
    static = [name for name in names if name not in data]

    def flatten(scale: Any) -> tuple[Any, Any]:
        keys = [(jax.tree_util.GetAttrKey(name), getattr(scale, name)) for name in data]
        return keys, tuple(getattr(scale, name) for name in static)

    def unflatten(others: Any, leaves: Any) -> Any:
        scale = object.__new__(cls)
        vars(scale).update(zip((*data, *static), (*leaves, *others), strict=True))
        return scale

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls


class _Scale:
    """The base of loss scales: it does not change, and has jmp's names."""

    value: Any = 1.0

    def scale(self, tree: Tree) -> Tree:
        """Multiply a tree, such as a loss, by the scale; each leaf keeps its dtype.

        A float16 loss overflows above 65504, which `scaled_value_and_grad` avoids.
        """
        return _mapped(operator.mul, tree, self.value)

    def unscale(self, tree: Tree) -> Tree:
        """Divide a tree, such as a gradient, by the scale in float32; each leaf keeps its dtype.

        Examples:
            >>> loss_scale = DynamicLossScale(8.0)
            >>> float(loss_scale.scale(2.0)), loss_scale.unscale(jnp.float16(16.0))
            (16.0, Array(2., dtype=float16))
        """
        return _unscaled(tree, self.value)

    def adjust(self, finite: Any) -> Any:
        """Return the scale of the next step, like `adjusted`; this is jmp's name."""
        return self.adjusted(finite)

    def adjusted(self, finite: Any) -> Any:
        """Return the scale of the next step, given whether this step's gradient is finite."""
        return self


@_pytree
@dataclasses.dataclass(frozen=True)
class NoOpLossScale(_Scale):
    """No loss scaling, for programs in bfloat16 or float32: a pytree without leaves.

    Examples:
        >>> NoOpLossScale().value
        1.0
    """


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
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    floor: float = 2.0**-24
    ceiling: float = 2.0**24

    def __post_init__(self) -> None:
        options = f"growth={self.growth!r}, backoff={self.backoff!r}, interval={self.interval!r}"
        is_whole = self.interval >= 1 and self.interval % 1 == 0
        if not (1 <= self.growth < math.inf and 0 < self.backoff <= 1 and is_whole):
            legal = "1 <= growth < inf, 0 < backoff <= 1, and a whole interval >= 1"
            raise ValueError(f"DynamicLossScale({options}): it takes {legal}")
        if not 0 < self.floor <= self.ceiling < math.inf:
            bounds = f"floor={self.floor!r}, ceiling={self.ceiling!r}"
            raise ValueError(f"DynamicLossScale({bounds}): it takes 0 < floor <= ceiling < inf")
        _checked(self, self.floor, self.ceiling)

    def adjusted(self, finite: Any) -> DynamicLossScale:
        """Return the scale of the next step, given whether this step's gradient is finite."""
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


def _mapped(operation: Callable[[Any, Any], Any], tree: Tree, scale: Any) -> Tree:
    """The inexact leaves of a tree with a scale, in float32 at least and back in their dtypes."""

    def applied(x: Any) -> Any:
        if not _is_inexact(x):
            return x
        wide = jnp.asarray(x, _wide(x))
        factor = jnp.asarray(scale, jnp.finfo(wide.dtype).dtype)
        return operation(wide, factor).astype(jnp.result_type(x))

    return jax.tree.map(applied, tree)


def _unscaled(gradient: Tree, scale: Any) -> Tree:
    # A reciprocal of 2^127 would be subnormal, which processors take for zero.
    return _mapped(operator.truediv, gradient, scale)


def _wide(x: Any) -> Any:
    dtype = jnp.result_type(x)
    return dtype if jnp.finfo(dtype).bits >= 32 else np.dtype(np.float32)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


# ---------------------------------------------------------------- gradients


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
                f"the first argument is {a_value(scale)}, and is to be a loss scale of "
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
            larger = jnp.asarray(loss, _wide(loss))
            return larger * used.astype(larger.dtype), (loss, aux, used)

        differentiated = jax.grad(scaled_loss, argnums, has_aux=True)
        gradient, (loss, aux, used) = differentiated(*args, **kwargs)
        gradient = _unscaled(gradient, used)
        value = (loss, aux) if has_aux else loss
        return value, gradient, all_finite(gradient, axis_name)

    return scaled


def all_finite(tree: Any, axis_name: Axes = None) -> jax.Array:
    """Return whether a tree has neither infinities nor NaNs, as a boolean scalar.

    Args:
        tree: a pytree. An empty tree is finite, and so are leaves that are not floating or complex.
        axis_name: axes of an enclosing `jax.shard_map` or `jax.vmap` along which all must agree.

    Examples:
        >>> bool(all_finite({"w": jnp.ones(3), "n": 1})), bool(all_finite([jnp.inf]))
        (True, False)
    """
    finite = jnp.asarray(True)
    for x in filter(_is_inexact, jax.tree.leaves(tree)):
        finite &= jnp.all(jnp.isfinite(x))
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
        return a_value(x)


# ---------------------------------------------------------------- optimizers


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
    optax, inner = _optax(optimizer, "scaled_optimizer")
    first = DynamicLossScale() if scale is None else scale

    def init(params: Any) -> ScaledState:
        arrays = jax.tree.map(jnp.asarray, first)
        return ScaledState(arrays, inner.init(params), jnp.zeros((), jnp.int32))

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, ScaledState]:
        gradient = _unscaled(updates, state.scale.value)
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
    optax, wrapped = _optax(optimizer, "master_copies")

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
        return jax.tree.map(operator.sub, master, stored), MasterState(master, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _optax(optimizer: Any, caller: str) -> tuple[Any, Any]:
    """The module, and the optimizer with support for extra arguments."""
    try:
        import optax  # optax is optional
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{caller} needs {error.name}: pip install optax", name=error.name
        ) from error
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        name = getattr(optimizer, "__name__", repr(optimizer))
        hint = f": call it, {name}(...)" if callable(optimizer) else ", such as optax.adam(1e-3)"
        raise TypeError(f"{caller} takes an optax optimizer, not {name}{hint}")
    return optax, optax.with_extra_args_support(optimizer)
