"""A convolutional network trained on real digits, whose dense layers have 8 bits."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from sklearn.datasets import load_digits

import precpass as pp
from precpass.types import OpKind

pytestmark = pytest.mark.programs
SIZES = (8 * 8 * 32, 256, 256, 10)


def logits(params, images):
    axes = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(
        images[..., None], params["kernel"], (1, 1), "SAME", dimension_numbers=axes
    )
    x = jax.nn.relu(x).reshape(len(images), -1)
    for w in params["dense"][:-1]:
        x = jax.nn.relu(x @ w)
    return x @ params["dense"][-1]


def loss(params, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).mean()


@pytest.fixture(scope="module")
def trained():
    """The parameters after 60 steps in float32, and 640 images that were not seen, with labels."""
    digits = load_digits()
    images = jnp.asarray(digits.images / 16, jnp.float32)
    labels = jnp.asarray(digits.target)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(images))
    seen, unseen = order[640:], order[:640]
    params = {
        "kernel": jnp.asarray(rng.normal(0, 0.3, (3, 3, 1, 32)), jnp.float32),
        "dense": [
            jnp.asarray(rng.normal(0, (2 / a) ** 0.5, (a, b)), jnp.float32)
            for a, b in itertools.pairwise(SIZES)
        ],
    }
    optimizer = optax.sgd(0.05, momentum=0.9)

    @jax.jit
    def step(state, batch):
        params, opt_state = state
        grads = jax.grad(loss)(params, images[batch], labels[batch])
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    state = params, optimizer.init(params)
    for _ in range(60):
        state = step(state, rng.choice(seen, 256))
    return state[0], images[unseen], labels[unseen]


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("policy", ["AutoMixedInt8", "AutoMixedF8"])
@pytest.mark.parametrize("is_ready", [False, True], ids=["float32 weights", "weights of 8 bits"])
def test_the_accuracy_is_that_of_float32(trained, policy, is_ready):
    params, images, labels = trained

    def accuracy(fn, params):
        return float((fn(params, images).argmax(-1) == labels).mean())

    wide = accuracy(logits, params)
    assert wide > 0.95
    given = pp.quant.quantized(logits, policy)(params, images) if is_ready else params
    plan = pp.inspect(logits, policy)(given, images).plan
    scaled = [d for d in plan.walk() if d.kind is OpKind.COMPUTE and d.product.scaled]
    assert len(scaled) == 2  # the two large dense layers
    assert abs(accuracy(pp.auto_mixed(logits, policy), given) - wide) <= 0.005
