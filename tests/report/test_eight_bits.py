"""What compare, bisect and calibrate say of products in 8 bits."""

import itertools
from typing import Any

import jax.numpy as jnp
import pytest

import precpass as pp
from precpass.types import PrecisionPolicy
from tests.support.values import normal_array

SIZES = 256, 128, 1024, 16
WS = [normal_array(i, n, m) / n**0.5 for i, (n, m) in enumerate(itertools.pairwise(SIZES))]
X = normal_array(9, 256, 256)
POLICIES = ["AutoMixedInt8", "AutoMixedF8"]


def layers(ws: Any, x: Any) -> Any:
    first, middle, last = ws  # the product in the middle alone is large enough
    x = jnp.tanh(x @ first)
    x = jnp.tanh(x @ middle)
    return jnp.tanh(x @ last)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_comparison_has_their_share_their_error_and_their_memory(policy: str):
    low, scaled = pp.compare(layers, ["bf16", policy], rounds=1)(WS, X).rows
    assert low.errors.relative < scaled.errors.relative < 0.1
    assert scaled.counts.low == low.counts.low == 3
    assert "72%" in str(pp.compare(layers, [policy], rounds=1)(WS, X))
    assert scaled.memory.temp > 0


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_bisection_ends_at_the_line_of_the_product_in_8_bits(policy: str):
    """bfloat16's error passes the check, that of 8 bits does not."""
    found = pp.bisect(layers, policy, 5e-3)(WS, X)
    assert found.found and len(found.rules) == 1
    assert found.rules[0].line == layers.__code__.co_firstlineno + 3
    kept = pp.auto_mixed(layers, found.policy)
    assert pp.inspect(layers, found.policy)(WS, X).plan.lowers
    assert jnp.linalg.norm(kept(WS, X) - layers(WS, X)) < 5e-3 * jnp.linalg.norm(layers(WS, X))


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_calibration_keeps_no_product_because_of_the_range_of_8_bits(policy: str):
    """Scales bring every size of values into it; what surrounds the product is bfloat16."""
    for size in (1e-20, 1.0, 1e20):
        found = pp.numerics.calibrate(layers, policy, [([size * w for w in WS], X)])
        (rule,) = (rule for rule in found.rules if rule.largest)
        assert found == PrecisionPolicy.parse(policy).with_rules(rule)
