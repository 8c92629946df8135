"""Programs of haiku under the pass: its layers, cells, state and lifted transforms."""

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support.libraries import check_program, parameters
from tests.support.training import assert_trains_alike, next_character_loss, text_batches
from tests.support.values import normal

pytestmark = pytest.mark.programs

KEY = jax.random.key(0)
X = jnp.asarray(normal(0, 4, 8, 32))


def pure(fn: Callable[..., Any], *args: Any) -> tuple[Any, Any, Any]:
    """A haiku function as (apply, parameters, state)."""
    transformed = hk.transform_with_state(fn)
    params, state = parameters(transformed.init, KEY, *args)
    return transformed.apply, params, state


def test_batch_norm_and_dropout_with_their_state():
    def network(x: Any) -> Any:
        h = jnp.tanh(hk.BatchNorm(True, True, 0.9)(hk.Linear(32)(x), is_training=True))
        h = hk.dropout(hk.next_rng_key(), 0.2, h)
        return hk.nets.MLP([32, 4], activation=jnp.tanh)(hk.LayerNorm(-1, True, True)(h))

    x = X.reshape(-1, 32)
    # haiku's moving averages take a float to the power of an integer counter
    with jax.numpy_dtype_promotion("standard"):
        apply, params, state = pure(network, x)
        checked = check_program(apply, params, state, KEY, x, least=3)
    counters = [k for k, v in checked.got[1].items() if "counter" in v]
    assert len(counters) == 2
    assert all(int(checked.got[1][k]["counter"]) == 1 for k in counters)


def test_an_lstm_unrolled_over_time():
    def network(x: Any) -> Any:
        cell = hk.LSTM(16)
        return hk.dynamic_unroll(cell, x, cell.initial_state(x.shape[1]))

    x = jnp.asarray(normal(1, 512, 2, 16))
    apply, params, state = pure(network, x)
    check_program(apply, params, state, None, x)


def test_attention():
    def network(x: Any) -> Any:
        mask = jnp.tril(jnp.ones((1, 1, 8, 8)))
        attend = hk.MultiHeadAttention(4, 8, w_init=hk.initializers.VarianceScaling())
        return attend(x, x, x, mask=mask)

    apply, params, state = pure(network, X)
    check_program(apply, params, state, None, X, least=6)


def test_scan_with_a_state_that_accumulates():
    def network(x: Any) -> Any:
        layer = hk.Linear(32)

        def body(h: Any, row: Any) -> Any:
            total = hk.get_state("total", [], init=jnp.zeros)
            hk.set_state("total", total + 1.0)
            h = jnp.tanh(layer(h) + row)
            return h, h

        return hk.scan(body, layer(x[0]), x)

    x = jnp.asarray(normal(1, 1000, 2, 32))
    apply, params, state = pure(network, x)
    state = jax.tree.map(jnp.zeros_like, state)
    checked = check_program(apply, params, state, None, x, least=2)
    # 256 if the state were held in bfloat16
    assert float(checked.got[1]["~"]["total"]) == 1000.0


def test_switch_takes_one_of_two_layers():
    def network(x: Any, which: Any) -> Any:
        one, other = hk.Linear(32), hk.Linear(32)
        if hk.running_init():
            one(x), other(x)
        return hk.switch(which, [lambda x: one(x), lambda x: jnp.tanh(other(x))], x)

    apply, params, state = pure(network, X, jnp.int32(1))
    check_program(apply, params, state, None, X, jnp.int32(1), least=2)


@pytest.mark.release
def test_a_character_model_learns_as_in_float32():
    """Layers stacked in a scan and rematerialised, convolutions over time, adam."""

    def network(tokens: Any) -> Any:
        embed = hk.Embed(128, 32)
        x = embed(tokens) * 0.3

        def layer(x: Any) -> Any:
            h = hk.Conv1D(32, 3, padding=hk.pad.causal)(hk.LayerNorm(-1, True, True)(x))
            return x + hk.remat(hk.Linear(32))(jax.nn.gelu(h))

        return hk.layer_stack(2)(layer)(x) @ embed.embeddings.T

    batches = text_batches(30, 8, 32)
    apply, params, state = pure(network, batches[0][:, :-1])
    optimizer = optax.adam(3e-3)

    def step(carry: Any, tokens: Any) -> Any:
        params, state, moments = carry

        def loss(params: Any) -> Any:
            logits, updated = apply(params, state, None, tokens[:, :-1])
            return next_character_loss(logits, tokens), updated

        (value, updated), grads = jax.value_and_grad(loss, has_aux=True)(params)
        changes, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, changes), updated, moments), value

    # optax is written for JAX's own promotion
    with jax.numpy_dtype_promotion("standard"):
        carry = (params, state, optimizer.init(params))
        got, want = assert_trains_alike(step, carry, batches, least=9)
    assert np.array_equal(got[2][0].count, want[2][0].count)
