"""`calibrate`: rules for what overflows or vanishes in the target, and for nothing else."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import low_products, normal, products
from jax import lax

import precpass as pp

f32 = jnp.float32


def two_products(x: Any, w: Any) -> Any:
    h = jnp.maximum(x @ w, 0.0) * 500.0
    with jax.named_scope("large"):
        y = h @ w
    return jnp.tanh(x @ w).sum() + y.sum()


X, W = np.abs(normal(0, 16, 32)), np.abs(normal(1, 32, 32))
FINE = X / 100, W / 100


def test_a_program_that_overflows_is_right_and_else_low_afterwards():
    want = two_products(X, W)
    assert not np.isfinite(pp.auto_mixed(two_products, policy="AutoMixed")(X * 10, W))
    policy = pp.calibrate(two_products, "AutoMixed", [(X, W), (X * 10, W)])
    got = pp.auto_mixed(two_products, policy=policy)
    np.testing.assert_allclose(got(X, W), want, rtol=2e-3)
    np.testing.assert_allclose(got(X * 10, W), two_products(X * 10, W), rtol=2e-3)
    after = pp.inspect(two_products, policy)(X, W).after
    assert len(products(after)) == 3
    assert len(low_products(after, np.float16)) == 2
    (rule,) = policy.rules
    assert rule.patterns.keys() == {"primitive", "scope", "function", "file", "line"}
    assert (rule.primitive, rule.scope) == ("dot_general", "large")
    assert rule.evidence.startswith("operands reach ")
    assert "evidence=" in repr(rule)
    reasons = [d.reason for d in pp.inspect(two_products, policy)(X, W).plan.walk()]
    assert repr(rule) in reasons


def test_what_fits_gets_no_rule():
    assert pp.calibrate(two_products, "AutoMixed", [FINE]) == pp.AutoMixed
    # bfloat16 has the range of float32
    assert pp.calibrate(two_products, "AutoMixedBf16", [(X * 10, W)]) == pp.AutoMixedBf16


def test_the_safety_factor_is_for_other_inputs():
    x = jnp.full((4, 4), 4e4)
    f = jnp.matmul
    assert not pp.calibrate(f, "AutoMixed", [(x, x)], safety=1.5).rules
    assert len(pp.calibrate(f, "AutoMixed", [(x, x)]).rules) == 1


def test_an_operand_that_vanishes_as_a_whole_stays_wide():
    x = normal(0, 8, 8)
    (rule,) = pp.calibrate(jnp.matmul, "AutoMixed", [(x * 1e-7, x)]).rules
    assert "no element of an operand is more than" in rule.evidence
    mixed = x.copy()
    mixed[0] *= 1e-9
    assert not pp.calibrate(jnp.matmul, "AutoMixed", [(mixed, x)]).rules
    # zeros are exact in any format
    assert not pp.calibrate(jnp.matmul, "AutoMixed", [(x * 0, x)]).rules


def test_elementwise_orders_are_kept_wide_where_their_results_leave_the_range():
    def f(x: Any) -> Any:
        y = x * x
        return jnp.sin(y), y + x

    policy = pp.calibrate(f, "AlwaysF16", [(jnp.asarray([300.0, 2.0]),)])
    evidence = {rule.primitive: rule.evidence for rule in policy.rules}
    assert evidence == {
        "mul": "results reach 9e+04, and f16 ends at 6.55e+04",
        "sin": "operands reach 9e+04, and f16 ends at 6.55e+04",
        "add": "operands reach 9e+04, and f16 ends at 6.55e+04",
    }
    policy = pp.calibrate(lambda x: x * x, "AlwaysF16", [(jnp.asarray([1e-5, 1.0]),)])
    assert [r.evidence for r in policy.rules] == ["results come down to 1e-10, and f16 to 5.96e-08"]


def test_batches_are_streamed_and_may_have_other_shapes():
    alive: list[int] = []

    def batches() -> Iterator[tuple[Any, Any]]:
        for i, n in enumerate((4, 4, 2)):
            alive.append(i)
            yield X[:n], W * 10.0**i

    policy = pp.calibrate(two_products, "AutoMixed", batches())
    assert alive == [0, 1, 2]
    assert policy.rules


def test_runs_merge():
    def f(x: Any, w: Any) -> Any:
        y = x @ w
        return y, w @ w

    large, ones = jnp.full((4, 4), 7e4), jnp.ones((4, 4))
    one = pp.calibrate(f, "AutoMixed", [(large, ones)])
    assert len(one.rules) == 1
    assert pp.calibrate(f, one, [(ones, ones)]) == one
    other = pp.calibrate(f, "AutoMixed", [(ones, large)])
    both = one.with_rules(*other.rules)
    assert len(set(both.rules)) == 2
    assert pp.calibrate(f, one, [(ones, large)]).rules[-1:] == one.rules


def test_values_that_are_not_finite_leave_the_range_and_are_reported():
    bad = X.copy()
    bad[0, 0] = np.nan
    assert pp.calibrate(two_products, "AutoMixed", [(bad / 100, W / 100)]) == pp.AutoMixed

    def f(x: Any, w: Any) -> Any:
        return jnp.log(x - 100.0).sum() + (x @ w).sum()

    with pytest.warns(
        pp.PrecisionWarning, match=r"born at 1 line, first by log  \S*test_calibrate\.py"
    ):
        policy = pp.calibrate(f, "AutoMixed", [FINE])
    assert not policy.rules


def test_what_no_batch_reaches_is_reported():
    def f(x: Any, w: Any) -> Any:
        return lax.cond(x[0, 0] > 1e6, lambda: x @ w, lambda: x * 2.0)

    with pytest.warns(pp.PrecisionWarning, match=r"no batch reached 1 equation .*dot_general at"):
        assert not pp.calibrate(f, "AutoMixed", [(jnp.ones((4, 4)),) * 2]).rules


def test_in_loops_and_gradients():
    def loss(ws: Any, x: Any) -> Any:
        def body(x: Any, ws: Any) -> Any:
            h = jnp.tanh(x @ ws[0]) * 1e5
            return jnp.tanh(h * 1e-5 @ ws[1]) * 1e5, None

        return lax.scan(jax.checkpoint(body), x, ws)[0].mean() * 0.01

    w, x = normal(0, 3, 16, 16), normal(1, 4, 16)
    grad, ws = jax.grad(loss), (w * 1e-5, w)
    policy = pp.calibrate(grad, "AutoMixed", [(ws, x)])
    assert {rule.line for rule in policy.rules} == {loss.__code__.co_firstlineno + 2}
    want, got = grad(ws, x), pp.auto_mixed(grad, policy=policy)(ws, x)
    for a, b in zip(got, want, strict=True):
        assert np.abs(a - b).max() <= 0.02 * np.abs(b).max()
    after = pp.inspect(grad, policy)(ws, x).after
    assert low_products(after, np.float16)


@pytest.mark.parametrize(
    ("batches", "safety", "error", "match"),
    [
        ([], 2.0, ValueError, "there are no batches"),
        ([X], 2.0, TypeError, r"batch 0 is a ndarray, and is to be a tuple .*\(batch,\)"),
        ([FINE], 0.5, ValueError, "safety=0.5"),
        ([FINE], "2", ValueError, "safety='2'"),
    ],
    ids=["none", "array", "small", "text"],
)
def test_bad_input(batches: Any, safety: Any, error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        pp.calibrate(two_products, "AutoMixed", batches, safety=safety)
