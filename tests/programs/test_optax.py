"""Training steps of optax under the pass, wrapped whole: products are low, state is float32's."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import precpass as pp
from tests.support.jaxprs import dtypes_in, inner_jaxprs, opened, touches_low, walk
from tests.support.libraries import FAST, assert_float32, assert_leaves_near
from tests.support.passes import AUTO, look, quiet
from tests.support.training import assert_trains_alike
from tests.support.values import identical, normal

pytestmark = pytest.mark.programs


@pytest.fixture(scope="module", autouse=True)
def optax_is_written_for_standard_promotion() -> Iterator[None]:
    """It takes floats to the power of an integer count."""
    with jax.numpy_dtype_promotion("standard"):
        yield


PARAMS = {
    "w": jnp.asarray(normal(0, 16, 32)) / 4,
    "b": jnp.asarray(normal(1, 32)) / 8,
    "out": jnp.asarray(normal(2, 32, 4)) / 6,
    "scale": jnp.float32(1.5),
}
# of the size of updates, not of parameters: bfloat16 would lose all of them in `w - lr * g`
GRADS = [
    jax.tree.map(lambda w, s=s: jnp.asarray(normal(s, *w.shape) * w.dtype.type(1e-3)), PARAMS)
    for s in (5, 6)
]
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 2, 10)
OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "sgd with momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-3),
    "adamw on a schedule": optax.adamw(SCHEDULE, weight_decay=0.1),
    "lamb": optax.lamb(1e-3, weight_decay=0.1),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "clipped by global norm": optax.chain(optax.clip_by_global_norm(1e-2), optax.adam(1e-3)),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-3), 3),
    "ema of updates": optax.chain(optax.adam(1e-3), optax.ema(0.99)),
    "injected hyperparameters": optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
}


def updating(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """Two updates with given gradients, and an average of the parameters."""

    def update(params: Any, state: Any, average: Any, grads: Any) -> Any:
        for g in grads:
            changes, state = optimizer.update(g, state, params)
            params = optax.apply_updates(params, changes)
            average = optax.incremental_update(params, average, 1e-3)
        return params, state, average

    return update


@pytest.mark.release(keep=3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_gradients_give_the_same_bits(name: str):
    optimizer = OPTIMIZERS[name]
    update = updating(optimizer)
    args = PARAMS, optimizer.init(PARAMS), PARAMS, GRADS
    for policy in AUTO:
        after = look(update, policy, *args).after
        assert not any(touches_low(eqn) for eqn in walk(after)), policy.name
    with quiet():
        got = pp.auto_mixed(update, **FAST)(*args)
    want = jax.jit(update, **FAST)(*args)
    assert identical(got, want)
    assert not identical(want[0], PARAMS)
    assert_float32(got)


def test_muon_orthogonalises_low_and_keeps_its_momentum_to_the_bit():
    """Its Newton-Schulz iteration is products: those are the policy's, the state is not."""
    optimizer = optax.contrib.muon(1e-3)
    args = PARAMS, optimizer.init(PARAMS), GRADS[:1]

    def update(params: Any, state: Any, grads: Any) -> Any:
        changes, state = optimizer.update(grads[0], state, params)
        return optax.apply_updates(params, changes), state

    after = look(update, pp.AutoMixedBf16, *args).after
    assert sum(e.primitive.name == "dot_general" and touches_low(e) for e in walk(after)) >= 3
    got, want = pp.auto_mixed(update, **FAST)(*args), jax.jit(update, **FAST)(*args)
    assert identical(got[1], want[1])
    assert_leaves_near(got[0], want[0], pp.types.Precision.BF16.unit_roundoff)


X = jnp.asarray(normal(3, 256, 16))
Y = jnp.tanh(X @ jnp.asarray(normal(4, 16, 4)) / 4)


def loss(params: Any, rows: Any) -> jax.Array:
    h = jnp.tanh(X[rows] @ params["w"] + params["b"][None])
    return jnp.mean(jnp.square(params["scale"] * (h @ params["out"]) - Y[rows]))


def whole_step(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    def step(carry: Any, rows: Any) -> Any:
        params, state, average = carry
        value, grads = jax.value_and_grad(loss)(params, rows)
        with jax.named_scope("update"):
            changes, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, changes)
            average = optax.incremental_update(params, average, 0.1)
        return (params, state, average), value

    return step


STEPS = [jnp.arange(i * 64, i * 64 + 64) % len(X) for i in range(40)]
TRAINED = {
    "sgd with momentum": optax.sgd(0.05, momentum=0.9),
    "adamw, clipped, on a schedule": optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 60)),
    ),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "MultiSteps of apply_if_finite": optax.MultiSteps(
        optax.apply_if_finite(optax.adam(1e-2), 3), 2
    ).gradient_transformation(),
}


def optimizer_equations(jaxpr: Any, outer: str = "") -> list[str]:
    """The equations in the scope of the update, as text of primitive and dtypes."""
    found: list[str] = []
    for eqn in opened(jaxpr).eqns:
        stack = f"{outer}/{eqn.source_info.name_stack}"
        inner = inner_jaxprs(eqn)
        for j in inner:
            found += optimizer_equations(j, stack)
        if not inner and "update" in stack.split("/"):
            assert not touches_low(eqn), str(eqn)
            found.append(f"{eqn.primitive} {dtypes_in(eqn)}")
    return found


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("name", TRAINED)
def test_a_whole_step_learns_as_in_float32(name: str):
    optimizer = TRAINED[name]
    step = whole_step(optimizer)
    carry = PARAMS, optimizer.init(PARAMS), PARAMS
    # two products, and three behind them
    assert_trains_alike(step, carry, STEPS, least=4, rtol=0.03)
    inspection = look(step, pp.AutoMixedBf16, carry, STEPS[0])
    # what follows the gradients is what float32 does, equation by equation
    updates = optimizer_equations(inspection.before)
    assert updates
    assert optimizer_equations(inspection.after) == updates
