"""equinox models as arguments: Python's numbers in them are static, as under `eqx.filter_jit`."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import precpass as pp
from precpass.testing import assert_precision
from tests.support.values import rel_error

X = jax.random.normal(jax.random.key(1), (4, 8))
KEY = jax.random.key(2)
OPTIMIZER = optax.sgd(1e-2, momentum=0.9)


class Net(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.BatchNorm

    def __init__(self, key: Any):
        keys = jax.random.split(key)
        self.linear = eqx.nn.Linear(8, 8, key=keys[0])
        self.dropout = eqx.nn.Dropout(0.25)
        self.attention = eqx.nn.MultiheadAttention(2, 8, key=keys[1])
        self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch")

    def __call__(self, x: Any, state: Any, key: Any) -> Any:
        x = self.dropout(jax.vmap(self.linear)(x), key=key)
        x = self.attention(x, x, x)
        norm = jax.vmap(self.norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        return norm(x, state)


NET, STATE = eqx.nn.make_with_state(Net)(jax.random.key(0))
OPTIMIZER_STATE = OPTIMIZER.init(eqx.filter(NET, eqx.is_inexact_array))
ARGUMENTS = NET, STATE, OPTIMIZER_STATE, X, KEY


def loss(net: Any, state: Any, x: Any, key: Any) -> Any:
    y, state = net(x, state, key)
    return jnp.square(y - 1.0).mean(), state


def step(net: Any, state: Any, optimizer_state: Any, x: Any, key: Any) -> Any:
    gradient_of = eqx.filter_value_and_grad(loss, has_aux=True)
    (value, state), gradient = gradient_of(net, state, x, key)
    params = eqx.filter(net, eqx.is_inexact_array)
    updates, optimizer_state = OPTIMIZER.update(gradient, optimizer_state, params)
    return eqx.apply_updates(net, updates), state, optimizer_state, value


def trained(step_of: Any) -> tuple[Any, Any]:
    net, state, optimizer_state = NET, STATE, OPTIMIZER_STATE
    value = None
    for i in range(3):
        net, state, optimizer_state, value = step_of(
            net, state, optimizer_state, X, jax.random.key(i)
        )
    return net, value


def test_a_model_with_dropout_attention_and_statistics_trains_as_by_filter_jit():
    net, value = trained(pp.auto_mixed(step))
    _, expected = trained(eqx.filter_jit(step))
    assert rel_error(value, expected) < 0.05
    assert trained(pp.auto_mixed(step, "AlwaysF32"))[1] == pytest.approx(float(expected), rel=1e-6)
    # a rate that had been traced would be an array now, and trained like a weight
    assert net.dropout.p == 0.25 and type(net.dropout.p) is float
    assert net.norm.inference is False


def test_a_switch_to_inference_is_another_program():
    mixed = pp.auto_mixed(loss)
    training, inferring = (
        functools.partial(mixed, net, STATE, X) for net in (NET, eqx.nn.inference_mode(NET))
    )
    first = training(KEY)[0]
    assert inferring(None)[0] != first
    assert training(KEY)[0] == first


def test_scalar_arrays_of_a_model_are_traced():
    class Scaled(eqx.Module):
        factor: jax.Array
        rate: float

        def __call__(self, x: Any) -> Any:
            return x @ x.T * self.factor * self.rate

    traces = []

    def fn(model: Any, x: Any) -> Any:
        traces.append(type(model.rate))
        return model(x).sum()

    mixed = pp.auto_mixed(fn)
    one, two = (float(mixed(Scaled(jnp.float32(f), 1.0), X)) for f in (1, 2))
    assert two == pytest.approx(2 * one)
    assert set(traces) == {float} and len(traces) == 1


@pytest.mark.release(keep=1)
@pytest.mark.parametrize(
    "look",
    [
        pp.inspect,
        pp.explain,
        pp.monitor,
        lambda fn: pp.compare(fn, ["f32", "bf16"], rounds=0),
        lambda fn: lambda *args: pp.numerics.calibrate(fn, "bf16", [args]),
        lambda fn: lambda *args: assert_precision(fn, args, {"dot_general": "bf16"}),
    ],
    ids=["inspect", "explain", "monitor", "compare", "calibrate", "assert_precision"],
)
def test_what_looks_at_a_function_takes_such_a_model(look):
    look(step)(*ARGUMENTS)


def test_a_module_that_is_made_inside_keeps_its_numbers():
    made = pp.auto_mixed(lambda x: (eqx.nn.Dropout(0.5), x @ x.T))(X)[0]
    assert made.p == 0.5 and made.inference is False
