"""Values that cross the borders of loops in float8, each with its scale, as for an H100."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, PartitionSpec as P

import precpass as pp
from precpass.devices.detect import planned_for
from precpass.devices.targets import target_of
from tests.support.jaxprs import named
from tests.support.values import normal_array, rel_error

WS, X = jnp.stack([normal_array(i, 32, 32) / 6 for i in range(3)]), normal_array(9, 16, 32)
ORDER = pp.Rule(primitive="dot_general", precision="f8e4m3")
POLICY = pp.AutoMixedBf16.with_rules(ORDER)
"""A policy that orders float8 for every dot, whatever its size."""


@pytest.fixture(autouse=True)
def for_an_h100():
    with planned_for(target_of("h100")):
        yield


def body_of(eqn):
    jaxpr = eqn.params["jaxpr"]
    return getattr(jaxpr, "jaxpr", jaxpr)


def scans(fn, policy=POLICY):
    """The jaxpr of a gradient under a policy, and its two scans."""
    jaxpr = jax.make_jaxpr(pp.auto_mixed(jax.grad(fn), policy))(WS, X).jaxpr
    while [e.primitive.name for e in jaxpr.eqns] == ["jit"]:
        jaxpr = body_of(jaxpr.eqns[0])
    return jaxpr, *(e for e in jaxpr.eqns if e.primitive.name == "scan")


def roundings(jaxpr):
    """The shapes of what the equations of a jaxpr itself, without its bodies, round to 8 bits."""
    made = [e for e in jaxpr.eqns if e.primitive.name == "precpass_scaling" and len(e.invars) == 1]
    return sorted(e.outvars[0].aval.shape for e in made)


def in_eight_bits(atoms):
    """The shapes of values that cross in 8 bits."""
    return [v.aval.shape for v in atoms if v.aval.dtype == np.uint8]


def loss(ws, x):
    return jnp.square(lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, ws)[0]).sum()


def test_a_forward_loop_stacks_8_bits_for_the_backward_loop():
    jaxpr, forward, backward = scans(loss)
    # The stack of weights is rounded once for both loops, with a scale for each layer.
    assert roundings(jaxpr) == [WS.shape]
    assert in_eight_bits(forward.invars) == [WS.shape]
    # Each layer's input is rounded in the forward pass alone, which stacks it in 8 bits.
    # A derivative of this gradient would read them in another order.
    assert roundings(body_of(forward)) == [X.shape, X.shape[::-1]]
    assert in_eight_bits(forward.outvars) == [(3, *X.shape)]
    assert sorted(in_eight_bits(backward.invars)) == [(3, *X.shape), WS.shape]
    # The cotangent, in the orders in which two products read it.
    assert roundings(body_of(backward)) == [X.shape, X.shape[::-1]]
    # In the compiled program the loops hold no stack of these values in float32.
    mixed = jax.jit(pp.auto_mixed(jax.grad(loss), POLICY))
    lines = mixed.lower(WS, X).compile().as_text().splitlines()
    loops = [line for line in lines if " while(" in line]
    assert loops and not any("f32[3,16,32]" in line for line in loops)
    assert any("u8[3,16,32]" in line for line in loops)


def gated(ws, x):
    def layer(x, w):
        y = jnp.tanh(x @ w)
        return y * x, None  # the derivative of the product reads x, and so does that of `*`

    return jnp.square(lax.scan(layer, x, ws)[0]).sum()


def nested(ws, x):
    def outer(x, ws):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0], None

    return jnp.square(lax.scan(outer, x, jnp.stack([ws, ws[::-1]]))[0]).sum()


@pytest.mark.parametrize(
    ("fn", "policy", "weights"),
    [
        (gated, POLICY, [WS.shape]),
        (nested, POLICY, []),
        (loss, POLICY.with_weight_gradients("bf16"), [WS.shape]),
        (loss, pp.AutoMixedBf16, []),
    ],
)
def test_what_is_read_in_16_bits_too_and_a_stack_of_stacks_cross_as_before(fn, policy, weights):
    _, forward, backward = scans(fn, policy)
    assert in_eight_bits(forward.outvars) == []
    assert in_eight_bits(forward.invars) == in_eight_bits(backward.invars) == weights


def checkpointed(ws, x):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    return jnp.square(lax.scan(layer, x, ws)[0]).sum()


def called(ws, x):
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))
    return jnp.square(lax.scan(lambda x, w: (layer(layer(x, w), w), None), x, ws)[0]).sum()


def turned(ws, x):
    def layer(x, w):
        return jnp.tanh(x @ w.T).T.reshape(32, 16).T, None

    return jnp.square(lax.scan(layer, x, jnp.swapaxes(ws, 1, 2))[0]).sum()


def branched(ws, x):
    def layer(x, w):
        return lax.cond(x.sum() > 0, lambda: jnp.tanh(x @ w), lambda: jnp.arctan(x @ w.T)), None

    return jnp.square(lax.scan(layer, x, ws)[0]).sum()


def in_batches(ws, x):
    return jax.vmap(loss, (None, 0))(ws, jnp.stack([x, 2 * x])).sum()


PROGRAMS = [loss, gated, nested, checkpointed, called, turned, branched, in_batches]


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
def test_programs_are_near(fn):
    gradient = jax.grad(fn, (0, 1))
    mixed, want = pp.auto_mixed(gradient, POLICY), gradient(WS, X)
    # Of six products and more, each of which rounds two operands.
    got = mixed(WS, X)
    assert rel_error(got, want) < 0.25
    mapped = jax.vmap(mixed, (None, 0))(WS, jnp.stack([X, -X]))
    assert rel_error([m[0] for m in mapped], got) < 1e-3
    exported = export.export(jax.jit(mixed), platforms=("cpu", "cuda"))(WS, X)
    assert rel_error(exported.call(WS, X), got) < 1e-5


@pytest.mark.release
def test_a_second_derivative_passes_through():
    def directional(ws, x):
        return (jax.grad(loss)(ws, x) * WS).sum()

    want = jax.jit(jax.grad(directional))(WS, X)
    for outer in (
        pp.auto_mixed(jax.grad(directional), POLICY),
        jax.grad(pp.auto_mixed(directional, POLICY)),
    ):
        assert rel_error(outer(WS, X), want) < 0.25


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_so_across_a_border(value):
    bad = X.at[3, 5].set(value)
    assert not np.isfinite(np.asarray(pp.auto_mixed(jax.grad(loss), POLICY)(WS, bad))).all()


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
        got = jax.jit(pp.auto_mixed(fn, POLICY))(ws, x)
        found = named(jax.make_jaxpr(pp.auto_mixed(fn, POLICY))(ws, x), "scan")
    assert any(in_eight_bits(scan.outvars) for scan in found)
    assert rel_error(np.asarray(got), want) < 0.15


def test_the_diff_the_listing_and_the_explanation_say_so():
    found = pp.inspect(jax.grad(loss), POLICY)(WS, X)
    lines = str(found.diff()).splitlines()
    assert any("1 result is passed in 8 bits (f8e4m3[3,16,32])" in line for line in lines)
    assert any("2 operands are passed in 8 bits" in line for line in lines)
    assert "u8[3,16,32]" in str(found.listing())
    assert "0 values in 16 bits and 4 in 8 bits kept across function" in found.explain().all
