"""Train a flax linen classifier of handwritten digits in bfloat16: python flax_linen.py FOLDER.

Saves a checkpoint after each epoch, and continues from the last one if you run it again.
"""

import functools
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training import train_state
from sklearn.datasets import load_digits

import precpass as pp

EPOCHS, BATCH, ACCUMULATE, DECAY = 10, 128, 2, 0.9


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(32, (3, 3))(x)
        x = nn.relu(nn.BatchNorm(momentum=0.9, use_running_average=not train)(x))
        x = nn.avg_pool(x, (2, 2), strides=(2, 2)).reshape(len(x), -1)
        x = nn.Dropout(0.2, deterministic=not train)(nn.relu(nn.Dense(128)(x)))
        return nn.Dense(10)(x)


class TrainState(train_state.TrainState):
    batch_stats: Any
    average: Any  # a moving average of the parameters
    key: jax.Array


def create(steps):
    model = Classifier()
    variables = model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)), train=False)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, steps // 10, steps)
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)),
        batch_stats=variables["batch_stats"],
        average=jax.tree.map(jnp.copy, variables["params"]),
        key=jax.random.key_data(jax.random.key(1)),
    )


# The old state is donated: XLA writes the new one in its place.
@functools.partial(pp.auto_mixed, donate_argnums=0)
def train_step(state, x, y):
    """One update, from the mean of the gradients of ACCUMULATE parts of the batch."""
    keys = jax.random.split(
        jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step), ACCUMULATE
    )

    def loss(params, batch_stats, key, x, y):
        logits, changed = state.apply_fn(
            {"params": params, "batch_stats": batch_stats},
            x,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": key},
        )
        value = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return value, changed["batch_stats"]

    def add(carry, part):
        batch_stats, total, gradients = carry
        (value, batch_stats), gradient = jax.value_and_grad(loss, has_aux=True)(
            state.params, batch_stats, *part
        )
        return (batch_stats, total + value, jax.tree.map(jnp.add, gradients, gradient)), None

    zeros = jax.tree.map(jnp.zeros_like, state.params)
    parts = keys, *(a.reshape(ACCUMULATE, -1, *a.shape[1:]) for a in (x, y))
    (batch_stats, total, gradients), _ = jax.lax.scan(add, (state.batch_stats, 0.0, zeros), parts)
    state = state.apply_gradients(
        grads=jax.tree.map(lambda g: g / ACCUMULATE, gradients), batch_stats=batch_stats
    )
    average = optax.incremental_update(state.params, state.average, 1 - DECAY)
    return state.replace(average=average), total / ACCUMULATE


@pp.auto_mixed
def eval_step(state, x, y):
    variables = {"params": state.average, "batch_stats": state.batch_stats}
    return (state.apply_fn(variables, x, train=False).argmax(axis=1) == y).mean()


def data():
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    is_test = np.arange(len(images)) % 5 == 0
    return (images[~is_test], digits.target[~is_test]), (images[is_test], digits.target[is_test])


def main(folder, epochs=EPOCHS):
    (x, y), test = data()
    per_epoch = len(x) // BATCH
    state = create(EPOCHS * per_epoch)
    with ocp.CheckpointManager(Path(folder).absolute()) as checkpoints:
        done = checkpoints.latest_step() or 0
        if done:
            state = checkpoints.restore(done, args=ocp.args.StandardRestore(state))
        for epoch in range(done, epochs):
            order = np.random.default_rng(epoch).permutation(len(x))
            for i in range(per_epoch):
                batch = order[i * BATCH : (i + 1) * BATCH]
                state, value = train_step(state, x[batch], y[batch])
            accuracy = float(eval_step(state, *test))
            print(f"epoch {epoch + 1}: loss {value:.4f}, {accuracy:.1%} of the test set right")
            checkpoints.save(epoch + 1, args=ocp.args.StandardSave(state))
    return float(eval_step(state, *test))


if __name__ == "__main__":
    assert main(sys.argv[1]) > 0.95
