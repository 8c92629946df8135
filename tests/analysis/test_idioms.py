"""On a GPU or TPU the products before activation functions have results in 16 bits.

What makes float32 results necessary elsewhere, a difference or a comparison, is in many of these
functions or in their derivatives.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import precpass as pp
from precpass.devices.detect import planned_for
from tests.support.devices import AbsentDevice
from tests.support.jaxprs import low_products, named
from tests.support.passes import quiet
from tests.support.values import normal_array, rel_error

Function = Callable[[jax.Array], jax.Array]
X, W, V = normal_array(0, 64, 48), normal_array(1, 48, 32) / 4, normal_array(2, 32, 16) / 6


def gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


def clip(x: jax.Array) -> jax.Array:
    return jnp.clip(x, -1, 1.5)


def centred(x: jax.Array) -> jax.Array:
    return x - x.mean(1, keepdims=True)


def shift_of(x: jax.Array) -> jax.Array:
    return lax.stop_gradient(jnp.maximum(x.max(1, keepdims=True), 2.0))


def two_passes(x: jax.Array) -> jax.Array:
    """As equinox and haiku normalise."""
    return centred(x) * lax.rsqrt(x.var(1, keepdims=True) + 1e-6) * 2.0


def one_pass(x: jax.Array) -> jax.Array:
    """As flax normalises."""
    mean = x.mean(1, keepdims=True)
    variance = jnp.maximum(0.0, jnp.square(x).mean(1, keepdims=True) - jnp.square(mean))
    return (x - mean) * (lax.rsqrt(variance + 1e-6) * jnp.ones((1, 32)))


def by_its_root(x: jax.Array) -> jax.Array:
    left = centred(x)
    return left / jnp.sqrt(jnp.mean(left * left, 1, keepdims=True) + 1e-6)


def in_groups(x: jax.Array) -> jax.Array:
    """As flax normalises groups: the sums are of the value in another shape."""
    grouped = x.reshape(*x.shape[:-1], 8, -1)
    mean = grouped.mean(-1)
    variance = jnp.maximum(0.0, jnp.square(grouped).mean(-1) - jnp.square(mean))
    mean, variance = (jnp.repeat(a, grouped.shape[-1], axis=-1) for a in (mean, variance))
    return (x - mean) * lax.rsqrt(variance + 1e-6)


ACTIVATIONS: dict[str, Function] = {
    **{
        name: getattr(jax.nn, name)
        for name in ("relu6", "softplus", "mish", "log_sigmoid", "hard_tanh", "hard_sigmoid")
        + ("sparse_plus", "elu", "celu", "selu", "silu", "squareplus", "log_softmax")
    },
    "gelu": gelu,
    "erf": lax.erf,
    "clip": clip,
    "maximum": lambda x: jnp.maximum(x, 0.0),
    "maximum of rows": lambda x: jnp.abs(x.reshape(4, 16, 32).max(1)),
    "huber": lambda x: jnp.where(jnp.abs(x) < 1.0, 0.5 * x * x, jnp.abs(x) + 0.5),
    "xlogy": lambda x: jax.scipy.special.xlogy(jnp.abs(x), jnp.abs(x)),
    "after a bias": lambda x: jnp.clip(x + jnp.arange(32.0)[None] / 32, -1, 1.5),
    "exp of a shift": lambda x: jnp.exp(x - shift_of(x)),
    "two passes": two_passes,
    "one pass": one_pass,
    "root": by_its_root,
    "groups": in_groups,
    "power": lambda x: centred(x) * (x.var(1, keepdims=True) + 1e-6) ** -0.5,
    "divided by a power": lambda x: (
        centred(x) / (jnp.square(centred(x)).mean(1, keepdims=True) + 1e-6) ** 0.5
    ),
    "deviation": lambda x: (x - x.mean(1, keepdims=True)) / (x.std(1, keepdims=True) + 1e-6),
    "over rows": lambda x: (x - x.mean(0, keepdims=True)) * lax.rsqrt(x.var(0, keepdims=True)),
    "standardize": jax.nn.standardize,
}


def loss_of(activation: Function) -> Callable[..., jax.Array]:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.square(activation(x @ w) @ V).sum()

    return loss


def results(fn: Any, *args: Any, target: str = "h100") -> list[str]:
    """The dtypes of the results of a program's products as they are planned for a target."""
    found = pp.inspect(fn, target=target)(*args).after
    return [str(eqn.outvars[0].aval.dtype) for eqn in named(found, "dot_general")]


@pytest.mark.parametrize("target", ["h100", "tpu v5e"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_product_before_an_activation_has_a_result_in_bfloat16(name: str, target: str):
    loss = loss_of(ACTIVATIONS[name])
    assert results(loss, W, X, target=target) == ["bfloat16", "bfloat16"]
    # the last one is the weight's gradient, which is returned
    of_gradient = results(jax.grad(loss), W, X, target=target)
    assert of_gradient[:2] == ["bfloat16", "bfloat16"]
    assert of_gradient[-1] == "float32"


@pytest.mark.release(keep=1)
@pytest.mark.parametrize(
    "name", ["gelu", "softplus", "clip", "maximum", "huber", "two passes", "one pass"]
)
def test_an_activation_of_a_rounded_result_is_no_worse_than_by_hand(name: str):
    activation = ACTIVATIONS[name]

    def by_hand(w: jax.Array, x: jax.Array) -> jax.Array:
        low = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        h = activation(low.astype(jnp.float32)).astype(jnp.bfloat16)
        return jnp.square((h @ V.astype(jnp.bfloat16)).astype(jnp.float32)).sum()

    def run(fn: Any) -> jax.Array:
        lowered = jax.jit(jax.grad(fn) if fn is by_hand else fn).lower(W, X)
        return lowered.compile({"xla_allow_excess_precision": False})(W, X)

    loss = loss_of(activation)
    with planned_for(AbsentDevice()):
        got = run(pp.auto_mixed(jax.grad(loss)))
    want = jax.jit(jax.grad(loss))(W, X)
    assert rel_error(got, want) <= 1.05 * rel_error(run(by_hand), want)


@jax.custom_jvp
def exp_neg_sq(x: jax.Array) -> jax.Array:
    """A function of the user's with the name of one of JAX's."""
    return x - jnp.sin(jnp.arctan(x))


@exp_neg_sq.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return exp_neg_sq(*primals), tangents[0]


@pytest.mark.parametrize(
    "read",
    [
        lambda p: jnp.where(p > 300.0, p, 0.0),  # 301 is 300 in bfloat16
        lambda p: jnp.where(p / 1000 > 0.5, p, 0.0),
        lambda p: jnp.where(p - 500.0 > 0.5, p, 0.0),
        lambda p: jnp.where(0.002 * (2.0 - p).T > 0.5, p.T, 0.0),
        lambda p: jnp.where(p > 0.5, 1.0, 0.0).astype(jnp.int32).astype(jnp.float32),
        lambda p: lax.cond(jnp.where(p > 0.5, 1.0, 0.0).sum() > 3, jnp.arctan, jnp.tanh, p),
        lambda p: jnp.where(p > 0.5, 1.0, 0.0).sum(1),
        lambda p: (p > 0.5).astype(jnp.float32),
        lambda p: jnp.where(p > 0.5, 2, 1).astype(jnp.float32),
        lambda p: jnp.where(p == 0.5, p, jnp.arctan(p)),
        lambda p: jnp.where(p == p.max(1, keepdims=True), p, 0.0),
        lambda p: (p == p.max(1, keepdims=True)).astype(jnp.float32).sum(1),
        lambda p: jnp.where(p > X[:, :32], p, 2.0),
        lambda p: lax.cond((p > 0.5).any(), jnp.arctan, jnp.tanh, p),
        lambda p: jnp.where(jnp.where(p > 0.5, p > X[:, :32], p < 0.2).astype(int) > 0, p, 1.0),
        lambda p: p - jnp.sin(jnp.arctan(p)),
        lambda p: jnp.square(p - 1.0),
        lambda p: jnp.exp(p - X[:, :32]),
        lambda p: jnp.exp(X[:, :32] - p) + p,
        lambda p: jnp.exp(p - p.mean()),
        lambda p: jnp.exp2(p - p[:1]),
        lambda p: jnp.exp(p - jnp.sin(jnp.arctan(p))),
        lambda p: jnp.exp(p[:32] - p[:32].T),
        lambda p: jnp.exp(p[:32] - jnp.diagonal(p[:32])[:, None]),
        lambda p: jnp.exp(
            jnp.where(X[:, :32] > 0, p, 0.0) - jnp.where(X[:, :32] > 0, X[:, 1:33], 0.0)
        ),
        lambda p: jnp.exp(jnp.maximum(p, X[:, :32]) - X[:, :32]),
        lambda p: jnp.exp(p - 0.5 * jnp.square(X).sum(1, keepdims=True)),
        lambda p: jnp.arctan(p - p.mean(1, keepdims=True)),
        lambda p: jnp.arctan(p) * p.var(1, keepdims=True),
        lambda p: jnp.arctan(p) * p.std(1, keepdims=True),
        lambda p: p - p.mean(1, keepdims=True) - p.mean(0, keepdims=True) + p.mean(),
        lambda p: centred(p) / (centred(p).std(0, keepdims=True) + 1e-6),
        lambda p: centred(p) * lax.rsqrt(1 + jnp.square(centred(p))),
        lambda p: 1 - jnp.square(X).sum() / jnp.square(centred(p)).sum(),
        lambda p: jnp.arctan(centred(p)) + two_passes(p),
        lambda p: (p - 2 * p.mean(1, keepdims=True)) / p.std(1, keepdims=True),
        lambda p: p - jnp.arange(32.0)[None],
        lambda p: jnp.square(p - jnp.ones_like(p)),
        lambda p: jnp.abs(p.astype(jnp.complex64) - 1j),
        lambda p: (p - X[:, :32]) * lax.rsqrt(jnp.square(p).sum(1, keepdims=True)),
        lambda p: p * jnp.argmax(p, 1, keepdims=True).astype(jnp.float32),
        exp_neg_sq,
    ],
    ids=[
        *("large number", "scaled", "shifted", "behind both", "chosen index", "chosen branch"),
        *("count", "mask", "whole numbers", "equality", "largest", "ties", "other array", "branch"),
        *("mask of masks", "own function", "number", "exp of difference", "negative", "mean"),
        *("row", "function", "transposed", "diagonal", "masks", "maximum of two", "radial"),
        *(
            "own mean",
            "variance",
            "deviation",
            "both means",
            "other axis",
        ),
        *("elementwise", "explained", "read twice", "twice"),
        *("iota", "ones", "complex", "other mean", "order", "same name"),
    ],
)
def test_a_result_whose_digits_decide_keeps_them(read: Function):
    found = pp.inspect(lambda w, x: jnp.arctan(read(x @ w)).sum(), target="h100")(W, X).after
    (product,) = named(found, "dot_general")
    assert product.outvars[0].aval.dtype == jnp.float32
    assert low_products(found) == [product], "no reader needs exact digits"


@pytest.mark.parametrize("target", ["h100", "tpu v5e"])
@pytest.mark.parametrize(
    "read",
    [jnp.sin, jnp.floor, lambda p: p == 0.5, lambda p: jnp.linalg.qr(p)[1]],
    ids=["angle", "whole numbers", "equality", "factors"],
)
def test_a_result_that_is_needed_exactly_is_of_float32_operands_too(read: Function, target: str):
    with quiet():
        found = pp.inspect(lambda w, x: read(x @ w), target=target)(W, X)
    assert found.after is found.before


def test_a_number_is_followed_through_calls_that_share_a_body():
    limited = jax.jit(lambda x, top: jnp.minimum(x, top))

    def twice(top: float, other: float) -> Callable[..., jax.Array]:
        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            h = limited(x @ w, top) @ V
            return limited(h @ V.T, other).sum()

        return loss

    near = results(jax.grad(twice(2.0, 2.0)), W, X)
    assert near[0] == near[2] == "bfloat16"
    far = results(jax.grad(twice(2.0, 2000.0)), W, X)
    assert "float32" in (far[0], far[2])


def test_a_comparison_in_a_loop_has_a_number_from_outside():
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        top = jnp.float32(2.0)

        def step(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            return c + jnp.square(jnp.minimum(x @ w, top)).sum(), None

        return lax.scan(step, jnp.zeros(()), None, length=3)[0]

    assert results(loss, W, X) == ["bfloat16"]
    assert results(jax.grad(loss), W, X)[0] == "bfloat16"


def test_a_gate_behind_a_root_mean_square_is_no_normalisation():
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        h = x * lax.rsqrt(jnp.square(x).mean(1, keepdims=True) + 1e-6)
        left = centred(h @ w)
        return jnp.square(left * jnp.tanh(left)).sum()

    assert results(loss, W, X) == ["float32"]


def test_a_majority_of_exact_votes_is_decided_as_in_float32():
    votes = jnp.zeros((8, 1000)).at[:, :501].set(1.0)

    def share(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.where((x @ w) / 1000 > 0.5, x[:, :1], 0.0)

    after = pp.inspect(share, target="h100")(votes, jnp.ones((1000, 1))).after
    (decided,) = jaxpr_as_fun(after)(votes, jnp.ones((1000, 1)))
    assert bool((decided == 1.0).all())


@pytest.mark.release
def test_a_choice_behind_each_of_many_products_leaves_their_results_low():
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(300):
            x = lax.select(x @ w > 0.5, x, jnp.full_like(x, 2.0))
        return x.sum()

    assert set(results(loss, jnp.ones((8, 8)), jnp.ones((4, 8)))) == {"bfloat16"}
