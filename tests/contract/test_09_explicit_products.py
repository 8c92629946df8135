"""An equation with an explicit `precision=HIGHEST`, a dot `algorithm`, or a
`preferred_element_type` other than its operands' is the user's order: left alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from tests.support.jaxprs import PRODUCTS, low_products, named
from tests.support.passes import LOWERING, look, quiet
from tests.support.values import normal

HIGHEST = lax.Precision.HIGHEST
Algorithm = lax.DotAlgorithmPreset
BF16 = jnp.bfloat16

each_policy = pytest.mark.parametrize("policy", LOWERING, ids=lambda p: p.name)


def _conv(x, w):
    return lax.conv(x[None, None], w[None, None], (1, 1), "SAME", precision=HIGHEST)


def _under_context(x, w):
    with jax.default_matmul_precision("highest"):
        return x @ w


ORDERS = {
    "highest": lambda x, w: jnp.matmul(x, w, precision=HIGHEST),
    "high": lambda x, w: jnp.matmul(x, w, precision=lax.Precision.HIGH),
    "one side": lambda x, w: jnp.matmul(x, w, precision=(HIGHEST, lax.Precision.DEFAULT)),
    "einsum": lambda x, w: jnp.einsum("ij,jk->ik", x, w, precision="highest"),
    "context": _under_context,
    "convolution": _conv,
    "algorithm f32": lambda x, w: jnp.matmul(x, w, precision=Algorithm.F32_F32_F32),
    "algorithm bf16": lambda x, w: jnp.matmul(x, w, precision=Algorithm.BF16_BF16_F32),
    "algorithm x3": lambda x, w: jnp.matmul(x, w, precision=Algorithm.BF16_BF16_F32_X3),
    "wider result": lambda x, w: jnp.matmul(
        x.astype(BF16), w.astype(BF16), preferred_element_type=np.float32
    ),
    "narrower result": lambda x, w: jnp.matmul(x, w, preferred_element_type=BF16),
    "in jit": jax.jit(lambda x, w: jnp.matmul(x, w, precision=HIGHEST)),
    "in scan": lambda x, w: lax.scan(
        lambda c, _: (jnp.matmul(c, w, precision=HIGHEST), None), x, None, length=2
    )[0],
    "in remat": jax.checkpoint(lambda x, w: jnp.matmul(x, w, precision=HIGHEST)),
    "in cond": lambda x, w: lax.cond(
        x[0, 0] > 0, lambda: jnp.matmul(x, w, precision=HIGHEST), lambda: x
    ),
}
each_order = pytest.mark.parametrize("name", ORDERS)


def square(n=8):
    return jnp.asarray(normal(0, n, n)), jnp.asarray(normal(1, n, n))


def described(jaxpr):
    """Operands, result and params of every product."""
    return [
        ([str(v.aval) for v in (*e.invars, *e.outvars)], str(sorted(e.params.items(), key=str)))
        for e in named(jaxpr, *PRODUCTS)
    ]


@each_policy
@each_order
def test_left_alone(name, policy):
    inspection = look(ORDERS[name], policy, *square())
    assert described(inspection.after) == described(inspection.before) != []
    reasons = [str(d.reason) for d in inspection.plan.walk() if d.kind is pp.types.OpKind.COMPUTE]
    assert reasons and all("user" in reason for reason in reasons)


@each_policy
@each_order
def test_left_alone_in_the_gradient(name, policy):
    fn = ORDERS[name]

    def loss(x, w):
        return jnp.sum(jnp.sin(fn(x, w).astype(np.float32)))

    inspection = look(jax.grad(loss, (0, 1)), policy, *square())
    assert described(inspection.after) == described(inspection.before)


@pytest.mark.parametrize("name", ["highest", "algorithm f32", "narrower result", "convolution"])
def test_left_alone_whatever_rules_and_regions_say(name):
    """What the user wrote at the product wins over rules and keep regions."""

    def kept(x, w):
        with pp.keep("f16"):
            return ORDERS[name](x, w)

    rules = [pp.Rule(primitive=p, precision="bf16") for p in ("dot_general", "conv_*")]
    policy = pp.AlwaysBf16.with_rules(*rules)
    for fn in (ORDERS[name], kept):
        inspection = look(fn, policy, *square())
        assert described(inspection.after) == described(inspection.before)


@each_policy
def test_what_says_nothing_is_lowered(policy):
    """Explicit defaults, and a result type that is the operands': no orders."""

    def f(x, w):
        y = jnp.matmul(x, w, precision=lax.Precision.DEFAULT)
        y = jnp.matmul(y, w, preferred_element_type=np.float32)
        with jax.default_matmul_precision("default"):
            return y @ w

    assert len(low_products(look(f, policy, *square()).after, policy.low.dtype)) == 3


@each_policy
def test_grad_of_the_pass_leaves_them_alone_too(policy):
    def loss(w, x):
        return jnp.sum(jnp.matmul(x, w, precision=HIGHEST))

    w, x = square()
    with quiet():
        jaxpr = jax.make_jaxpr(jax.grad(pp.auto_mixed(loss, policy=policy)))(w, x)
    assert low_products(jaxpr) == []
    assert len(named(jaxpr, "dot_general")) >= 1
