"""Models whose code nobody here wrote: from haiku, keras, flax, equinox, jraph and diffrax.

"By hand" is here what the library itself offers: its dtype option or its policy of mixed precision,
and for libraries without one a cast of parameters and data, as their documentation advises.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench_models.model import BF16, F32, Model, adam, cross_entropy, low

IMAGES = {
    "small": (2, 32),
    "medium": (8, 64),
    "target": (64, 224),
    "large": (256, 224),
}
"""The images of a batch, and the pixels of a side."""
TOKENS = {
    "small": (2, 16, 32, 2),
    "medium": (2, 128, 256, 4),
    "target": (8, 1024, 1024, 16),
    "large": (16, 2048, 2048, 16),
}
"""The sequences of a batch, their length, the width and the heads."""
CLASSES, LAYERS, BYTES, STEPS = 10, 4, 256, 4


def cast_model(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward pass with parameters and data cast to bfloat16, its outputs to float32."""

    def by_hand(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        outputs, state = forward(low(params), state, low(batch))
        return jax.tree.map(lambda x: x.astype(F32), outputs), state

    return by_hand


# ---------------------------------------------------------------- images


def image_batches(size: str) -> dict[str, jax.Array]:
    count, side = IMAGES[size]
    rng = np.random.default_rng(0)
    images = np.broadcast_to(
        rng.standard_normal((1, count, side, side, 3), np.float32), (STEPS, count, side, side, 3)
    )
    labels = rng.integers(CLASSES, size=(STEPS, count))
    return {"images": jnp.asarray(images), "labels": jnp.asarray(labels, jnp.int32)}


def of_images(outputs: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    return cross_entropy(outputs, batch["labels"])


def resnet50(size: str) -> Model:
    """haiku's ResNet-50; by hand under haiku's own mixed precision, as its examples set it."""
    import haiku as hk
    import jmp

    def network(images: jax.Array) -> jax.Array:
        # by default the head's weights are zero, and so are then all other gradients
        head = {"w_init": hk.initializers.TruncatedNormal(0.02)}
        return hk.nets.ResNet50(CLASSES, logits_config=head)(images, is_training=True)

    written = hk.transform_with_state(network)

    def mixed(images: jax.Array) -> jax.Array:
        policy = jmp.get_policy("p=f32,c=bf16,o=bf16")
        norm = jmp.get_policy("p=f32,c=f32,o=bf16")
        hk.mixed_precision.set_policy(hk.nets.ResNet50, policy)
        hk.mixed_precision.set_policy(hk.BatchNorm, norm)
        try:
            return network(images)
        finally:
            hk.mixed_precision.clear_policy(hk.nets.ResNet50)
            hk.mixed_precision.clear_policy(hk.BatchNorm)

    by_library = hk.transform_with_state(mixed)
    batches = image_batches(size)
    params, state = jax.jit(written.init)(jax.random.key(0), batches["images"][0][:1, :32, :32])

    def forward(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
        return written.apply(params, state, None, batch["images"])

    def by_hand(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
        logits, state = by_library.apply(params, state, None, batch["images"])
        return logits.astype(F32), state

    return Model("resnet50", params, state, batches, forward, by_hand, of_images, adam())


def keras_model(make: str, size: str) -> Model:
    """One of `keras.applications`, on JAX; by hand under keras's policy "mixed_bfloat16"."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    def made(policy: str) -> Any:
        keras.utils.set_random_seed(0)
        keras.config.set_dtype_policy(policy)
        try:
            _, side = IMAGES[size]
            options: dict[str, Any] = {"weights": None, "classes": CLASSES}
            return getattr(keras.applications, make)(
                **options, input_shape=(side, side, 3), classifier_activation=None
            )
        finally:
            keras.config.set_dtype_policy("float32")

    def forward_of(model: Any) -> Callable[..., tuple[jax.Array, Any]]:
        def forward(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
            # dropout has no seed here, so the pass is that of inference, BatchNorm included
            logits, new = model.stateless_call(params, state, batch["images"], training=False)
            return logits.astype(F32), new

        return forward

    wide, mixed = made("float32"), made("mixed_bfloat16")
    params = [v.value for v in wide.trainable_variables]
    state = [v.value for v in wide.non_trainable_variables]
    name = make.lower()
    passes = forward_of(wide), forward_of(mixed)
    return Model(name, params, state, image_batches(size), *passes, of_images, adam())


# ---------------------------------------------------------------- sequences


def token_batches(size: str) -> jax.Array:
    count, length, *_ = TOKENS[size]
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(BYTES, size=(STEPS, count, length + 1)), jnp.int32)


def of_tokens(outputs: jax.Array, tokens: jax.Array) -> jax.Array:
    return cross_entropy(outputs, tokens[:, 1:])


def flax_decoder(size: str) -> Model:
    """A decoder of flax's layers; by hand by their `dtype=bfloat16`."""
    from flax import linen as nn

    _, length, width, heads = TOKENS[size]

    class Decoder(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = nn.Embed(BYTES, width, dtype=self.dtype)(tokens)
            mask = nn.make_causal_mask(tokens)
            for _ in range(LAYERS):
                h = nn.LayerNorm(dtype=self.dtype)(x)
                x = x + nn.MultiHeadDotProductAttention(heads, dtype=self.dtype)(h, mask=mask)
                h = nn.Dense(4 * width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
                x = x + nn.Dense(width, dtype=self.dtype)(nn.gelu(h))
            x = nn.LayerNorm(dtype=self.dtype)(x)
            return nn.Dense(BYTES, dtype=self.dtype)(x).astype(F32)

    def forward(dtype: Any, params: Any, state: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        return Decoder(dtype).apply(params, tokens[:, :-1]), state

    params = jax.jit(Decoder(F32).init)(jax.random.key(0), jnp.zeros((1, length), jnp.int32))
    passes = partial(forward, F32), partial(forward, BF16)
    return Model("flax-decoder", params, (), token_batches(size), *passes, of_tokens, adam())


def equinox_decoder(size: str) -> Model:
    """A decoder of equinox's layers, which have no dtype option: by hand its arrays are cast."""
    import equinox as eqx

    *_, width, heads = TOKENS[size]

    class Layer(eqx.Module):
        norm1: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention
        norm2: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP

        def __call__(self, x: jax.Array) -> jax.Array:
            h = jax.vmap(self.norm1)(x)
            mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
            x = x + self.attention(h, h, h, mask=mask)
            return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))

    class Decoder(eqx.Module):
        embedding: eqx.nn.Embedding
        layers: list[Layer]
        head: eqx.nn.Linear

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = jax.vmap(self.embedding)(tokens)
            for layer in self.layers:
                x = layer(x)
            return jax.vmap(self.head)(x)

    keys = iter(jax.random.split(jax.random.key(0), 3 * LAYERS + 2))

    def layer() -> Layer:
        mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=next(keys))
        attention = eqx.nn.MultiheadAttention(heads, width, key=next(keys))
        return Layer(eqx.nn.LayerNorm(width), attention, eqx.nn.LayerNorm(width), mlp)

    decoder = Decoder(
        eqx.nn.Embedding(BYTES, width, key=next(keys)),
        [layer() for _ in range(LAYERS)],
        eqx.nn.Linear(width, BYTES, key=next(keys)),
    )
    params, static = eqx.partition(decoder, eqx.is_inexact_array)

    def forward(params: Any, state: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        return jax.vmap(eqx.combine(params, static))(tokens[:, :-1]), state

    passes = forward, cast_model(forward)
    return Model("equinox-decoder", params, (), token_batches(size), *passes, of_tokens, adam())
