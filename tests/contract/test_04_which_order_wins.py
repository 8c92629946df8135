"""Which order wins, highest first: types and BOUNDARY (original dtypes) > what the user wrote >
guards > rules and keep regions, innermost first > profitability > the preset."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from tests.support.jaxprs import LOW, low_products, named
from tests.support.passes import ALWAYS_LOW, POLICIES, look, run
from tests.support.values import normal

ids = {"ids": lambda p: p.name}


def square(n=8):
    return jnp.asarray(normal(0, n, n)), jnp.asarray(normal(1, n, n))


def product(x, w):
    with jax.named_scope("head"):
        return x @ w


HEAD = {"scope": "head"}


@pytest.mark.parametrize("policy", POLICIES, **ids)
def test_a_rule_wins_over_the_preset(policy):
    x, w = square()
    wide = look(product, policy.with_rules(pp.Rule(**HEAD, precision="f32")), x, w)
    assert low_products(wide.after) == []
    for low in ("bf16", "f16"):
        ruled = look(product, policy.with_rules(pp.Rule(**HEAD, precision=low)), x, w)
        assert len(low_products(ruled.after, pp.types.Precision.parse(low).dtype)) == 1


def test_the_innermost_keep_region_wins_over_rules_and_outer_regions():
    def f(x, w):
        with pp.keep("bf16"), pp.keep("f32"):
            y = product(x, w)
        with pp.keep("f32"), pp.keep("f16"):
            return product(y, w)

    policy = pp.AutoMixedBf16.with_rules(pp.Rule(**HEAD, precision="bf16"))
    after = look(f, policy, *square()).after
    assert [e.invars[0].aval.dtype for e in named(after, "dot_general")] == [np.float32, np.float16]


def test_what_the_user_wrote_wins_over_rules_and_keep():
    def f(x, w):
        with pp.keep("bf16"):
            return jnp.matmul(x, w, precision=lax.Precision.HIGHEST), x.astype(
                jnp.float16
            ) @ w.astype(jnp.float16)

    policy = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="dot_general", precision="bf16"))
    after = look(f, policy, *square()).after
    assert [e.invars[0].aval.dtype for e in named(after, "dot_general")] == [np.float32, np.float16]


@pytest.mark.parametrize("how", ["rule", "keep", "custom"])
def test_guards_win_over_rules_and_keep_regions(how):
    """16384 ones in a scan's carry, and a mask of -1e30, whatever asks for float16."""

    def f(x):
        with (
            pp.keep("f16" if how == "keep" else "f32") if how != "custom" else jax.named_scope("a")
        ):
            total, _ = lax.scan(lambda c, x: (c + x, None), jnp.float32(0), x)
            return total, jnp.where(x > 1, x, jnp.float32(-1e30))[0]

    rule = pp.Rule(where=lambda eqn: True, precision="f16")
    policy = pp.AutoMixed.with_rules(rule) if how == "rule" else pp.AutoMixed
    if how == "custom":
        policy = pp.Custom({"elementwise": "f16", "data_movement": "f16"})
    got = run(f, policy, jnp.ones(16384))
    assert [float(v) for v in got] == [16384.0, float(np.float32(-1e30))]


@pytest.mark.parametrize(
    "policy", [*ALWAYS_LOW, pp.Custom({"boundary": "f32", "compute": "f16"})], **ids
)
def test_types_and_boundary_win_over_everything(policy):
    def f(x, n):
        with pp.keep("bf16"):
            return lax.bitcast_convert_type(x, jnp.int32), n * 3, lax.nextafter(x, x + 1)

    x = jnp.asarray(normal(0, 16))
    ruled = policy.with_rules(pp.Rule(where=lambda eqn: True, precision="bf16"))
    after = look(f, ruled, x, jnp.int32(7)).after
    for eqn in named(after, "bitcast_convert_type", "nextafter"):
        assert all(v.aval.dtype not in LOW for v in eqn.invars)
    bits, n, _ = run(f, ruled, x, jnp.int32(7))
    assert np.array_equal(bits, np.asarray(x).view(np.int32)) and int(n) == 21
