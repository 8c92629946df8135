"""Modules whose variables hold references or hijax values: they are updated as under `jax.jit`.

`nnx.with_vars(model, ref=True)` puts each array of a model into a `jax.Ref`, and the equations that
write it are effects of the program.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import precpass as pp
from tests.support.jaxprs import low_products
from tests.support.passes import quiet

X = jax.random.normal(jax.random.key(1), (16, 8))
POLICIES = ("AlwaysF32", "AutoMixedBf16", "AutoMixed")


class Counting(nnx.Module):
    """A layer that counts its calls, twice in the graph where `tied`."""

    def __init__(self, tied: bool = False) -> None:
        self.layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(1))
        self.calls = nnx.BatchStat(jnp.zeros(()))
        self.again = self.layer if tied else nnx.Linear(8, 8, rngs=nnx.Rngs(2))

    def __call__(self, x):
        self.calls[...] += 1
        return self.again(self.norm(self.layer(x)))


def with_references(tied: bool = False) -> Counting:
    return nnx.with_vars(Counting(tied), ref=True)


def loss(model, x):
    return (model(x) ** 2).mean()


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("policy", POLICIES)
def test_references_of_a_model_take_the_updates(policy, tied):
    model, plain = with_references(tied), with_references(tied)
    held = model.calls.get_raw_value()
    mixed, jitted = pp.auto_mixed(loss, policy=policy), nnx.jit(loss)
    for times in (1, 2, 3):
        found, wanted = mixed(model, X), jitted(plain, X)
        assert model.calls[...] == times and model.calls.get_raw_value() is held
        tolerance = 1e-6 if policy == "AlwaysF32" else 0.03
        np.testing.assert_allclose(found, wanted, rtol=tolerance)
        np.testing.assert_allclose(
            model.norm.mean[...], plain.norm.mean[...], rtol=tolerance, atol=tolerance
        )


def test_their_products_are_lowered():
    model = with_references(tied=True)
    assert low_products(pp.auto_mixed(loss).trace(model, X).jaxpr)
    assert model.calls[...] == 0


def test_the_variables_of_two_models_stay_shared():
    def scaled(one, other, x):
        one.layer.kernel[...] *= 2
        return (one(x) + other(x)).sum()

    one, other = with_references(), with_references()
    other.layer.kernel = one.layer.kernel
    before = np.asarray(other.layer.kernel[...])
    pp.auto_mixed(scaled)(one, other, X)
    assert other.layer.kernel is one.layer.kernel
    np.testing.assert_array_equal(other.layer.kernel[...], 2 * before)


def test_a_variable_by_itself_and_a_new_one():
    variable = nnx.Variable(jnp.zeros(()), ref=True)

    def count(variable):
        variable[...] += 1
        return variable[...] * 2

    counted = pp.auto_mixed(count)
    with quiet():
        assert [float(counted(variable)) for _ in range(2)] == [2.0, 4.0]
    assert variable[...] == 2

    def extend(model, x):
        model.extra = nnx.Variable(x[0] * 2, ref=True)
        return model(x).sum()

    model = with_references()
    pp.auto_mixed(extend)(model, X)
    assert isinstance(model.extra.get_raw_value(), jax.Ref)
    np.testing.assert_array_equal(model.extra[...], X[0] * 2)


def test_a_program_reads_what_was_assigned_since():
    layer = nnx.with_vars(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), ref=True)
    mixed = pp.auto_mixed(lambda layer, x: layer(x))
    assert np.abs(mixed(layer, X)).sum() > 0
    layer.kernel[...] = jnp.zeros((8, 8))
    assert np.abs(mixed(layer, X)).sum() == 0


def test_a_copy_takes_the_updates_of_a_monitor_and_a_comparison():
    model = with_references()
    pp.compare(loss, ["AlwaysF32", "AutoMixedBf16"])(model, X)
    pp.monitor(loss, every=2).init(model, X)
    assert model.calls[...] == 0
    variables = [v for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)]
    assert len(variables) > 5
    assert all(isinstance(v.get_raw_value(), jax.Ref) for v in variables)


# ---------------------------------------------------------------- hijax


@pytest.mark.usefixtures("jax_leaks_too")  # a jit in a jit
def test_a_hijax_variable_is_taken_as_jit_takes_it():
    variable = nnx.Variable(jnp.ones((8, 8)), hijax=True)

    def total(variable, x):
        return jnp.abs(variable[...] @ x.T).sum()  # terms of one sign do not cancel

    mixed = pp.auto_mixed(total, policy="AutoMixedBf16")
    assert low_products(mixed.trace(variable, X).jaxpr)
    wanted = jax.jit(total)(variable, X)
    np.testing.assert_allclose(mixed(variable, X), wanted, rtol=0.02)
    np.testing.assert_allclose(pp.auto_mixed(lambda x: total(variable, x))(X), wanted, rtol=0.02)


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="flax forbids to write one inside jit since jax 0.11"
)
@pytest.mark.usefixtures("jax_leaks_too")
def test_a_hijax_variable_takes_the_updates():
    variable = nnx.Variable(jnp.ones((8, 8)), hijax=True)

    def scaled(variable, x):
        variable[...] = variable[...] * 4
        return (variable[...] @ x.T).sum()

    pp.auto_mixed(scaled)(variable, X)
    np.testing.assert_array_equal(variable[...], np.full((8, 8), 4.0))
