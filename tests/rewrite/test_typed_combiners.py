"""A scatter holds a scalar combiner that is typed: it changes with the equation's precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precpass as pp
from tests.support.jaxprs import dtypes_out, named
from tests.support.passes import look, run
from tests.support.values import identical, normal

UPDATES = ("add", "multiply", "max", "min")
IDS = np.array([0, 1, 1, 2])
X, Y = normal(0, 4, 3), normal(1, 4, 3)


def updated(how, dtype):
    return lambda x, y: getattr(x.astype(dtype).at[IDS], how)(y.astype(dtype))


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("how", UPDATES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
def test_always_f32_widens_a_low_scatter(how, dtype):
    got = run(lambda x, y: updated(how, dtype)(x, y) * 1, pp.AlwaysF32, X, Y)
    assert identical(got, updated(how, jnp.float32)(jnp.asarray(X), Y).astype(dtype))


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("how", UPDATES)
@pytest.mark.parametrize("policy", [pp.AlwaysF32, pp.AutoMixedBf16], ids=lambda p: p.name)
def test_a_float64_region_holds_scatters(how, policy):
    def fn(x, y):
        with pp.keep("f64"):
            return updated(how, jnp.float32)(x + 1e8, y) - 1e8

    after = look(fn, policy, X, Y).after
    (scatter,) = [e for u in (how, how[:3]) for e in named(after, f"scatter-{u}")][:1]
    assert dtypes_out(scatter) == [np.float64]
    wide = X.astype(np.float64) + 1e8
    getattr(np, {"max": "maximum", "min": "minimum"}.get(how, how)).at(wide, IDS, Y)
    np.testing.assert_allclose(run(fn, policy, X, Y), wide - 1e8, rtol=1e-6, atol=1e-6)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("how", ("add", "max"))
def test_its_gradient_too(how):
    def loss(x, y):
        with pp.keep("f64"):
            return jnp.sum(jnp.sin(updated(how, jnp.float32)(x, y)))

    for form in (
        pp.auto_mixed(jax.grad(loss), policy=pp.AlwaysF32),
        jax.grad(pp.auto_mixed(loss, policy=pp.AlwaysF32)),
    ):
        np.testing.assert_allclose(form(X, Y), jax.grad(loss)(X, Y), atol=1e-6)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("how", ["add", "multiply", "min", "max"])
def test_a_combiner_is_evaluated_on_its_own_types(how):
    """JAX's own checks see an equation on other types than those that it was made for."""
    x = jnp.arange(8, dtype=jnp.bfloat16)

    def fn(x):
        return getattr(x.at[jnp.array([0, 0, 3])], how)(jnp.full(3, 3, jnp.bfloat16))

    with jax.enable_checks(True):
        got = pp.auto_mixed(fn, policy="AlwaysF32")(x)
        derivative = None
        if how == "add":
            total = pp.auto_mixed(lambda x: fn(x).astype(jnp.float32).sum(), policy="AlwaysF32")
            derivative = jax.grad(total)(x)
    assert got.dtype == jnp.bfloat16
    assert (got == fn(x)).all()
    assert derivative is None or (derivative == 1).all()
