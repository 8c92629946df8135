"""Programs of flax linen under the pass: its own layers, lifted transforms and mutable state."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState

import precpass as pp
from tests.support.jaxprs import is_low, products
from tests.support.libraries import (
    FAST,
    assert_float32,
    assert_leaves_near,
    check_products,
    check_program,
    parameters,
    signature,
)
from tests.support.passes import look
from tests.support.training import assert_trains_alike, next_character_loss, text_batches
from tests.support.values import normal

pytestmark = pytest.mark.programs

KEY = jax.random.key(0)
X = jnp.asarray(normal(0, 4, 8, 32))


def test_attention_with_a_mask_and_dropout():
    layer = nn.MultiHeadDotProductAttention(num_heads=4, dropout_rate=0.1, deterministic=False)
    mask = nn.make_causal_mask(jnp.ones((4, 8)))

    def attend(variables: Any, x: Any, key: Any) -> Any:
        return layer.apply(variables, x, x, mask=mask, rngs={"dropout": key})

    variables = parameters(lambda: layer.init({"params": KEY, "dropout": KEY}, X, X, mask=mask))
    # query, key, value, out; scores and weighted values
    check_program(attend, variables, X, KEY, wrt=(0, 1), least=6)


def test_a_decode_cache_is_filled_call_by_call():
    layer = nn.MultiHeadDotProductAttention(num_heads=4, decode=True)
    variables = parameters(layer.init, KEY, X, X)

    def decode(variables: Any, x: Any) -> Any:
        return layer.apply(variables, x, x, mutable=["cache"])

    def decoded(step: Any) -> Any:
        state, outs = dict(variables), []
        for i in range(X.shape[1]):
            out, updated = step(state, X[:, i : i + 1])
            state |= updated
            outs.append(out)
        return outs, state["cache"]

    mixed = pp.auto_mixed(decode, **FAST)
    check_products(mixed.trace(variables, X[:, :1]).jaxpr, pp.AutoMixedBf16, 6)
    got, want = decoded(mixed), decoded(jax.jit(decode, **FAST))
    assert_leaves_near(got, want, 6 * pp.types.Precision.BF16.unit_roundoff)
    assert int(got[1]["cache_index"]) == X.shape[1]
    assert_float32(got)


@pytest.mark.release
def test_an_lstm_over_a_thousand_steps():
    layer = nn.RNN(nn.OptimizedLSTMCell(16), return_carry=True)
    x = jnp.asarray(normal(1, 2, 1024, 16))
    # one product for all four gates of the state, one for the input
    check_program(layer.apply, parameters(layer.init, KEY, x), x, least=2)


@pytest.mark.release
def test_a_bidirectional_network_of_two_cells():
    layer = nn.Bidirectional(nn.RNN(nn.SimpleCell(16)), nn.RNN(nn.GRUCell(16)))
    check_program(layer.apply, parameters(layer.init, KEY, X), X, least=8)


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        x = nn.Conv(8, (3, 3))(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        # smooth: where a rounding turns a relu off, its gradient is another one
        x = nn.max_pool(nn.gelu(x), (2, 2), (2, 2))
        x = nn.gelu(nn.Conv(16, (3, 3), strides=2, feature_group_count=2)(x))
        x = nn.ConvTranspose(4, (2, 2), strides=(2, 2))(x)
        return nn.Dense(4)(x.reshape(x.shape[0], -1))


IMAGES = jnp.asarray(normal(1, 16, 8, 8, 3))


@pytest.fixture(scope="module")
def image_variables() -> Any:
    return parameters(Convolutions().init, KEY, IMAGES)


def test_convolutions_with_batch_norm(image_variables: Any):
    def apply(variables: Any, images: Any) -> Any:
        return Convolutions().apply(variables, images, mutable=["batch_stats"])

    checked = check_program(apply, image_variables, IMAGES, least=4, factor=6)
    mean = checked.got[1]["batch_stats"]["BatchNorm_0"]["mean"]
    assert not np.array_equal(mean, image_variables["batch_stats"]["BatchNorm_0"]["mean"])


def test_training_hands_on_batch_statistics(image_variables: Any):
    labels = jnp.asarray(np.random.default_rng(0).integers(0, 4, len(IMAGES)))

    def loss(params: Any, stats: Any, shift: Any) -> Any:
        variables = {"params": params, "batch_stats": stats}
        images = jnp.roll(IMAGES, shift, axis=2)
        logits, updated = Convolutions().apply(variables, images, mutable=["batch_stats"])
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
        return -jnp.mean(picked), updated["batch_stats"]

    def step(state: Any, shift: Any) -> Any:
        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, stats), grads = gradient(state["params"], state["batch_stats"], shift)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, state["params"], grads)
        return {"params": params, "batch_stats": stats}, value

    shifts = [jnp.int32(i % 3) for i in range(24)]
    got, want = assert_trains_alike(step, image_variables, shifts, least=10)
    assert_leaves_near(got["batch_stats"], want["batch_stats"], 0.02)


class Tied(nn.Module):
    @nn.compact
    def __call__(self, ids: Any) -> Any:
        embed = nn.Embed(50, 32)
        h = nn.LayerNorm()(embed(ids))
        self.sow("intermediates", "normed", h)
        return embed.attend(nn.tanh(nn.Dense(32)(h)))


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("policy", [pp.AutoMixedBf16, pp.AutoMixed], ids=lambda p: p.name)
def test_a_tied_embedding_and_what_it_sows(policy: pp.types.PrecisionPolicy):
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 50, (4, 8)))
    params = {"params": parameters(Tied().init, KEY, ids)["params"]}

    def apply(params: Any, ids: Any) -> Any:
        return Tied().apply(params, ids, mutable=["intermediates"])

    checked = check_program(apply, params, ids, policy=policy, least=2)
    (normed,) = checked.got[1]["intermediates"]["normed"]
    assert normed.shape == (4, 8, 32)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        mask = nn.make_causal_mask(x[..., 0])
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(4)(h, mask=mask)
        h = nn.gelu(nn.Dense(64)(nn.LayerNorm()(x)))
        h = nn.Dropout(0.1, deterministic=False)(h)
        return x + nn.Dense(x.shape[-1])(h), None


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(128, 32)
        x = embed(tokens)
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        block = nn.scan(
            nn.remat(Block, policy=policy, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=3,
        )
        x, _ = block()(x, None)
        return embed.attend(nn.LayerNorm()(x))


@pytest.mark.release  # the training scripts have such steps
def test_a_train_state_step_learns_as_in_float32():
    batches = text_batches(40, 8, 32)
    model = Transformer()
    rngs = {"params": KEY, "dropout": KEY}
    params = parameters(model.init, rngs, batches[0][:, :-1])["params"]
    params["Embed_0"]["embedding"] *= 0.3
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(3e-3))

    def step(state: TrainState, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            rngs = {"dropout": jax.random.fold_in(KEY, state.step)}
            logits = state.apply_fn({"params": params}, tokens[:, :-1], rngs=rngs)
            return next_character_loss(logits, tokens)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    def outside(params: Any, key: Any) -> Any:
        logits = pp.auto_mixed(model.apply)(params, batches[0][:, :-1], rngs={"dropout": key})
        return next_character_loss(logits, batches[0])

    check_products(jax.make_jaxpr(jax.grad(outside))({"params": params}, KEY), pp.AutoMixedBf16, 25)
    # optax and the train state's count are written for JAX's own promotion
    with jax.numpy_dtype_promotion("standard"):
        got, _ = assert_trains_alike(step, state, batches, least=25)
    assert int(got.step) == len(batches)


class Routed(nn.Module):
    @nn.compact
    def __call__(self, x: Any, which: Any) -> Any:
        stacked = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})
        x = nn.tanh(stacked(32)(x))
        wide, narrow, again = nn.Dense(32), nn.Dense(32), nn.Dense(32)
        if self.is_initializing():
            wide(x), narrow(x), again(x)
        x = nn.cond(which > 0, lambda m, x: wide(x), lambda m, x: nn.tanh(narrow(x)), self, x)

        def body(_: Any, carry: Any) -> Any:
            count, x = carry
            return count + 1, nn.tanh(again(x))

        _, x = nn.while_loop(lambda _, carry: carry[0] < 3, body, self, (0, x))
        return x


def test_lifted_vmap_cond_and_while():
    model = Routed()
    variables = parameters(model.init, KEY, X, jnp.int32(1))
    check_program(model.apply, variables, X, jnp.int32(1), wrt=None, least=4)


def test_a_lifted_custom_gradient():
    def clipped(module: nn.Module, x: Any) -> Any:
        def forward(module: nn.Module, x: Any) -> Any:
            return nn.vjp(lambda m, x: m(x), module, x)

        def backward(pullback: Any, g: Any) -> Any:
            return pullback(jnp.clip(g, -0.5, 0.5))

        run = nn.custom_vjp(lambda m, x: m(x), forward_fn=forward, backward_fn=backward)
        return run(module, x)

    class Clipped(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.tanh(clipped(nn.Dense(32), x) * 2.0)

    check_program(Clipped().apply, parameters(Clipped().init, KEY, X), X)


def test_always_f32_undoes_the_dtype_that_a_model_was_given():
    layer = functools.partial(nn.MultiHeadDotProductAttention, num_heads=4)
    by_hand, plain = layer(dtype=jnp.bfloat16), layer()
    variables = parameters(plain.init, KEY, X, X)
    low = look(by_hand.apply, pp.AutoMixedBf16, variables, X, X)
    assert low.after is low.before, "what the user lowered needs nothing"
    wide = look(by_hand.apply, pp.AlwaysF32, variables, X, X)
    assert signature(wide.after) == signature(wide.before)
    assert len(products(wide.after)) == 6
    assert not any(is_low(e) for e in products(wide.after))
    assert all(is_low(e) for e in products(wide.before))
    got = pp.auto_mixed(by_hand.apply, policy=pp.AlwaysF32)(variables, X, X)
    want = plain.apply(variables, X, X)
    assert_leaves_near(got.astype(jnp.float32), want, pp.types.Precision.BF16.unit_roundoff)


def test_layers_with_a_float8_of_their_own_run_unchanged():
    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(2):
                dense = nn.Dense(32, dtype=jnp.bfloat16, dot_general_cls=nn.Fp8DirectDotGeneralOp)
                x = nn.relu(dense(x))
            return x

    layers = Layers()
    variables = parameters(lambda: layers.init(KEY, X))

    def loss(variables: Any, x: Any) -> Any:
        return jnp.square(layers.apply(variables, x).astype(jnp.float32)).mean()

    def formats(jaxpr: Any) -> list[str]:
        return sorted(str([v.aval.dtype for v in eqn.invars]) for eqn in products(jaxpr))

    gradient = jax.grad(loss, allow_int=True)
    assert_leaves_near(pp.auto_mixed(gradient)(variables, X), jax.jit(gradient)(variables, X), 0.0)
    inspection = look(gradient, "AutoMixedBf16", variables, X)
    assert formats(inspection.after) == formats(inspection.before)
