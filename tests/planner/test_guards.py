"""Guards: what would overflow, vanish, lose integers or spoil a sampler stays in float32."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from precpass import AlwaysBf16, AlwaysF16, AutoMixed, AutoMixedBf16
from precpass.analysis.propagate import ANY, ValueRange
from precpass.planner.guards import why_out_of_range
from precpass.types import Precision
from tests.support.jaxprs import low_values, named, operand_dtypes, product_dtypes, walk
from tests.support.passes import decided, quiet
from tests.support.ranges import bounds, fact_of
from tests.support.values import f32, stable_id

F16, BF16, F32 = Precision.F16, Precision.BF16, Precision.F32
LOWEST = float(np.finfo(np.float32).min)


def known(value):
    return ValueRange(value, value, abs(value), constant=True)


# ---------------------------------------------------------------- the rule itself


@pytest.mark.parametrize(
    ("fact", "target", "fires"),
    [
        # -1e9 is a mask: minus infinity in float16, an ordinary number in bfloat16
        (known(-1e9), F16, True),
        (known(-1e9), BF16, False),
        # the lowest float32 rounds to minus infinity in both
        (known(LOWEST), F16, True),
        (known(LOWEST), BF16, True),
        (known(LOWEST), F32, False),
        (ValueRange(-1.0, 65504.0), F16, False),
        (ValueRange(-65505.0, 0.0), F16, True),
        # no bound is no evidence
        (ANY, F16, False),
        (ValueRange(0.0, math.inf), F16, False),
        (known(1e-12), F16, True),
        (known(1e-12), BF16, False),
        (known(1e-39), BF16, True),
        (known(0.0), F16, False),
        (known(6.2e-5), F16, False),
        (known(6.0e-5), F16, True),
        # bounds alone say nothing of what lies close to zero
        (ValueRange(0.0, 1.0), F16, False),
        (ValueRange(0.0, 256.0, integer=True), BF16, False),
        (ValueRange(0.0, 257.0, integer=True), BF16, True),
        (ValueRange(-257.0, 0.0, integer=True), BF16, True),
        (ValueRange(0.0, 2048.0, integer=True), F16, False),
        (ValueRange(0.0, 2049.0, integer=True), F16, True),
        (ValueRange(integer=True), BF16, True),
        (ValueRange(0.0, 257.0), BF16, False),
    ],
)
def test_a_guard_fires_exactly_at_the_formats_limits(fact, target, fires):
    assert (why_out_of_range(fact, target) is not None) is fires


@pytest.mark.parametrize(
    ("fact", "target", "words"),
    [
        (known(-1e9), F16, ["1e+09", "f16", "6.55e+04"]),
        (known(1e-12), F16, ["1e-12", "f16", "vanishes"]),
        (ValueRange(0.0, 299.0, integer=True), BF16, ["299", "bf16", "256"]),
    ],
)
def test_a_guard_names_the_value_the_format_and_the_limit(fact, target, words):
    text = str(why_out_of_range(fact, target))
    assert all(word in text for word in words), text


# ---------------------------------------------------------------- in a plan


def after(fn, policy, *args):
    return pp.inspect(fn, policy)(*args)


def masked(value):
    """Two uses of one shared `_where` body; only the first has the mask."""

    def fn(mask, x):
        h = x @ x
        hidden = jnp.where(mask, h, jnp.float32(value))
        return hidden, jnp.where(mask, h, jnp.float32(0.0))

    return fn


MASK = jax.ShapeDtypeStruct((8, 8), bool)


@pytest.mark.parametrize(
    ("policy", "value", "dtypes"),
    [
        (AlwaysF16, -1e9, ["float32", "float16"]),
        (AlwaysF16, LOWEST, ["float32", "float16"]),
        (AlwaysBf16, LOWEST, ["float32", "bfloat16"]),
        (AlwaysBf16, -1e9, ["bfloat16", "bfloat16"]),
        (AlwaysF16, -3.0, ["float16", "float16"]),
    ],
)
def test_a_mask_that_overflows_keeps_its_select_and_no_other(policy, value, dtypes):
    found = after(masked(value), policy, MASK, f32(8, 8))
    # both calls of `jnp.where` may share one jaxpr
    eqns = walk(found.after, repeated=True)
    selects = [str(e.invars[1].aval.dtype) for e in eqns if e.primitive.name == "select_n"]
    assert selects == dtypes


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("policy", [AlwaysF16, AlwaysBf16, AutoMixed, AutoMixedBf16], ids=stable_id)
def test_a_softmax_with_masked_rows_has_the_values_of_float32(policy):
    def fn(mask, x):
        scores = jnp.where(mask, x @ x.T, LOWEST)
        return jax.nn.softmax(scores) @ x

    mask = jnp.arange(64).reshape(8, 8) % 3 == 0
    mask = mask.at[3].set(False)  # a row without any key
    x = jax.random.normal(jax.random.key(0), (8, 8)) / 3
    low = pp.auto_mixed(fn, policy=policy)(mask, x)
    assert product_dtypes(after(fn, policy, mask, x).after)[0] != "float32"
    np.testing.assert_allclose(low, fn(mask, x), atol=0.05)


@pytest.mark.parametrize(("policy", "low"), [(AlwaysF16, "float32"), (AlwaysBf16, "bfloat16")])
def test_an_epsilon_that_vanishes_keeps_its_sum(policy, low):
    found = after(lambda x: x @ x + 1e-12, policy, f32(8, 8))
    assert operand_dtypes(found.after, "add") == [low]


@pytest.mark.parametrize(
    ("fn", "low"),
    [
        (lambda x, w: (x * 1e-12) @ w, False),
        (lambda x, w: (-x / 1e12) @ w, False),
        (lambda x, w: jnp.where(x > 0, x * 1e-12, 0).T @ w, False),
        (lambda x, w: (x * 1e-12 + w * 1e-13) @ w, False),
        (lambda x, w: (x * 1e-12 + w) @ w, True),
        (lambda x, w: (x * 1e-4) @ w, True),
        # a sum of many terms is no smaller for being divided by their number
        (lambda x, w: jnp.broadcast_to(x, (1000, 100, 8, 8)).mean((0, 1)) @ w, True),
    ],
)
def test_a_product_of_what_was_scaled_to_nothing_stays_wide(fn, low):
    with quiet():
        found = after(fn, AutoMixed, f32(8, 8), f32(8, 8))
    assert product_dtypes(found.after) == ["float16" if low else "float32"]
    assert ("vanishes in f16" in str(decided(found, "dot_general")[0].reason)) != low
    # bfloat16 has the range of float32
    assert product_dtypes(after(fn, AutoMixedBf16, f32(8, 8), f32(8, 8)).after) == ["bfloat16"]


def test_what_is_scaled_to_nothing_and_back_has_the_values_and_gradients_of_float32():
    def loss(x):
        return jnp.square((x * 1e-12) @ X8.T * 1e12).sum()

    for mixed, plain in (
        (pp.auto_mixed(loss, policy=AutoMixed), loss),
        (pp.auto_mixed(jax.grad(loss), policy=AutoMixed), jax.grad(loss)),
        (jax.grad(pp.auto_mixed(loss, policy=AutoMixed)), jax.grad(loss)),
    ):
        with quiet():
            got, want = jax.jit(lambda x: (mixed(x), plain(x)))(X8)  # noqa: B023
        np.testing.assert_allclose(got, want, rtol=1e-2)


@pytest.mark.parametrize("count", [256, 300])
def test_positions_stay_wide_where_the_format_cannot_count_so_far(count):
    def fn(x):
        return x * jnp.arange(count).astype(jnp.float32)

    def low(x):
        return fn(x @ jnp.ones((count, count)))

    found = after(low, AlwaysBf16, f32(count))
    assert product_dtypes(found.after) == ["bfloat16"]
    expected = "bfloat16" if count == 256 else "float32"
    assert operand_dtypes(found.after, "mul") == [expected]


def test_the_product_of_positions_stays_exact():
    def fn(w):
        positions = jnp.arange(512).astype(jnp.float32)
        return positions @ w

    with pytest.warns(pp.PrecisionWarning, match="an operand has integers up to 511"):
        found = after(fn, AutoMixedBf16, f32(512, 4))
    assert found.after is found.before


def test_rotary_embeddings_stay_wide():
    # an outer product contracts nothing: it is elementwise, and cos of it has no digits to spare
    def fn(x):
        frequencies = 1.0 / 10000 ** (jnp.arange(0, 8, 2) / 8)
        angles = jnp.einsum("i,j->ij", jnp.arange(2048.0), frequencies)
        return jnp.cos(angles) @ x

    x = jnp.ones((4, 3))
    found = after(fn, AutoMixedBf16, x)
    cosines = named(found.after, "cos")
    assert [str(e.invars[0].aval.dtype) for e in cosines] == ["float32"]
    assert product_dtypes(found.after)[-1] == "bfloat16"
    outer = [d for e, d, _ in found.decisions() if e.outvars[0].aval.shape == (2048, 4)]
    assert outer and not any(d.changes for d in outer)
    low = pp.auto_mixed(fn)(x)
    np.testing.assert_allclose(low, fn(x), atol=0.02)


# ---------------------------------------------------------------- samplers


def test_random_bits_are_random_and_bounded_by_their_dtype():
    fact = fact_of(lambda key: jax.random.bits(key, (3,), "uint8"), jax.random.key(0))
    assert fact.random
    assert bounds(fact) == (0, 255)


@pytest.mark.parametrize("argument", [f32(3), jax.ShapeDtypeStruct((3,), "uint32")], ids=stable_id)
def test_an_argument_is_not_random(argument):
    assert not fact_of(lambda x: x + x, argument).random


def test_what_is_mixed_with_data_is_not_random():
    def fn(key, x):
        return x + jax.random.uniform(key, (3,))

    assert not fact_of(fn, jax.random.key(0), f32(3)).random


def truncated_normal(key, shape):
    return jax.random.truncated_normal(key, -2.0, 2.0, shape)


SAMPLERS = [
    jax.random.normal,
    jax.random.uniform,
    jax.random.gumbel,
    jax.random.exponential,
    jax.random.laplace,
    jax.random.cauchy,
    truncated_normal,
]


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("policy", [AlwaysBf16, AlwaysF16], ids=stable_id)
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda f: f.__name__)
def test_a_sampler_gives_the_very_digits_of_float32(sampler, policy):
    def fn(key, x):
        return x @ x, sampler(key, (200,))

    key, x = jax.random.key(3), jnp.ones((8, 8))
    _, drawn = pp.auto_mixed(fn, policy=policy)(key, x)
    np.testing.assert_array_equal(drawn, jax.jit(fn)(key, x)[1])
    assert np.isfinite(drawn).all()


def test_no_equation_of_a_sampler_is_low_and_its_own_say_why():
    def fn(key, x):
        return x @ x, jax.random.normal(key, (8, 8))

    found = after(fn, AlwaysBf16, jax.random.key(0), f32(8, 8))
    (sampler,) = (e for e in named(found.after, "jit") if e.params["name"] == "_normal")
    assert low_values(sampler.params["jaxpr"]) == []
    assert product_dtypes(found.after) == ["bfloat16"]
    (inverse,), (largest,) = decided(found, "erf_inv"), decided(found, "max")
    assert "random bits" in str(inverse.reason)
    assert "random bits" in str(largest.reason)


def test_what_a_sample_is_added_to_is_lowered_all_the_same():
    def fn(key, x):
        return (x @ x) * jax.random.bernoulli(key, 0.5, (8, 8)).astype(jnp.float32)

    found = after(fn, AlwaysBf16, jax.random.key(0), f32(8, 8))
    assert "bfloat16" in operand_dtypes(found.after, "mul")
    assert product_dtypes(found.after) == ["bfloat16"]


# ---------------------------------------------------------------- order


def test_a_guard_beats_a_rule_and_a_keep_region():
    def fn(x):
        with pp.keep("f16"):
            return (x @ x) + lax.full((8, 8), -1e9)

    rule = pp.Rule(primitive="add", precision="f16")
    with pytest.warns(pp.PrecisionWarning, match="matched no equation"):
        found = after(fn, AutoMixed.with_rules(rule), f32(8, 8))
    assert operand_dtypes(found.after, "add") == ["float32"]
    plain = after(lambda x: (x @ x) + lax.full((8, 8), -1e9), AutoMixed.with_rules(rule), f32(8, 8))
    assert operand_dtypes(plain.after, "add") == ["float32"]
    assert "1e+09" in str(decided(plain, "add")[0].reason)


@pytest.mark.release(keep=2)
@pytest.mark.parametrize(
    "loss",
    [
        lambda w: (X8 @ w).mean() * 1e-6,
        lambda w: (1e5 * jnp.tanh(X8 @ w)).sum(),
        lambda w: (1e5 * (X8 @ w)).sum(),
    ],
    ids=["cotangents that vanish", "cotangents that overflow", "constant ones that overflow"],
)
def test_cotangents_that_float16_cannot_hold_keep_their_products_wide(loss):
    w = jnp.full((16, 4), 0.01)
    got, expected = (
        pp.auto_mixed(jax.grad(loss), policy=pp.AutoMixed)(w),
        jax.jit(jax.grad(loss))(w),
    )
    np.testing.assert_allclose(got, expected, rtol=1e-2)


X8 = jnp.asarray(np.random.default_rng(8).standard_normal((8, 16)), jnp.float32)
