"""`calibrate`: rules for what overflows or vanishes in the target, and for nothing else."""

import dataclasses
import math
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import precpass as pp
from tests.support.jaxprs import low_products, products
from tests.support.values import normal

pytestmark = pytest.mark.programs

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
    policy = pp.numerics.calibrate(two_products, "AutoMixed", [(X, W), (X * 10, W)])
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
    reasons = [str(d.reason) for d in pp.inspect(two_products, policy)(X, W).plan.walk()]
    assert repr(rule) in reasons


def test_a_batch_runs_once():
    runs: list[int] = []

    def called(x: Any) -> Any:
        runs.append(1)
        return x

    def fn(x: Any, w: Any) -> Any:
        return jax.pure_callback(called, jax.ShapeDtypeStruct((16, 32), f32), x @ w)

    pp.numerics.calibrate(fn, "AutoMixed", [(X, W)])
    assert len(runs) == 1


def test_what_fits_gets_no_rule():
    assert pp.numerics.calibrate(two_products, "AutoMixed", [FINE]) == pp.AutoMixed
    # bfloat16 has the range of float32
    assert pp.numerics.calibrate(two_products, "AutoMixedBf16", [(X * 10, W)]) == pp.AutoMixedBf16


def test_the_safety_factor_is_for_other_inputs():
    x = jnp.full((4, 4), 4e4)
    f = jnp.matmul
    assert not pp.numerics.calibrate(f, "AutoMixed", [(x, x)], safety=1.5).rules
    assert len(pp.numerics.calibrate(f, "AutoMixed", [(x, x)]).rules) == 1


def test_an_operand_that_vanishes_as_a_whole_stays_wide():
    x = normal(0, 8, 8)
    (rule,) = pp.numerics.calibrate(jnp.matmul, "AutoMixed", [(x * 1e-7, x)]).rules
    assert "no element of an operand is more than" in rule.evidence
    mixed = x.copy()
    mixed[0] *= 1e-9
    assert not pp.numerics.calibrate(jnp.matmul, "AutoMixed", [(mixed, x)]).rules
    # zeros are exact in any format
    assert not pp.numerics.calibrate(jnp.matmul, "AutoMixed", [(x * 0, x)]).rules


def test_elementwise_orders_are_kept_wide_where_their_results_leave_the_range():
    def f(x: Any) -> Any:
        y = x * x
        return jnp.sin(y), y + x

    policy = pp.numerics.calibrate(f, "AlwaysF16", [(jnp.asarray([300.0, 2.0]),)])
    evidence = {rule.primitive: rule.evidence for rule in policy.rules}
    assert evidence == {
        "mul": "results reach 9e+04, and f16 ends at 6.55e+04",
        "sin": "operands reach 9e+04, and f16 ends at 6.55e+04",
        "add": "operands reach 9e+04, and f16 ends at 6.55e+04",
    }
    policy = pp.numerics.calibrate(lambda x: x * x, "AlwaysF16", [(jnp.asarray([1e-5, 1.0]),)])
    assert [r.evidence for r in policy.rules] == ["results come down to 1e-10, and f16 to 5.96e-08"]


def test_batches_are_streamed_and_may_have_other_shapes():
    alive: list[int] = []

    def batches() -> Iterator[tuple[Any, Any]]:
        for i, n in enumerate((4, 4, 2)):
            alive.append(i)
            yield X[:n], W * 10.0**i

    policy = pp.numerics.calibrate(two_products, "AutoMixed", batches())
    assert alive == [0, 1, 2]
    assert policy.rules


def test_runs_merge():
    def f(x: Any, w: Any) -> Any:
        y = x @ w
        return y, w @ w

    large, ones = jnp.full((4, 4), 7e4), jnp.ones((4, 4))
    one = pp.numerics.calibrate(f, "AutoMixed", [(large, ones)])
    assert len(one.rules) == 1
    assert pp.numerics.calibrate(f, one, [(ones, ones)]) == one
    other = pp.numerics.calibrate(f, "AutoMixed", [(ones, large)])
    both = one.with_rules(*other.rules)
    assert len(set(both.rules)) == 2
    assert pp.numerics.calibrate(f, one, [(ones, large)]).rules[-1:] == one.rules


def test_values_that_are_not_finite_leave_the_range_and_are_reported():
    bad = X.copy()
    bad[0, 0] = np.nan
    assert pp.numerics.calibrate(two_products, "AutoMixed", [(bad / 100, W / 100)]) == pp.AutoMixed

    def f(x: Any, w: Any) -> Any:
        return jnp.log(x - 100.0).sum() + (x @ w).sum()

    with pytest.warns(
        pp.PrecisionWarning, match=r"appear at 1 line, first by log  \S*test_calibrate\.py"
    ):
        policy = pp.numerics.calibrate(f, "AutoMixed", [FINE])
    assert not policy.rules


def test_what_no_batch_reaches_is_reported():
    def f(x: Any, w: Any) -> Any:
        return lax.cond(x[0, 0] > 1e6, lambda: x @ w, lambda: x * 2.0)

    with pytest.warns(pp.PrecisionWarning, match=r"no batch reached 1 equation .*dot_general at"):
        assert not pp.numerics.calibrate(f, "AutoMixed", [(jnp.ones((4, 4)),) * 2]).rules


def test_what_only_moves_values_is_recorded_where_it_is_low():
    def f(x: Any, z: Any) -> Any:
        y = jnp.concatenate([x, 2.0 * x])
        return jnp.pad(y[1:].T, 1).reshape(-1), jnp.tanh(z)

    large = X / X.max() * 1e5
    assert not pp.numerics.calibrate(f, "AlwaysF16", [(X, X)]).rules
    policy = pp.numerics.calibrate(f, "AlwaysF16", [(large, X)])
    evidence = {rule.primitive: rule.evidence for rule in policy.rules}
    moves = {"concatenate", "slice", "transpose", "pad", "reshape"}
    assert evidence.keys() == moves | {"mul"}
    assert evidence["pad"] == "operands reach 2e+05, and f16 ends at 6.55e+04"
    assert np.isfinite(pp.auto_mixed(f, policy=policy)(large, X)[0]).all()
    (rule,) = pp.numerics.calibrate(lambda x: x.T, "AlwaysF16", [(jnp.full((2, 3), 1e-9),)]).rules
    assert rule.evidence == "operands come down to 1e-09, and f16 to 5.96e-08"


def test_what_is_moved_and_stored_low_is_recorded():
    def loss(x: Any, w: Any) -> Any:
        h = (x @ w).reshape(4, 4, 32).transpose(1, 0, 2)
        y = h @ w
        return jnp.einsum("abc,abd->cd", h, h).sum() + y.sum()

    grad = jax.grad(loss, (0, 1))
    plan = pp.inspect(grad, "AutoMixed")(X, np.ones((32, 32), np.float32)).plan
    assert any(d.stores_low and d.kind is pp.types.OpKind.DATA_MOVEMENT for d in plan.walk())
    assert not pp.numerics.calibrate(
        grad, "AutoMixed", [(X / 100, np.ones((32, 32), np.float32))]
    ).rules
    policy = pp.numerics.calibrate(grad, "AutoMixed", [(X * 1e5, np.ones((32, 32), np.float32))])
    assert "transpose" in {rule.primitive for rule in policy.rules}


def test_values_of_other_shards_are_not_born_where_they_arrive():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))

    def f(x: Any) -> Any:
        return lax.ppermute(x, "i", [(0, 1), (1, 0)]) * 2.0

    shared = jax.shard_map(f, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i"))
    assert not pp.numerics.calibrate(
        shared, "AlwaysF16", [(jnp.asarray([np.inf, 1.0, 2.0, 3.0]),)]
    ).rules


@pytest.mark.parametrize("low", ["f16", "bf16", "f32"])
def test_products_in_float64_that_a_policy_retypes(low: str):
    def f(x: Any, w: Any) -> Any:
        return x @ w

    with jax.enable_x64(True):
        policy = pp.Custom({"compute": low}).with_retypes("f64")
        one = jnp.ones((4, 4))
        assert pp.numerics.calibrate(f, policy, [(one, one)]) == policy

        def evidence(x: Any, w: Any, safety: float = 1.0) -> list[str]:
            found = pp.numerics.calibrate(f, policy, [(x, w)], safety=safety)
            got, want = pp.auto_mixed(f, policy=found)(x, w), x @ w
            if found.rules:
                np.testing.assert_allclose(got, want, rtol=1e-12)
                assert {str(rule.precision) for rule in found.rules} == {"f64"}
            return [rule.evidence for rule in found.rules]

        (text,) = evidence(one * 1e200, one)
        assert text.startswith("operands reach 3.4e+38 or more, and ")
        (text,) = evidence(one * 1e-200, one)
        assert "no element of an operand is more than" in text
        if low == "bf16":
            # its sums are in float32
            (text,) = evidence(one * 1e30, one * 1e30)
            assert text == "results reach 3.4e+38 or more, and f32 ends at 3.4e+38"
            assert evidence(one * 1e19, one * 1e19, safety=2.0)
            (text,) = evidence(one * 1e-30, one * 1e-30)
            assert text == "results come down to 1.4e-45 or less, and f32 to 1.4e-45"
        if low == "f32":
            # its sums are in float64
            assert not evidence(one * 1e30, one * 1e30)


def test_elementwise_equations_in_float64_that_a_policy_retypes():
    with jax.enable_x64(True):
        policy = pp.Custom({"elementwise": "f32"}).with_retypes("f64")
        x = jnp.asarray([1e30, 1.0])
        found = pp.numerics.calibrate(lambda x: x * x, policy, [(x,)], safety=1)
        assert [r.evidence for r in found.rules] == [
            "results reach 3.4e+38 or more, and f32 ends at 3.4e+38"
        ]
        x = jnp.asarray([1e-30, 1.0])
        assert pp.numerics.calibrate(lambda x: x * x, policy, [(x,)], safety=1).rules


def test_numbers_are_traced_and_what_is_static_is_planned_for_itself():
    seen: list[Any] = []

    def f(x: Any, scale: Any, kind: str) -> Any:
        seen.append((scale, kind))
        assert jax.typeof(scale).weak_type
        return (x.astype(jnp.bfloat16) * scale) @ x.astype(jnp.bfloat16) if kind == "own" else x @ x

    x = jnp.full((4, 4), 300.0)
    batches = [(x, float(n), "own") for n in range(1, 6)]
    assert not pp.numerics.calibrate(f, "AlwaysF32", batches).rules
    assert len(seen) == 1
    policy = pp.numerics.calibrate(f, "AutoMixed", [*batches, (x * 1e3, 1.0, "other")])
    assert [kind for _, kind in seen] == ["own", "own", "other"]
    assert [rule.primitive for rule in policy.rules] == ["dot_general"]


def test_declared_static_arguments():
    def f(x: Any, n: int) -> Any:
        for _ in range(n):
            x = x @ x
        return x

    mixed = pp.auto_mixed(f, static_argnums=1)
    x = jnp.full((4, 4), 100.0)
    assert not pp.numerics.calibrate(mixed, "AutoMixed", [(x, 1)]).rules
    (rule,) = pp.numerics.calibrate(mixed, "AutoMixed", [(x, 1), (x, 2)]).rules
    assert rule.evidence.startswith("operands reach 4e+04")


def test_a_pass_that_is_switched_off_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    want = pp.numerics.calibrate(two_products, "AutoMixed", [(X * 10, W)])
    assert want.rules
    with pp.use_policy(None):
        assert pp.numerics.calibrate(two_products, "AutoMixed", [(X * 10, W)]) == want
    monkeypatch.setattr("precpass.jit.region._SWITCHED_OFF", True)
    assert pp.numerics.calibrate(two_products, "AutoMixed", [(X * 10, W)]) == want


@pytest.mark.parametrize("safety", [2, np.float16(2)], ids=repr)
def test_any_real_number_is_a_safety(safety: Any):
    policy = pp.numerics.calibrate(two_products, "AutoMixed", [(X * 10, W)], safety=safety)
    assert policy == pp.numerics.calibrate(two_products, "AutoMixed", [(X * 10, W)], safety=2.0)


@pytest.mark.parametrize("leaf", [{1, 2}, bytearray(b"a")], ids=["set", "bytearray"])
def test_a_leaf_without_a_hash_is_named(leaf: Any):
    @dataclasses.dataclass
    class Options:
        kinds: Any

    jax.tree_util.register_dataclass(Options, ["kinds"], [])

    def f(x: Any, options: Any) -> Any:
        return x.T @ x

    fine = W, {"own": Options("a")}
    match = rf"f was given options\['own'\].kinds = .* of .*{type(leaf).__name__}.*Pass an array"
    with pytest.raises(TypeError, match=match) as found:
        pp.numerics.calibrate(f, "AutoMixed", [fine, (W, {"own": Options(leaf)})])
    assert "in batch 1 of calibrate" in found.value.__notes__


def test_in_loops_and_gradients():
    def loss(ws: Any, x: Any) -> Any:
        def body(x: Any, ws: Any) -> Any:
            h = jnp.tanh(x @ ws[0]) * 1e5
            return jnp.tanh(h * 1e-5 @ ws[1]) * 1e5, None

        return lax.scan(jax.checkpoint(body), x, ws)[0].mean() * 0.01

    w, x = normal(0, 3, 16, 16), normal(1, 4, 16)
    grad, ws = jax.grad(loss), (w * 1e-5, w)
    policy = pp.numerics.calibrate(grad, "AutoMixed", [(ws, x)])
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
        ([X], 2.0, TypeError, r"batch 0 is an array, and is to be a tuple .*\(batch,\)"),
        ([FINE], 0.5, ValueError, "safety=0.5"),
        ([FINE], "2", ValueError, "safety='2'"),
        ([FINE], True, ValueError, "safety=True"),
        ([FINE], math.inf, ValueError, "safety=inf"),
        ([FINE], np.float32(np.nan), ValueError, "safety=.*nan"),
    ],
    ids=["none", "array", "small", "text", "boolean", "infinite", "nan"],
)
def test_bad_input(batches: Any, safety: Any, error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        pp.numerics.calibrate(two_products, "AutoMixed", batches, safety=safety)


# ---------------------------------------------------------------- scales of 8 bits


def perceptron(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jax.nn.relu(x @ w)
    return x


WEIGHTS, DATA = [normal(i, 256, 256) / 16 for i in range(3)], normal(9, 256, 256)


@pytest.mark.parametrize("policy", ["AutoMixedF8", "AutoMixedInt8"])
def test_products_in_8_bits_get_the_magnitudes_of_their_operands(policy: str):
    batches = [(WEIGHTS, DATA), (WEIGHTS, 2 * DATA), (WEIGHTS, DATA / 2)]
    found = pp.numerics.calibrate(perceptron, policy, batches, safety=1.5)
    (rule,) = (rule for rule in found.rules if rule.largest)
    activations = [perceptron(WEIGHTS[:i], 2 * DATA) for i in range(3)]
    want = [max(np.abs(x).max() for x in side) for side in (activations, WEIGHTS)]
    np.testing.assert_allclose(rule.largest, np.multiply(1.5, want), rtol=2e-2)
    assert rule.evidence == f"operands reach {want[0]:.3g} and {want[1]:.3g}"
    # It is as weak as the rule by size that asked for 8 bits.
    assert rule.min_flops == 2 * 256**3
    small = pp.quant.quantized(perceptron, found)(WEIGHTS, DATA)
    plan = pp.inspect(perceptron, found)(small, DATA).plan
    forms = [d.product for d in plan.walk() if d.product.scaled]
    assert [form.largest for form in forms] == [(rule.largest[0], None)] + [
        (rule.largest[0], None)
    ] * 2


def test_the_products_of_a_derivative_get_no_scales():
    def loss(ws: Any, x: Any) -> Any:
        return jnp.square(perceptron(ws, x)).sum()

    found = pp.numerics.calibrate(jax.grad(loss), "AutoMixedF8", [(WEIGHTS, DATA)])
    assert not any(rule.largest for rule in found.rules)


def test_more_batches_join_the_magnitudes_of_all():
    large = pp.numerics.calibrate(perceptron, "AutoMixedF8", [(WEIGHTS, 100 * DATA)])
    small = pp.numerics.calibrate(perceptron, "AutoMixedF8", [(WEIGHTS, DATA)])
    joined = pp.numerics.calibrate(perceptron, large, [(WEIGHTS, DATA)])
    assert [rule.largest for rule in joined.rules] == [rule.largest for rule in large.rules]
    joined = pp.numerics.calibrate(perceptron, small, [(WEIGHTS, 100 * DATA)])
    assert [rule.largest for rule in joined.rules] == [rule.largest for rule in large.rules]


def test_a_batch_in_which_products_are_small_leaves_the_scales_of_others():
    batches = [(WEIGHTS, DATA), (WEIGHTS, DATA[:16])]
    found = pp.numerics.calibrate(perceptron, "AutoMixedF8", batches)
    assert found.rules[0].min_flops == 2 * 256**3


def test_a_product_that_is_ordered_in_8_bits_stays_ordered():
    ordered = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="dot_general", precision="f8"))
    small = [w[:32, :32] for w in WEIGHTS], DATA[:32, :32]
    found = pp.numerics.calibrate(perceptron, ordered, [small])
    (rule, _) = found.rules
    assert rule.largest is not None
    assert rule.min_flops is None
    with warnings.catch_warnings(action="error"):  # the user's own rule has no equation left
        pp.auto_mixed(perceptron, found)(*small)


def test_an_operand_of_zeros_gets_no_scale():
    zeros = [np.zeros_like(w) for w in WEIGHTS]
    assert (
        pp.numerics.calibrate(perceptron, "AutoMixedF8", [(zeros, DATA)]).rules
        == pp.AutoMixedF8.rules
    )


def test_a_saved_plan_keeps_the_scales_of_its_policy(tmp_path: Any):
    found = pp.numerics.calibrate(perceptron, "AutoMixedF8", [(WEIGHTS, DATA)])
    plan = pp.inspect(perceptron, found)(WEIGHTS, DATA).plan
    plan.save(tmp_path / "plan.json")
    locked = found.with_lock(type(plan).load(tmp_path / "plan.json").lock)
    again = pp.inspect(perceptron, locked)(WEIGHTS, DATA).plan
    for one in (plan, again):
        known = {d.product.largest[0] for d in one.walk() if d.product.scaled}
        assert known == {None, found.rules[0].largest[0]}  # the first layer reads an argument
