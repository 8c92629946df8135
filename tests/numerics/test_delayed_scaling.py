"""`delayed_scaling`: the scales of products in 8 bits from earlier calls."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import precpass as pp
from tests.support.jaxprs import named
from tests.support.values import identical, normal_array, rel_error

W, X = normal_array(1, 256, 256) / 16, normal_array(2, 256, 256)
STACK = jnp.stack([W, W.T])
FLOAT8 = "float8_e4m3fn"


def layers(ws: Any, x: Any) -> Any:
    first, stack, last = ws
    for w in (first, *stack, last):
        x = jnp.tanh(x @ w)
    return x @ first


def scanned(ws: Any, x: Any) -> Any:
    first, stack, last = ws
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), jnp.tanh(x @ first), stack)[0] @ last


def rematted(ws: Any, x: Any) -> Any:
    first, stack, last = ws
    step = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    return lax.scan(step, jnp.tanh(x @ first), stack)[0] @ last


def looped(ws: Any, x: Any) -> Any:
    first, stack, last = ws

    def step(state: Any) -> Any:
        i, x = state
        return i + 1, jnp.tanh(x @ stack[i])

    with pp.keep("f8"):
        return lax.while_loop(lambda state: state[0] < 2, step, (0, jnp.tanh(x @ first)))[1] @ last


def branched(ws: Any, x: Any) -> Any:
    first, stack, last = ws
    x = jnp.tanh(x @ first)
    return lax.cond(x[0, 0] < 2, lambda: jnp.tanh(x @ stack[0]), lambda: x @ stack[1]) @ last


def jitted(ws: Any, x: Any) -> Any:
    first, stack, last = ws
    dense = jax.jit(lambda x, w: jnp.tanh(x @ w))
    return dense(dense(dense(x, first), stack[0]), stack[1]) @ last


def in_custom_rule(ws: Any, x: Any) -> Any:
    first, stack, last = ws

    @jax.custom_jvp
    def dense(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    dense.defjvp(lambda primals, tangents: (dense(*primals), tangents[0]))
    return dense(jnp.tanh(x @ first), stack[0]) @ last


def loss_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda ws, x: jnp.square(fn(ws, x)).sum()


FUNCTIONS = [layers, scanned, rematted, looped, branched, jitted, in_custom_rule]
each_function = pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
WS = W, STACK, W


@pytest.mark.release(keep=1)
@each_function
def test_the_scales_of_the_same_call_give_its_result(fn: Callable[..., Any]):
    scaled = pp.quant.delayed_scaling(fn)
    scales = scaled.init(WS, X)
    assert scales.places
    out, after = scaled(scales, WS, X)
    now = pp.auto_mixed(fn, "AutoMixedF8")(WS, X)
    # In a loop a scale is that of all trips, which for float8 changes no digit of normal numbers.
    assert rel_error(out, now) < 1e-2
    assert rel_error(out, jax.jit(fn)(WS, X)) < 0.1
    assert np.array_equal(after.history[:, 0], after.history[:, 1])
    with warnings.catch_warnings():  # of the branch that is not taken
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        assert identical(scaled.frozen(scales)(WS, X), out)
    assert bool(scales.unseen()) == (fn is branched) and not after.saturated()


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("policy", ["AutoMixedF8", "AutoMixedInt8"])
@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(layers, marks=pytest.mark.programs),
        pytest.param(scanned, marks=pytest.mark.programs),
        rematted,
    ],
    ids=lambda f: f.__name__,
)
def test_a_gradient_is_near(fn: Callable[..., Any], policy: str):
    gradient = jax.value_and_grad(loss_of(fn))
    scaled = pp.quant.delayed_scaling(gradient, policy)
    scales = scaled.init(WS, X)
    out, scales = scaled(scales, WS, X)
    assert rel_error(out, gradient(WS, X)) < 0.1


@pytest.mark.release(keep=1)
@each_function
def test_every_rounding_takes_its_scale_from_the_state(fn: Callable[..., Any]):
    """The silent failure would be a scale of the present values."""
    scaled = pp.quant.delayed_scaling(fn)
    scales = scaled.init(WS, X)
    program = jax.make_jaxpr(scaled)(scales, WS, X)
    roundings = [e for e in named(program, "precpass_scaling") if len(e.outvars) == 2]
    assert roundings and scales.places
    assert all("by a given scale" in str(e.params["arithmetic"]) for e in roundings)
    dots = named(program, "dot_general")
    assert any({v.aval.dtype.name for v in dot.invars} == {FLOAT8} for dot in dots)
    # Scales a thousand times as large leave nothing of the values.
    larger = jax.tree.map(lambda history: history * 2.0**20, scales)
    assert rel_error(scaled(larger, WS, X)[0], jax.jit(fn)(WS, X)) > 0.2


@pytest.mark.release
def test_the_history_moves_and_forgets():
    scaled = pp.quant.delayed_scaling(layers, history=2)
    scales = scaled.init(WS, X)
    first = scales.history[:, 0]
    _, scales = scaled(scales, WS, 0.5 * X)
    assert np.array_equal(scales.history[:, 1], first)
    _, scales = scaled(scales, WS, 0.25 * X)
    assert not np.array_equal(scales.history[:, 1], first)
    assert scales.history.shape == (len(scales.places), 2)


@pytest.mark.release
def test_what_is_larger_than_before_is_clipped_and_told():
    product = jax.jit(lambda w, x: jnp.sin(x) * 0 + x @ w)
    policy = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="dot_general", precision="f8"))
    scaled = pp.quant.delayed_scaling(product, policy)
    scales = scaled.init(W, X / jnp.abs(X).max())
    assert scales.saturated() == []
    out, scales = scaled(scales, W, X)
    assert bool(jnp.isfinite(out).all())
    (place,) = scales.saturated()
    assert place.startswith("f8e4m3 at ") and "test_delayed_scaling.py" in place
    assert rel_error(out, X @ W) > 0.1
    out, scales = scaled(scales, W, X)
    assert rel_error(out, X @ W) < 0.06 and scales.saturated() == []


def test_the_shares_of_saturated_and_flushed_values_are_those_that_numpy_counts():
    policy = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="dot_general", precision="f8"))

    def product(w: Any, x: Any) -> Any:
        return lax.scan(lambda c, _: (c, c @ w), x, None, length=3)[1].sum(0)

    scaled = pp.quant.delayed_scaling(product, policy)
    scales = scaled.init(W, X)
    assert [(each.saturated, each.flushed) for each in scaled.lost(scales, W, X)] == [
        (0.0, 0.0)
    ] * 2
    more = np.array(X)
    largest = np.abs(more).max()
    more[:4], more[5:7], more[8], more[9] = 3 * largest, 1e-9 * largest, np.nan, 0.0
    of_x, of_w = scaled.lost(scales, W, more)
    assert of_x.place == scales.places[0]
    # neither NaN nor zero counts
    assert of_x.saturated == pytest.approx(4 / len(X))
    assert of_x.flushed == pytest.approx(2 / len(X), abs=0.02)
    assert (of_w.saturated, of_w.flushed) == (0.0, 0.0)
    assert str(of_x).startswith(f"{4 / len(X):.2%} saturated, ")
    jitted = jax.jit(lambda scales: scaled(scales, W, more)[1])(scales)
    assert jitted.saturated() == [of_x.place]


@pytest.mark.release
def test_a_branch_that_is_not_taken_loses_nothing():
    scaled = pp.quant.delayed_scaling(branched)
    scales = scaled.init(WS, X)
    assert len(scaled.lost(scales, WS, X)) == len(scales.places)
    assert all(each.saturated == 0.0 for each in scaled.lost(scales, WS, X))
    with pytest.raises(TypeError, match="the first argument is the DelayedScales"):
        scaled.lost(WS, X)  # pyright: ignore[reportArgumentType, reportCallIssue]


@pytest.mark.release
@pytest.mark.parametrize("policy", ["AutoMixedF8", "AutoMixedInt8"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_and_is_forgotten(policy: str, value: float):
    def fn(ws: Any, x: Any) -> Any:
        y = jnp.tanh(x @ ws[0])
        return ((y + x) @ ws[1]) @ ws[2]

    ws, bad = (W, W, W), X.at[3, 5].set(value)
    scaled = pp.quant.delayed_scaling(fn, policy)
    scales = scaled.init(ws, X)
    for out in (scaled(scales, ws, bad)[0], scaled.frozen(scales)(ws, bad)):
        assert not np.isfinite(np.asarray(out)[3]).any()
    _, scales = scaled(scales, ws, bad)
    assert np.isfinite(scales.history).all()
    out, _ = scaled(scales, ws, X)
    assert rel_error(out, jax.jit(fn)(ws, X)) < 0.1


@pytest.mark.release
def test_each_call_of_a_block_has_scales_of_its_own():
    for wrap in (jax.jit, jax.checkpoint):
        block = wrap(lambda x, w: jnp.tanh(x @ w))

        def fn(ws: Any, x: Any, block: Any = block) -> Any:
            x = jnp.tanh(x @ ws[0])
            return block(1e-3 * x, ws[1]) @ ws[2], block(3 * x, ws[1]) @ ws[2]

        scaled = pp.quant.delayed_scaling(fn, "AutoMixedInt8")
        scales = scaled.init((W, W, W), X)
        assert len(scales.places) == 3  # the weight, which both calls read, and their operands
        for got, want in zip(scaled(scales, (W, W, W), X)[0], fn((W, W, W), X), strict=True):
            assert rel_error(got, want) < 0.05


@pytest.mark.release
def test_a_branch_that_no_batch_took_is_named_and_rounded_as_if_its_largest_were_one():
    def fn(ws: Any, x: Any, is_other: Any) -> Any:
        x = jnp.tanh(x @ ws[0])
        return lax.cond(is_other, lambda x: jnp.sin(x @ ws[1]), lambda x: x, x) @ ws[2]

    scaled = pp.quant.delayed_scaling(fn)
    scales = scaled.calibrated([((W, W, W), X, False)] * 2)
    assert len(scales.unseen()) == 2 and all("branch 1" in place for place in scales.unseen())
    with pytest.warns(pp.PrecisionWarning, match=r"2 operands had no number but zero in these"):
        run = scaled.frozen(scales)
    assert rel_error(run((W, W, W), X, True), fn((W, W, W), X, True)) < 0.1


@pytest.mark.release
def test_a_weight_that_was_zero_keeps_its_first_small_numbers():
    def fn(params: Any, x: Any) -> Any:
        h = jnp.tanh(x @ params["in"])
        return (jnp.sin(h @ params["a"]) @ params["b"]) @ params["in"]

    zero = {"in": W, "a": W, "b": jnp.zeros_like(W)}
    small = zero | {"b": 1e-3 * W.T}
    scaled = pp.quant.delayed_scaling(fn)
    scales = scaled.init(zero, X)
    assert len(scales.unseen()) == 1
    assert rel_error(scaled(scales, small, X)[0], jax.jit(fn)(small, X)) < 0.1


@pytest.mark.release
def test_batches_of_other_sizes_have_the_same_scales():
    scaled = pp.quant.delayed_scaling(layers)
    more = jnp.concatenate([X, 0.5 * X])
    scales = scaled.calibrated([(WS, X), (WS, more)])
    assert rel_error(scaled.frozen(scales)(WS, more), jax.jit(layers)(WS, more)) < 0.1
    assert rel_error(scaled(scales, WS, more)[0], jax.jit(layers)(WS, more)) < 0.1


@pytest.mark.release
def test_the_same_values_are_not_beyond_the_scales_of_int8():
    scaled = pp.quant.delayed_scaling(layers, "AutoMixedInt8")
    _, scales = scaled(scaled.init(WS, X), WS, X)
    assert scales.saturated() == []


@pytest.mark.release
def test_the_state_is_a_tree_like_any_other():
    scaled = pp.quant.delayed_scaling(layers)
    scales = scaled.init(WS, X)
    each = jax.vmap(scaled.init, in_axes=(None, 0))(WS, jnp.stack([X, 2 * X]))
    assert repr(each) == repr(scales) and each.saturated() == [] == each.unseen()
    assert "DelayedScales" in repr(jax.tree.map(lambda _: P(), scales))
    copies = copy.deepcopy(scales), pickle.loads(pickle.dumps(scales))
    assert all(identical(scaled(same, WS, X), scaled(scales, WS, X)) for same in copies)
    assert scales != copies[0] and hash(scales)
    shapes = scaled.init(WS, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert shapes.history.shape == scales.history.shape and shapes.places == scales.places


def test_scales_of_no_call_are_those_of_a_largest_magnitude_of_one():
    def fn(ws: Any, x: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]) @ ws[2]

    scaled, ws = pp.quant.delayed_scaling(fn), (W, W, W)
    shapes = jax.eval_shape(scaled.init, ws, X)
    assert isinstance(shapes, pp.quant.DelayedScales) and shapes.history.shape == (2, 16)
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    out, scales = scaled(zero, ws, X)
    assert rel_error(out, jax.jit(fn)(ws, X)) < 0.1
    assert scales.history[:, 0].all() and scales.saturated() == []


def test_calibrated_scales_are_those_of_all_batches():
    scaled = pp.quant.delayed_scaling(layers, "AutoMixedInt8")
    batches = [(WS, X * factor) for factor in (0.1, 1.0, 0.3)]
    scales = scaled.calibrated(batches)
    each = [scaled.init(*batch).history[:, 0] for batch in batches]
    assert np.array_equal(scales.history[:, 0], np.max(each, 0))
    run = scaled.frozen(scales)
    assert all(rel_error(run(*batch), jax.jit(layers)(*batch)) < 0.05 for batch in batches)


def test_frozen_scales_are_read_and_no_magnitude_is():
    scaled = pp.quant.delayed_scaling(layers)
    scales = scaled.init(WS, X)
    text = jax.jit(scaled.frozen(scales)).lower(WS, X).compile().as_text()
    assert "maximum" not in text.split("ENTRY")[1]
    program = jax.make_jaxpr(lambda *args: scaled(*args))(scales, WS, X)
    assert named(program, "reduce_max")


@pytest.mark.release
def test_weights_of_eight_bits_need_no_scale():
    def fn(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    ws = [W] * 4
    small = pp.quant.quantized(fn)(ws, X)
    scaled = pp.quant.delayed_scaling(fn, "AutoMixedInt8")
    scales = scaled.init(small, X)
    assert len(scales.places) == 2  # the activations of the two layers in the middle
    assert rel_error(scaled.frozen(scales)(small, X), jax.jit(fn)(ws, X)) < 0.05


@pytest.mark.release
def test_it_trains_under_jit_and_in_a_scan():
    """Twenty steps of a small network: the state is a carry like the optimizer's."""
    target = jnp.tanh(X @ W)
    params = {"a": W * 0.9, "b": W.T, "c": W * 1.1}

    def loss(params: Any, x: Any) -> Any:
        y = jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]) @ params["c"]
        return jnp.square(y - target).mean()

    optimizer = optax.adam(1e-2)
    gradient = pp.quant.delayed_scaling(jax.value_and_grad(loss), history=4)

    def step(state: Any, _: Any) -> Any:
        params, opt_state, scales = state
        (value, grads), scales = gradient(scales, params, X)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state, scales), value

    start = params, optimizer.init(params), gradient.init(params, X)
    with jax.numpy_dtype_promotion("standard"):  # optax promotes types
        _, losses = jax.jit(lambda s: lax.scan(step, s, None, length=20))(start)

    def plain(state: Any, _: Any) -> Any:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, X)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), value

    with jax.numpy_dtype_promotion("standard"):
        _, wanted = lax.scan(plain, start[:2], None, length=20)
    assert losses[-1] < losses[0] / 2
    assert abs(losses[-1] - wanted[-1]) < 0.1 * wanted[-1]


@pytest.mark.release
def test_it_is_mapped_and_exported():
    scaled = pp.quant.delayed_scaling(layers)
    scales = scaled.init(WS, X)
    xs = jnp.stack([X, 2 * X])
    outs, each = jax.vmap(scaled, in_axes=(None, None, 0))(scales, WS, xs)
    assert each.history.shape == (2, *scales.history.shape)
    assert rel_error(outs[0], scaled(scales, WS, X)[0]) < 1e-6
    exported = jax.export.export(jax.jit(scaled.frozen(scales)), platforms=("cpu", "cuda", "tpu"))
    assert "f8E4M3FN" in exported(WS, X).mlir_module()


@pytest.mark.release
def test_shards_keep_scales_of_the_present_values():
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))

    def fn(ws: Any, x: Any) -> Any:
        x = jnp.tanh(x @ ws[0])
        specs = {"in_specs": (P(), P("rows")), "out_specs": P("rows")}
        x = jax.shard_map(lambda w, x: jnp.tanh(x @ w), mesh=mesh, **specs)(ws[1], x)
        return jnp.tanh(x @ ws[1]) @ ws[2]

    policy = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="dot_general", precision="f8"))
    scaled = pp.quant.delayed_scaling(fn, policy)
    scales = scaled.init((W, W, W), X)
    out, after = scaled(scales, (W, W, W), X)
    assert rel_error(out, fn((W, W, W), X)) < 0.1
    assert np.array_equal(after.history[:, 0], scales.history[:, 0])


@pytest.mark.release
def test_sharded_arguments(tmp_path: Any):
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    x = jax.device_put(X, jax.NamedSharding(mesh, P("rows")))
    scaled = pp.quant.delayed_scaling(scanned)
    scales = scaled.init(WS, x)
    out, _ = scaled(scales, WS, x)
    assert rel_error(out, scaled(scales, WS, X)[0]) < 1e-5


def test_the_state_is_saved_and_restored(tmp_path: Any):
    ocp = pytest.importorskip("orbax.checkpoint")
    scaled = pp.quant.delayed_scaling(layers)
    scales = scaled.init(WS, X)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "scales", scales)
        checkpointer.wait_until_finished()
        shapes = jax.eval_shape(scaled.init, WS, X)
        restored = checkpointer.restore(tmp_path / "scales", shapes)
    assert restored.places == scales.places
    assert np.array_equal(restored.history, scales.history)


def test_switched_off_it_is_the_function():
    scaled = pp.quant.delayed_scaling(layers)
    scales = scaled.init(WS, X)
    with pp.use_policy(None):
        out, same = scaled(scales, WS, X)
        assert identical(out, layers(WS, X)) and np.array_equal(same.history, scales.history)
        assert identical(scaled.frozen(scales)(WS, X), layers(WS, X))


def test_what_is_wrong_is_refused():
    scaled = pp.quant.delayed_scaling(layers)
    scales = scaled.init(WS, X)
    with pytest.raises(TypeError, match=r"the first argument is the DelayedScales, not a tuple"):
        scaled(WS, WS, X)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"not a dict: begin with scales = scaled\.init"):
        scaled.frozen({})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"of another program: they have \d+ operands, and this"):
        pp.quant.delayed_scaling(scanned)(scales, WS, X)
    with pytest.raises(ValueError, match=r"history=0\): it is to be a whole number of 1 or more"):
        pp.quant.delayed_scaling(layers, history=0)
    with pytest.raises(TypeError, match=r"delayed_scaling\(jax\.grad\(loss\)\)"):
        jax.grad(lambda ws: pp.quant.delayed_scaling(layers)(scales, ws, X)[0].sum())(WS)
    with pytest.raises(ValueError, match="there are no batches"):
        scaled.calibrated([])
    with pytest.raises(TypeError, match=r"a batch is a list, and is to be a tuple"):
        scaled.calibrated([[WS, X]])  # pyright: ignore[reportArgumentType]
    with pytest.warns(pp.PrecisionWarning, match="layers has no products in int8 or f8e4m3"):
        assert pp.quant.delayed_scaling(layers, "bf16").init(WS, X).places == ()


@pytest.mark.release
@pytest.mark.parametrize("policy", ["AutoMixedBf16", "AutoMixedF8"])
def test_flaxs_own_float8_layers_keep_their_products_and_their_state(policy: str):
    """Their state "overwrites with the gradient": `jax.grad` returns the next one for it."""
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(2):
                x = jnp.tanh(nn.Dense(256, dot_general_cls=nn.Fp8DirectDotGeneralOp)(x))
            return nn.Dense(16)(x)

    net = Net()
    variables = net.init(jax.random.key(0), X)

    def loss(variables: Any) -> Any:
        return jnp.square(net.apply(variables, X)).mean()

    wanted = jax.jit(jax.grad(loss))(variables)["_overwrite_with_gradient"]
    for mixed in (pp.auto_mixed(jax.grad(loss), policy), jax.grad(pp.auto_mixed(loss, policy))):
        found = mixed(variables)["_overwrite_with_gradient"]
        for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert rel_error(got, want) < 0.01 or identical(got, want)
        programs = [jax.make_jaxpr(f)(variables) for f in (mixed, jax.grad(loss))]
        of_flax = [
            sorted(
                tuple(v.aval.dtype.name for v in dot.invars)
                for dot in named(program, "dot_general")
                if FLOAT8 in {v.aval.dtype.name for v in dot.invars}
            )
            for program in programs
        ]
        assert of_flax[0] == of_flax[1] != []
