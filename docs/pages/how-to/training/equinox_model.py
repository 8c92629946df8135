"""Train an equinox classifier of handwritten digits in bfloat16: python equinox_model.py FOLDER.

Saves a checkpoint after each epoch, and continues from the last one if you run it again.
"""

import sys
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits

import precpass as pp

EPOCHS, BATCH, ACCUMULATE, DECAY = 10, 64, 2, 0.95


class Classifier(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    pool: eqx.nn.AvgPool2d
    hidden: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.conv = eqx.nn.Conv2d(1, 32, 3, padding=1, key=k1)
        self.norm = eqx.nn.BatchNorm(32, axis_name="batch", momentum=0.9, mode="batch")
        self.pool = eqx.nn.AvgPool2d(2, stride=2)
        self.hidden = eqx.nn.Linear(16 * 32, 128, key=k2)
        self.dropout = eqx.nn.Dropout(0.2)
        self.head = eqx.nn.Linear(128, 10, key=k3)

    def __call__(self, x, state, key=None):  # one image, (1, 8, 8)
        x, state = self.norm(self.conv(x), state)
        x = self.pool(jax.nn.relu(x)).reshape(-1)
        x = self.dropout(jax.nn.relu(self.hidden(x)), key=key)
        return self.head(x), state


def over_batch(model, state, x, keys):
    mapped = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
    return mapped(x, state, keys)


STEPS = EPOCHS * (1437 // BATCH) // ACCUMULATE  # of 1437 images
schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, STEPS // 10, STEPS)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
optimizer = optax.MultiSteps(optimizer, every_k_schedule=ACCUMULATE)  # sums in float32


def create():
    """The model, a moving average of it, the state of its BatchNorm, and that of the optimizer."""
    model, state = eqx.nn.make_with_state(Classifier)(jax.random.key(0))
    average = jax.tree.map(lambda leaf: leaf.copy() if eqx.is_array(leaf) else leaf, model)
    return model, average, state, optimizer.init(eqx.filter(model, eqx.is_array))


# The old arrays of `training` are donated: XLA writes the new ones in their place.
@eqx.filter_jit(donate="all-except-first")
@pp.auto_mixed
def train_step(batch, training):
    x, y, key = batch
    model, average, state, opt_state = training

    def loss(model):
        logits, changed = over_batch(model, state, x, jax.random.split(key, len(x)))
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), changed

    (value, state), gradient = eqx.filter_value_and_grad(loss, has_aux=True)(model)
    parameters = eqx.filter(model, eqx.is_array)
    updates, opt_state = optimizer.update(gradient, opt_state, parameters)
    model = eqx.apply_updates(model, updates)
    new, old = (eqx.filter(m, eqx.is_array) for m in (model, average))
    average = eqx.combine(optax.incremental_update(new, old, 1 - DECAY), average)
    return (model, average, state, opt_state), value


@eqx.filter_jit
@pp.auto_mixed
def eval_step(model, state, x, y):
    logits, _ = over_batch(eqx.nn.inference_mode(model), state, x, None)
    return (logits.argmax(axis=1) == y).mean()


def data():
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    is_test = np.arange(len(images)) % 5 == 0
    return (images[~is_test], digits.target[~is_test]), (images[is_test], digits.target[is_test])


def main(folder, epochs=EPOCHS):
    (x, y), test = data()
    training = create()
    arrays, static = eqx.partition(training, eqx.is_array)
    with ocp.CheckpointManager(Path(folder).absolute()) as checkpoints:
        done = checkpoints.latest_step() or 0
        if done:
            arrays = checkpoints.restore(done, args=ocp.args.StandardRestore(arrays))
            training = eqx.combine(arrays, static)
        for epoch in range(done, epochs):
            order = np.random.default_rng(epoch).permutation(len(x))
            for i in range(len(x) // BATCH):
                batch = order[i * BATCH : (i + 1) * BATCH]
                key = jax.random.fold_in(jax.random.key(epoch), i)
                training, value = train_step((x[batch], y[batch], key), training)
            _, average, state, _ = training
            accuracy = float(eval_step(average, state, *test))
            print(f"epoch {epoch + 1}: loss {value:.4f}, {accuracy:.1%} of the test set right")
            arrays = eqx.filter(training, eqx.is_array)
            checkpoints.save(epoch + 1, args=ocp.args.StandardSave(arrays))
    _, average, state, _ = training
    return float(eval_step(average, state, *test))


if __name__ == "__main__":
    assert main(sys.argv[1]) > 0.95
