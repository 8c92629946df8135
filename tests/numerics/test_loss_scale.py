"""Loss scales step by step, and gradients of scaled losses: known bugs of others do not recur."""

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import precpass as pp
from tests.support.jaxprs import products
from tests.support.values import normal

P = PartitionSpec
f16, f32 = jnp.float16, jnp.float32
SCALES = {
    "none": pp.loss_scale.NoOpLossScale(),
    "static": pp.loss_scale.StaticLossScale(1024.0),
    "dynamic": pp.loss_scale.DynamicLossScale(2.0**10, interval=3),
}

# ---------------------------------------------------------------- the scale itself


def torchs(finite: Sequence[bool], scale: float, interval: int) -> list[tuple[float, int]]:
    """torch's `_amp_update_scale_`, as it is documented: the scale and the growth tracker."""
    tracker, seen = 0, []
    for is_finite in finite:
        if not is_finite:
            scale, tracker = scale * 0.5, 0
        else:
            tracker += 1
            if tracker == interval:
                scale, tracker = scale * 2.0, 0
        seen.append((scale, tracker))
    return seen


def followed(scale: Any, finite: Sequence[bool], step: Any) -> list[tuple[float, int]]:
    seen = []
    for is_finite in finite:
        scale = step(scale, jnp.asarray(is_finite))
        seen.append((float(scale.value), int(scale.steps)))
    return seen


STEPS = {
    "eager": lambda scale, finite: scale.adjusted(finite),
    "jit": jax.jit(lambda scale, finite: scale.adjusted(finite)),
}


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("interval", [1, 2, 3])
def test_every_sequence_is_torchs(step: str, interval: int):
    for finite in itertools.product((True, False), repeat=7):
        scale = pp.loss_scale.DynamicLossScale(2.0**8, interval=interval)
        assert followed(scale, finite, STEPS[step]) == torchs(finite, 2.0**8, interval)


def test_the_defaults_are_torchs():
    scale, steps = pp.loss_scale.DynamicLossScale(), 2000
    assert (scale.value, scale.growth, scale.backoff) == (2.0**16, 2.0, 0.5)
    assert scale.interval == steps
    run = jax.jit(
        lambda scale, n: lax.fori_loop(0, n, lambda _, s: s.adjusted(True), scale), static_argnums=1
    )
    start = jax.tree.map(
        jnp.asarray, pp.loss_scale.DynamicLossScale(jnp.float32(2.0**16), jnp.int32(0))
    )
    # with the 2000th finite step, neither one earlier nor one later
    assert [float(run(start, n).value) for n in (1999, 2000, 2001)] == [2.0**16, 2.0**17, 2.0**17]


def test_it_neither_leaves_its_bounds_nor_loses_them():
    bounds = {"floor": 4.0, "ceiling": 32.0, "interval": 1}
    scale = pp.loss_scale.DynamicLossScale(16.0, **bounds)
    up = [value for value, _ in followed(scale, [True] * 5, STEPS["jit"])]
    down = [value for value, _ in followed(scale, [False] * 5, STEPS["jit"])]
    assert up == [32.0] * 5 and down == [8.0, 4.0, 4.0, 4.0, 4.0]
    leaves, structure = jax.tree.flatten(scale)
    again = jax.tree.unflatten(structure, leaves)
    assert (again.floor, again.ceiling, again.interval) == (4.0, 32.0, 1)
    assert again == scale


@pytest.mark.parametrize("name", SCALES)
def test_a_scale_is_a_pytree(name: str):
    """In a scan's carry, under vmap, with another thing in the place of each leaf, and printed."""
    scale = SCALES[name]
    arrays = jax.tree.map(jnp.asarray, scale)
    finite = jnp.asarray([True, True, True, False])
    last, values = lax.scan(lambda s, ok: (s.adjusted(ok), f32(s.value)), arrays, finite)
    assert jax.tree.structure(last) == jax.tree.structure(scale)
    want = [1.0] * 4 if name == "none" else [1024.0] * 3 + [2048.0 if name == "dynamic" else 1024.0]
    assert values.tolist() == want
    axes = jax.tree.map(lambda _: None, scale)
    assert jax.tree.leaves(axes) == []
    assert len(jax.tree.leaves(jax.tree.map(lambda _: 0, scale))) == len(jax.tree.leaves(scale))
    assert type(scale).__name__ in repr(scale)


def test_a_step_is_compiled_once():
    traces = []

    @jax.jit
    def step(scale: Any) -> Any:
        traces.append(type(scale))
        return scale.adjusted(True)

    for scale in (pp.loss_scale.DynamicLossScale(), pp.loss_scale.StaticLossScale(4.0)):
        traces.clear()
        for _ in range(3):
            scale = step(scale)
        assert traces == [type(scale)]


@pytest.mark.parametrize(
    "make, said",
    [
        (
            lambda: pp.loss_scale.StaticLossScale(0.0),
            "StaticLossScale(value=0.0): it is to be positive",
        ),
        (lambda: pp.loss_scale.StaticLossScale(float("inf")), "positive and finite"),
        (
            lambda: pp.loss_scale.DynamicLossScale(-1.0),
            "DynamicLossScale(value=-1.0): it is to be from",
        ),
        (lambda: pp.loss_scale.DynamicLossScale(2.0**30), "to 16777216.0"),
        (lambda: pp.loss_scale.DynamicLossScale(growth=0.5), "growth=0.5"),
        (lambda: pp.loss_scale.DynamicLossScale(backoff=2.0), "backoff=2.0"),
        (lambda: pp.loss_scale.DynamicLossScale(interval=0), "interval=0"),
        (lambda: pp.loss_scale.DynamicLossScale(floor=8.0, ceiling=4.0), "floor=8.0, ceiling=4.0"),
    ],
)
def test_bad_scales_are_refused(make: Any, said: str):
    with pytest.raises(ValueError) as error:
        make()
    assert said in str(error.value)


# ---------------------------------------------------------------- gradients

W, X = jnp.asarray(normal(0, 16, 8)), jnp.asarray(normal(1, 4, 16))


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(x @ w))


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", SCALES)
def test_value_and_gradient_are_those_without_a_scale(name: str):
    value, gradient, finite = jax.jit(pp.loss_scale.scaled_value_and_grad(loss))(SCALES[name], W, X)
    wanted, want = jax.jit(jax.value_and_grad(loss))(W, X)
    assert (value, bool(finite)) == (wanted, True)
    # powers of two: not a bit differs
    np.testing.assert_array_equal(gradient, want)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("argnums", [1, (0, 1), -1])
def test_arguments_and_aux_are_those_of_jax(argnums: Any):
    def with_aux(w: Any, x: Any, *, by: Any) -> Any:
        return loss(w["w"], x) * by, {"seen": x.sum(), "name": jnp.int32(3)}

    args = {"w": W}, X
    scaled = pp.loss_scale.scaled_value_and_grad(with_aux, argnums, has_aux=True)
    got = scaled(SCALES["static"], *args, by=f32(2.0))[:2]
    want = jax.jit(jax.value_and_grad(with_aux, argnums, has_aux=True))(*args, by=f32(2.0))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def test_the_gradient_is_divided_by_the_scale_it_was_computed_with():
    """mpx divided by the scale of the next step: here that one is eight times as large."""
    scale = pp.loss_scale.DynamicLossScale(4.0, growth=8.0, interval=1)
    for _ in range(3):
        _, gradient, finite = pp.loss_scale.scaled_value_and_grad(loss)(scale, W, X)
        np.testing.assert_array_equal(gradient, jax.grad(loss)(W, X))
        scale = scale.adjusted(finite)
    assert scale.value == 4.0 * 8.0**3


def tiny(w: jax.Array, x: jax.Array) -> jax.Array:
    """A loss whose cotangents are below the smallest numbers of float16."""
    return 1e-7 * jnp.sum(jnp.arctan(x @ w))


def test_it_saves_what_float16_would_flush_to_zero():
    low = pp.auto_mixed(tiny, policy="AutoMixed")
    assert {e.invars[0].aval.dtype.name for e in products(jax.make_jaxpr(low)(W, X))} == {"float16"}
    want = jax.jit(jax.grad(tiny))(W, X)
    errors = {}
    for name, scale in {
        "none": pp.loss_scale.NoOpLossScale(),
        "2^16": pp.loss_scale.DynamicLossScale(),
    }.items():
        _, gradient, finite = pp.loss_scale.scaled_value_and_grad(low)(scale, W, X)
        assert finite
        errors[name] = float(jnp.linalg.norm(gradient - want) / jnp.linalg.norm(want))
    assert errors["2^16"] < 2e-3 < 0.1 < errors["none"]


@pytest.mark.parametrize("dtype", [f16, jnp.bfloat16, f32])
def test_a_loss_of_any_dtype_is_scaled(dtype: Any):
    """flax multiplies a float16 loss by a scale that float16 does not hold."""

    def narrow(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(x)).astype(dtype)

    x = jnp.arange(4.0)
    value, gradient, finite = pp.loss_scale.scaled_value_and_grad(narrow)(
        pp.loss_scale.DynamicLossScale(2.0**20), x
    )
    assert value.dtype == dtype and float(value) == 14.0 and finite
    np.testing.assert_array_equal(gradient, 2.0 * x)


def test_an_overflow_is_seen_and_halves_the_scale_until_it_is_gone():
    low = pp.auto_mixed(lambda w, x: jnp.sum(x @ w) * 16.0, policy="AutoMixed")
    scale, seen = pp.loss_scale.DynamicLossScale(2.0**16), []
    step = jax.jit(pp.loss_scale.scaled_value_and_grad(low))
    for _ in range(8):
        _, gradient, finite = step(scale, W, X)
        assert bool(finite) == bool(np.all(np.isfinite(gradient)))
        seen.append(bool(finite))
        scale = scale.adjusted(finite)
    # 16 * 2^12 is the first that float16 holds not, 16 * 2^11 holds
    assert seen == [False] * 5 + [True] * 3 and scale.value == 2.0**11


@pytest.mark.parametrize(
    "fn, said",
    [
        (lambda w: jnp.sum(w, axis=0), "float32[8]"),
        (lambda w: (jnp.sum(w), 1), "tuple"),
        (lambda w: jnp.sum(w).astype(jnp.int32), "int32[]"),
        (lambda w: jnp.sum(w).astype(jnp.complex64), "complex64[]"),
    ],
)
def test_what_is_no_loss_is_refused(fn: Any, said: str):
    with pytest.raises(TypeError, match="a loss is a real floating scalar") as error:
        pp.loss_scale.scaled_value_and_grad(fn)(SCALES["static"], W)
    assert said in str(error.value)


def test_what_is_no_scale_is_refused():
    with pytest.raises(TypeError, match="first argument is a float, and is to be a loss scale"):
        pp.loss_scale.scaled_value_and_grad(loss)(1024.0, W, X)


# ---------------------------------------------------------------- finite, and skipped


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_any_leaf_counts(bad: float):
    good = {"w": W, "n": jnp.int32(1), "key": jax.random.key(0), "empty": jnp.zeros((0, 3))}
    assert (
        pp.loss_scale.all_finite(good)
        and pp.loss_scale.all_finite({})
        and pp.loss_scale.all_finite(good | {"c": W.astype(jnp.complex64)})
    )
    for x in (W.at[3, 3].set(bad), jnp.asarray(bad, f16), jnp.asarray([complex(0.0, bad)])):
        assert not pp.loss_scale.all_finite(good | {"x": x})


def test_parameters_state_and_counters_are_taken_or_left_together():
    optimizer = optax.adam(1e-2)
    old = (W, optimizer.init(W), {"steps": jnp.int32(7), "key": jax.random.key(1)})
    with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
        updates, state = optimizer.update(jnp.full_like(W, jnp.nan), old[1], W)
    new = (W + updates, state, {"steps": jnp.int32(8), "key": jax.random.key(2)})
    for finite, want in ((True, new), (False, old)):
        got = jax.jit(pp.loss_scale.skip_nonfinite)(finite, new, old)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == b.dtype
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = map(jax.random.key_data, (a, b))
            np.testing.assert_array_equal(a, b)


def test_states_that_differ_are_named():
    with pytest.raises(
        ValueError, match=r"\['w'\] is bfloat16\[2\] after the step and was float32"
    ):
        pp.loss_scale.skip_nonfinite(True, {"w": jnp.zeros(2, jnp.bfloat16)}, {"w": jnp.zeros(2)})


# ---------------------------------------------------------------- around it


def mesh() -> Any:
    return jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def test_devices_agree():
    """One of four has an infinite gradient of its own: none of them takes the step."""

    def shard(scale: Any, w: Any, x: Any) -> Any:
        own = pp.loss_scale.scaled_value_and_grad(lambda w: jnp.sum(x @ w), axis_name="d")
        _, gradient, finite = own(scale, lax.pcast(w, "d", to="varying"))
        alone = pp.loss_scale.all_finite(gradient)
        return finite[None], alone[None], scale.adjusted(finite)

    x = jnp.ones((4, 16)).at[2].set(jnp.inf)
    run = jax.shard_map(
        shard, mesh=mesh(), in_specs=(P(), P(), P("d")), out_specs=(P("d"), P("d"), P())
    )
    agreed, alone, scale = jax.jit(run)(pp.loss_scale.DynamicLossScale(), W, x)
    assert alone.tolist() == [True, True, False, True]
    assert agreed.tolist() == [False] * 4 and scale.value == 2.0**15


def test_under_vmap_each_has_its_own_scale_or_all_agree():
    scales = pp.loss_scale.DynamicLossScale(jnp.asarray([8.0, 16.0]), jnp.asarray([0, 0]))
    xs = np.stack([X, X])
    xs[1, 0, 0] = np.nan
    for axis_name, want in ((None, [True, False]), ("batch", [False, False])):
        fn = pp.loss_scale.scaled_value_and_grad(loss, axis_name=axis_name)
        _, _, finite = jax.vmap(fn, in_axes=(0, None, 0), axis_name="batch")(scales, W, xs)
        assert finite.tolist() == want
        found = jax.vmap(lambda s, ok: s.adjusted(ok))(scales, finite)
        assert found.value.tolist() == [8.0 if want[0] else 4.0, 8.0]


def test_orbax_brings_a_scale_back(tmp_path: Any):
    scale = (
        pp.loss_scale.DynamicLossScale(interval=5, floor=2.0)
        .adjusted(True)
        .adjusted(False)
        .adjusted(True)
    )
    fresh = pp.loss_scale.DynamicLossScale(interval=5, floor=2.0)
    with ocp.StandardCheckpointer() as checkpoints:
        checkpoints.save(tmp_path / "step", {"scale": scale})
        checkpoints.wait_until_finished()
        found = checkpoints.restore(tmp_path / "step", {"scale": fresh})["scale"]
    assert (float(found.value), int(found.steps)) == (2.0**15, 1)
    assert (found.floor, found.interval) == (2.0, 5)
    assert followed(found, [True] * 4, STEPS["jit"])[-1] == (2.0**16, 0)


# ---------------------------------------------------------------- with optax


@functools.cache
def trained(scaled: bool, bad: tuple[int, ...] = ()) -> Any:
    optimizer = optax.adam(1e-2)
    if scaled:
        optimizer = pp.loss_scale.scaled_optimizer(
            optimizer, pp.loss_scale.DynamicLossScale(2.0**10, interval=4)
        )
    w, state, seen = W, optimizer.init(W), []

    @jax.jit
    def step(w: Any, state: Any, x: Any) -> Any:
        by = state.scale.value if scaled else 1.0
        gradient = jax.grad(lambda w: loss(w, x) * by)(w)
        updates, state = optimizer.update(gradient, state, w)
        return optax.apply_updates(w, updates), state

    for i in range(6):
        with jax.numpy_dtype_promotion("standard"):
            w, state = step(w, state, X.at[0, 0].set(jnp.inf) if i in bad else X)
        seen.append(w)
    return seen, state


def test_a_scaled_optimizer_takes_the_same_steps():
    (want, _), (got, state) = trained(False), trained(True)
    np.testing.assert_array_equal(got[-1], want[-1])
    assert (float(state.scale.value), int(state.scale.steps), int(state.skipped)) == (2.0**11, 2, 0)


def test_and_leaves_out_those_that_overflow():
    (plain, _), (got, state) = trained(False), trained(True, (0, 3))
    np.testing.assert_array_equal(got[0], W)
    np.testing.assert_array_equal(got[3], got[2])
    # the optimizer's own counters too: four steps were taken
    np.testing.assert_array_equal(got[-1], plain[3])
    assert int(state.skipped) == 2 and int(state.inner[0].count) == 4
    assert float(state.scale.value) == 2.0**8


# ---------------------------------------------------------------- jmp's names


@pytest.mark.parametrize("kind", ["DynamicLossScale", "StaticLossScale", "NoOpLossScale"])
def test_scales_have_jmps_names(kind: str):
    mine, its = getattr(pp.loss_scale, kind), getattr(jmp, kind)
    ours, theirs = (mine(), its()) if kind == "NoOpLossScale" else (mine(8.0), its(jnp.float32(8)))
    tree = {"a": jnp.float32(3.0), "b": jnp.ones(2, jnp.float16)}
    with jax.numpy_dtype_promotion("standard"):
        for name in ("scale", "unscale"):
            got, want = (getattr(scale, name)(tree) for scale in (ours, theirs))
            jax.tree.map(np.testing.assert_array_equal, got, want)
            assert [x.dtype for x in got.values()] == [x.dtype for x in tree.values()]
        for finite in (True, False):
            adjusted = ours.adjust(jnp.asarray(finite))
            assert adjusted == ours.adjusted(finite)
            if kind != "NoOpLossScale":
                assert float(adjusted.value) == float(theirs.adjust(jnp.asarray(finite)).loss_scale)


def test_jmps_own_scale_is_an_argument_like_others():
    """Its class looks at what it is made of, and refuses what is no array."""

    def step(w, scale, x):
        gradient = jax.grad(lambda w: scale.scale(jnp.square(jnp.tanh(x @ w)).mean()))(w)
        gradient = scale.unscale(gradient)
        finite = jmp.all_finite(gradient)
        return jmp.select_tree(finite, w - 0.1 * gradient, w), scale.adjust(finite)

    x, w = (jax.random.normal(jax.random.key(i), (16, 16)) / 4 for i in range(2))
    scale = jmp.DynamicLossScale(jnp.float32(2.0**15), period=1)
    with jax.numpy_dtype_promotion("standard"):
        want, want_scale = jax.jit(step)(w, scale, x)
        for got, got_scale in (
            pp.auto_mixed(step, policy="half")(w, scale, x),
            pp.monitor(step, "half")(w, scale, x)[0],
        ):
            np.testing.assert_allclose(got, want, atol=1e-3)
            assert isinstance(got_scale, jmp.DynamicLossScale)
            assert float(got_scale.loss_scale) == float(want_scale.loss_scale) == 2.0**16


@pytest.mark.parametrize("wrap", [pp.loss_scale.scaled_optimizer, pp.loss_scale.master_copies])
def test_without_optax_the_error_says_what_to_install(wrap, monkeypatch):
    optimizer = optax.sgd(1.0)
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(
        ModuleNotFoundError, match=f"{wrap.__name__} needs optax: pip install optax"
    ):
        wrap(optimizer)
