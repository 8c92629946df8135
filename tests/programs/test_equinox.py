"""Programs of equinox under the pass: modules as arguments, filtered transforms, bounded loops."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import precpass as pp
from tests.support.libraries import FAST, assert_leaves_near, check_program
from tests.support.training import assert_trains_alike
from tests.support.values import normal

pytestmark = pytest.mark.programs

ROUNDOFF = pp.types.Precision.BF16.unit_roundoff
KEY = jax.random.key(0)
X = jnp.asarray(normal(0, 16, 32))
W = jnp.asarray(normal(1, 32, 32)) / 6
NET = eqx.nn.MLP(32, 4, 32, 2, activation=jnp.tanh, key=KEY)


def loss(module: Any, x: Any) -> jax.Array:
    return jnp.mean(jnp.square(jax.vmap(module)(x)))


def arrays(tree: Any) -> Any:
    return eqx.filter(tree, eqx.is_array)


FORMS: dict[str, Callable[..., Any]] = {
    "auto_mixed(f)": lambda f: pp.auto_mixed(f, **FAST),
    "filter_jit(auto_mixed(f))": lambda f: eqx.filter_jit(pp.auto_mixed(f)),
    "auto_mixed(filter_jit(f))": lambda f: pp.auto_mixed(eqx.filter_jit(f)),
}
GRADIENTS: dict[str, Callable[..., Any]] = {
    "auto_mixed(filter_grad(f))": lambda f: pp.auto_mixed(eqx.filter_grad(f), **FAST),
    "filter_grad(auto_mixed(f))": lambda f: eqx.filter_grad(pp.auto_mixed(f)),
    "filter_jit(filter_grad(auto_mixed(f)))": lambda f: eqx.filter_jit(
        eqx.filter_grad(pp.auto_mixed(f))
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_module_with_static_leaves_is_an_argument(form: str):
    got, want = FORMS[form](loss)(NET, X), eqx.filter_jit(loss)(NET, X)
    assert_leaves_near(got, want, 4 * ROUNDOFF)
    assert float(got) != float(want), "nothing was lowered"


@pytest.mark.parametrize("form", GRADIENTS)
def test_a_filtered_gradient(form: str):
    got, want = GRADIENTS[form](loss)(NET, X), eqx.filter_jit(eqx.filter_grad(loss))(NET, X)
    assert_leaves_near(arrays(got), arrays(want), 8 * ROUNDOFF, floor=0.1)
    assert float(got.layers[0].weight[0, 0]) != float(want.layers[0].weight[0, 0])


def test_a_filtered_vmap_over_modules():
    make = eqx.filter_vmap(lambda key: eqx.nn.MLP(32, 4, 32, 1, activation=jnp.tanh, key=key))
    ensemble = make(jax.random.split(KEY, 3))
    run = pp.auto_mixed(lambda module, x: jax.vmap(module)(x))
    over = eqx.filter_vmap(run, in_axes=(eqx.if_array(0), None))(ensemble, X)
    want = eqx.filter_vmap(lambda module, x: jax.vmap(module)(x), in_axes=(eqx.if_array(0), None))(
        ensemble, X
    )
    assert_leaves_near(over, want, 4 * ROUNDOFF)


@pytest.mark.release
@pytest.mark.parametrize("kind", ["lax", "bounded", "checkpointed"])
def test_its_while_loops(kind: str):
    """The bounded ones are differentiable: by nested scans, or by checkpoints and a custom rule."""

    def run(w: Any, x: Any) -> Any:
        def body(carry: Any) -> Any:
            count, h = carry
            return count + 1, jnp.tanh(h @ w)

        options = {"checkpoints": 3} if kind == "checkpointed" else {}
        limit = None if kind == "lax" else 8
        return eqxi.while_loop(
            lambda carry: carry[0] < 5, body, (0, x), max_steps=limit, kind=kind, **options
        )

    check_program(run, W, X, wrt=None if kind == "lax" else (0, 1), factor=6)


class Stateful(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear
    repeat: int = eqx.field(static=True)

    def __init__(self, key: Any) -> None:
        one, other = jax.random.split(key)
        self.first = eqx.nn.Linear(32, 32, key=one)
        self.norm = eqx.nn.BatchNorm(32, axis_name="batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.2)
        self.last = eqx.nn.Linear(32, 4, key=other)
        self.repeat = 2

    def __call__(self, x: Any, state: Any, key: Any) -> Any:
        h = self.first(x)
        h, state = self.norm(h, state)
        h = self.dropout(jax.nn.gelu(h), key=key)
        return self.repeat * self.last(h), state


def test_training_hands_on_the_state_of_batch_norm():
    module, state = eqx.nn.make_with_state(Stateful)(KEY)
    params, static = eqx.partition(module, eqx.is_array)
    optimizer = optax.adam(3e-3)
    y = jnp.tanh(X[:, :4])

    def batch_loss(params: Any, state: Any, key: Any) -> Any:
        over = jax.vmap(
            eqx.combine(params, static),
            axis_name="batch",
            in_axes=(0, None, 0),
            out_axes=(0, None),
        )
        out, state = over(X, state, jax.random.split(key, len(X)))
        return jnp.mean(jnp.square(out - y)), state

    def step(carry: Any, key: Any) -> Any:
        params, state, moments = carry
        gradient = eqx.filter_value_and_grad(batch_loss, has_aux=True)
        (value, state), grads = gradient(params, state, key)
        changes, moments = optimizer.update(grads, moments, params)
        return (eqx.apply_updates(params, changes), state, moments), value

    keys = list(jax.random.split(KEY, 30))
    # optax is written for JAX's own promotion
    with jax.numpy_dtype_promotion("standard"):
        carry = params, state, optimizer.init(params)
        (_, got, _), _ = assert_trains_alike(step, carry, keys, least=4, rtol=0.05)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True)
    assert any(not np.array_equal(a, b) for a, b in pairs)


def test_its_custom_rules():
    @eqx.filter_custom_vjp
    def layer(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w)

    @layer.def_fwd
    def forward(_: Any, w: Any, x: Any) -> Any:
        y = jnp.tanh(x @ w)
        return y, y

    @layer.def_bwd
    def backward(y: Any, g: Any, _: Any, w: Any, x: Any) -> Any:
        return x.T @ (g * (1 - y**2))

    @eqx.filter_custom_jvp
    def again(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w)

    @again.def_jvp
    def tangent(primals: Any, tangents: Any) -> Any:
        (w, x), (tw, _) = primals, tangents
        y = jnp.tanh(x @ w)
        return y, (1 - y**2) * (x @ tw)

    check_program(lambda w, x: layer(w, x) + again(w, x), W, X, least=2)


def test_error_if_still_raises():
    def checked(w: Any, x: Any) -> Any:
        y = eqx.error_if(x @ w, jnp.any(jnp.isnan(x)), "an operand is not a number")
        return jnp.tanh(y)

    run = eqx.filter_jit(pp.auto_mixed(checked))
    assert_leaves_near(run(W, X), jnp.tanh(X @ W), 4 * ROUNDOFF)
    with pytest.raises(eqx.EquinoxRuntimeError, match="an operand is not a number"):
        run(W, X * np.float32(np.nan))


def test_attention_and_a_cell_and_a_checkpoint():
    attend = eqx.nn.MultiheadAttention(4, 32, key=KEY)
    cell = eqx.nn.GRUCell(32, 16, key=KEY)
    params, static = eqx.partition((attend, cell), eqx.is_array)

    def run(params: Any, x: Any) -> Any:
        attend, cell = eqx.combine(params, static)
        causal = jnp.tril(jnp.ones((len(x), len(x)), bool))
        h = eqx.filter_checkpoint(lambda x: attend(x, x, x, mask=causal))(x)
        return jax.lax.scan(lambda c, row: (cell(row, c), None), jnp.zeros(16), h)[0]

    check_program(run, params, X, least=8, factor=6)
