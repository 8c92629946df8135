"""Options of scaled products: the order of their operands, the gradients of weights in bfloat16."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from precpass.devices.detect import planned_for
from precpass.devices.targets import target_of
from precpass.types import Precision
from tests.eight_bits.test_scaled_products import ordered
from tests.support.jaxprs import named
from tests.support.passes import COMPOSITIONS
from tests.support.values import normal_array, rel_error

each_composition = pytest.mark.parametrize("compose", COMPOSITIONS.values(), ids=COMPOSITIONS)
F8 = pp.AutoMixedF8.with_rules(pp.Rule(primitive="dot_general", precision="f8"))
"""float8 for products of any form."""
W, X = normal_array(1, 256, 256) / 16, normal_array(2, 256, 256)


def layers(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x


def unrolled(ws, x):
    return layers(ws[0], jnp.sin(x)) @ ws[1]


def scanned(ws, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), jnp.sin(x), ws[0])[0] @ ws[1]


def rematted(ws, x):
    step = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    return lax.scan(step, jnp.sin(x), ws[0])[0] @ ws[1]


def squares(fn):
    def loss(ws, x):
        return jnp.square(fn(ws, x)).sum()

    return loss


def scaled_dots(fn, *args):
    """The dots of a function that read float8."""
    dots = named(jax.make_jaxpr(fn)(*args), "dot_general")
    return [dot for dot in dots if "float8_e4m3fn" in {v.aval.dtype.name for v in dot.invars}]


def test_a_float8_product_whose_result_is_stored_in_16_bits_is_made_in_16_bits():
    """Its scales are powers of two, so nothing is rounded twice; int8 adds up in int32."""

    def network(w, x):
        return jnp.tanh(x @ w) @ w

    with planned_for(target_of("h100")):
        for precision, dtype in (("f8", "bfloat16"), ("int8", "int32")):
            jaxpr = jax.make_jaxpr(pp.auto_mixed(network, ordered(precision)))(W, X)
            first, last = (e.outvars[0].aval.dtype.name for e in named(jaxpr, "dot_general"))
            assert (first, last) == (dtype, "int32" if precision == "int8" else "float32")


def are_summed_last(dot):
    (summed, _) = dot.params["dimension_numbers"]
    pairs = zip(dot.invars, summed, strict=True)
    return all(tuple(dims) == tuple(range(v.aval.ndim))[-len(dims) :] for v, dims in pairs)


def batched(ws, x):
    return jnp.einsum("bti,io->bto", jnp.sin(x).reshape(4, 64, 256), ws[0][0]) @ ws[1]


def mapped(ws, x):
    return jax.vmap(lambda x: layers(ws[0], jnp.sin(x)) @ ws[1])(x.reshape(4, 64, 256))


@each_composition
@pytest.mark.parametrize("fn", [unrolled, scanned, rematted, batched, mapped])
def test_float8_operands_have_the_summed_dimension_last_where_units_take_nothing_else(compose, fn):
    """An NVIDIA GPU's before Blackwell. The numbers are the same in any order."""
    ws, found = (jnp.stack([W, W.T]), W), {}
    for target in ("h100", "b200", "tpu 7x"):
        with planned_for(target_of(target)):
            gradient = compose(squares(fn), policy=F8)
            dots = scaled_dots(gradient, ws, X)
            assert len(dots) > 4
            assert all(map(are_summed_last, dots)) == (target == "h100")
            found[target] = gradient(ws, X)
    assert rel_error(found["h100"], found["b200"]) < 1e-6


@pytest.mark.release
@each_composition
@pytest.mark.parametrize("fn", [unrolled, scanned, rematted], ids=lambda f: f.__name__)
def test_the_gradients_of_weights_are_in_bfloat16_and_other_derivatives_in_float8(compose, fn):
    ws = jnp.stack([W, W.T]), W
    plain = compose(squares(fn), policy="AutoMixedF8")
    mixed = compose(squares(fn), policy=pp.AutoMixedF8.with_weight_gradients("bf16"))
    before, after = (len(scaled_dots(f, ws, X)) for f in (plain, mixed))
    weights = len(scaled_dots(pp.auto_mixed(fn, "AutoMixedF8"), ws, X))
    assert before - after == weights > 1
    # In a loop the input has a derivative, too; a checkpoint computes the product again.
    in_loop = fn is not unrolled
    assert after == 2 * weights - 1 + in_loop + (fn is rematted)
    wanted = jax.jit(jax.grad(squares(fn)))(ws, X)
    assert rel_error(mixed(ws, X), wanted) < 0.15


def test_a_data_gradient_is_known_by_an_operand_that_is_given():
    """So the gradient of a first layer's weight, which reads the data, is taken for one."""
    policy = ordered("f8").with_weight_gradients("bf16")

    def first(w, x):
        return jnp.square(jnp.tanh(x @ w)).sum()

    def computed(w, x):
        return jnp.square(jnp.tanh(jnp.sin(x) @ jnp.cos(w))).sum()

    for compose in COMPOSITIONS.values():
        assert len(scaled_dots(compose(first, policy=policy), W, X)) == 2
        assert len(scaled_dots(compose(computed, policy=policy), W, X)) == 1


@pytest.mark.parametrize("asked", ["bf16", "f8e4m3"])
def test_the_option_is_told_saved_and_read_again(tmp_path, asked: str):
    policy = pp.AutoMixedF8.with_weight_gradients(asked)
    text = repr(policy)
    assert f".with_weight_gradients('{asked}')" in text
    assert eval(text, vars(pp) | vars(pp.types)) == policy
    assert pp.types.PrecisionPolicy.from_dict(policy.to_dict()) == policy
    policy.save(tmp_path / "policy.toml")
    assert pp.types.PrecisionPolicy.load(tmp_path / "policy.toml") == policy
    pp.inspect(layers, policy)([W] * 3, X).plan.save(tmp_path / "plan.json")
    loaded = pp.Plan.load(tmp_path / "plan.json")
    assert loaded.weight_gradients is Precision(asked)


def test_what_is_unknown_is_refused_with_the_legal_values():
    with pytest.raises(ValueError, match=r"weight_gradients = 'f32': legal are 'bf16', 'f8e4m3' "):
        pp.AutoMixedF8.with_weight_gradients("f32")
    with pytest.raises(ValueError, match=r"weight_gradients = 'b16': legal are 'bf16', 'f8e4m3' "):
        pp.AutoMixedF8.with_weight_gradients("b16")
