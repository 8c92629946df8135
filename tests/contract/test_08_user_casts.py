"""A cast that the user wrote is honoured, except under AlwaysF32. Widen-then-narrow pairs are
removed because they are exact; narrow-then-widen is a rounding and stays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from tests.support.jaxprs import LOW, dtypes_in, low_products, named, touches_low, walk
from tests.support.passes import LOWERING, look, run
from tests.support.values import identical, normal, rel_error

BF16, F16 = jnp.bfloat16, jnp.float16

each_policy = pytest.mark.parametrize("policy", LOWERING, ids=lambda p: p.name)
each_low = pytest.mark.parametrize("low", [BF16, F16], ids=["bf16", "f16"])


def square(n=16):
    return jnp.asarray(normal(0, n, n)), jnp.asarray(normal(1, n, n))


@pytest.mark.release(keep=2)
@each_policy
@each_low
def test_a_product_that_the_user_made_low_keeps_his_format(policy, low):
    def f(x, w):
        return (x.astype(low) @ w.astype(low)).astype(np.float32)

    x, w = square()
    (eqn,) = named(look(f, policy, x, w).after, "dot_general")
    assert dtypes_in(eqn) == [low, low]
    assert eqn.outvars[0].aval.dtype == low
    assert identical(run(f, policy, x, w), jax.jit(f)(x, w))


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", ["jit", "scan", "cond", "remat", "vmap"])
def test_honoured_in_every_body_too(name):
    def cast(x):
        return x.astype(BF16).astype(np.float32)

    bodies = {
        "jit": jax.jit(cast),
        "scan": lambda x: lax.scan(lambda c, r: (c, cast(r)), 0.0, x)[1],
        "cond": lambda x: lax.cond(x[0, 0] < 99, cast, lambda x: x, x),
        "remat": jax.checkpoint(cast),
        "vmap": jax.vmap(cast),
    }
    x = square()[0]
    want = np.asarray(x).astype(BF16).astype(np.float32)
    for policy in LOWERING[:2] + LOWERING[-1:]:
        after = look(bodies[name], policy, x).after
        pairs = [
            (e.invars[0].aval.dtype, e.params["new_dtype"])
            for e in named(after, "convert_element_type")
        ]
        assert (np.float32, BF16) in pairs and (BF16, np.float32) in pairs
    assert identical(
        np.asarray(run(lambda x: lax.reduce_precision(bodies[name](x), 8, 7), pp.AutoMixedBf16, x)),
        want,
    )


# ---------------------------------------------------------------- pairs


def pairs(jaxpr):
    """(from, over, to) of every cast of a cast that nothing else reads."""
    made_by = {v: e for e in walk(jaxpr) for v in e.outvars}
    found = []
    for eqn in named(jaxpr, "convert_element_type"):
        first = made_by.get(eqn.invars[0]) if not hasattr(eqn.invars[0], "val") else None
        if first is not None and first.primitive.name == "convert_element_type":
            found.append(
                (first.invars[0].aval.dtype, first.params["new_dtype"], eqn.params["new_dtype"])
            )
    return found


@pytest.mark.release(keep=2)
@each_policy
def test_widen_then_narrow_pairs_are_removed(policy):
    """Both casts of a value that has the format already, where only the second is read."""
    low = policy.low.dtype

    def f(x, w):
        return x.astype(np.float32).astype(low) @ w

    args = [a.astype(low) for a in square()]
    inspection = look(f, policy, *args)
    assert (low, np.float32, low) in pairs(inspection.before)
    assert (low, np.float32, low) not in pairs(inspection.after)
    assert identical(run(f, policy, *args), jax.jit(f)(*args))


@each_policy
def test_the_pass_makes_no_such_pair_for_a_product(policy):
    """A user's low value, widened by him, is read by a lowered product without a new rounding."""
    low = policy.low.dtype

    def f(x, w):
        return x.astype(low).astype(np.float32) @ w

    x, w = square()
    want = jnp.matmul(x.astype(low), w.astype(low), preferred_element_type=np.float32)
    after = look(f, policy, x, w).after
    assert len(low_products(after, low)) == 1
    assert rel_error(run(f, policy, x, w), want) < 1e-3


@each_policy
@each_low
def test_narrow_then_widen_is_a_rounding_and_stays(policy, low):
    def f(x):
        return x.astype(low).astype(np.float32)

    x = square()[0]
    after = look(f, policy, x).after
    assert (np.float32, low, np.float32) in pairs(after)


@each_low
def test_narrow_then_widen_is_removed_under_always_f32(low):
    def f(x):
        return x.astype(low).astype(np.float32)

    x = square()[0]
    after = look(f, pp.AlwaysF32, x).after
    assert [e for e in walk(after) if touches_low(e)] == []
    assert identical(run(f, pp.AlwaysF32, x), x)


@each_policy
def test_casts_to_and_from_other_types_stay(policy):
    """Integers, booleans and the user's other 16-bit format."""

    def f(x, n):
        y = jax.nn.relu(x @ x) @ x  # of features, which no whole number needs exactly
        return (
            y.astype(jnp.int32),
            n.astype(np.float32) + 0.5,
            (x > 0).astype(np.float32),
            x.astype(F16).astype(BF16),
        )

    x, n = square()[0], jnp.asarray([257, 70_001, 16_777_215])
    inspection = look(f, policy, x, n)
    casts = [
        (str(e.invars[0].aval.dtype), str(e.params["new_dtype"]))
        for e in named(inspection.after, "convert_element_type")
    ]
    for wanted in [
        ("float32", "int32"),
        ("int32", "float32"),
        ("bool", "float32"),
        ("float16", "bfloat16"),
    ]:
        assert wanted in casts
    got = run(lambda n: n.astype(np.float32), policy, n)
    assert np.array_equal(got, np.asarray(n, np.float32))
    assert LOW
