"""Options of scaled products: the gradients of weights in bfloat16."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from precpass.devices.detect import planned_for
from precpass.devices.targets import target_of
from precpass.types import OpKind
from tests.rewrite.test_scaled_products import ordered
from tests.support.jaxprs import named
from tests.support.passes import COMPOSITIONS
from tests.support.values import f32, normal_array, rel_error

each_composition = pytest.mark.parametrize("compose", COMPOSITIONS.values(), ids=COMPOSITIONS)
W, X = normal_array(1, 256, 256) / 16, normal_array(2, 256, 256)


def layers(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x


def unrolled(ws, x):
    first, stack, last = ws
    return layers([first, *stack, last], x)


def scanned(ws, x):
    first, stack, last = ws
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), jnp.tanh(x @ first), stack)[0] @ last


def rematted(ws, x):
    first, stack, last = ws
    step = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    return lax.scan(step, jnp.tanh(x @ first), stack)[0] @ last


def squares(fn):
    def loss(ws, x):
        return jnp.square(fn(ws, x)).sum()

    return loss


def scaled_dots(fn, *args):
    """The dots of a function that read float8."""
    dots = named(jax.make_jaxpr(fn)(*args), "dot_general")
    return [dot for dot in dots if "float8_e4m3fn" in {v.aval.dtype.name for v in dot.invars}]


def counts(policy, fn, *args):
    plan = pp.inspect(jax.grad(squares(fn)), policy)(*args).plan
    found = [d for d in plan.walk() if d.kind is OpKind.COMPUTE]
    return sum(d.product.scaled is not None for d in found), [str(d.reason) for d in found]


def test_a_float8_product_whose_result_is_stored_in_16_bits_is_made_in_16_bits():
    """Its scales are powers of two, so nothing is rounded twice; int8 adds up in int32."""

    def network(w, x):
        return jnp.tanh(x @ w) @ w

    with planned_for(target_of("h100")):
        for precision, dtype in (("f8", "bfloat16"), ("int8", "int32")):
            jaxpr = jax.make_jaxpr(pp.auto_mixed(network, ordered(precision)))(W, X)
            first, last = (e.outvars[0].aval.dtype.name for e in named(jaxpr, "dot_general"))
            assert (first, last) == (dtype, "int32" if precision == "int8" else "float32")


@pytest.mark.release
@each_composition
@pytest.mark.parametrize("fn", [unrolled, scanned, rematted], ids=lambda f: f.__name__)
def test_the_gradients_of_weights_are_in_bfloat16_and_other_derivatives_in_float8(compose, fn):
    ws = W, jnp.stack([W, W.T]), W
    plain = compose(squares(fn), policy="AutoMixedF8")
    mixed = compose(squares(fn), policy=pp.AutoMixedF8.with_weight_gradients("bf16"))
    before, after = (scaled_dots(f, ws, X) for f in (plain, mixed))
    forward = len(scaled_dots(pp.auto_mixed(fn, "AutoMixedF8"), ws, X))
    assert len(before) - len(after) >= forward > 0
    # A checkpoint computes the product again.
    assert len(after) == 2 * forward + (fn is rematted)
    wanted = jax.jit(jax.grad(squares(fn)))(ws, X)
    assert rel_error(mixed(ws, X), wanted) < 0.15


def test_the_plan_says_which_products_are_gradients_of_weights():
    policy = pp.AutoMixedF8.with_weight_gradients("bf16")
    for fn in (unrolled, scanned, rematted):
        args = (f32(256, 256), f32(2, 256, 256), f32(256, 256)), f32(256, 256)
        all_scaled, _ = counts("AutoMixedF8", fn, *args)
        scaled, whys = counts(policy, fn, *args)
        of_weights = sum("it is the gradient of a weight" in why for why in whys)
        assert 0 < scaled < all_scaled
        assert of_weights >= all_scaled - scaled


def test_the_gradient_of_a_first_layers_weight_is_one_too():
    """Its operands are both given; a rule orders 8 bits for it."""
    policy = ordered("f8").with_weight_gradients("bf16")

    def loss(w, x):
        return jnp.square(jnp.tanh(x @ w)).sum()

    for compose in COMPOSITIONS.values():
        assert len(scaled_dots(compose(loss, policy=policy), W, X)) == 1


def test_attention_has_no_weights():
    def attention(q, k):
        q, k = jnp.sin(q), jnp.cos(k)
        return jnp.square(jax.nn.softmax(q @ k.T) @ k).sum()

    policy = ordered("f8").with_weight_gradients("bf16")
    gradient = jax.grad(attention, (0, 1))
    assert len(scaled_dots(pp.auto_mixed(gradient, policy), X, W)) == 6
