"""Values that cross the borders of loops, branches and calls in 8 bits, each with its scale."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import precpass as pp
from precpass.devices.detect import planned_for
from tests.support.jaxprs import named
from tests.support.values import normal_array, rel_error

WS, X = jnp.stack([normal_array(i, 32, 32) / 6 for i in range(3)]), normal_array(9, 16, 32)
INTEGERS = (np.dtype(np.uint8), np.dtype(np.int8))


def policy(precision):
    """A policy that orders 8 bits for every dot, whatever its size."""
    order = pp.Rule(primitive="dot_general", precision=precision)
    return pp.AutoMixedBf16.with_rules(order)


def roundings(jaxpr):
    """The shapes of what the equations of a jaxpr itself, without its bodies, round to 8 bits."""
    made = [e.outvars[0].aval for e in jaxpr.eqns if e.primitive.name == "precpass_scaling"]
    return sorted(a.shape for a in made if a.dtype.itemsize == 1 and a.dtype != np.uint8)


def of(fn, precision, *args):
    """The jaxpr of a function under a policy of 8 bits."""
    jaxpr = jax.make_jaxpr(pp.auto_mixed(fn, policy(precision)))(*args).jaxpr
    while [e.primitive.name for e in jaxpr.eqns] == ["jit"]:
        jaxpr = body_of(jaxpr.eqns[0])
    return jaxpr


def body_of(eqn):
    jaxpr = eqn.params["jaxpr"]
    return getattr(jaxpr, "jaxpr", jaxpr)


def in_eight_bits(atoms):
    """The shapes of values that cross in 8 bits."""
    return sorted(v.aval.shape for v in atoms if v.aval.dtype in INTEGERS)


def loss(ws, x):
    return jnp.square(lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, ws)[0]).sum()


def test_a_gradient_rounds_each_value_once():
    jaxpr = of(jax.grad(loss), "f8e4m3", WS, X)
    forward, backward = (e for e in jaxpr.eqns if e.primitive.name == "scan")
    # The stack of weights is rounded once for both loops, with a scale for each layer.
    assert roundings(jaxpr) == [WS.shape]
    assert in_eight_bits(forward.invars) == [WS.shape]
    # Each layer's input is rounded in the forward pass alone, which stacks it in 8 bits.
    assert roundings(body_of(forward)) == [X.shape]
    assert in_eight_bits(forward.outvars) == [(3, *X.shape)]
    assert in_eight_bits(backward.invars) == sorted([(3, *X.shape), WS.shape])
    assert roundings(body_of(backward)) == [X.shape]  # the cotangent, once for two products
    # In the compiled program the loops hold no float32 stack.
    mixed = jax.jit(pp.auto_mixed(jax.grad(loss), policy("f8e4m3")))
    lines = mixed.lower(WS, X).compile().as_text().splitlines()
    loops = [line for line in lines if " while(" in line]
    assert loops and not any("f32[3,16,32]" in line for line in loops)
    assert any("u8[3,16,32]" in line for line in loops)


@pytest.mark.release
def test_the_gradient_is_that_of_the_other_side_of_the_pass():
    got = pp.auto_mixed(jax.grad(loss, (0, 1)), policy("f8e4m3"))(WS, X)
    want = jax.grad(pp.auto_mixed(loss, policy("f8e4m3")), (0, 1))(WS, X)
    assert rel_error(got, want) < 1e-6
    assert rel_error(got, jax.jit(jax.grad(loss, (0, 1)))(WS, X)) < 0.15


@pytest.mark.release
@pytest.mark.parametrize("precision", ["int8", "f8e4m3"])
def test_a_constant_of_a_loop_is_rounded_before_it(precision):
    def recurrent(w, xs):
        return lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), xs[0], xs)[0]

    def looped(w, xs):
        return lax.while_loop(
            lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, xs[0])
        )[1]

    w, xs = WS[0], jnp.stack([X, X, X])
    for fn in (recurrent, looped):
        jaxpr = of(fn, precision, w, xs)
        (loop,) = [e for e in jaxpr.eqns if e.primitive.name in ("scan", "while")]
        assert roundings(jaxpr) == [w.shape]
        assert in_eight_bits(loop.invars) == [w.shape]
        body = loop.params.get("body_jaxpr") or loop.params["jaxpr"]
        assert roundings(getattr(body, "jaxpr", body)) == [X.shape]
        mixed = pp.auto_mixed(fn, policy(precision))
        assert rel_error(mixed(w, xs), jax.jit(fn)(w, xs)) < (0.03 if precision == "int8" else 0.15)


def test_int8_has_a_scale_for_each_column_of_a_constant():
    def recurrent(w, xs):
        return lax.scan(lambda h, x: (h @ w, None), xs[0], xs)[0]

    jaxpr = of(recurrent, "int8", WS[0], jnp.stack([X, X]))
    (scan,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    (scale,) = [v.aval for v in scan.invars if v.aval.shape == (1, 32)]
    assert scale.dtype == np.float32


@dataclasses.dataclass(frozen=True)
class Place:
    """A device that is not there."""

    platform: str
    device_kind: str = ""


def test_where_a_stack_that_one_loop_reads_is_rounded():
    """int8 has no backward pass to read it again, so the stack pays on GPUs alone."""
    for platform, precision, before in (
        ("cpu", "f8e4m3", True),
        ("tpu", "f8e4m3", True),
        ("tpu", "int8", False),
        ("cpu", "int8", False),
        ("gpu", "int8", True),
    ):
        with planned_for(Place(platform)):
            jaxpr = of(loss, precision, WS, X)
        (scan,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
        assert in_eight_bits(scan.invars) == roundings(jaxpr) == ([WS.shape] if before else [])
        in_loop = [X.shape] if before else [X.shape, WS.shape[1:]]
        assert roundings(body_of(scan)) == in_loop, (platform, precision)


def test_what_others_read_too_crosses_as_before():
    def gated(ws, x):
        def layer(x, w):
            y = jnp.tanh(x @ w)
            return y * x, None  # the derivative of the product reads x, and so does that of `*`

        return jnp.square(lax.scan(layer, x, ws)[0]).sum()

    jaxpr = of(jax.grad(gated), "f8e4m3", WS, X)
    forward, backward = (e for e in jaxpr.eqns if e.primitive.name == "scan")
    assert in_eight_bits(forward.outvars) == []
    assert in_eight_bits(backward.invars) == [WS.shape]
    got = pp.auto_mixed(jax.grad(gated), policy("f8e4m3"))(WS, X)
    assert rel_error(got, jax.jit(jax.grad(gated))(WS, X)) < 0.15


def checkpointed(ws, x):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    return jnp.square(lax.scan(layer, x, ws)[0]).sum()


def nested(ws, x):
    def outer(x, ws):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0], None

    return jnp.square(lax.scan(outer, x, jnp.stack([ws, ws[::-1]]))[0]).sum()


def called(ws, x):
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))
    return jnp.square(lax.scan(lambda x, w: (layer(layer(x, w), w), None), x, ws)[0]).sum()


def turned(ws, x):
    def layer(x, w):
        return jnp.tanh(x @ w.T).T.reshape(32, 16).T, None

    return jnp.square(lax.scan(layer, x, jnp.swapaxes(ws, 1, 2))[0]).sum()


def reshaped(ws, x):
    def layer(x, w):
        heads = jnp.tanh(x @ w).reshape(16, 4, 8)
        return jnp.einsum("bhd,hdm->bm", heads, w.reshape(4, 8, 32)), None

    return jnp.square(lax.scan(layer, x, ws)[0]).sum()


def branched(ws, x):
    def layer(x, w):
        return lax.cond(x.sum() > 0, lambda: jnp.tanh(x @ w), lambda: jnp.arctan(x @ w.T)), None

    return jnp.square(lax.scan(layer, x, ws)[0]).sum()


def counted(ws, x):
    def layer(i, x):
        return jnp.tanh(x @ ws[i])

    return jnp.square(lax.fori_loop(0, 3, layer, x)).sum()


def in_batches(ws, x):
    return jax.vmap(loss, (None, 0))(ws, jnp.stack([x, 2 * x])).sum()


PROGRAMS = [loss, checkpointed, nested, called, turned, reshaped, branched, counted, in_batches]


@pytest.mark.release
@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("precision", ["int8", "f8e4m3"])
def test_programs_are_near(fn, precision):
    # Of six products and more, each of which rounds two operands.
    most = 0.05 if precision == "int8" else 0.25
    asked = policy(precision)
    gradient = jax.grad(fn, (0, 1))
    got, want = pp.auto_mixed(gradient, asked)(WS, X), gradient(WS, X)
    assert rel_error(got, want) < most
    assert rel_error(pp.auto_mixed(fn, asked)(WS, X), jax.jit(fn)(WS, X)) < most
    other = jax.grad(pp.auto_mixed(fn, asked), (0, 1))(WS, X)
    assert rel_error(other, want) < most
    mapped = jax.vmap(pp.auto_mixed(gradient, asked), (None, 0))(WS, jnp.stack([X, -X]))
    assert rel_error([m[0] for m in mapped], got) < 1e-3
    exported = export.export(jax.jit(pp.auto_mixed(gradient, asked)), platforms=("cpu", "cuda"))(
        WS, X
    )
    assert rel_error(exported.call(WS, X), got) < 1e-5


@pytest.mark.release
def test_a_second_derivative_passes_through():
    def directional(ws, x):
        return (jax.grad(loss)(ws, x) * WS).sum()

    for outer in (
        pp.auto_mixed(jax.grad(directional), policy("f8e4m3")),
        jax.grad(pp.auto_mixed(directional, policy("f8e4m3"))),
    ):
        assert rel_error(outer(WS, X), jax.jit(jax.grad(directional))(WS, X)) < 0.25


def test_checkpointed_layers_take_8_bits_and_put_no_float32_behind_a_barrier():
    jaxpr = of(jax.grad(checkpointed), "f8e4m3", WS, X)
    *_, backward = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    (again,) = named(body_of(backward), "remat2") or named(body_of(backward), "checkpoint")
    assert in_eight_bits(again.invars)
    barred = again.params["prevent_cse"]
    assert isinstance(barred, tuple) and any(barred)
    barred_avals = [v.aval for v, is_barred in zip(again.invars, barred, strict=True) if is_barred]
    assert not [a for a in barred_avals if a.shape == WS.shape[1:] and a.dtype == np.float32]


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_so_across_a_border(value):
    bad = X.at[3, 5].set(value)
    got = pp.auto_mixed(jax.grad(lambda ws, x: loss(ws, x)), policy("f8e4m3"))(WS, bad)
    assert not np.isfinite(np.asarray(got[0])).all()


@pytest.mark.release
def test_zeros_stay_zero():
    got = pp.auto_mixed(jax.grad(loss), policy("f8e4m3"))(WS, 0 * X)
    assert not np.asarray(got[0]).any() and np.isfinite(np.asarray(got)).all()


@pytest.mark.release
@pytest.mark.parametrize("axes", ["Auto", "Explicit", "shard_map"])
def test_on_a_mesh(axes):
    kind = AxisType.Explicit if axes == "Explicit" else AxisType.Auto
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(kind,))
    fn = jax.grad(loss)
    if axes == "shard_map":
        specs = {"in_specs": (P(), P("rows")), "out_specs": P()}

        def on_shard(ws, x):
            ws = lax.pcast(ws, "rows", to="varying")
            return lax.psum(jax.grad(loss)(ws, x), "rows")

        fn = jax.shard_map(on_shard, mesh=mesh, **specs)
    want = jax.jit(jax.grad(loss))(WS, X)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, P("rows")))
        ws = jax.device_put(WS, jax.NamedSharding(mesh, P()))
        got = jax.jit(pp.auto_mixed(fn, policy("f8e4m3")))(ws, x)
        scans = named(jax.make_jaxpr(pp.auto_mixed(fn, policy("f8e4m3")))(ws, x), "scan")
    assert any(in_eight_bits(scan.outvars) for scan in scans)
    assert rel_error(np.asarray(got), want) < 0.15


def test_the_diff_the_listing_and_the_explanation_say_so():
    found = pp.inspect(jax.grad(loss), policy("f8e4m3"))(WS, X)
    lines = str(found.diff()).splitlines()
    assert any("1 result is passed in 8 bits (f8e4m3[3,16,32])" in line for line in lines)
    assert any("2 operands are passed in 8 bits" in line for line in lines)
    assert "u8[3,16,32]" in found.listing()
    assert "0 values in 16 bits and 4 in 8 bits kept across function" in found.explain().all


def test_a_policy_of_16_bits_has_none():
    jaxpr = jax.make_jaxpr(pp.auto_mixed(jax.grad(loss), "AutoMixedBf16"))(WS, X)
    assert not any(in_eight_bits(e.invars) for e in named(jaxpr, "scan"))
