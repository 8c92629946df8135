"""The full-precision set (exp, log, pow, rsqrt, division by something small, softmax, log-sum-exp,
norms, erf_inv, ...) is evaluated in float32 under the AutoMixed policies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from tests.support.jaxprs import dtypes_in, dtypes_out, low_products, named
from tests.support.passes import ALWAYS_LOW, AUTO, assert_close, look, run
from tests.support.values import normal, rel_error

each_policy = pytest.mark.parametrize("policy", AUTO, ids=lambda p: p.name)

UNARY = {
    **{name: getattr(lax, name) for name in ("rsqrt", "exp", "exp2", "expm1", "log", "log1p")},
    **{name: getattr(lax, name) for name in ("sin", "cos", "tan", "asin", "acos", "atan")},
    **{name: getattr(lax, name) for name in ("sinh", "cosh", "asinh", "acosh", "atanh")},
    **{name: getattr(lax, name) for name in ("erf_inv", "lgamma", "digamma", "square")},
    **{name: getattr(lax, name) for name in ("bessel_i0e", "bessel_i1e")},
    **{name: getattr(lax, name) for name in ("floor", "ceil", "round")},
    **{name: getattr(lax, name) for name in ("cumsum", "cumprod", "cumlogsumexp")},
    "integer_pow": lambda y: lax.integer_pow(y, 3),
    "fft": lambda y: jnp.abs(jnp.fft.fft(y)),
    "cholesky": lambda y: lax.linalg.cholesky(y @ y.T + 8 * jnp.eye(8)),
    "qr": lambda y: lax.linalg.qr(y)[0],
    "svd": lambda y: lax.linalg.svd(y)[1],
    "triangular_solve": lambda y: lax.linalg.triangular_solve(y, y),
    "reduce_window_sum": lambda y: lax.reduce_window(y, 0.0, lax.add, (2, 2), (1, 1), "SAME"),
    "scatter-add": lambda y: y.at[jnp.asarray([0, 0])].add(y[:2]),
    "scatter-sub": lambda y: y.at[jnp.asarray([0, 0])].subtract(y[:2]),
    "scatter-mul": lambda y: y.at[jnp.asarray([0, 0])].multiply(y[:2]),
}
BINARY = {
    "pow": lambda y: lax.pow(jnp.abs(y), y),
    "atan2": lambda y: lax.atan2(y, y + 1),
    "rem": lambda y: lax.rem(y, y + 3),
    "zeta": lambda y: lax.zeta(y + 3, y + 4),
    "polygamma": lambda y: lax.polygamma(jnp.ones_like(y), y),
    "igamma": lambda y: lax.igamma(jnp.abs(y), jnp.abs(y)),
    "igammac": lambda y: lax.igammac(jnp.abs(y), jnp.abs(y)),
    "regularized_incomplete_beta": lambda y: lax.betainc(y, y, y),
    "div": lambda y: y / (jnp.abs(y) + 1e-12),
}
SET = UNARY | BINARY
READS_DIGITS = frozenset(
    ("sin", "cos", "tan", "rem", "floor", "ceil", "round")
    + ("cholesky", "qr", "svd", "triangular_solve")
)
"""A product alone before one of these is float32 too (test_07_what_readers_need.py), and a product
of features is not."""


def behind_a_product(name):
    if name in READS_DIGITS:
        return lambda x, w: SET[name](jax.nn.relu(x @ w) @ w)
    return lambda x, w: SET[name](x @ w)


@each_policy
@pytest.mark.parametrize("name", SET)
def test_each_primitive_of_the_set_stays_float32_between_low_products(name, policy):
    x, w = (jnp.asarray(normal(s, 8, 8)) for s in (0, 1))
    after = look(behind_a_product(name), policy, x, w).after
    assert len(low_products(after, policy.low.dtype)) == len(named(after, "dot_general")) > 0
    found = named(after, name, f"{name}_p")
    assert found
    for eqn in found:
        assert set(dtypes_in(eqn) + dtypes_out(eqn)) <= {np.dtype(np.float32)}, eqn


@each_policy
@pytest.mark.parametrize("name", ["exp", "rsqrt", "log", "erf_inv", "pow"])
def test_also_in_a_region_that_is_lowered_as_a_whole(name, policy):
    x, w = (jnp.asarray(normal(s, 8, 8)) for s in (0, 1))

    def kept(x, w):
        with pp.keep("bf16"):
            return behind_a_product(name)(x, w)

    for after in (
        look(kept, policy, x, w).after,
        look(
            behind_a_product(name), policy.with_rules(pp.Rule(scope="*", precision="bf16")), x, w
        ).after,
    ):
        assert low_products(after, jnp.bfloat16)
        for eqn in named(after, name):
            assert set(dtypes_in(eqn)) == {np.dtype(np.float32)}


@pytest.mark.parametrize("name", ["exp", "rsqrt", "log", "sin", "floor"])
def test_only_an_order_runs_one_of_them_low(name):
    """What the tests above would see: AlwaysBf16, or a rule that names the primitive."""
    x, w = (jnp.asarray(normal(s, 8, 8)) for s in (0, 1))
    ruled = pp.AutoMixedBf16.with_rules(pp.Rule(primitive=name, precision="bf16"))
    for policy in (pp.AlwaysBf16, ruled):
        (eqn,) = named(look(behind_a_product(name), policy, x, w).after, name)
        assert dtypes_in(eqn) == [jnp.bfloat16]


def _normalised(x, w):
    y = x @ w
    y = (y - y.mean(1, keepdims=True)) * lax.rsqrt(y.var(1, keepdims=True) + 1e-6)
    return y / (jnp.linalg.norm(y, axis=1, keepdims=True) + 1e-12)


COMPOSED = {
    "softmax": (lambda x, w: jax.nn.softmax(x @ w), ("exp", "div", "reduce_sum", "sub")),
    "log_softmax": (lambda x, w: jax.nn.log_softmax(x @ w), ("exp", "log", "reduce_sum")),
    "logsumexp": (lambda x, w: jax.nn.logsumexp(x @ w, axis=1), ("exp", "log", "reduce_sum")),
    "norms": (_normalised, ("rsqrt", "reduce_sum", "div", "sqrt")),
    "softplus": (lambda x, w: jax.nn.softplus(x @ w), ("exp", "log1p")),
    "gelu": (lambda x, w: jax.nn.gelu(x @ w), ("tanh",)),
}


@pytest.mark.release(keep=2)
@each_policy
@pytest.mark.parametrize("name", COMPOSED)
def test_softmax_logsumexp_and_norms_are_float32(name, policy):
    fn, primitives = COMPOSED[name]
    x, w = (jnp.asarray(normal(s, 16, 16)) for s in (0, 1))
    after = look(fn, policy, x, w).after
    assert len(low_products(after, policy.low.dtype)) == 1
    found = named(after, *primitives)
    assert found
    for eqn in found:
        assert set(dtypes_in(eqn)) <= {np.dtype(np.float32)}
    low = policy.low.dtype
    product = jnp.matmul(x.astype(low), w.astype(low), preferred_element_type=np.float32)
    want = fn(product, jnp.eye(16))
    assert rel_error(run(fn, policy, x, w), want) < 1e-5


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("policy", [*AUTO, *ALWAYS_LOW], ids=lambda p: p.name)
def test_cross_entropy_over_thousands_of_classes_has_the_values_and_gradients_of_float32(policy):
    x, w = jnp.asarray(normal(0, 32, 16)), jnp.asarray(normal(1, 16, 4096)) / 4
    labels = jnp.arange(32) * 97

    def loss(w, x):
        return jnp.sum(-jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[:, None], 1)) / 32

    inspection = look(jax.grad(loss), policy, w, x)
    assert len(low_products(inspection.after, policy.low.dtype)) == 2
    assert_close(loss, policy, w, x, tol=0.02)
