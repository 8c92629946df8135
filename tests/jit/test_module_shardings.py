"""Shardings among `jax.jit`'s options that are given for modules of flax nnx."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import precpass as pp
from tests.support.jaxprs import product_dtypes
from tests.support.passes import quiet
from tests.support.values import rel_error

X = jnp.linspace(-1.0, 1.0, 32).reshape(8, 4)


@pytest.fixture(autouse=True)
def optax_promotes_types():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def mesh():
    return jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.second = nnx.Linear(8, 4, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.second(jnp.tanh(self.first(x)))


def shardings_of(model, mesh, spec=None):
    """Rows of matrices over the devices, and all else on each of them."""
    whole = NamedSharding(mesh, P())
    rows = NamedSharding(mesh, P("x") if spec is None else spec)
    return jax.tree.map(lambda x: rows if x.ndim == 2 else whole, model)


def forms(model, mesh):
    """What nnx and its users write for the same shardings."""
    tree = shardings_of(model, mesh)
    rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    by_filter = {nnx.PathContains("kernel"): rows, ...: whole}
    return {
        "module": tree,
        "state": nnx.state(tree),
        "filters": nnx.StateSharding(by_filter),
        "one sharding": whole,
        "nothing": None,
    }


FORMS = ("module", "state", "filters", "one sharding", "nothing")


def loss(model, x):
    return (model(x) ** 2).mean()


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("form", FORMS)
def test_of_an_argument(form, mesh):
    model = Net(nnx.Rngs(0))
    want = loss(model, X)
    whole = NamedSharding(mesh, P())
    mixed = pp.auto_mixed(loss, in_shardings=(forms(model, mesh)[form], whole))
    for calls in (2, 3):
        assert rel_error(mixed(model, X), want) < 2e-2
        assert int(model.calls[...]) == calls
    compiled = mixed.lower(model, X).compile()
    assert rel_error(compiled(model, X), want) < 2e-2
    assert set(product_dtypes(mixed.trace(model, X).jaxpr)) == {"bfloat16"}
    if form in ("module", "state", "filters"):
        kernel = model.first.kernel[...]
        found = [s for s in jax.tree.leaves(compiled.input_shardings) if s.spec == P("x")]
        assert len(found) == 2, compiled.input_shardings
        assert kernel.shape == (4, 8)


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("form", ["module", "state", "filters"])
def test_of_a_result(form, mesh):
    """The module that comes back is the one that went in, with its arrays where they should be."""
    model = Net(nnx.Rngs(0))
    whole = NamedSharding(mesh, P())

    def step(model, x):
        gradient = nnx.grad(loss)(model, x)
        kernel = model.first.kernel
        kernel[...] = kernel[...] - 0.1 * gradient.first.kernel[...]
        return model, model(x)

    mixed = pp.auto_mixed(step, out_shardings=(forms(model, mesh)[form], whole))
    before = np.asarray(model.first.kernel[...])
    got, out = mixed(model, X)
    assert got is model
    rows = NamedSharding(mesh, P("x"))
    for layer in (model.first, model.second):
        assert layer.kernel[...].sharding.is_equivalent_to(rows, 2)
    assert out.sharding.is_equivalent_to(whole, 2)
    assert 1e-4 < np.abs(np.asarray(model.first.kernel[...]) - before).max() < 1


def test_of_a_module_that_is_made_inside(mesh):
    made = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    of_it = jax.tree.map(lambda x: NamedSharding(mesh, P("x") if len(x.shape) == 2 else P()), made)
    mixed = pp.auto_mixed(
        lambda x: (Net(nnx.Rngs(0)), x @ x.T), out_shardings=(of_it, NamedSharding(mesh, P()))
    )
    model, _ = mixed(X)
    assert model.first.kernel[...].sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
    assert model(X).shape == (8, 4)


def test_of_a_train_step(mesh):
    """Model and optimizer, in and out, in a tree, with donation."""
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    state = {"model": model, "optimizer": optimizer}
    of_state = {
        "model": shardings_of(model, mesh),
        "optimizer": jax.tree.map(lambda _: NamedSharding(mesh, P()), optimizer),
    }

    def step(state, x):
        value, gradient = nnx.value_and_grad(loss)(state["model"], x)
        state["optimizer"].update(state["model"], gradient)
        return state, value

    whole = NamedSharding(mesh, P())
    mixed = pp.auto_mixed(
        step, in_shardings=(of_state, whole), out_shardings=(of_state, whole), donate_argnums=0
    )
    values = []
    for _ in range(4):
        state, value = mixed(state, X)
        values.append(float(value))
    assert values == sorted(values, reverse=True) and values[0] > values[-1]
    assert int(optimizer.step[...]) == 4
    rows = NamedSharding(mesh, P("x"))
    assert model.first.kernel[...].sharding.is_equivalent_to(rows, 2)


def test_of_tied_weights(mesh):
    """`jax.tree.map` gives a shared array a sharding at each of its places."""
    model = nnx.Sequential(
        nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(4, 4, rngs=nnx.Rngs(1))
    )
    model.layers[2].kernel = model.layers[0].kernel
    want = loss(model, X)
    of_model, whole = shardings_of(model, mesh), NamedSharding(mesh, P())
    mixed = pp.auto_mixed(
        lambda m, x: (m, loss(m, x)), in_shardings=(of_model, whole), out_shardings=(of_model, None)
    )
    got, value = mixed(model, X)
    assert rel_error(value, want) < 2e-2
    assert got.layers[2].kernel is got.layers[0].kernel
    assert got.layers[0].kernel[...].sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)


@pytest.mark.release
def test_beside_static_arguments_and_other_tools(mesh):
    model = Net(nnx.Rngs(0))
    of_model, whole = shardings_of(model, mesh), NamedSharding(mesh, P())
    mixed = pp.auto_mixed(
        lambda mode, model, x: loss(model, x) * (2 if mode == "twice" else 1),
        static_argnums=0,
        in_shardings=(of_model, whole),
    )
    want = loss(model, X)
    assert rel_error(mixed("twice", model, X), 2 * want) < 2e-2
    assert rel_error(mixed("once", model, X), want) < 2e-2
    assert mixed.eval_shape("once", model, X).shape == ()
    assert pp.inspect(mixed)("once", model, X).plan.lowers
    value, health = pp.monitor(mixed)("once", model, X)
    assert rel_error(value, want) < 2e-2 and not health.born()
    with quiet():
        policy = pp.numerics.calibrate(mixed, "AutoMixedBf16", [("once", model, X)])
    assert policy.name == "AutoMixedBf16" and policy.rules == ()


def test_an_array_that_is_elsewhere_is_refused_as_under_jit(mesh):
    model = Net(nnx.Rngs(0))
    columns = NamedSharding(mesh, P(None, "x"))
    model.first.kernel[...] = jax.device_put(model.first.kernel[...], columns)
    fn = pp.auto_mixed(loss, in_shardings=(shardings_of(model, mesh), NamedSharding(mesh, P())))
    with pytest.raises(ValueError, match=r"the array at first\.kernel of a module is committed"):
        fn(model, X)


def test_shardings_of_another_module_are_refused_by_the_place_that_is_missing(mesh):
    model, other = Net(nnx.Rngs(0)), nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    fn = pp.auto_mixed(loss, in_shardings=(shardings_of(other, mesh), NamedSharding(mesh, P())))
    with pytest.raises(ValueError, match=r"have none at \w+(\.\w+)?, where it has a (Param|Var)"):
        fn(model, X)


def test_explicit_axes():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
        of_model = jax.tree.map(lambda x: NamedSharding(mesh, P()), model)
        x = jax.device_put(X, NamedSharding(mesh, P("x")))

        def scaled(model, x):
            model.kernel[...] = 2.0 * model.kernel[...]
            return model, model(x)

        mixed = pp.auto_mixed(scaled, out_shardings=(of_model, NamedSharding(mesh, P("x"))))
        before = np.asarray(model.kernel[...])
        _, out = mixed(model, x)
        np.testing.assert_array_equal(model.kernel[...], 2 * before)
        assert out.sharding.spec[0] == "x"
