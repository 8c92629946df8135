"""Products of 8 bits that do not pay have 16, or stay float32."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from precpass.analysis.operand_origin import OperandOrigin
from precpass.autotune import compiled
from precpass.autotune.timing import timed
from precpass.planner.planner import make_plan
from precpass.planner.profit import Product
from precpass.policy.policy import PrecisionPolicy
from precpass.types import OpKind, Precision
from tests.support.profitability import Clock
from tests.support.values import f32, normal_array

D = 256
LAYERS = 5
WS = [f32(D, D)] * LAYERS
X = f32(D, D)
SMALL_WS = [pp.quant.QuantizedArray(jax.ShapeDtypeStruct((D, D), jnp.int8), f32(1, D))] * LAYERS


def model(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jax.nn.relu(x @ w)
    return x


def gradient(ws: Any, x: Any) -> Any:
    return jax.grad(lambda ws: jnp.square(model(ws, x)).mean())(ws)


def formats(policy: PrecisionPolicy, fn: Any, *args: Any, **options: Any) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        plan = pp.inspect(fn, policy, **options)(*args).plan
    return [d.product.scaled or d.compute for d in plan.walk() if d.kind is OpKind.COMPUTE]


def costing(times: dict[Precision, float], rounding: float = 0.0) -> Callable[[Product], float]:
    """The time of a product to that in float32: by its format, more for what it has to round."""
    has_eight_bits = OperandOrigin.IN_INT8, OperandOrigin.IN_FLOAT8

    def ratio(product: Product) -> float:
        is_scaled = product.low.is_scaled
        rounded = sum(origin not in has_eight_bits for origin in product.origins)
        return times[product.low] + is_scaled * rounding * rounded

    return ratio


# ---------------------------------------------------------------- measured


@pytest.mark.parametrize("precision, name", [("int8", "AutoMixedInt8"), ("f8", "AutoMixedF8")])
@pytest.mark.parametrize(
    "eight, sixteen, chosen",
    [(0.3, 0.5, None), (0.49, 0.5, Precision.BF16), (0.7, 0.5, Precision.BF16)],
)
def test_the_fastest_format_is_chosen(
    clock: Clock, precision: str, name: str, eight: float, sixteen: float, chosen: Any
):
    scaled = Precision.parse(precision)
    clock.seconds, clock.ratio = 1e-3, costing({scaled: eight, Precision.BF16: sixteen})
    policy = getattr(pp, name).with_profitability("measured")
    middle = chosen or scaled
    expected = [Precision.BF16, *[middle] * (LAYERS - 2), Precision.BF16]
    assert formats(policy, model, WS, X) == expected


def test_a_product_that_no_format_makes_faster_stays_wide(clock: Clock):
    clock.seconds, clock.ratio = 1e-3, costing({Precision.INT8: 1.4, Precision.BF16: 1.2})
    policy = pp.AutoMixedInt8.with_profitability("measured")
    assert formats(policy, model, WS, X) == [Precision.F32] * LAYERS


def test_eight_bits_may_pay_where_sixteen_do_not(clock: Clock):
    clock.seconds, clock.ratio = 1e-3, costing({Precision.INT8: 0.4, Precision.BF16: 1.2})
    policy = pp.AutoMixedInt8.with_profitability("measured")
    middle = [Precision.INT8] * (LAYERS - 2)
    assert formats(policy, model, WS, X) == [Precision.F32, *middle, Precision.F32]


def test_the_reason_has_both_times(clock: Clock):
    clock.seconds, clock.ratio = 1e-3, costing({Precision.INT8: 0.7, Precision.BF16: 0.5})
    policy = pp.AutoMixedInt8.with_profitability("measured")
    _, found, *_ = [d for d in pp.inspect(model, policy)(WS, X).plan.walk() if d.compute]
    assert str(found.reason) == (
        "AutoMixedInt8: compute in int8; in bf16 and not in int8: it takes 700 us, and 500 us in "
        "bf16 (measured)"
    )


def test_a_weight_that_has_eight_bits_before_the_call_is_asked_about_as_such(clock: Clock):
    """Rounding both operands takes too long, and one of them does not."""
    both = {Precision.INT8: 0.3, Precision.BF16: 0.5}
    clock.seconds, clock.ratio = 1e-3, costing(both, rounding=0.15)
    policy = pp.AutoMixedInt8.with_profitability("measured")
    assert Precision.INT8 not in formats(policy, model, WS, X)
    assert all(OperandOrigin.IN_INT8 not in product.origins for product in clock.asked)
    found = formats(policy, model, SMALL_WS, X)
    assert found[1:-1] == [Precision.INT8] * (LAYERS - 2)
    assert {p.origins[1] for p in clock.asked if p.low is Precision.INT8} == {
        OperandOrigin.IN_MEMORY,
        OperandOrigin.IN_INT8,
    }


def test_a_rule_is_not_judged(clock: Clock):
    clock.ratio = lambda product: 5.0
    rule = pp.Rule(primitive="dot_general", precision="int8")
    policy = pp.AutoMixedBf16.with_rules(rule).with_profitability("measured")
    assert formats(policy, model, WS, X) == [Precision.INT8] * LAYERS


def test_the_presets_of_sixteen_bits_choose_no_eight(clock: Clock):
    clock.ratio = costing({Precision.INT8: 0.1, Precision.F8E4M3: 0.1, Precision.BF16: 0.5})
    policy = pp.AutoMixedBf16.with_profitability("measured")
    assert formats(policy, model, WS, X) == [Precision.BF16] * LAYERS
    assert all(product.low is Precision.BF16 for product in clock.asked)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize(
    "low, right",
    [
        (Precision.INT8, OperandOrigin.IN_MEMORY),
        (Precision.INT8, OperandOrigin.IN_INT8),
        (Precision.F8E4M3, OperandOrigin.FUSED),
        (Precision.F8E4M3, OperandOrigin.IN_FLOAT8),
        (Precision.F8E5M2, OperandOrigin.IN_MEMORY),
        (Precision.BF16, OperandOrigin.IN_INT8),
        (Precision.BF16, OperandOrigin.IN_FLOAT8),
    ],
)
def test_what_is_timed_multiplies_in_the_format(
    monkeypatch: pytest.MonkeyPatch, low: Precision, right: OperandOrigin
):
    (eqn,) = jax.make_jaxpr(jnp.matmul)(f32(32, 64), f32(64, 48)).eqns
    seen: list[Any] = []

    def planned(jaxpr: Any, *args: Any, **options: Any) -> Any:
        plan = make_plan(jaxpr, *args, **options)
        (decision,) = [d for d in plan.walk() if d.kind is OpKind.COMPUTE]
        seen.append((decision.product.scaled or decision.compute, str(jaxpr)))
        return plan

    monkeypatch.setattr("precpass.autotune.timing.make_plan", planned)
    product = Product(eqn, low, (OperandOrigin.FUSED, right))
    found = timed(product, jax.devices()[0])
    assert found.by == "measured" and found.low > 0 and found.wide > 0
    ((multiplied, text),) = seen
    # In the forward direction float8's other format is that with more digits.
    assert multiplied is low
    is_given = right in (OperandOrigin.IN_INT8, OperandOrigin.IN_FLOAT8)
    assert ("precpass_dequantized" in text) == is_given


# ---------------------------------------------------------------- assumed


@pytest.mark.parametrize(
    "target, policy, size, is_scaled",
    [
        ("h100", pp.AutoMixedF8, 4096, True),
        ("h100", pp.AutoMixedInt8, 4096, True),
        ("h100", pp.AutoMixedF8, 256, False),  # rounding takes kernels of its own
        ("a100", pp.AutoMixedF8, 4096, False),
        ("a100", pp.AutoMixedInt8, 4096, True),
        ("tpu v5e", pp.AutoMixedF8, 4096, False),
        ("tpu v5e", pp.AutoMixedInt8, 4096, True),
    ],
)
def test_the_table_knows_which_devices_gain(
    target: str, policy: PrecisionPolicy, size: int, is_scaled: bool
):
    ws, x = [f32(size, size)] * LAYERS, f32(size, size)
    found = formats(policy.with_profitability("assumed"), model, ws, x, target=target)
    assert all((each is policy.scaled) == is_scaled for each in found[1:-1])
    assert policy.scaled not in (found[0], found[-1])


@pytest.mark.release
def test_products_share_the_rounding_of_what_they_read():
    """Its derivatives read each operand again, so a product bears half of the rounding."""

    policy = pp.AutoMixedF8.with_profitability("assumed")
    pairs: list[tuple[Any, Any]] = []
    for size in range(1024, 4096, 512):
        ws, x = [f32(size, size)] * LAYERS, f32(size, size)
        alone = formats(policy, model, ws, x, target="h100")[1]
        pairs.append((alone, formats(policy, gradient, ws, x, target="h100")[1]))
    assert (Precision.BF16, Precision.F8E4M3) in pairs
    assert (Precision.F8E4M3, Precision.BF16) not in pairs


def test_a_policy_that_orders_all_elementwise_work_judges_them_too():
    """Such a policy has no cut, and asks for each product alone."""
    kinds = dict.fromkeys(("elementwise", "data_movement"), "bf16")
    policy = pp.Custom({"compute": "f8", **kinds}).with_profitability("assumed")
    assert Precision.F8E4M3 not in formats(policy, model, WS, X, target="h100")
    large = [f32(4096, 4096)] * LAYERS
    assert Precision.F8E4M3 in formats(policy, model, large, large[0], target="h100")


def beside(others: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A product that does not pay alone, with others that read its left operand."""

    def fn(ws: Any, x: Any) -> Any:
        h = jnp.tanh(x @ ws["first"])
        out = jnp.tanh(h @ ws["own"]).sum() + others(ws, h)
        return jnp.tanh((out + h[:16, :16]) @ ws["last"])

    return fn


def with_scope(ws: Any, h: Any) -> Any:
    with jax.named_scope("rest"):
        return sum(jnp.tanh(h @ w).sum() for w in ws["large"])


def in_branches(ws: Any, h: Any) -> Any:
    branches = [lambda h, w=w: jnp.tanh(h @ w).sum() for w in ws["large"]]
    return lax.switch(jnp.int32(h[0, 0]), branches, h)


BESIDE = {
    "first": f32(2048, 2048),
    "own": f32(2048, 2048),
    "small": [f32(2048, 16)] * 8,
    "large": [f32(2048, 2048)] * 4,
    "last": f32(16, 16),
}


@pytest.mark.release(keep=3)
@pytest.mark.parametrize(
    "others, rules, is_scaled",
    [
        (lambda ws, h: 0.0, (), False),
        (with_scope, (), True),
        # These do not bear a share, so that the product would bear it all.
        (lambda ws, h: sum(jnp.tanh(h @ w).sum() for w in ws["small"]), (), False),
        (with_scope, (pp.Rule(scope="*rest*", precision="bf16"),), False),
        (in_branches, (), False),
    ],
    ids=["alone", "beside others", "beside small ones", "beside bf16", "beside branches"],
)
def test_only_products_that_round_an_operand_share_its_rounding(
    others: Any, rules: Any, is_scaled: bool
):
    policy = pp.AutoMixedF8.with_rules(*rules).with_profitability("assumed")
    found = formats(policy, beside(others), BESIDE, f32(4096, 2048), target="h100")
    assert (found[1] is Precision.F8E4M3) == is_scaled


def test_a_policy_without_a_cut_shares_the_rounding_too():
    def fn(ws: Any, x: Any) -> Any:
        h = jnp.tanh(x @ ws[0])
        return sum(jnp.tanh(h @ w) for w in ws[1:-1]) @ ws[-1]

    ws = [f32(4096, 4096), *[f32(4096, 1024)] * 6, f32(1024, 4096)]
    each = {"compute": "int8"}, {"compute": "int8", "elementwise": "f32"}
    plans = [
        formats(pp.Custom(kinds).with_profitability("assumed"), fn, ws, f32(16384, 4096), target=t)
        for kinds in each
        for t in ("tpu v5e",)
    ]
    assert plans[0][1:7] == plans[1][1:7] == [Precision.INT8] * 6


def test_a_saved_plan_has_no_eight_bits_that_do_not_pay(tmp_path: Any):
    """A product that stays in float32 is no scaled product any more."""

    def fn(ws: Any, x: Any) -> Any:
        h = jnp.tanh(x @ ws[0])
        return sum(jnp.tanh(h @ w) for w in ws[1:]) @ ws[0]

    policy = pp.AutoMixedInt8.with_profitability("assumed")
    args = [f32(2048, 2048)] * 4, f32(4096, 2048)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        plan = pp.inspect(fn, policy, target="tpu v5e")(*args).plan
    assert all(d.product.scaled is None for d in plan.walk() if d.action is pp.types.Action.KEEP)
    plan.save(tmp_path / "plan.json")
    products = re.findall(r'dot_general": "([^"]*)"', (tmp_path / "plan.json").read_text())
    assert products and all("int8" not in each for each in products)


@pytest.mark.release
def test_scales_of_a_program_whose_products_do_not_pay_freeze():
    policy = pp.AutoMixedInt8.with_profitability("assumed")
    scaled = pp.quant.delayed_scaling(lambda w, x: jnp.tanh(x @ w), policy)
    w, x = jnp.eye(D), jnp.ones((D, D))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        scales = scaled.calibrated([(w, x)])
        assert scales.places == () and scales.unseen() == scales.saturated() == []
        found = scaled.frozen(scales)(w, x)
    assert jnp.linalg.norm(found - jnp.tanh(x)) < 0.01 * D


# ---------------------------------------------------------------- compiled


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Callable[[float], list[str]]:
    """Gives programs with values of int8 a cost, and all others 1."""
    monkeypatch.setenv("PRECPASS_CACHE_DIR", str(tmp_path))

    def given(eight: float) -> list[str]:
        asked: list[str] = []

        def figures(jaxpr: Any, *_: Any) -> compiled.Figures:
            asked.append(str(jaxpr))
            return compiled.Figures(0.0, eight if "i8[" in asked[-1] else 1.0, 100.0)

        monkeypatch.setattr(compiled, "figures_of", figures)
        return asked

    return given


@pytest.mark.parametrize("eight, is_scaled", [(0.9, True), (0.98, False), (1.2, False)])
def test_a_form_of_eight_bits_is_taken_if_it_saves_enough(
    costs: Callable[[float], list[str]], eight: float, is_scaled: bool
):
    asked = costs(eight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        found = pp.inspect(model, pp.AutoMixedInt8.with_profitability("compiled"))(WS, X)
    assert sum("i8[" in text for text in asked) == 1
    assert ("i8[" in str(found.after)) == is_scaled
    assert "products of 8 bits" in found.plan.costs


def test_the_other_forms_have_no_eight_bits(costs: Callable[[float], list[str]]):
    asked = costs(0.1)
    with pytest.warns(pp.PrecisionWarning, match="lowered nothing"):
        found = pp.inspect(model, pp.AutoMixedBf16.with_profitability("compiled"))(WS, X)
    assert not any("i8[" in text for text in asked)
    assert "8 bits" not in found.plan.costs


def test_of_a_program_that_cannot_be_compiled_no_product_has_eight_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    def fails(*_: Any) -> Any:
        raise ValueError("no such kernel")

    monkeypatch.setenv("PRECPASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "figures_of", fails)
    policy = pp.AutoMixedInt8.with_profitability("compiled")
    with pytest.warns(pp.PrecisionWarning, match="lowered to 16 bits instead"):
        found = pp.inspect(model, policy)(WS, X)
    low = [d.product.scaled or d.compute for d in found.plan.walk() if d.kind is OpKind.COMPUTE]
    assert low == [Precision.BF16] * LAYERS


@pytest.mark.release
def test_compiled_for_a_cpu_the_program_is_near_and_its_weights_are_rounded_ahead_of_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    """`quantized` asks for no costs, because it takes away what makes 8 bits dear."""
    monkeypatch.setenv("PRECPASS_CACHE_DIR", str(tmp_path))
    policy = pp.AutoMixedInt8.with_profitability("compiled")
    ws, x = [normal_array(i, D, D) / 16 for i in range(LAYERS)], normal_array(9, D, D)
    small = pp.quant.quantized(model, policy)(ws, x)
    assert sum(isinstance(w, pp.quant.QuantizedArray) for w in small) == LAYERS - 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        found = pp.auto_mixed(model, policy)(small, x)
    exact = model(ws, x)
    assert 0 < jnp.linalg.norm(found - exact) < 0.05 * jnp.linalg.norm(exact)
