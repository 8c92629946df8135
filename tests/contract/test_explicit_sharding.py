"""Contract lines 5, 14 and 16 on a mesh of explicit axes, where shardings stand in types."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import precpass as pp
from tests.support.jaxprs import check_all_low, products, walk
from tests.support.passes import COMPOSITIONS
from tests.support.values import assert_near, normal_array

N = 4096
each_composition = pytest.mark.parametrize("compose", COMPOSITIONS.values(), ids=COMPOSITIONS)
each_placement = pytest.mark.parametrize("placement", ["sharded", "replicated", "reduced"])


@pytest.fixture(autouse=True)
def mesh():
    found = jax.make_mesh((2, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(found):
        yield found


def whole(w: Any, placement: str) -> Any:
    """A weight as a product reads it: where it is sharded, gathered from all devices."""
    if placement == "reduced":
        return jax.reshard(w, P(reduced={"d"}))
    return jax.reshard(w, P(*[None] * w.ndim)) if placement == "sharded" else w


def placed(value: Any, placement: str, spec: P) -> jax.Array:
    mesh = jax.sharding.get_mesh()
    return jax.device_put(value, NamedSharding(mesh, spec if placement == "sharded" else P()))


def is_exactly_low(x: Any) -> bool:
    """Whether bfloat16 has every element, as it has after a rounding."""
    x = np.asarray(x)
    return bool((x.astype(jnp.bfloat16).astype(np.float32) == x).all())


def sums_over_devices(jaxpr: Any) -> list[Any]:
    """The products that add up over a dimension of which each device has a part."""
    found: list[Any] = []
    for eqn in products(jaxpr):
        spec = eqn.outvars[0].aval.sharding.spec
        contracted = ()
        if eqn.primitive.name == "dot_general":
            (dims, _), _ = eqn.params["dimension_numbers"]
            contracted = [eqn.invars[0].aval.sharding.spec.partitions[d] for d in dims]
        if spec.unreduced or any(part is not None for part in contracted):
            found.append(eqn)
    return found


def check_sums(jaxpr: Any, least: int) -> None:
    """Every sum over devices, of a product or of terms that are added up later, is float32."""
    sums = sums_over_devices(jaxpr)
    assert len(sums) >= least
    assert {e.outvars[0].aval.dtype.name for e in sums} <= {"float32"}
    for eqn in walk(jaxpr):
        for v in (*eqn.invars, *eqn.outvars):
            spec = getattr(getattr(v.aval, "sharding", None), "spec", None)
            if getattr(spec, "unreduced", None):
                assert v.aval.dtype == np.float32, eqn


# ---------------------------------------------------------------- gradients


def perceptron(w: Any, x: Any, *, placement: str) -> Any:
    return jnp.sum(jnp.tanh(x @ whole(w, placement)) ** 2)


def rnn(w: Any, xs: Any, *, placement: str) -> Any:
    own = whole(w, placement)
    h = jax.reshard(jnp.zeros(xs.shape[1:]), jax.typeof(xs[0]).sharding)
    h, hs = lax.scan(lambda h, x: (jnp.tanh(h @ own + x),) * 2, h, xs)
    return h.sum() + hs.mean(0).sum()


def gathered_in_the_loop(w: Any, xs: Any, *, placement: str) -> Any:
    """As the weights of a layer are: gathered anew in every trip."""

    def step(c: Any, x: Any) -> Any:
        return c + (jnp.tanh(x @ whole(w, placement)) ** 2).sum(), None

    return lax.scan(step, jnp.zeros(()), xs)[0]


def loop_constant(w: Any, xs: Any, *, placement: str) -> Any:
    own = whole(w, placement)
    return lax.scan(lambda c, x: (c + (x @ own).sum(), None), jnp.zeros(()), xs)[0]


def bias(b: Any, x: Any, *, placement: str) -> Any:
    eye = jnp.eye(8)
    return ((x @ eye + whole(b, placement)) @ eye).sum()


def token(table: Any, ids: Any, *, placement: str) -> Any:
    spec = P("d", None) if placement == "sharded" else P(None, None)
    rows = whole(table, placement)
    return (rows.at[ids].get(out_sharding=spec) @ jnp.eye(8)).sum()


ROWS, TRIPS = P("d", None), P(None, "d", None)
Case = tuple[Callable[..., Any], Any, P, Any, P, float | None]
# the function; its weight and data, each with the way it is sharded; the gradient where it is known
CASES: dict[str, Case] = {
    "perceptron": (
        perceptron,
        normal_array(0, 32, 16) / 4,
        ROWS,
        normal_array(1, 64, 32),
        ROWS,
        None,
    ),
    "rnn": (
        rnn,
        normal_array(0, 16, 16) / 8,
        ROWS,
        abs(normal_array(1, N, 4, 16)) / 2,
        TRIPS,
        None,
    ),
    "gathered in the loop": (
        *(gathered_in_the_loop, normal_array(0, 16, 16) / 8, ROWS),
        *(abs(normal_array(1, N, 4, 16)) / 8, TRIPS, None),
    ),
    "loop constant": (loop_constant, jnp.eye(8), ROWS, jnp.ones((N, 2, 8)), TRIPS, 2 * N),
    "bias": (bias, jnp.ones((1, 8)), P(None, "d"), jnp.ones((4 * N, 8)), ROWS, 4 * N),
    "token": (token, jnp.ones((4, 8)), ROWS, jnp.zeros(4 * N, jnp.int32), P("d"), None),
}


@pytest.mark.release(keep=1)
@each_composition
@each_placement
@pytest.mark.parametrize("policy", ["AutoMixedBf16", "AutoMixed"])
@pytest.mark.parametrize("name", CASES)
def test_a_gradient_of_many_terms(name: str, policy: str, placement: str, compose: Any):
    fn, w, of_w, x, of_x, known = CASES[name]
    fn = functools.partial(fn, placement=placement)
    if placement == "reduced" and name in ("bias", "token"):
        return  # JAX adds and gathers nothing of that type to what is sharded
    data = "replicated" if placement == "replicated" else "sharded"
    args = placed(w, placement, of_w), placed(x, data, of_x)
    mixed = compose(fn, jax.value_and_grad, policy)
    traced = jax.jit(mixed).trace(*args)
    check_all_low(traced.jaxpr, 1)
    check_sums(traced.jaxpr, int(placement != "replicated" and name not in ("bias", "token")))
    value, got = traced.lower().compile()(*args)
    want = jax.jit(jax.value_and_grad(fn))(*args)
    assert jax.typeof(got) == jax.typeof(want[1])
    assert_near((value, got), want)
    if known is not None:
        np.testing.assert_array_equal(got, np.full(got.shape, known, np.float32))
    elif name == "token":
        np.testing.assert_array_equal(got, np.zeros((4, 8)) + 4 * N * (np.arange(4) == 0)[:, None])
    else:
        assert not is_exactly_low(got)


# ---------------------------------------------------------------- line 5: other sums


@each_composition
@pytest.mark.parametrize("axis", ["d", "m"], ids=["data", "model"])
def test_convolutions(axis: str, compose: Any):
    """The kernel's gradient adds up over the batch, of which each device has a part."""
    x = placed(normal_array(0, 8, 8, 8, 4), "sharded", P(axis))
    w = placed(normal_array(1, 3, 3, 4, 6) / 4, "replicated", P())

    def loss(w: Any, x: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
        return jnp.sum(jnp.tanh(y) ** 2)

    mixed = compose(loss)
    jaxpr = check_all_low(jax.make_jaxpr(mixed)(w, x), 2)
    kernels = [e for e in products(jaxpr) if e.outvars[0].aval.shape == w.shape]
    assert {e.outvars[0].aval.dtype.name for e in kernels} == {"float32"}
    got, want = jax.jit(lambda *args: (mixed(*args), jax.grad(loss)(*args)))(w, x)
    assert_near(got, want, 0.02)
    assert not is_exactly_low(got)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_kernels_gradient_on_any_mesh(kind: AxisType):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
    x = jax.device_put(normal_array(0, 8, 8, 8, 4), NamedSharding(mesh, P("d")))
    w = jax.device_put(normal_array(1, 3, 3, 4, 6) / 4, NamedSharding(mesh, P()))

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(lax.conv(jnp.moveaxis(x, 3, 1), w.T, (1, 1), "SAME")))

    with jax.set_mesh(mesh):
        assert not is_exactly_low(jax.grad(pp.auto_mixed(loss))(w, x))


@each_composition
def test_tensor_parallel_layers_sum_in_float32(compose: Any):
    """A row-parallel layer: the sum over the sharded features is one over devices, forward too."""
    x = placed(normal_array(0, 8, 32), "sharded", P("d", "m"))
    w = placed(normal_array(1, 32, 16) / 4, "sharded", P("m", None))

    def loss(w: Any, x: Any) -> Any:
        y = jnp.dot(x, w, out_sharding=P("d", None))
        return jnp.sum(jnp.tanh(y) ** 2)

    mixed = compose(loss)
    jaxpr = check_all_low(jax.make_jaxpr(mixed)(w, x), 2)
    check_sums(jaxpr, 2)
    assert_near(*jax.jit(lambda *args: (mixed(*args), jax.grad(loss)(*args)))(w, x), 0.02)


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("policy", ["AutoMixedBf16", "AutoMixed", "AlwaysBf16", "AlwaysF16"])
def test_terms_that_are_added_up_later_are_float32(policy: str):
    x = placed(normal_array(0, 8, 32), "sharded", P(None, "d"))
    w = placed(normal_array(1, 32, 16) / 4, "sharded", P("d", None))

    def fn(w: Any, x: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            terms = jnp.dot(x, w, out_sharding=P(unreduced={"d"}))
            return jnp.tanh(c + jax.reshard(terms + terms, P(None, None))), terms

        c, _ = lax.scan(step, jnp.zeros((8, 16)), None, length=3)
        return c

    low = pp.auto_mixed(fn, policy=policy)
    check_sums(check_all_low(low.trace(w, x).jaxpr, 1), 1)
    assert_near(low(w, x), jax.jit(fn)(w, x), 0.02)
    plan = pp.inspect(fn, policy)(w, x).plan
    if policy.startswith("Always"):
        assert "each device holds one term" in " ".join(str(d.reason) for d in plan.walk())


def test_a_gathered_weight_is_cast_before_it_is_sent():
    x = placed(normal_array(0, 8, 32), "sharded", P("d"))
    w = placed(normal_array(1, 32, 16) / 4, "sharded", P("m", None))
    fn = lambda x, w: x @ jax.reshard(w, P(None, None))  # noqa: E731
    sent = [e.invars[0].aval for e in walk(pp.auto_mixed(fn).trace(x, w).jaxpr)]
    gathers = [a for a in sent if a.shape == w.shape and a.sharding.spec.partitions[0] == "m"]
    assert "bfloat16" in {a.dtype.name for a in gathers}
    reshards = [e for e in walk(pp.auto_mixed(fn).trace(x, w).jaxpr) if "reshard" in str(e)]
    assert any(e.invars[0].aval.dtype == jnp.bfloat16 for e in reshards)
    assert_near(pp.auto_mixed(fn)(x, w), fn(x, w), 0.02)


# ---------------------------------------------------------------- line 14: custom rules


@jax.custom_vjp
def projected(x: Any, w: Any) -> Any:
    return x @ w


def projected_backward(residuals: Any, g: Any) -> Any:
    x, w = residuals
    of_w = jnp.dot(x.T, g, out_sharding=P(None, None))
    return jnp.dot(g, w.T, out_sharding=jax.typeof(x).sharding), 3.0 * of_w


projected.defvjp(lambda x, w: (x @ w, (x, w)), projected_backward)


@jax.custom_jvp
def scaled(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


@scaled.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x, w), (dx, dw) = primals, tangents
    y = scaled(x, w)
    return y, (1.0 - y * y) * (dx @ w + 2.0 * (x @ dw))


@each_composition
@pytest.mark.parametrize("rule", [projected, scaled], ids=["vjp", "jvp"])
@pytest.mark.parametrize("placement", ["sharded", "replicated"])
def test_custom_rules(rule: Any, placement: str, compose: Any):
    w, x = (
        placed(normal_array(0, 32, 16) / 4, placement, ROWS),
        placed(normal_array(1, 64, 32), placement, ROWS),
    )

    def loss(w: Any, x: Any) -> Any:
        own = whole(w, placement)
        return sum(jnp.sum(jnp.arctan(rule(x, own)) ** 2) for _ in range(2))

    mixed = compose(loss)
    check_sums(check_all_low(jax.make_jaxpr(mixed)(w, x), 2), int(placement == "sharded"))
    got, want = jax.jit(lambda *args: (mixed(*args), jax.grad(loss)(*args)))(w, x)
    assert_near(got, want, 0.02)
    assert not is_exactly_low(got)


# ---------------------------------------------------------------- line 16: what is kept


def test_no_transpose_is_left_behind_a_weight_gradient():
    w, x = (
        placed(normal_array(0, 32, 16), "sharded", P(None, "m")),
        placed(normal_array(1, 64, 32), "sharded", ROWS),
    )
    fn = jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2))
    jaxpr = pp.auto_mixed(fn).trace(w, x).jaxpr
    wide = [e for e in walk(jaxpr) if e.primitive.name == "transpose"]
    assert all(e.invars[0].aval.dtype == jnp.bfloat16 for e in wide)
    got = pp.auto_mixed(fn)(w, x)
    assert jax.typeof(got) == jax.typeof(w)
    assert_near(got, jax.jit(fn)(w, x), 0.02)


# ---------------------------------------------------------------- reduced types in other tools


def in_a_loop(w: Any, x: Any) -> Any:
    own = jax.reshard(w, P(reduced={"d"}))
    h, hs = lax.scan(lambda h, _: (jnp.tanh(h @ own),) * 2, x, None, length=3)
    return jnp.sum(h**2) + jnp.sum(hs)


@pytest.fixture
def weights():
    return placed(normal_array(0, 16, 16) / 4, "replicated", P()), placed(
        normal_array(1, 8, 16), "sharded", ROWS
    )


@pytest.mark.release(keep=1)
@pytest.mark.parametrize(
    "policy", ["AlwaysF32", "AlwaysF16", "AlwaysBf16", "AutoMixedConservative"]
)
@each_composition
def test_reduced_weights_in_a_loop_under_the_other_policies(
    policy: str, compose: Any, weights: Any
):
    got = jax.jit(compose(in_a_loop, jax.grad, policy))(*weights)
    assert_near(got, jax.jit(jax.grad(in_a_loop))(*weights), 0.05)


def test_reduced_weights_with_a_loss_scale(weights: Any):
    mixed = pp.auto_mixed(in_a_loop, policy="AutoMixed")
    scale = pp.loss_scale.DynamicLossScale(2.0**4)
    value, got, finite = jax.jit(pp.loss_scale.scaled_value_and_grad(mixed))(scale, *weights)
    assert bool(finite)
    assert_near((value, got), jax.jit(jax.value_and_grad(in_a_loop))(*weights))


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("report", ["inspect", "explain", "audit", "compare", "calibrate"])
def test_reports_of_reduced_weights(report: str, weights: Any):
    fn = jax.grad(in_a_loop)
    text = {
        "inspect": lambda: pp.inspect(fn)(*weights).diff(),
        "explain": lambda: pp.explain(fn)(*weights),
        "audit": lambda: pp.audit(fn)(*weights),
        "compare": lambda: pp.compare(fn, ["AlwaysF32", "AutoMixedBf16"], rounds=1)(*weights),
        "calibrate": lambda: pp.numerics.calibrate(fn, "AutoMixed", [weights]),
    }
    assert str(text[report]())


@each_composition
@pytest.mark.parametrize("placement", ["sharded", "replicated"])
def test_axes_that_are_automatic_for_a_part_of_the_program(placement: str, compose: Any):
    """The equations of `jax.sharding.auto_axes` have another mesh than the program around them."""

    def loss(w: Any, x: Any) -> Any:
        hidden = jax.sharding.auto_axes(
            lambda x, w: jnp.tanh(x @ w), out_sharding=P("d", None), axes=("d", "m")
        )
        return (hidden(x, whole(w, placement)) ** 2).mean()

    w = placed(normal_array(0, 8, 6) / 3, placement, P("d", None))
    x = placed(normal_array(1, 16, 8), "sharded", P("d", None))
    gradient = compose(loss)
    check_all_low(jax.make_jaxpr(gradient)(w, x), 2)
    assert_near(jax.jit(gradient)(w, x), jax.jit(jax.grad(loss))(w, x), 0.02)
