"""The benchmark's columns: what each makes of a model's forward pass, gradient and train step."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from bench_models import Model
from bench_models.model import Forward

import precpass as pp

MODES = ("forward", "gradient", "step")

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]


def as_is(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


@dataclass(frozen=True)
class Column:
    """One way of running a model.

    Attributes:
        title: the heading of its column.
        forward: the forward pass that it uses of a model.
        inner: what it makes of a function that is then differentiated.
        outer: what it makes of the whole of a mode.
        modes: those in which it is a program of its own.
    """

    title: str
    forward: Callable[[Model], Forward] = lambda model: model.forward
    inner: Transform = as_is
    outer: Transform = as_is
    modes: tuple[str, ...] = MODES

    def program(self, model: Model, mode: str) -> Callable[..., Any]:
        """The function of one mode, to be jitted or made by `auto_mixed`.

        forward: (params, state, batch) -> (outputs, state). gradient: the same arguments -> the
        gradient. step: (params, state, optimizer's state, batch) -> the first three and the loss;
        it donates them.
        """
        forward = self.forward(model)
        if mode == "forward":
            return self.outer(forward)
        differentiated = model.differentiate(self.inner(model.loss(forward)))
        if mode == "gradient":
            return self.outer(lambda *args: differentiated(*args)[1])
        step = partial(train_step, model.optimizer, differentiated)
        jit = jax.jit if self.outer is as_is else self.outer
        return jit(step, donate_argnums=(0, 1, 2))


def train_step(
    optimizer: optax.GradientTransformation,
    differentiated: Callable[..., Any],
    params: Any,
    state: Any,
    opt_state: Any,
    batch: Any,
) -> tuple[Any, Any, Any, jax.Array]:
    (value, state), gradient = differentiated(params, state, batch)
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), state, opt_state, value


mixed = partial(pp.auto_mixed, policy=pp.AutoMixedBf16)
COLUMNS = {
    "float32": Column("float32"),
    "swapped": Column("float32 swapped", outer=partial(pp.auto_mixed, policy=pp.Custom({}))),
    "hand": Column("by hand", forward=lambda model: model.by_hand),
    "grad-auto": Column("grad(auto)", inner=mixed, modes=("gradient", "step")),
    "auto-grad": Column("auto(grad)", outer=mixed),
}
"""Key -> column, in the order of the table. The others are compared with the first."""


def arguments(model: Model, mode: str, batch: int = 0) -> tuple[Any, ...]:
    """What a mode's function takes, with one of the model's batches."""
    if mode != "step":
        return model.params, model.state, model.batch(batch)
    return model.params, model.state, model.optimizer.init(model.params), model.batch(batch)


def copied(args: Any) -> Any:
    """Arguments that a run may overwrite."""
    return jax.tree.map(jnp.copy, args)
