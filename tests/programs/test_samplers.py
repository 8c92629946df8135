"""Every sampler of `jax.random` draws float32's very digits under the AutoMixed policies."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precpass as pp
from tests.support.jaxprs import touches_low, walk
from tests.support.passes import AUTO, look, run
from tests.support.values import identical, normal

pytestmark = pytest.mark.programs

SHAPE = (64,)
COVARIANCE = np.eye(4, dtype=np.float32) + np.float32(0.3)

SAMPLERS = {
    "ball": lambda key: jax.random.ball(key, 3, shape=SHAPE),
    "bernoulli": lambda key: jax.random.bernoulli(key, 0.3, SHAPE),
    "beta": lambda key: jax.random.beta(key, 2.0, 3.0, SHAPE),
    "binomial": lambda key: jax.random.binomial(key, 10.0, 0.3, SHAPE),
    "bits": lambda key: jax.random.bits(key, SHAPE),
    "categorical": lambda key: jax.random.categorical(key, jnp.arange(4.0), shape=SHAPE),
    "cauchy": lambda key: jax.random.cauchy(key, SHAPE),
    "chisquare": lambda key: jax.random.chisquare(key, 3.0, shape=SHAPE),
    "choice": lambda key: jax.random.choice(
        key, jnp.arange(300.0), SHAPE, p=jnp.arange(300.0) / 44850
    ),
    "dirichlet": lambda key: jax.random.dirichlet(key, jnp.ones(3), SHAPE),
    "double_sided_maxwell": lambda key: jax.random.double_sided_maxwell(key, 0.0, 1.0, SHAPE),
    "exponential": lambda key: jax.random.exponential(key, SHAPE),
    "f": lambda key: jax.random.f(key, 2.0, 3.0, SHAPE),
    "fold_in": lambda key: jax.random.key_data(jax.random.fold_in(key, 3)),
    "gamma": lambda key: jax.random.gamma(key, 2.0, SHAPE),
    "generalized_normal": lambda key: jax.random.generalized_normal(key, 2.0, SHAPE),
    "geometric": lambda key: jax.random.geometric(key, 0.3, SHAPE),
    "gumbel": lambda key: jax.random.gumbel(key, SHAPE),
    "laplace": lambda key: jax.random.laplace(key, SHAPE),
    "loggamma": lambda key: jax.random.loggamma(key, 2.0, SHAPE),
    "logistic": lambda key: jax.random.logistic(key, SHAPE),
    "lognormal": lambda key: jax.random.lognormal(key, 2.0, SHAPE),
    "maxwell": lambda key: jax.random.maxwell(key, SHAPE),
    "multinomial": lambda key: jax.random.multinomial(key, 50.0, jnp.ones(3) / 3),
    "multivariate_normal": lambda key: jax.random.multivariate_normal(
        key, jnp.ones(4), COVARIANCE, SHAPE
    ),
    "normal": lambda key: jax.random.normal(key, SHAPE),
    "orthogonal": lambda key: jax.random.orthogonal(key, 4),
    "pareto": lambda key: jax.random.pareto(key, 2.0, SHAPE),
    "permutation": lambda key: jax.random.permutation(key, jnp.arange(300.0)),
    "poisson": lambda key: jax.random.poisson(key, 3.0, SHAPE),
    "rademacher": lambda key: jax.random.rademacher(key, SHAPE),
    "randint": lambda key: jax.random.randint(key, SHAPE, 0, 70_000),
    "rayleigh": lambda key: jax.random.rayleigh(key, 2.0, SHAPE),
    "split": lambda key: jax.random.key_data(jax.random.split(key)),
    "t": lambda key: jax.random.t(key, 2.0, SHAPE),
    "triangular": lambda key: jax.random.triangular(key, 0.0, 0.5, 1.0, SHAPE),
    "truncated_normal": lambda key: jax.random.truncated_normal(key, -1.0, 1.0, SHAPE),
    "uniform": lambda key: jax.random.uniform(key, SHAPE, minval=-3.0, maxval=5.0),
    "wald": lambda key: jax.random.wald(key, 2.0, SHAPE),
    "weibull_min": lambda key: jax.random.weibull_min(key, 2.0, 3.0, SHAPE),
}
# `Key`, a type, is public since 0.12.
MAKE_OR_READ_KEYS = {
    *("Key", "PRNGKey", "clone", "key", "key_data", "key_dtype", "key_impl", "wrap_key_data")
}
each_auto = pytest.mark.parametrize("policy", AUTO, ids=lambda p: p.name)


def draw_all(key):
    return {name: sampler(key) for name, sampler in SAMPLERS.items()}


def test_every_public_sampler_is_here():
    """A new one of a later JAX must be added above."""
    public = {
        name
        for name in dir(jax.random)
        if not name.startswith("_")
        and callable(getattr(jax.random, name))
        and not isinstance(getattr(jax.random, name), type)
    }
    assert public - MAKE_OR_READ_KEYS == SAMPLERS.keys()


@each_auto
def test_no_sampler_is_changed(policy):
    found = look(draw_all, policy, jax.random.key(0))
    assert found.after is found.before


def loop_of(names):
    """A scan that draws and multiplies in each trip."""

    def fn(keys, w):
        def step(x, key):
            drawn = {name: SAMPLERS[name](key) for name in names}
            return jnp.tanh(x @ w), drawn

        return jax.lax.scan(step, jnp.ones((4, 8)), keys)[1]

    return fn


def low_equations(names, policy, *args):
    after = look(loop_of(names), policy, *args).after
    return collections.Counter(e.primitive.name for e in walk(after) if touches_low(e))


@each_auto
def test_beside_products_in_a_loop_nothing_of_a_sampler_is_low(policy):
    args = jax.random.split(jax.random.key(1), 3), jnp.asarray(normal(0, 8, 8))
    without = low_equations((), policy, *args)
    assert without["dot_general"] == 1
    assert low_equations(SAMPLERS, policy, *args) == without


def test_samples_drawn_in_a_loop_beside_products_are_bit_equal():
    fn = loop_of(("choice", "multivariate_normal", "normal", "uniform"))
    args = jax.random.split(jax.random.key(1), 3), jnp.asarray(normal(0, 8, 8))
    assert identical(run(fn, pp.AutoMixedBf16, *args), jax.jit(fn)(*args))
