"""What stands around a call: `use_policy`, `keep`, and `PRECPASS=off`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precpass as pp
from precpass import AlwaysF32, AutoMixed, AutoMixedBf16, PrecisionWarning
from tests.support.jaxprs import operand_dtypes, product_dtypes
from tests.support.passes import quiet
from tests.support.values import stable_id

X = jnp.linspace(-1, 1, 64).reshape(8, 8)


def square(x):
    return x @ x


def run(fn, x=X):
    """The operand dtypes of the products that calling `fn` runs."""
    return product_dtypes(jax.make_jaxpr(fn)(x))


# ---------------------------------------------------------------- use_policy


@pytest.mark.parametrize(
    ("own", "around", "wanted"),
    [
        (None, ["AutoMixed"], "float16"),
        (None, [AutoMixed], "float16"),
        (None, ["p=f32,c=f16,o=f32"], "float16"),
        (AutoMixedBf16, ["AutoMixed"], "bfloat16"),
        (None, ["AutoMixed", "AutoMixedBf16"], "bfloat16"),
        (None, ["AutoMixed", None], "float32"),
        (None, [AlwaysF32], "float32"),
    ],
    ids=stable_id,
)
def test_the_innermost_use_policy_is_the_default(own, around, wanted):
    mixed = pp.auto_mixed(square, policy=own)
    jitted = jax.jit(lambda x: mixed(x))
    outside = run(mixed)
    assert run(jitted) == outside == ["bfloat16"]

    def inside(policies):
        if not policies:
            return run(mixed), run(jitted)
        with pp.use_policy(policies[0]):
            before = run(mixed)
            found = inside(policies[1:])
            assert run(mixed) == before, "the outer one comes back"
            return found

    assert inside(around) == ([wanted], [wanted])
    assert run(mixed) == outside


def test_an_exception_inside_restores_the_default():
    with pytest.raises(KeyError), pp.use_policy("AutoMixed"):
        raise KeyError
    assert run(pp.auto_mixed(square)) == ["bfloat16"]


def test_each_policy_has_its_own_compiled_program():
    mixed = pp.auto_mixed(square)
    outs = [mixed(X)]
    for policy in ("AutoMixed", None, "AlwaysF32"):
        with pp.use_policy(policy):
            outs.append(mixed(X))
    low, half, off, wide = (np.abs(out - square(X)).max() for out in outs)
    assert low > half > off == wide == 0


def test_use_policy_and_keep_work_as_decorators():
    mixed = pp.auto_mixed(square)
    fn = pp.use_policy(None)(lambda x: mixed(x))
    assert run(fn) == run(fn) == ["float32"]
    head = pp.keep("f32")(square)
    assert head.__name__ == "square"
    assert run(pp.auto_mixed(lambda x: head(head(x)) @ x)) == ["float32", "float32", "bfloat16"]


@pytest.mark.parametrize(
    ("take", "bad", "error"),
    [
        (pp.use_policy, "Quarter", ValueError),
        (pp.use_policy, 16, TypeError),
        (pp.use_policy, "c=quarter", ValueError),
        (pp.keep, "float8_e3m4", ValueError),
        (pp.keep, 3, ValueError),
    ],
    ids=stable_id,
)
def test_what_is_no_policy_or_precision_is_refused(take, bad, error):
    with pytest.raises(error) as caught, take(bad):
        pytest.fail("the body ran")
    assert str(bad).removeprefix("c=") in str(caught.value)
    assert "bf16" in str(caught.value)


def test_off_means_that_nothing_is_refused_or_warned_of():
    with pp.use_policy(None):
        assert int(pp.auto_mixed(lambda n: n + 1)(jnp.int32(2))) == 3
        np.testing.assert_array_equal(pp.auto_mixed(jnp.tanh)(X), jax.jit(jnp.tanh)(X))


# ---------------------------------------------------------------- keep


def kept(*precisions):
    """A chain of products, each in its own `keep`, or in none for None."""

    def fn(x):
        h = x
        for precision in precisions:
            if precision is None:
                h = h @ x
            else:
                with pp.keep(precision):
                    h = h @ x
        return h

    return fn


@pytest.mark.parametrize(
    ("inside", "around", "policy", "wanted"),
    [
        (["f32", None], None, None, ["float32", "bfloat16"]),
        ([None, None], "f16", None, ["float16"] * 2),
        ([None, None], "f32", None, ["float32"] * 2),
        (["bf16", None], "f16", None, ["bfloat16", "float16"]),
        (["bf16", None, "f64"], None, AlwaysF32, ["bfloat16", "float32", "float64"]),
    ],
    ids=stable_id,
)
def test_the_innermost_keep_counts(inside, around, policy, wanted):
    mixed = pp.auto_mixed(kept(*inside), policy=policy)
    context = pp.keep(around) if around else quiet()
    with quiet(), context:
        assert product_dtypes(pp.inspect(mixed)(X).after) == wanted
        out = mixed(X)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, kept(*inside)(X), atol=0.05)


def test_a_keep_around_a_call_that_lowers_nothing_is_named():
    with pp.keep("f32"), pytest.warns(PrecisionWarning, match=r"keep\('f32'\)"):
        pp.auto_mixed(square)(X)


def test_keep_alone_changes_nothing():
    with pp.keep("bf16"):
        assert run(square) == ["float32"]
        np.testing.assert_array_equal(square(X), jnp.asarray(X) @ X)


def test_keep_f64_has_the_digits_of_float64_with_x64_off():
    def fn(x):
        with pp.keep("f64"):
            return (x + 1e8) - 1e8

    x = jnp.linspace(0, 1, 7)
    mixed = pp.auto_mixed(fn, policy=AlwaysF32)
    assert np.abs(fn(x) - x).max() > 0.1
    np.testing.assert_allclose(mixed(x), x, atol=1e-6)
    assert operand_dtypes(pp.inspect(mixed)(x).after, "add") == ["float64"]
