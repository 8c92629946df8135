"""Train a flax nnx classifier of handwritten digits in bfloat16: python flax_nnx.py FOLDER.

Saves a checkpoint after each epoch, and continues from the last one if you run it again.
"""

import functools
import sys
from pathlib import Path

import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from sklearn.datasets import load_digits

import precpass as pp

EPOCHS, BATCH, ACCUMULATE, DECAY = 10, 64, 2, 0.95


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.hidden = nnx.Linear(16 * 32, 128, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        x = nnx.avg_pool(x, (2, 2), strides=(2, 2)).reshape(len(x), -1)
        return self.head(self.dropout(nnx.relu(self.hidden(x))))


def create(steps):
    """The model, a moving average of it, and the optimizer."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)
    update = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    update = optax.MultiSteps(update, every_k_schedule=ACCUMULATE)  # sums gradients in float32
    # Not `nnx.clone`: its arrays would be those of the model, and can be donated only once.
    model, average = (Classifier(nnx.Rngs(params=0, dropout=1)) for _ in range(2))
    return model, average, nnx.Optimizer(model, update, wrt=nnx.Param)


# The old arrays of the modules are donated: XLA writes the new ones in their place.
@functools.partial(pp.auto_mixed, donate_argnums=(0, 1, 2))
def train_step(model, average, optimizer, x, y):
    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    value, gradient = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradient)
    new = nnx.state(model, nnx.Param)
    old = nnx.state(average, nnx.Param)
    nnx.update(average, optax.incremental_update(new, old, 1 - DECAY))
    nnx.update(average, nnx.state(model, nnx.BatchStat))
    return value


@pp.auto_mixed
def eval_step(model, x, y):
    return (model(x).argmax(axis=1) == y).mean()


def evaluate(model, x, y):
    return float(eval_step(nnx.view(model, deterministic=True, use_running_average=True), x, y))


def data():
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    is_test = np.arange(len(images)) % 5 == 0
    return (images[~is_test], digits.target[~is_test]), (images[is_test], digits.target[is_test])


def main(folder, epochs=EPOCHS):
    (x, y), test = data()
    per_epoch = len(x) // BATCH
    modules = create(EPOCHS * per_epoch // ACCUMULATE)
    with ocp.CheckpointManager(Path(folder).absolute()) as checkpoints:
        done = checkpoints.latest_step() or 0
        if done:
            saved = ocp.args.StandardRestore(nnx.to_pure_dict(nnx.state(modules)))
            nnx.update(modules, checkpoints.restore(done, args=saved))
        for epoch in range(done, epochs):
            order = np.random.default_rng(epoch).permutation(len(x))
            for i in range(per_epoch):
                batch = order[i * BATCH : (i + 1) * BATCH]
                value = train_step(*modules, x[batch], y[batch])
            accuracy = evaluate(modules[1], *test)
            print(f"epoch {epoch + 1}: loss {value:.4f}, {accuracy:.1%} of the test set right")
            state = nnx.to_pure_dict(nnx.state(modules))
            checkpoints.save(epoch + 1, args=ocp.args.StandardSave(state))
    return evaluate(modules[1], *test)


if __name__ == "__main__":
    assert main(sys.argv[1]) > 0.95
