"""The benchmark's columns: what each makes of a model's forward pass, gradient and train step."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax
from bench_models import Model
from bench_models.model import Forward, Loss

import precpass as pp

MODES = ("forward", "gradient", "step")
LOSS_SCALE = 2.0**12

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]


def as_is(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


@dataclass(frozen=True)
class Column:
    """One way of running a model.

    Attributes:
        title: the heading of its column.
        meaning: a line about it.
        forward: the forward pass that it uses of a model.
        inner: what it makes of a function that is then differentiated.
        outer: what it makes of the whole of a mode.
        context: under what it is traced.
        scale: the static factor of the loss in a step.
        modes: those in which it is a program of its own.
        missing: why there is no such program, "" where there is one.
    """

    title: str
    meaning: str
    forward: Callable[[Model], Forward] = lambda model: model.forward
    inner: Transform = as_is
    outer: Transform = as_is
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    scale: float = 1.0
    modes: tuple[str, ...] = MODES
    missing: str = ""

    def program(self, model: Model, mode: str) -> Callable[..., Any]:
        """The function of one mode: that which is jitted, or which `auto_mixed` made.

        forward: (params, state, batch) -> (outputs, state). gradient: the same arguments -> the
        gradient. step: (params, state, optimizer's state, batch) -> the first three and the loss;
        it donates them.
        """
        forward = self.forward(model)
        if mode == "forward":
            return self.outer(forward)
        differentiated = model.differentiate(self.inner(self._scaled(model.loss(forward), mode)))
        if mode == "gradient":
            return self.outer(lambda *args: differentiated(*args)[1])
        step = partial(train_step, model.optimizer, differentiated, self.scale)
        if self.outer is as_is:
            return jax.jit(step, donate_argnums=(0, 1, 2))
        return partial(self.outer, donate_argnums=(0, 1, 2))(step)

    def _scaled(self, loss: Loss, mode: str) -> Loss:
        if mode != "step" or self.scale == 1.0:
            return loss

        def scaled(*args: Any) -> tuple[jax.Array, Any]:
            value, state = loss(*args)
            return value * self.scale, state

        return scaled


def train_step(
    optimizer: optax.GradientTransformation,
    differentiated: Callable[..., Any],
    scale: float,
    params: Any,
    state: Any,
    opt_state: Any,
    batch: Any,
) -> tuple[Any, Any, Any, jax.Array]:
    (value, state), gradient = differentiated(params, state, batch)
    if scale != 1.0:
        value, gradient = jax.tree.map(lambda x: x / scale, (value, gradient))
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), state, opt_state, value


def cast_by_jmp(model: Model) -> Forward:
    """Parameters and batch cast at the entrance, outputs at the exit, as jmp has it."""
    policy = jmp.get_policy("p=f32,c=bf16,o=f32")

    def forward(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        params, batch = policy.cast_to_compute((params, batch))
        return policy.cast_to_output(model.forward(params, state, batch))

    return forward


COLUMNS = {
    "float32": Column("float32", "the model as it is written"),
    "swapped": Column(
        "float32 swapped",
        "float32, operands swapped instead of transposes behind products",
        outer=partial(pp.auto_mixed, policy=pp.Custom({})),
    ),
    "hand": Column(
        "by hand",
        "written in bfloat16 by hand, float32 parameters in the step",
        forward=lambda model: model.by_hand,
    ),
    "jmp": Column("jmp", "cast by jmp, p=f32,c=bf16,o=f32", forward=cast_by_jmp),
    "matmul": Column(
        "BF16_BF16_F32",
        'under jax.default_matmul_precision("BF16_BF16_F32")',
        context=lambda: jax.default_matmul_precision("BF16_BF16_F32"),
    ),
    "grad-auto": Column(
        "grad(auto)",
        "jax.grad(auto_mixed(f)), bfloat16",
        inner=partial(pp.auto_mixed, policy=pp.AutoMixedBf16),
        modes=("gradient", "step"),
    ),
    "auto-grad": Column(
        "auto(grad)",
        "auto_mixed(jax.grad(f)), bfloat16; of the forward pass and of the whole step likewise",
        outer=partial(pp.auto_mixed, policy=pp.AutoMixedBf16),
    ),
    "auto-best": Column(
        "auto(grad), best",
        'as auto(grad), with profitability="best": in the form whose program costs least',
        outer=partial(pp.auto_mixed, policy=pp.AutoMixedBf16, profitability="best"),
    ),
    "float16": Column(
        "auto float16",
        f"auto_mixed(jax.grad(f)), float16; a step with a loss scale of {LOSS_SCALE:.0f}",
        outer=partial(pp.auto_mixed, policy=pp.AutoMixedF16),
        scale=LOSS_SCALE,
    ),
}
"""Key -> column, in the order of the table. The first is what the others are held against."""


def arguments(model: Model, mode: str, batch: int = 0) -> tuple[Any, ...]:
    """What a mode's function takes, with one of the model's batches."""
    if mode != "step":
        return model.params, model.state, model.batch(batch)
    return model.params, model.state, model.optimizer.init(model.params), model.batch(batch)


def copied(args: Any) -> Any:
    """Arguments that a run may overwrite."""
    return jax.tree.map(jnp.copy, args)
