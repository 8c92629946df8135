"""Bit-level code (bitcast, nextafter, reduce_precision) is BOUNDARY, and so is what follows random
bits up to the end of the innermost jit of the sampler (sub, mul, max, erf_inv ...), or up to its
first other consumer. Unknown and opaque primitives (pallas_call, ffi, callbacks, custom calls) are
BOUNDARY."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback, pallas as pl

import precpass as pp
from tests.support.jaxprs import LOW, dtypes_in, dtypes_out, low_products, named, walk
from tests.support.passes import ALWAYS_LOW, LOWERING, look, run
from tests.support.values import identical, normal

each_policy = pytest.mark.parametrize("policy", LOWERING, ids=lambda p: p.name)
each_order = pytest.mark.parametrize("policy", ALWAYS_LOW, ids=lambda p: p.name)

BITS = {
    "bitcast_convert_type": lambda x: lax.bitcast_convert_type(x, jnp.int32),
    "nextafter": lambda x: lax.nextafter(x, jnp.full_like(x, 9)),
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 10),
}


@pytest.mark.release(keep=2)
@each_policy
@pytest.mark.parametrize("name", BITS)
def test_bit_level_code_is_boundary(name, policy):
    """Exact on what the user gave, behind arithmetic that the policy may run low."""
    x = jnp.asarray(normal(0, 64))
    inspection = look(BITS[name], policy, x)
    for eqn in named(inspection.after, name):
        assert not any(d in LOW for d in (*dtypes_in(eqn), *dtypes_out(eqn)))
    kinds = [d.kind for e, d, _ in inspection.decisions() if e.primitive.name == name]
    assert kinds == [pp.types.OpKind.BOUNDARY]
    assert identical(run(BITS[name], policy, x), BITS[name](x))


# ---------------------------------------------------------------- samplers


def _by_hand(key, shape):
    """Uniform numbers from bits, without a sampler's jit around them."""
    bits = jax.random.bits(key, shape)
    words = lax.shift_right_logical(bits, jnp.uint32(9)) | jnp.uint32(0x3F800000)
    return lax.bitcast_convert_type(words, jnp.float32) - 1.0


SAMPLERS = {
    "normal": lambda key: jax.random.normal(key, (4096,)),
    "uniform": lambda key: jax.random.uniform(key, (4096,), minval=-3.0, maxval=5.0),
    "truncated_normal": lambda key: jax.random.truncated_normal(key, -2.0, 2.0, (4096,)),
    "gumbel": lambda key: jax.random.gumbel(key, (4096,)),
    "exponential": lambda key: jax.random.exponential(key, (4096,)),
    "laplace": lambda key: jax.random.laplace(key, (4096,)),
    "cauchy": lambda key: jax.random.cauchy(key, (4096,)),
    "logistic": lambda key: jax.random.logistic(key, (4096,)),
    "bernoulli": lambda key: jax.random.bernoulli(key, 0.3, (4096,)),
    "randint": lambda key: jax.random.randint(key, (4096,), 0, 70_000),
    "permutation": lambda key: jax.random.permutation(key, 4096),
    "by hand": lambda key: _by_hand(key, (4096,)),
}


def with_a_product(sampler):
    """Some floats to lower beside the sampler, so that the policy has work."""
    return lambda key, x: (sampler(key), x @ x)


@pytest.mark.release(keep=2)
@each_policy
@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_are_bit_equal_to_float32s(name, policy):
    fn, args = with_a_product(SAMPLERS[name]), (jax.random.key(3), jnp.eye(4))
    assert low_products(look(fn, policy, *args).after, policy.low.dtype)
    assert identical(run(fn, policy, *args)[0], jax.jit(fn)(*args)[0])


@each_order
def test_at_the_end_of_the_samplers_jit_orders_hold_again(policy):
    """What a user computes with samples is his program, not the sampler."""

    def f(key):
        return jnp.tanh(jax.random.normal(key, (64,)))

    (eqn,) = named(look(f, policy, jax.random.key(0)).after, "tanh")
    assert dtypes_in(eqn) == [policy.low.dtype]


@each_order
def test_at_its_first_other_consumer_too(policy):
    def f(key, x):
        return _by_hand(key, (64,)) * x

    inspection = look(f, policy, jax.random.key(0), jnp.ones(64))
    (mul,) = named(inspection.after, "mul")
    assert policy.low.dtype in dtypes_in(mul)
    (sub,) = named(inspection.after, "sub")
    assert dtypes_in(sub) == [np.float32] * 2


# ---------------------------------------------------------------- opaque


def _kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2.0 + 1e-3


def _pallas(x):
    return pl.pallas_call(_kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def _ffi(x):
    return jax.ffi.ffi_call("precpass_test", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def _host(x):
    assert x.dtype == np.float32
    return np.asarray(x) + np.float32(1e-6)


def _pure(x):
    return jax.pure_callback(_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def _io(x):
    return io_callback(_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True)


OPAQUE = {
    "pallas_call": _pallas,
    "ffi_call": _ffi,
    "pure_callback": _pure,
    "io_callback": _io,
    "fft": lambda x: jnp.real(jnp.fft.rfft(x)),
    "cholesky": lambda x: lax.linalg.cholesky(x @ x.T + 16 * jnp.eye(16)),
}


@each_policy
@pytest.mark.parametrize("name", OPAQUE)
def test_opaque_primitives_are_boundary(name, policy):
    def f(x):
        # of features, of which a factorization needs no more digits than they have
        return OPAQUE[name](jax.nn.relu(x @ x) @ x).sum()

    x = jnp.asarray(normal(0, 16, 16))
    inspection = look(f, policy, x)
    before, after = (named(j, name) for j in (inspection.before, inspection.after))
    assert len(before) == len(after) == 1
    assert [str(v.aval) for v in after[0].invars] == [str(v.aval) for v in before[0].invars]
    assert [str(v.aval) for v in after[0].outvars] == [str(v.aval) for v in before[0].outvars]
    decided = [d for e, d, _ in inspection.decisions() if e.primitive.name == name]
    assert [d.kind for d in decided] == [pp.types.OpKind.BOUNDARY]
    low = low_products(inspection.after, policy.low.dtype)
    assert len(low) == len(named(inspection.after, "dot_general")) > 0


@each_policy
def test_a_kernels_body_is_not_rewritten(policy):
    inspection = look(lambda x: _pallas(x @ x), policy, jnp.ones((16, 16)))
    bodies = [
        str(e.params["jaxpr"])
        for j in (inspection.before, inspection.after)
        for e in walk(j)
        if e.primitive.name == "pallas_call"
    ]
    assert len(bodies) == 2 and bodies[0] == bodies[1]
