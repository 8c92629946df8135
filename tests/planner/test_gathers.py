"""Gathers: in 16 bits where their operand has no more digits, and after a cast where they grow."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from precpass.devices.detect import planned_for
from tests.support.devices import AbsentDevice
from tests.support.jaxprs import low_products, named, products
from tests.support.values import normal_array, rel_error

NODES, EDGES, WIDTH = 8, 64, 16
SENDERS = jnp.asarray(np.random.default_rng(0).integers(0, NODES, EDGES))
RECEIVERS = jnp.asarray(np.random.default_rng(1).integers(0, NODES, EDGES))
W = normal_array(0, WIDTH, WIDTH) / 4
X = normal_array(1, NODES, WIDTH)


def gathered(fn: Any, *args: Any, target: str | None = None) -> list[str]:
    """The avals of what a program's gathers make."""
    after = pp.inspect(fn, "AutoMixedBf16", target=target)(*args).after
    return [str(eqn.outvars[0].aval) for eqn in named(after, "gather")]


def summed(w: jax.Array, x: jax.Array) -> jax.Array:
    """Sums over edges of a product's rows, whose cotangents a backward pass gathers."""
    messages = jnp.tanh(x[SENDERS] @ w) @ w
    sums = jax.ops.segment_sum(messages, RECEIVERS, NODES)
    return jnp.arctan(jnp.tanh(sums @ w) @ w).sum()


def of_a_product(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.arctan((x @ w)[SENDERS]) + 1.0


@pytest.mark.parametrize("target", ["h100", "tpu v5e"])
def test_a_products_result_of_16_bits_is_gathered_in_16_bits(target: str):
    low, wide = f"bfloat16[{EDGES},{WIDTH}]", f"float32[{EDGES},{WIDTH}]"
    # The float32 gather has the derivative, and nothing else reads it.
    assert gathered(of_a_product, W, X, target=target) == [wide, low]
    assert low not in gathered(of_a_product, W, X)
    assert low in gathered(jax.grad(summed), W, X, target=target)


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


@pytest.mark.release
@pytest.mark.parametrize("transform", [jax.jacfwd, jax.jacrev, jax.hessian])
def test_derivatives_of_every_kind_are_near_to_float32s(transform: Any):
    def loss(w: jax.Array) -> jax.Array:
        return of_a_product(w, X).sum() + summed(w, X)

    with planned_for(AbsentDevice()):
        assert rel_error(transform(pp.auto_mixed(loss))(W), transform(loss)(W)) < 0.05
        both = jax.vmap(pp.auto_mixed(jax.grad(loss)))(jnp.stack([W, 2 * W]))
    assert rel_error(both[0], jax.jit(jax.grad(loss))(W)) < 0.03


# ---------------------------------------------------------------- casts before gathers


def casts(fn: Any, *args: Any) -> list[tuple[int, ...]]:
    """The shapes of what is cast to bfloat16."""
    after = pp.inspect(fn, "AutoMixedBf16")(*args).after
    assert len(low_products(after)) == len(products(after))
    results = [e.outvars[0].aval for e in named(after, "convert_element_type")]
    return [aval.shape for aval in results if aval.dtype == jnp.bfloat16]


def test_a_cast_comes_before_a_gather_that_repeats_rows():
    assert (NODES, WIDTH) in casts(lambda w, x: x[SENDERS] @ w, W, X)
    assert (EDGES, WIDTH) not in casts(lambda w, x: x[SENDERS] @ w, W, X)


def test_and_after_a_gather_that_takes_a_few_rows():
    few = jnp.asarray([3, 5])
    shapes = casts(lambda w, x: x[few] @ w, W, X)
    assert (2, WIDTH) in shapes and (NODES, WIDTH) not in shapes


def message(w: jax.Array, edges: jax.Array, x: jax.Array) -> jax.Array:
    """The product of a graph network: rows of an edge and of the two nodes that it joins."""
    rows = jnp.concatenate([edges, x[SENDERS], x[RECEIVERS]], axis=1)
    return rows @ w


def test_casts_come_before_a_concatenation_of_what_is_mostly_gathered():
    w, edges = normal_array(2, 3 * WIDTH, WIDTH), normal_array(3, EDGES, WIDTH)
    shapes = casts(message, w, edges, X)
    assert shapes.count((NODES, WIDTH)) == 1, "both gathers read one cast"
    assert (EDGES, 3 * WIDTH) not in shapes
    error = rel_error(pp.auto_mixed(message)(w, edges, X), message(w, edges, X))
    assert 1e-4 < error < 0.02


def test_and_after_a_concatenation_of_what_is_mostly_not():
    edges, w = normal_array(3, EDGES, 3 * WIDTH), normal_array(2, 5 * WIDTH, WIDTH)
    shapes = casts(message, w, edges, X)
    assert (EDGES, 5 * WIDTH) in shapes and (NODES, WIDTH) not in shapes


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
