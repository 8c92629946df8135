"""Products that do not pay stay float32: by the table, or by times that a probe takes."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from precpass.analysis.operand_origin import OperandOrigin
from precpass.autotune import cache
from precpass.devices import detect
from precpass.devices.devices import device_named
from precpass.plan import reasons
from precpass.planner.planner import make_plan
from precpass.planner.profit import Assumed, Product, ProductTimes
from precpass.types import Action
from tests.support.profitability import (
    ASSUMED,
    H200,
    MEASURED,
    PARAMS,
    Clock,
    actions,
    mlp,
    products,
    restarted,
    weights,
)
from tests.support.values import f32

# ---------------------------------------------------------------- measured


def test_a_perceptron_is_lowered_where_it_pays(clock: Clock):
    with pytest.warns(pp.PrecisionWarning, match="lowered nothing in mlp: does not pay here"):
        one = pp.inspect(mlp, MEASURED)(PARAMS, f32(1, 8))
    assert [d.action for d in products(one)] == [Action.KEEP] * 3
    assert "bf16" not in str(one.after)
    many = pp.inspect(mlp, MEASURED)(PARAMS, f32(64, 8))
    assert [d.action for d in products(many)] == [Action.LOWER] * 3


def test_the_reason_has_both_times_and_the_device(clock: Clock):
    clock.ratio = lambda product: 5.2
    with pytest.warns(pp.PrecisionWarning):
        (first, *_) = products(pp.inspect(mlp, MEASURED)(PARAMS, f32(1, 8)))
    device = detect.device_for().kind
    said = f"does not pay here: 52 us in bf16, 10 us in f32 (measured on {device})"
    assert str(first.reason) == said
    assert reasons.DOES_NOT_PAY.gave(first.reason)
    assert first.decided_by is reasons.DecidedBy.COST
    assert "Rule" in first.reason.remedy() and "'always'" in first.reason.remedy()


@pytest.mark.parametrize(
    "ratio, action", [(0.96, Action.LOWER), (0.98, Action.KEEP), (1.0, Action.KEEP)]
)
def test_a_product_must_be_clearly_faster(clock: Clock, ratio: float, action: Action):
    """In company of one that pays well: little is left alone anyway."""
    clock.seconds = 1e-3
    clock.ratio = lambda product: 0.2 if product.avals[1][1] == (16, 16) else ratio
    assert actions(mlp, MEASURED, PARAMS, f32(64, 8)) == [action, Action.LOWER, action]


def test_each_distinct_product_is_timed_once(clock: Clock):
    params = weights(8, 8, 8, 8, 8)
    actions(mlp, MEASURED, params, f32(64, 8))
    # the first one's operand is given, those of the others are made
    assert [p.origins[0] for p in clock.asked] == [OperandOrigin.IN_MEMORY, OperandOrigin.FUSED]
    actions(mlp, MEASURED, params, f32(64, 8))
    pp.auto_mixed(mlp, profitability="measured")(params, jnp.ones((64, 8)))
    restarted()
    actions(mlp, MEASURED, params, f32(64, 8))
    assert len(clock.asked) == 2
    actions(mlp, MEASURED, params, f32(32, 8))
    actions(mlp, pp.AutoMixed.with_profitability("measured"), params, f32(32, 8))
    assert len(clock.asked) == 6


def test_a_product_is_timed_on_the_device_of_the_arguments_or_the_context(clock: Clock):
    _, second, third, *_ = jax.devices()
    there = jax.device_put((PARAMS, jnp.ones((64, 8))), second)
    actions(mlp, MEASURED, *there)
    with jax.default_device(third):
        pp.auto_mixed(mlp, policy=MEASURED)(PARAMS, jnp.ones((32, 8)))
    assert clock.devices == [second] * 3 + [third] * 3


def test_one_file_gives_one_plan(clock: Clock):
    args = PARAMS, f32(64, 8)
    clock.ratio = lambda product: 0.5 if OperandOrigin.FUSED in product.origins else 2.0
    plan = pp.inspect(mlp, MEASURED)(*args).plan
    restarted()
    clock.ratio = lambda product: 1.0
    assert pp.inspect(mlp, MEASURED)(*args).plan == plan
    assert plan.count()[pp.types.OpKind.COMPUTE, Action.LOWER] == 2


def test_products_are_told_apart_by_all_that_their_time_hangs_on():
    def text(
        fn, *shapes, low=pp.types.Precision.BF16, origins=(OperandOrigin.IN_MEMORY,) * 2, behind=()
    ):
        jaxpr = jax.make_jaxpr(fn)(*[f32(*shape) for shape in shapes])
        (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
        return Product(eqn, low, origins, behind).text

    square = (8, 8), (8, 8)
    matmul = jnp.matmul
    batched = (2, 8, 8), (2, 8, 8)
    found = [
        text(matmul, *square),
        text(matmul, (8, 8), (8, 4)),
        text(matmul, *batched),
        text(lambda x, w: lax.dot_general(x, w, (((0,), (0,)), ((), ()))), *square),
        text(lambda x, w: lax.dot_general(x, w, (((1,), (1,)), ((), ()))), *square),
        text(matmul, *square, low=pp.types.Precision.F16),
        text(matmul, *square, origins=(OperandOrigin.FUSED, OperandOrigin.IN_MEMORY)),
        text(matmul, *square, origins=(OperandOrigin.IN_MEMORY, OperandOrigin.FUSED)),
        text(matmul, *square, behind=(1, 0)),
    ]
    assert len(set(found)) == len(found)
    assert all(" at 0x" not in name for name in found)
    assert text(matmul, *square) == found[0]


def test_a_transpose_that_alone_reads_a_product_belongs_to_it(clock: Clock):
    actions(lambda x, w: ((x @ w).T + 1, (w @ x) - 1), MEASURED, f32(8, 8), f32(8, 8))
    assert sorted(p.behind for p in clock.asked) == [(), (1, 0)]


ORIGINS: dict[str, tuple[Callable[..., Any], tuple[OperandOrigin, OperandOrigin]]] = {
    "arguments": (lambda x, w: x @ w, (OperandOrigin.IN_MEMORY, OperandOrigin.IN_MEMORY)),
    "elementwise": (lambda x, w: jnp.tanh(x) @ w, (OperandOrigin.FUSED, OperandOrigin.IN_MEMORY)),
    "movement": (
        lambda x, w: (x + 1).reshape(x.shape).T @ w.T,
        (OperandOrigin.FUSED, OperandOrigin.IN_MEMORY),
    ),
    "in a jit": (
        lambda x, w: jax.nn.relu(x) @ jax.jit(jnp.sin)(w),
        (OperandOrigin.FUSED, OperandOrigin.FUSED),
    ),
    "into a jit": (
        lambda x, w: jax.jit(jnp.matmul)(x + 1, w),
        (OperandOrigin.FUSED, OperandOrigin.IN_MEMORY),
    ),
    "a sum": (lambda x, w: x.sum(0)[None] @ w, (OperandOrigin.IN_MEMORY, OperandOrigin.IN_MEMORY)),
    "a loop's constant": (
        lambda x, w: lax.scan(lambda c, _: (jnp.arctan(c @ w), None), x, length=3)[0],
        (OperandOrigin.IN_MEMORY, OperandOrigin.LOOP_INVARIANT),
    ),
    "a while loop's constant": (
        lambda x, w: lax.while_loop(lambda c: c[0, 0] < 3, lambda c: (c + 1) @ w, x),
        (OperandOrigin.FUSED, OperandOrigin.LOOP_INVARIANT),
    ),
    "a loop's slices": (
        lambda x, w: lax.scan(lambda c, row: (c + (row[None] @ w)[0], None), x[0], x)[0],
        (OperandOrigin.IN_MEMORY, OperandOrigin.LOOP_INVARIANT),
    ),
    "remat": (
        lambda x, w: jax.checkpoint(lambda x: jnp.sin(x) @ w)(x),
        (OperandOrigin.FUSED, OperandOrigin.IN_MEMORY),
    ),
}


@pytest.mark.parametrize("name", ORIGINS)
def test_how_operands_come_about(clock: Clock, name: str):
    fn, origins = ORIGINS[name]
    actions(fn, MEASURED, f32(8, 8), f32(8, 8))
    assert [p.origins for p in clock.asked] == [origins]


# that loop's state may be held low: then its cast is no part of the product any more
@pytest.mark.parametrize("ratio, action", [(1.05, Action.KEEP), (0.9, Action.LOWER)])
@pytest.mark.parametrize("size, seconds", [(8, 5e-5), (256, 1e-3)])
@pytest.mark.parametrize("name", [name for name in ORIGINS if name != "a loop's constant"])
def test_a_product_that_shares_nothing_is_judged_by_its_own_times(
    clock: Clock, name: str, size: int, seconds: float, ratio: float, action: Action
):
    """What its operands' casts take is a part of them, wherever these are cast."""
    clock.ratio, clock.seconds = (lambda product: ratio), seconds
    fn, _ = ORIGINS[name]
    assert actions(fn, MEASURED, f32(size, size), f32(size, size)) == [action]


@pytest.mark.parametrize("ratio", [1.02, 1.3])
@pytest.mark.parametrize("seconds", [1e-6, 1e-5, 3e-5])
def test_a_small_state_is_cast_in_the_time_of_its_product(
    clock: Clock, seconds: float, ratio: float
):
    """Where a loop holds it low its cast is gone, but a small one has no launch of its own."""
    clock.ratio, clock.seconds = (lambda product: ratio), seconds
    fn, _ = ORIGINS["a loop's constant"]
    assert actions(fn, MEASURED, f32(2, 16), f32(16, 16)) == [Action.KEEP]


def test_what_a_clock_cannot_tell_stays_wide(clock: Clock):
    clock.ratio = lambda product: 0.8
    for seconds, action in ((2e-6, Action.KEEP), (1e-5, Action.LOWER)):
        clock.seconds = seconds
        restarted()
        for file in cache.cache_folder().glob("*"):
            file.unlink()
        assert actions(jnp.matmul, MEASURED, f32(8, 8), f32(8, 8)) == [action]


def test_of_products_that_share_an_operand_all_may_pay_where_none_does_alone(clock: Clock):
    """What the second one takes is without the cast that the first one pays for."""
    clock.ratio = lambda product: 1.02 if OperandOrigin.IN_MEMORY in product.origins else 0.5
    x, *ws = (f32(2048, 2048) for _ in range(4))
    assert actions(lambda x, w: x @ (w + 1), MEASURED, x, ws[0]) == [Action.KEEP]
    found = actions(lambda x, *ws: [x @ (w + 1) for w in ws], MEASURED, x, *ws)
    assert found == [Action.LOWER] * 3


@pytest.mark.parametrize("part, action", [(0.002, Action.KEEP), (0.4, Action.LOWER)])
def test_a_program_is_left_alone_for_next_to_nothing(clock: Clock, part: float, action: Action):
    """What lowering one product changes around it may cost more than that product gains."""

    def product_times(product: Product, device: Any) -> ProductTimes:
        is_small = product.avals[1][1] == (16, 4)
        wide = 0.1 * (part if is_small else 1.0)
        return ProductTimes(wide, wide * (0.5 if is_small else 1.5), "measured")

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        patch.setattr("precpass.autotune.timing.timed", product_times)
        found = products(pp.inspect(mlp, MEASURED)(PARAMS, f32(64, 8)))
    assert [d.action for d in found] == [Action.KEEP, Action.KEEP, action]
    assert reasons.DOES_NOT_PAY.gave(found[0].reason)
    if action is Action.KEEP:
        said = "pays here, but all that pays would save 93 us of the products' 194 ms"
        assert str(found[2].reason) == said
        assert reasons.GAINS_LITTLE.gave(found[2].reason)
        assert found[2].reason.remedy() == reasons.GAINS_LITTLE.remedy


# ---------------------------------------------------------------- assumed


def planned(fn: Callable[..., Any], device: Any, *args: Any) -> list[Any]:
    """The decisions for the products of a program on a device that is not here."""
    plan = make_plan(jax.make_jaxpr(fn)(*args), ASSUMED, profit_model=Assumed(device))
    return [d for d in plan.walk() if d.kind is pp.types.OpKind.COMPUTE]


def test_the_table_lowers_what_computes_long_and_not_what_is_only_cast():
    large = f32(4096, 4096), f32(4096, 4096)
    (decision,) = planned(jnp.matmul, H200, *large)
    assert decision.action is Action.LOWER
    (decision,) = planned(jnp.matmul, H200, f32(1, 4096), f32(4096, 4096))
    assert decision.action is Action.KEEP
    assert str(decision.reason).startswith("does not pay on NVIDIA H200: ")
    assert str(decision.reason).endswith("in f32 (assumed)")
    # one pass in bfloat16 either way, and then the casts
    (decision,) = planned(jnp.matmul, device_named("tpu", "TPU v5 lite"), *large)
    assert decision.action is Action.KEEP
    plain = device_named("cpu", "unknown CPU, 4 cores")
    (decision,) = planned(lambda x, w: x @ w, plain, *large)
    assert decision.action is Action.KEEP


def test_casts_that_cost_nothing_are_not_counted():
    x, w = f32(64, 4096), f32(4096, 4096)
    (given,) = planned(lambda x, w: jnp.tanh(x) @ w, H200, x, w)
    (made,) = planned(lambda x, w: jnp.tanh(x) @ (w * 2), H200, x, w)
    assert (given.action, made.action) == (Action.KEEP, Action.LOWER)


# ---------------------------------------------------------------- precedence


def test_rules_regions_and_saved_plans_come_before_it(clock: Clock, tmp_path: Path):
    clock.ratio = lambda product: 9.0
    x, w = f32(64, 8), f32(8, 8)
    rule = MEASURED.with_rules(pp.Rule(primitive="dot_general", precision="bf16"))
    assert actions(jnp.matmul, rule, x, w) == [Action.LOWER]
    assert actions(pp.keep("bf16")(jnp.matmul), MEASURED, x, w) == [Action.LOWER]
    pp.inspect(jnp.matmul, "AutoMixedBf16")(x, w).plan.save(tmp_path / "plan.json")
    saved = pp.Plan.load(tmp_path / "plan.json").with_profitability("measured")
    assert actions(jnp.matmul, saved, x, w) == [Action.LOWER]
    assert not clock.asked
    assert actions(jnp.matmul, MEASURED, x, w) == [Action.KEEP]


def test_it_comes_before_every_preset_and_behind_the_guards(clock: Clock):
    clock.ratio = lambda product: 9.0
    x, w = f32(64, 8), f32(8, 8)
    for preset in (pp.AlwaysBf16, pp.AutoMixed, pp.Custom({"compute": "bf16"})):
        assert actions(jnp.matmul, preset.with_profitability("measured"), x, w) == [Action.KEEP]
    asked = len(clock.asked)
    masked = lambda x, w: jnp.where(x > 0, x, jnp.finfo(jnp.float32).min) @ w  # noqa: E731
    with pytest.warns(pp.PrecisionWarning, match="reaches"):
        pp.inspect(masked, MEASURED)(x, w)
    assert len(clock.asked) == asked


def test_what_has_no_low_form_is_not_asked_about(clock: Clock):
    x, w = f32(64, 8), f32(8, 8)
    actions(lambda x, w: jnp.einsum("i,j->ij", x[0], w[0]), MEASURED, x, w)
    actions(lambda x, w: lax.dot(x, w, precision="highest"), MEASURED, x, w)
    actions(lambda x, w: x.astype("bfloat16") @ w.astype("bfloat16"), MEASURED, x, w)
    actions(jnp.matmul, pp.AlwaysF32.with_profitability("measured"), x, w)
    assert not clock.asked
    narrowed = pp.Custom({"compute": "f32"}).with_retypes("f64").with_profitability("measured")
    with jax.enable_x64(True):
        wide = [jax.ShapeDtypeStruct((8, 8), "float64")] * 2
        assert actions(jnp.matmul, narrowed, *wide) == [Action.LOWER]
    assert not clock.asked


def test_always_asks_nobody(clock: Clock):
    plan = pp.inspect(mlp, "AutoMixedBf16")(PARAMS, f32(1, 8)).plan
    assert plan.count()[pp.types.OpKind.COMPUTE, Action.LOWER] == 3
    assert not clock.asked and plan.costs == ""


def test_custom_rules_are_asked_about_too(clock: Clock):
    @jax.custom_vjp
    def f(x, w):
        return x @ w

    f.defvjp(lambda x, w: (f(x, w), (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    mixed = pp.auto_mixed(lambda x, w: jnp.arctan(f(x, w)).sum(), policy=MEASURED)
    clock.ratio = lambda product: 0.5 if product.avals[0][1] == (64, 8) else 2.0
    text = str(jax.make_jaxpr(jax.grad(mixed, (0, 1)))(jnp.ones((64, 8)), jnp.ones((8, 8))))
    assert {p.avals[0][1] for p in clock.asked} == {(64, 8), (8, 64)}
    assert "bf16[64,8]" in text and "bf16[8,64]" not in text
