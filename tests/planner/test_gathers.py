"""Gathers: in 16 bits where their operand has no more digits, and after a cast where they grow."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import precpass as pp
from precpass.devices.detect import planned_for
from tests.support.devices import AbsentDevice
from tests.support.jaxprs import low_products, named, walk
from tests.support.values import assert_near, normal_array, rel_error

NODES, EDGES, WIDTH = 8, 64, 16
SENDERS = jnp.asarray(np.random.default_rng(0).integers(0, NODES, EDGES))
W = normal_array(0, WIDTH, WIDTH) / 4
X = normal_array(1, NODES, WIDTH)


def of_a_product(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.arctan((x @ w)[SENDERS]) + 1.0


def test_the_values_are_those_that_a_float32_gather_has():
    def later(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(x @ w)[SENDERS]

    with planned_for(AbsentDevice()):
        at_once, rounded = pp.auto_mixed(lambda w, x: (x @ w)[SENDERS]), pp.auto_mixed(later)
        assert rel_error(at_once(W, X), rounded(W, X)) == 0


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("fill", [None, 0.0, 1.1])
def test_what_stands_for_an_element_that_does_not_exist_keeps_its_digits(fill: float | None):
    def program(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.arctan((x @ w).at[jnp.asarray([0, 99])].get(mode="fill", fill_value=fill))

    with planned_for(AbsentDevice()):
        found = pp.auto_mixed(program)(W, X)[1]
    assert np.array_equal(found, program(W, X)[1], equal_nan=True)


def test_a_saved_plan_gathers_as_the_plan_did(tmp_path: Path):
    with planned_for(AbsentDevice()):
        found = pp.inspect(of_a_product, "AutoMixedBf16")(W, X)
        found.plan.save(tmp_path / "plan.json")
        again = pp.inspect(of_a_product, pp.Plan.load(tmp_path / "plan.json"))(W, X)
    assert str(again.after) == str(found.after)
    assert f"bf16[{EDGES},{WIDTH}] = gather" in str(again.after)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("composition", ["auto(grad)", "grad(auto)"])
def test_many_cotangents_of_one_element_add_up_in_float32(composition: str):
    """bfloat16 would stop at 256."""
    ids = jnp.zeros(4096, int)

    def total(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.arctan((x @ w)[ids]).sum()

    x, w = jnp.zeros((1, 16)), jnp.eye(16)
    with planned_for(AbsentDevice()):
        if composition == "auto(grad)":
            gradient = pp.auto_mixed(jax.grad(total))(x, w)
        else:
            gradient = jax.grad(pp.auto_mixed(total))(x, w)
    assert np.array_equal(gradient, np.full((1, 16), 4096.0))


# ---------------------------------------------------------------- casts before gathers


def test_the_gradient_of_a_concatenation_adds_up_in_float32():
    ids = jnp.zeros(4096, int)

    def total(x: jax.Array, w: jax.Array) -> jax.Array:
        return (jnp.concatenate([x[ids], x[ids]], axis=1) @ w).sum()

    x, w = jnp.ones((1, 1)), jnp.ones((2, 1))
    assert float(jax.grad(pp.auto_mixed(total))(x, w)[0, 0]) == 8192.0
    assert float(pp.auto_mixed(jax.grad(total))(x, w)[0, 0]) == 8192.0


def test_a_value_that_many_concatenations_move_is_found_in_no_time():
    """Each moves it twice, so there are 2**60 ways."""

    def turned(w: jax.Array, x: jax.Array) -> jax.Array:
        def trip(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            for _ in range(60):
                c = lax.concatenate([c[1:], c[:1]], 0)
            return jnp.tanh(c @ w), None

        return lax.scan(trip, x, None, length=3)[0]

    assert rel_error(pp.auto_mixed(turned)(W, X), turned(W, X)) < 0.02


def test_a_buffer_may_grow_by_any_number_of_concatenations():
    def grown(w: jax.Array, x: jax.Array) -> jax.Array:
        buffer = x
        for _ in range(1200):
            buffer = lax.concatenate([buffer, x[:1]], 0)
        return buffer @ w

    assert len(low_products(pp.inspect(grown, "AutoMixedBf16")(W, X).after)) == 1


def test_a_weight_that_a_constraint_gathers_is_cast_before_it_is_sent():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    here, everywhere = NamedSharding(mesh, P("d", None)), NamedSharding(mesh, P())
    x = jax.device_put(normal_array(0, 8, 32), here)
    w = jax.device_put(normal_array(1, 32, 16) / 4, here)

    def loss(w, x):
        return jnp.tanh(x @ lax.with_sharding_constraint(w, everywhere)).sum()

    for form in (pp.auto_mixed(jax.grad(loss)), jax.grad(pp.auto_mixed(loss))):
        traced = jax.make_jaxpr(form)(w, x)
        low = {
            eqn.outvars[0]
            for eqn in named(traced, "sharding_constraint")
            if eqn.invars[0].aval.dtype == jnp.bfloat16
        }
        reads = [v for eqn in walk(traced) for v in eqn.invars if not hasattr(v, "val")]
        assert low and low <= set(reads)
        found = form(w, x)
        assert found.sharding == jax.jit(jax.grad(loss))(w, x).sharding
        assert_near(found, jax.grad(loss)(w, x), 0.03)
