"""A custom rule is planned under the scope of the call that it serves, shared layers included."""

import warnings

import jax
import jax.numpy as jnp

import precpass as pp
from tests.support.jaxprs import operand_dtypes

W = jnp.eye(4)


@jax.custom_vjp
def sine(x):
    return jnp.sin(x)


sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: ((g * jnp.cos(x)) @ W,))
layer = jax.jit(lambda x: sine(x) * 2.0)


def loss(x):
    with jax.named_scope("low"):
        h = layer(x)
    with jax.named_scope("wide"):
        return layer(h).sum()


def test_a_shared_layers_rule_follows_each_calls_scope():
    # the product stands in the rule alone, so both calls of the layer have equal plans
    policy = pp.AutoMixedBf16.with_rules(
        pp.Rule(primitive="dot_general", scope="wide", precision="f32")
    )
    mixed = pp.auto_mixed(loss, policy=policy)
    with warnings.catch_warnings():
        # before it is differentiated the program has no product to lower
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        traced = jax.make_jaxpr(jax.grad(mixed))(jnp.ones((4, 4)))
    assert sorted(operand_dtypes(traced, "dot_general")) == ["bfloat16", "float32"]
