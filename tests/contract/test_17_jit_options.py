"""Design section 3, line 17: donation, shardings, ahead-of-time stages, functions jitted before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import precpass as pp
from tests.support.calls import W, X, counted
from tests.support.jaxprs import product_dtypes
from tests.support.values import f32, rel_error

ROUNDING = 2**-8
"""Of bfloat16: one operation at a time, XLA makes roundings that it leaves out when it fuses."""

DONATIONS = [{"donate_argnums": 0}, {"donate_argnums": (0,)}, {"donate_argnames": "state"}]


def step(state, x, mode=None):
    return jax.tree.map(lambda s: s + x @ x, state)


def copies():
    return {"a": jnp.array(X), "b": jnp.array(W)}


@pytest.mark.parametrize("options", DONATIONS, ids=["argnums", "tuple", "argnames"])
@pytest.mark.parametrize("mode", [None, "static"])
def test_donated_buffers_are_deleted_and_no_others(options, mode):
    mixed = pp.auto_mixed(step, **options)
    for _ in range(2):  # the call that traces, and the one that does not
        state, x = copies(), jnp.array(X)
        out = mixed(state, x, mode) if mode else mixed(state, x)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
        assert not x.is_deleted()
        assert rel_error(out, step(copies(), X)) < 2e-2


def test_without_donation_nothing_is_deleted_and_ahead_of_time_it_is():
    state = copies()
    pp.auto_mixed(step)(state, X)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    lowered = pp.auto_mixed(step, donate_argnums=0).lower(state, X)
    assert [info.donated for info in jax.tree.leaves(lowered.args_info)] == [True, True, False]
    lowered.compile()(state, X)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def sharding(*spec):
    mesh = jax.make_mesh((4,), ("d",), (AxisType.Auto,), devices=jax.devices()[:4])
    return NamedSharding(mesh, PartitionSpec(*spec))


@pytest.mark.parametrize("mode", [None, "static"])
def test_shardings_of_arguments_and_results(mode):
    rows, whole = sharding("d"), sharding()
    shardings = (rows, whole) if mode is None else (rows, whole, None)

    def fn(x, w, mode=None):
        return {"y": x @ w, "sum": (x @ w).sum()}

    options = {"in_shardings": shardings, "out_shardings": {"y": rows, "sum": whole}}
    mixed = pp.auto_mixed(fn, **options)
    out = mixed(X, W, mode) if mode else mixed(X, W)
    assert out["y"].sharding.is_equivalent_to(rows, 2)
    assert len(out["y"].addressable_shards) == 4
    assert out["sum"].sharding.is_equivalent_to(whole, 0)
    assert rel_error(out, fn(X, W)) < 2e-2


def test_shardings_of_the_gradient_and_products_low():
    rows = sharding("d")
    mixed = pp.auto_mixed(
        jax.grad(lambda w, x: jnp.tanh(x @ w).sum()), in_shardings=(rows, None), out_shardings=rows
    )
    x = jax.device_put(X, sharding(None, "d"))
    grad = mixed(W, x)
    assert grad.sharding.is_equivalent_to(rows, 2)
    assert rel_error(grad, jax.grad(lambda w, x: jnp.tanh(x @ w).sum())(W, X)) < 2e-2
    assert set(product_dtypes(mixed.trace(W, x).jaxpr)) == {"bfloat16"}


@pytest.mark.parametrize("options", [{"keep_unused": True}, {"inline": True}], ids=str)
def test_other_options_reach_jit(options):
    mixed = pp.auto_mixed(lambda x, unused: x @ x, **options)
    compiled = mixed.lower(X, W).compile()
    assert rel_error(compiled(X, W), X @ X) < 2e-2
    parameters = compiled.as_text().split("entry_computation_layout={(")[1].split(")->")[0]
    assert parameters.count("f32[8,8]") == (2 if "keep_unused" in options else 1)


def test_an_unknown_option_is_jits_error():
    with pytest.raises(TypeError, match="no_such_option"):
        pp.auto_mixed(step, no_such_option=1)


# ---------------------------------------------------------------- stages


def test_stages_without_running():
    counting, runs = counted(lambda x, n=1.0: {"y": x @ x * n})
    mixed = pp.auto_mixed(counting)
    assert isinstance(mixed, jax.stages.Wrapped)
    traced = mixed.trace(f32(8, 8))
    assert isinstance(traced, jax.stages.Traced)
    assert product_dtypes(traced.jaxpr) == ["bfloat16"]
    lowered = traced.lower()
    assert "bf16" in lowered.as_text()
    compiled = lowered.compile()
    assert rel_error(compiled(X), {"y": X @ X}) < 2e-2
    assert mixed.eval_shape(f32(8, 8)) == {"y": f32(8, 8)}
    mixed(X)
    assert len(runs) == 1
    with pytest.raises(TypeError):
        compiled(X[:4])


# ---------------------------------------------------------------- jitted before


def test_a_jitted_functions_own_options_stay_with_its_own_call():
    """As for a jit in a jit: the outer one decides what is donated and static."""
    inner = jax.jit(lambda state, x: state + x @ x, donate_argnums=0)
    state = jnp.array(X)
    assert rel_error(pp.auto_mixed(inner)(state, W), X + W @ W) < 2e-2
    assert not state.is_deleted()
    pp.auto_mixed(inner, donate_argnums=0)(state, W)
    assert state.is_deleted()


def test_a_jitted_functions_static_arguments_are_declared_again():
    def power(x, n):
        for _ in range(n):
            x = x @ x
        return x

    inner = jax.jit(power, static_argnums=1)
    for wrap in (jax.jit, pp.auto_mixed):
        with pytest.raises(ValueError, match="Non-hashable static arguments"):
            wrap(inner)(X, 2)
    assert rel_error(pp.auto_mixed(inner, static_argnums=1)(X, 1), X @ X) < 2e-2
    named = jax.jit(lambda x, act: act(x @ x), static_argnums=1)
    assert rel_error(pp.auto_mixed(named)(X, jnp.tanh), jnp.tanh(X @ X)) < 3e-2


# ---------------------------------------------------------------- jit switched off


def loss(w, x):
    h, ys = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), h.sum()), x, None, length=3)
    h = jax.lax.fori_loop(0, 2, lambda _, h: h * 0.5, h)
    return (jax.jit(lambda h: h @ w)(h) ** 2).sum() + ys.sum()


@pytest.mark.parametrize(
    "form",
    [
        lambda f: pp.auto_mixed(jax.value_and_grad(f)),
        lambda f: jax.grad(pp.auto_mixed(f)),
        lambda f: lambda w, x: jax.vmap(pp.auto_mixed(f), (0, None))(jnp.asarray(w)[None], x),
        lambda f: pp.auto_mixed(lambda w, x: (w @ x, x.sum(), x.astype(jnp.int32))),
    ],
    ids=["gradient inside", "gradient outside", "vmap", "types"],
)
def test_disable_jit_gives_the_values_and_types_of_jit(form):
    want = form(loss)(W, X)
    for kind in (jnp.asarray, np.asarray):
        with jax.disable_jit():
            got = form(loss)(kind(W), kind(X))
        assert rel_error(got, want) < ROUNDING
        types = [[(x.dtype, x.shape) for x in jax.tree.leaves(tree)] for tree in (got, want)]
        assert types[0] == types[1]
    with jax.disable_jit(), pp.use_policy(None):
        wide = form(loss)(W, X)
    assert rel_error(got, wide) > 1e-6, "its products are low"


def test_disable_jit_leaves_numbers_and_static_leaves_as_they_are():
    def fn(x, n, mode):
        for _ in range(n):  # a tracer would not do here
            x = x @ x
        return x if mode == "m" else -x, mode

    with jax.disable_jit():
        y, mode = pp.auto_mixed(fn)(X, 2, "m")
        assert pp.auto_mixed(fn, static_argnums=1)(np.asarray(X), 1, "m")[1] == "m"
    assert mode == "m"
    assert rel_error(y, (X @ X) @ (X @ X)) < 2e-2
