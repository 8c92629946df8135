"""Training steps over a mesh of devices, as the field writes them (`support.sharded_programs`)."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import precpass as pp
from precpass.policy.rules import WIRE
from tests.support.libraries import FAST, assert_leaves_near, check_products
from tests.support.sharded_programs import (
    PROGRAMS,
    meshed,
    value,
)

pytestmark = pytest.mark.programs

P = PartitionSpec
RUN = [name for name in PROGRAMS if name != "ragged_experts"]  # XLA:CPU cannot run it


def placed_alike(got: Any, want: Any) -> None:
    """Two trees have one sharding, kind of memory and type, leaf by leaf."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (a.sharding, b.sharding)
        assert a.sharding.memory_kind == b.sharding.memory_kind
        assert jax.typeof(a) == jax.typeof(b)


def step_of(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, x: Any) -> Any:
        found, grads = jax.value_and_grad(loss)(params, x)
        return found, grads, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return step


@pytest.mark.parametrize("name", RUN)
def test_a_step_is_that_of_plain_jax(name: str):
    """Values, gradients, where they are, and the donated parameters, in both compositions."""
    program = PROGRAMS[name](jax.devices(), 32)
    options: dict[str, Any] = {"donate_argnums": 0, **FAST}
    forms = {
        "float32": jax.jit(step_of(program.loss), **options),
        "auto(grad)": pp.auto_mixed(step_of(program.loss), **options),
        "grad(auto)": jax.jit(step_of(pp.auto_mixed(program.loss)), **options),
    }
    want = None
    with program.in_force():
        for form, step in forms.items():
            params, x = program.arguments(value)
            traced = step.trace(params, x)
            got = traced.lower().compile()(params, x)
            assert all(p.is_deleted() for p in jax.tree.leaves(params)), form
            if want is None:
                want = got
                continue
            check_products(traced.jaxpr, pp.AutoMixedBf16, least=3)
            assert_leaves_near(got, want, 8 * pp.AutoMixedBf16.low.unit_roundoff, what=form)
            placed_alike(got, want)


@pytest.mark.release(keep=4)
@pytest.mark.parametrize("reduce", ["bf16", WIRE])
@pytest.mark.parametrize("name", RUN)
def test_sums_that_are_sent_in_16_bits_are_off_by_few_more_roundings(name: str, reduce: str):
    """Each of the sums between devices rounds once for each of them."""
    program = PROGRAMS[name](jax.devices(), 32)
    policy = pp.AutoMixedBf16.with_reduce(reduce)
    with program.in_force():
        params, x = program.arguments(value)
        want = jax.jit(step_of(program.loss), **FAST)(params, x)
        for form, step in {
            "auto(grad)": pp.auto_mixed(step_of(program.loss), policy=policy, **FAST),
            "grad(auto)": jax.jit(step_of(pp.auto_mixed(program.loss, policy=policy)), **FAST),
        }.items():
            got = step(params, x)
            bound = (8 + len(jax.devices())) * policy.low.unit_roundoff
            assert_leaves_near(got, want, bound, what=form)
            placed_alike(got, want)


# ---------------------------------------------------------------- libraries


class Network(nnx.Module):
    """Two layers, whose parameters say how they are sharded."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(
            32, 64, rngs=rngs, kernel_init=nnx.with_partitioning(init, (None, "model"))
        )
        self.down = nnx.Linear(
            64, 32, rngs=rngs, kernel_init=nnx.with_partitioning(init, ("model", None))
        )

    def __call__(self, x: Any) -> Any:
        return x + self.down(nnx.gelu(self.up(x)))


def test_a_flax_nnx_model_and_its_momentum_are_updated_where_they_are():
    mesh = meshed(jax.devices(), "data", "model")

    def step(model: Network, optimizer: Any, x: Any) -> Any:
        found, grads = nnx.value_and_grad(lambda m: jnp.square(m(x)).mean())(model)
        optimizer.update(model, grads)
        return found

    def three_steps(jitted: Any) -> tuple[Any, Any]:
        with jax.set_mesh(mesh):
            model = Network(nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
            x = value(0, (16, 32), NamedSharding(mesh, P("data")))
            found = [jitted(model, optimizer, x) for _ in range(3)]
        return found, nnx.to_pure_dict(nnx.state((model, optimizer)))

    want, got = three_steps(nnx.jit(step)), three_steps(pp.auto_mixed(step))
    kernels = [x for x in jax.tree.leaves(want) if x.ndim == 2]
    assert kernels and not any(x.sharding.is_fully_replicated for x in kernels)
    placed_alike(got, want)
    assert_leaves_near(got, want, 8 * pp.AutoMixedBf16.low.unit_roundoff, floor=0.1)


def test_an_equinox_model_and_its_momentum_keep_their_shardings():
    """Parameters and momentum sharded over all devices, and gathered where they are read."""
    mesh = meshed(jax.devices(), "data")
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(model: Any, state: Any, x: Any) -> Any:
        def loss(model: Any) -> Any:
            arrays, static = eqx.partition(model, eqx.is_array)
            gathered = eqx.combine(lax.with_sharding_constraint(arrays, whole), static)
            return jnp.square(jax.vmap(gathered)(x)).mean()

        found, grads = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimizer.update(grads, state)
        return found, eqx.apply_updates(model, updates), state

    def three_steps(jitted: Any) -> Any:
        model = eqx.nn.MLP(32, 32, 64, 2, activation=jax.nn.gelu, key=jax.random.key(0))
        arrays, static = eqx.partition(model, eqx.is_array)
        model = eqx.combine(jax.device_put(arrays, split), static)
        state = optimizer.init(eqx.filter(model, eqx.is_array))
        x = value(0, (16, 32), split)
        for _ in range(3):
            found, model, state = jitted(model, state, x)
        return found, eqx.filter(model, eqx.is_array), state

    want, got = three_steps(eqx.filter_jit(step)), three_steps(pp.auto_mixed(step))
    placed_alike(got, want)
    assert_leaves_near(got, want, 8 * pp.AutoMixedBf16.low.unit_roundoff, floor=0.1)
