"""What the models of the benchmark have in common."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

SIZES = ("small", "medium", "target", "large")
"""For a test, for a CPU, for the compiler of a device that is not there, for a GPU."""

BF16, F32 = jnp.bfloat16, jnp.float32

Forward = Callable[[Any, Any, Any], tuple[Any, Any]]
Loss = Callable[[Any, Any, Any], tuple[jax.Array, Any]]


def reverse(loss: Loss) -> Callable[..., Any]:
    """`((loss, state), gradient)` by reverse mode, as nearly every program differentiates."""
    return jax.value_and_grad(loss, has_aux=True)


@dataclass(frozen=True)
class Model:
    """A model written twice, and what training it takes.

    Attributes:
        name: its name in the tables.
        params: its float32 parameters.
        state: what a step updates without a gradient, such as the statistics of a BatchNorm.
        batches: the data of all steps, arrays with a leading axis of steps.
        forward: (params, state, batch) -> (outputs, state), in plain float32.
        by_hand: the same in bfloat16.
        readout: (outputs, batch) -> the loss, which every column takes in float32.
        optimizer: of optax.
        differentiate: makes of a loss `((loss, state), gradient)`.
    """

    name: str
    params: Any
    state: Any
    batches: Any
    forward: Forward
    by_hand: Forward
    readout: Callable[[Any, Any], jax.Array]
    optimizer: optax.GradientTransformation
    differentiate: Callable[[Loss], Callable[..., Any]] = reverse

    def batch(self, step: int) -> Any:
        """The data of one step; they begin again when they are over."""
        return jax.tree.map(lambda x: x[step % len(x)], self.batches)

    def loss(self, forward: Forward) -> Loss:
        """The loss of one of the two forward passes, or of what was made of one."""

        def loss(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
            outputs, state = forward(params, state, batch)
            return self.readout(outputs, batch), state

        return loss


def low(tree: Any) -> Any:
    """The cast of a whole step: what is floating, in bfloat16."""
    return jax.tree.map(lambda x: x.astype(BF16) if jnp.issubdtype(x.dtype, F32) else x, tree)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean negative log-likelihood, in nats."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(F32), labels)
    return losses.mean()


class Weights:
    """Draws initial weights, the same in every run."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def __call__(self, *shape: int, scale: float | None = None) -> jax.Array:
        """Normal numbers; without a scale, as wide as keeps a dense layer's results as wide."""
        spread = shape[-2] ** -0.5 if scale is None else scale
        return jnp.asarray(spread * self._rng.standard_normal(shape), F32)


@cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 pixels from 0 to 1, and their labels."""
    # the file that load_digits reads: importing scikit-learn for it would take seconds
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the digits are scikit-learn's: pip install scikit-learn")
    rows = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    return (rows[:, :-1] / 16.0).astype(np.float32), rows[:, -1].astype(np.int32)


def digit_batches(batch: int, steps: int = 32) -> dict[str, jax.Array]:
    """Random digits, the same in every run: `[steps, batch, 64]` pixels and their labels."""
    images, labels = digits()
    rows = np.random.default_rng(0).integers(len(images), size=(steps, batch))
    return {"images": jnp.asarray(images[rows]), "labels": jnp.asarray(labels[rows])}


def classified(outputs: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """The loss of logits for the digits."""
    return cross_entropy(outputs, batch["labels"])


adam = partial(optax.adam, 1e-3)
