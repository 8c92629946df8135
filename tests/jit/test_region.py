"""What stands around a call: `use_policy`, `keep`, and `PRECPASS=off`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precpass as pp
from precpass import AlwaysF32, AutoMixed, AutoMixedBf16, PrecisionWarning
from tests.support.jaxprs import operand_dtypes, product_dtypes
from tests.support.values import stable_id

X = jnp.linspace(-1, 1, 64).reshape(8, 8)


def square(x):
    return x @ x


def run(fn, x=X):
    """The operand dtypes of the products that calling `fn` runs."""
    return product_dtypes(jax.make_jaxpr(fn)(x))


# ---------------------------------------------------------------- use_policy


@pytest.mark.parametrize("policy", ["AutoMixed", AutoMixed, "p=f32,c=f16,o=f32"], ids=stable_id)
def test_use_policy_is_the_default_inside_and_not_outside(policy):
    mixed = pp.auto_mixed(square)
    with pp.use_policy(policy):
        assert run(mixed) == ["float16"]
    assert run(mixed) == ["bfloat16"]


def test_a_policy_of_its_own_comes_first():
    mixed = pp.auto_mixed(square, policy=AutoMixedBf16)
    with pp.use_policy("AutoMixed"):
        assert run(mixed) == ["bfloat16"]


def test_the_innermost_use_policy_wins_and_the_outer_one_comes_back():
    mixed = pp.auto_mixed(square)
    with pp.use_policy("AutoMixed"):
        with pp.use_policy("AutoMixedBf16"):
            assert run(mixed) == ["bfloat16"]
        assert run(mixed) == ["float16"]
        with pp.use_policy(None):
            assert run(mixed) == ["float32"]
            with pp.use_policy("AutoMixedBf16"):
                assert run(mixed) == ["bfloat16"]
            assert run(mixed) == ["float32"]
        assert run(mixed) == ["float16"]


def test_an_exception_inside_restores_the_default():
    with pytest.raises(KeyError), pp.use_policy("AutoMixed"):
        raise KeyError
    assert run(pp.auto_mixed(square)) == ["bfloat16"]


def test_each_policy_has_its_own_compiled_program():
    mixed = pp.auto_mixed(square)
    outs = [mixed(X)]
    with pp.use_policy("AutoMixed"):
        outs.append(mixed(X))
    with pp.use_policy(None):
        outs.append(mixed(X))
    with pp.use_policy("AlwaysF32"):
        outs.append(mixed(X))
    low, half, off, wide = (np.abs(out - square(X)).max() for out in outs)
    assert low > half > off == wide == 0


def test_use_policy_decides_inside_a_jitted_function_that_was_traced_outside():
    mixed = pp.auto_mixed(square)
    jitted = jax.jit(lambda x: mixed(x))
    assert run(jitted) == ["bfloat16"]
    with pp.use_policy(None):
        assert run(jitted) == ["float32"]


@pytest.mark.parametrize("policy", [None, AlwaysF32], ids=stable_id)
def test_use_policy_works_as_a_decorator(policy):
    mixed = pp.auto_mixed(square)

    @pp.use_policy(policy)
    def fn(x):
        return mixed(x)

    assert run(fn) == run(fn) == ["float32"]
    assert run(mixed) == ["bfloat16"]


@pytest.mark.parametrize(
    ("bad", "error"),
    [("Quarter", ValueError), (16, TypeError), ("c=quarter", ValueError)],
    ids=stable_id,
)
def test_use_policy_refuses_what_is_no_policy(bad, error):
    with pytest.raises(error) as caught, pp.use_policy(bad):
        pytest.fail("the body ran under a policy that does not exist")
    assert str(bad).removeprefix("c=") in str(caught.value)
    assert "bf16" in str(caught.value)


def test_off_means_that_nothing_is_refused_or_warned_of():
    with pp.use_policy(None):
        assert int(pp.auto_mixed(lambda n: n + 1)(jnp.int32(2))) == 3
        np.testing.assert_array_equal(pp.auto_mixed(jnp.tanh)(X), jax.jit(jnp.tanh)(X))


# ---------------------------------------------------------------- keep


def test_keep_as_a_context_manager():
    def fn(x):
        with pp.keep("f32"):
            h = x @ x
        return h @ x

    assert run(pp.auto_mixed(fn)) == ["float32", "bfloat16"]


def test_keep_as_a_decorator_works_at_every_call():
    head = pp.keep("f32")(square)

    def fn(x):
        return head(head(x)) @ x

    assert run(pp.auto_mixed(fn)) == ["float32", "float32", "bfloat16"]
    assert head.__name__ == "square"


def test_keep_around_a_call_fixes_the_whole_program():
    mixed = pp.auto_mixed(lambda x: (x @ x) @ x)
    with pp.keep("f16"):
        assert run(mixed) == ["float16"] * 2
    assert run(mixed) == ["bfloat16"] * 2
    with pp.keep("f32"), pytest.warns(PrecisionWarning, match=r"keep\('f32'\)"):
        assert run(mixed) == ["float32"] * 2


def test_keep_around_a_call_gives_way_to_one_inside():
    def fn(x):
        with pp.keep("bf16"):
            h = x @ x
        return h @ x

    with pp.keep("f16"):
        assert run(pp.auto_mixed(fn)) == ["bfloat16", "float16"]


def test_keep_alone_changes_nothing():
    with pp.keep("bf16"):
        out = square(X)
    np.testing.assert_array_equal(out, square(X))
    assert run(square) == ["float32"]


def test_early_layers_low_middle_wide_head_in_float64_under_always_f32():
    def fn(x):
        with pp.keep("bf16"):
            h = x @ x
        h = h @ x
        with pp.keep("f64"):
            return h @ x

    mixed = pp.auto_mixed(fn, policy=AlwaysF32)
    found = pp.inspect(mixed)(X)
    assert product_dtypes(found.after) == ["bfloat16", "float32", "float64"]
    out = mixed(X)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, fn(X), atol=0.05)


def test_keep_f64_has_the_digits_of_float64_with_x64_off():
    def fn(x):
        with pp.keep("f64"):
            return (x + 1e8) - 1e8

    x = jnp.linspace(0, 1, 7)
    mixed = pp.auto_mixed(fn, policy=AlwaysF32)
    assert np.abs(fn(x) - x).max() > 0.1
    np.testing.assert_allclose(mixed(x), x, atol=1e-6)
    assert operand_dtypes(pp.inspect(mixed)(x).after, "add") == ["float64"]


@pytest.mark.parametrize("bad", ["quarter", "float8_e3m4", 3], ids=stable_id)
def test_keep_refuses_an_unknown_precision(bad):
    with pytest.raises(ValueError) as caught, pp.keep(bad):
        pytest.fail("the region ran in a precision that does not exist")
    assert repr(bad) in str(caught.value)
    assert "'bf16'" in str(caught.value)
