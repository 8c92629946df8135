"""Products that do not pay stay float32: by the table, or by times that a probe takes."""

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from unit_helpers import f32

import precpass as pp
from precpass import Action, probe, reasons, worth
from precpass import jaxpr as ir
from precpass.cli import main
from precpass.devices import device_named
from precpass.measure import Timing
from precpass.origins import Origin
from precpass.planner import make_plan
from precpass.profit import Assumed, Product, Verdict

# that of the tests refuses (`conftest`), and was not in force yet
REAL_ROUNDS = probe._rounds
MEASURED = pp.AutoMixedBf16.with_profitability("measured")
ASSUMED = pp.AutoMixedBf16.with_profitability("assumed")
H200 = device_named("gpu", "NVIDIA H200")


def mlp(params, x):
    for w, b in params:
        x = jax.nn.relu(x @ w + b[None])
    return x


def weights(*widths: int) -> list[Any]:
    rng = np.random.default_rng(0)
    pairs = itertools.pairwise(widths)
    return [(jnp.asarray(rng.random((m, n), np.float32)), jnp.zeros(n)) for m, n in pairs]


PARAMS = weights(8, 16, 16, 4)


class Clock:
    """Stands in for `probe.timed`: products of one row take twice as long low."""

    def __init__(self, ratio: Callable[[Product], float] | None = None) -> None:
        self.asked: list[Product] = []
        self.ratio = ratio or (lambda product: 2.0 if 1 in product.avals[0][1] else 0.5)

    def __call__(self, product: Product, device: Any) -> Verdict:
        self.asked.append(product)
        ratio = self.ratio(product)
        return Verdict(1e-5, 1e-5 * ratio, ratio, "measured")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    """A probe that asks no clock, and an empty folder of verdicts."""
    found = Clock()
    monkeypatch.setattr("precpass.probe.timed", found)
    monkeypatch.setenv("PRECPASS_CACHE_DIR", str(tmp_path / "verdicts"))
    return found


def restarted() -> None:
    """What a process knows is forgotten, as in a new one."""
    worth._measured.cache_clear()
    worth._verdicts.cache_clear()


def products(found: pp.Inspection) -> list[pp.Decision]:
    return [d for eqn, d, _ in found.decisions() if eqn.primitive.name == "dot_general"]


def actions(fn: Callable[..., Any], policy: Any, *args: Any) -> list[Action]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        return [d.action for d in products(pp.inspect(fn, policy)(*args))]


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
    device = worth.device_for().kind
    said = f"does not pay here: 52 us in bf16, 10 us in f32 (measured on {device})"
    assert first.reason == said
    assert reasons.DOES_NOT_PAY.gave(said)
    assert "Rule" in reasons.remedy(said) and "'always'" in reasons.remedy(said)


@pytest.mark.parametrize(
    "ratio, action", [(0.96, Action.LOWER), (0.98, Action.KEEP), (1.0, Action.KEEP)]
)
def test_a_product_must_be_clearly_faster(clock: Clock, ratio: float, action: Action):
    clock.ratio = lambda product: ratio
    assert set(actions(mlp, MEASURED, PARAMS, f32(64, 8))) == {action}


def test_each_distinct_product_is_timed_once(clock: Clock):
    params = weights(8, 8, 8, 8, 8)
    actions(mlp, MEASURED, params, f32(64, 8))
    # the first one's operand is given, those of the others are made
    assert [p.origins[0] for p in clock.asked] == [Origin.GIVEN, Origin.MADE]
    actions(mlp, MEASURED, params, f32(64, 8))
    pp.auto_mixed(mlp, profitability="measured")(params, jnp.ones((64, 8)))
    restarted()
    actions(mlp, MEASURED, params, f32(64, 8))
    assert len(clock.asked) == 2
    actions(mlp, MEASURED, params, f32(32, 8))
    actions(mlp, pp.AutoMixed.with_profitability("measured"), params, f32(32, 8))
    assert len(clock.asked) == 6


def test_one_file_gives_one_plan(clock: Clock):
    args = PARAMS, f32(64, 8)
    clock.ratio = lambda product: 0.5 if Origin.MADE in product.origins else 2.0
    plan = pp.inspect(mlp, MEASURED)(*args).plan
    restarted()
    clock.ratio = lambda product: 1.0
    assert pp.inspect(mlp, MEASURED)(*args).plan == plan
    assert plan.count()[pp.OpKind.COMPUTE, Action.LOWER] == 2


def test_products_are_told_apart_by_all_that_their_time_hangs_on():
    def text(fn, *shapes, low=pp.Precision.BF16, origins=(Origin.GIVEN,) * 2, behind=()):
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
        text(matmul, *square, low=pp.Precision.F16),
        text(matmul, *square, origins=(Origin.MADE, Origin.GIVEN)),
        text(matmul, *square, origins=(Origin.GIVEN, Origin.MADE)),
        text(matmul, *square, behind=(1, 0)),
    ]
    assert len(set(found)) == len(found)
    assert all(" at 0x" not in name for name in found)
    assert text(matmul, *square) == found[0]


def test_a_transpose_that_alone_reads_a_product_belongs_to_it(clock: Clock):
    actions(lambda x, w: ((x @ w).T + 1, (w @ x) - 1), MEASURED, f32(8, 8), f32(8, 8))
    assert sorted(p.behind for p in clock.asked) == [(), (1, 0)]


ORIGINS: dict[str, tuple[Callable[..., Any], tuple[Origin, Origin]]] = {
    "arguments": (lambda x, w: x @ w, (Origin.GIVEN, Origin.GIVEN)),
    "elementwise": (lambda x, w: jnp.tanh(x) @ w, (Origin.MADE, Origin.GIVEN)),
    "movement": (lambda x, w: (x + 1).reshape(8, 8).T @ w.T, (Origin.MADE, Origin.GIVEN)),
    "in a jit": (lambda x, w: jax.nn.relu(x) @ jax.jit(jnp.sin)(w), (Origin.MADE, Origin.MADE)),
    "into a jit": (lambda x, w: jax.jit(jnp.matmul)(x + 1, w), (Origin.MADE, Origin.GIVEN)),
    "a sum": (lambda x, w: x.sum(0)[None] @ w, (Origin.GIVEN, Origin.GIVEN)),
    "a loop's constant": (
        lambda x, w: lax.scan(lambda c, _: (jnp.sin(c @ w), None), x, length=3)[0],
        (Origin.GIVEN, Origin.HELD),
    ),
    "a while loop's constant": (
        lambda x, w: lax.while_loop(lambda c: c[0, 0] < 3, lambda c: (c + 1) @ w, x),
        (Origin.MADE, Origin.HELD),
    ),
    "a loop's slices": (
        lambda x, w: lax.scan(lambda c, row: (c + (row[None] @ w)[0], None), x[0], x)[0],
        (Origin.GIVEN, Origin.HELD),
    ),
    "remat": (
        lambda x, w: jax.checkpoint(lambda x: jnp.sin(x) @ w)(x),
        (Origin.MADE, Origin.GIVEN),
    ),
}


@pytest.mark.parametrize("name", ORIGINS)
def test_how_operands_come_about(clock: Clock, name: str):
    fn, origins = ORIGINS[name]
    actions(fn, MEASURED, f32(8, 8), f32(8, 8))
    assert [p.origins for p in clock.asked] == [origins]


# ---------------------------------------------------------------- no trace is touched


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """The probe itself, with all that it traces, compiles and runs but for the clock."""
    seen: list[dict[str, Any]] = []

    def rounds(runs: Any) -> dict[str, Timing]:
        seen.append({name: np.asarray(run(), np.float32) for name, run in runs.items()})
        return {"wide": Timing((2.0, 2.0, 4.0)), "low": Timing((1.0, 1.0, 2.0))}

    monkeypatch.setattr("precpass.probe._rounds", rounds)
    monkeypatch.setenv("PRECPASS_CACHE_DIR", str(tmp_path / "verdicts"))
    return seen


def loss(w, x):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=2)[0].sum()


AROUND: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "make_jaxpr": lambda f: f,
    "jit": jax.jit,
    "grad": jax.grad,
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
    "vmap": lambda f: jax.vmap(f, in_axes=(None, 0)),
    "scan": lambda f: lambda w, x: lax.scan(lambda c, _: (c + f(w, x), None), 0.0, length=2)[0],
    "checkpoint": jax.checkpoint,
    "default device": lambda f: jax.default_device(jax.devices()[1])(f),
    "x64": lambda f: jax.enable_x64(True)(f),
}


@pytest.mark.parametrize("name", AROUND)
def test_measuring_adds_no_equation_to_a_trace(compiled: list[Any], name: str):
    w, x = jnp.eye(8), jnp.ones((3, 4, 8) if name == "vmap" else (4, 8))

    def traced(profitability: str) -> str:
        mixed = pp.auto_mixed(loss, profitability=profitability)
        return str(jax.make_jaxpr(AROUND[name](mixed))(w, x))

    measured = traced("measured")
    assert len(compiled) == 1
    assert measured == traced("always")
    assert "bf16" in measured


def test_measuring_heeds_neither_disabled_jit_nor_an_enclosing_policy(compiled: list[Any]):
    w, x = jnp.eye(8), jnp.ones((4, 8))
    with jax.disable_jit(), pp.use_policy("AlwaysF32"):
        pp.auto_mixed(loss, policy=MEASURED)(w, x)
    ((found),) = compiled
    # low, whatever stands around
    assert 0 < np.max(np.abs(found["low"] - found["wide"])) < 0.05


def conv(x, k):
    return lax.conv_general_dilated(x + 1, k, (1, 1), "SAME")


def ragged(x, w):
    return lax.ragged_dot(jnp.sin(x), w, jnp.array([2, 6], jnp.int32))


BILINEAR: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "dot_general": (lambda x, w: jnp.sin(x) @ w, ((4, 8), (8, 8))),
    "weight gradient": (
        lambda x, g: lax.dot_general(x, g + 1, (((0,), (0,)), ((), ()))).T * 2,
        ((16, 8), (16, 4)),
    ),
    "batched": (lambda x, w: jnp.einsum("bij,bjk->bik", x, w), ((3, 4, 8), (3, 8, 8))),
    "conv_general_dilated": (conv, ((1, 2, 8, 8), (3, 2, 3, 3))),
    "ragged_dot_general": (ragged, ((8, 4), (2, 4, 8))),
    "in a loop": (lambda x, w: lax.fori_loop(0, 3, lambda _, c: c @ w, x), ((4, 8), (8, 8))),
}


@pytest.mark.parametrize("name", BILINEAR)
@pytest.mark.parametrize("policy", [MEASURED, pp.AutoMixed.with_profitability("measured")])
def test_every_product_is_timed_in_both_precisions(
    compiled: list[Any], name: str, policy: pp.PrecisionPolicy
):
    fn, shapes = BILINEAR[name]
    found = pp.inspect(fn, policy)(*[f32(*shape) for shape in shapes])
    assert found.plan.count()[pp.OpKind.COMPUTE, Action.LOWER] == 1
    ((times),) = compiled
    wide, low = times["wide"], times["low"]
    assert wide.shape == low.shape
    np.testing.assert_allclose(low, wide, rtol=0.05, atol=0.05)
    assert np.any(low != wide)


def test_symbolic_dimensions_have_a_nominal_size(clock: Clock):
    (n,) = jax.export.symbolic_shape("n")
    actions(jnp.matmul, MEASURED, jax.ShapeDtypeStruct((n, 8), "float32"), f32(8, 8))
    assert clock.asked[0].avals == (("float32", (128, 8)), ("float32", (8, 8)))


# ---------------------------------------------------------------- what is not timed


def test_what_is_too_large_is_left_to_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PRECPASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(worth, "LONGEST", float("inf"))
    x, w = f32(2**15, 2**14), f32(2**14, 1)
    # the probe itself refuses before it allocates
    with pytest.warns(pp.PrecisionWarning, match=r"\(assumed: too large to be timed\)"):
        (decision,) = products(pp.inspect(jnp.matmul, MEASURED)(x, w))
    assert decision.action is Action.KEEP
    assert not any(tmp_path.iterdir())


def test_what_takes_too_long_is_left_to_the_table(clock: Clock):
    n = 8192
    found = pp.inspect(jnp.matmul, MEASURED)(f32(n, n), f32(n, n))
    assert not clock.asked
    (decision,) = products(found)
    cpu = worth.device_for()
    assert (decision.action is Action.LOWER) == (cpu.bf16 > cpu.f32)


def test_what_cannot_be_compiled_is_left_to_the_table_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    tried = []

    def fails(_runs: Any) -> None:
        tried.append(1)
        raise RuntimeError("UNIMPLEMENTED: no kernel\nwith much more text")

    monkeypatch.setenv("PRECPASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("precpass.probe._rounds", fails)
    for _ in range(2):
        with pytest.warns(pp.PrecisionWarning, match="assumed: it cannot be timed: RuntimeError"):
            (decision,) = products(pp.inspect(jnp.matmul, MEASURED)(f32(1, 8), f32(8, 8)))
        assert decision.reason.endswith("UNIMPLEMENTED: no kernel)")
    assert len(tried) == 1


def test_several_processes_plan_by_the_table_as_they_must_run_one_program(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    found = worth.worth_of(MEASURED)
    assert isinstance(found, Assumed)
    assert found.costs.startswith("assumed for") and "several processes" in found.costs


def test_a_folder_that_cannot_be_written_is_warned_of_once(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PRECPASS_CACHE_DIR", str(tmp_path / "file"))
    mixed = pp.auto_mixed(mlp, policy=MEASURED)
    with pytest.warns(pp.PrecisionWarning, match="PRECPASS_CACHE_DIR") as said:
        mixed(PARAMS, jnp.ones((64, 8)))
    assert [w.filename for w in said] == [__file__]
    mixed(PARAMS, jnp.ones((32, 8)))
    timed = len(clock.asked)
    pp.inspect(mlp, MEASURED)(PARAMS, f32(32, 8))
    assert len(clock.asked) == timed


def test_a_damaged_file_is_warned_of_and_rebuilt(clock: Clock):
    args = PARAMS, f32(64, 8)
    before = pp.inspect(mlp, MEASURED)(*args).plan
    (path,) = worth.cache_folder().iterdir()
    path.write_text("{")
    restarted()
    with pytest.warns(pp.PrecisionWarning, match="rebuilt") as said:
        assert pp.inspect(mlp, MEASURED)(*args).plan == before
    assert str(path) in str(said[0].message)
    restarted()
    assert pp.inspect(mlp, MEASURED)(*args).plan == before


def test_the_probe_measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The only test that times products: it checks that there are times, not what they are."""
    monkeypatch.setenv("PRECPASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(probe, "SECONDS", 0.001)
    monkeypatch.setattr("precpass.probe._rounds", REAL_ROUNDS)
    (eqn,) = jax.make_jaxpr(jnp.matmul)(f32(8, 8), f32(8, 8)).eqns
    product = Product(eqn, pp.Precision.BF16, (Origin.MADE, Origin.GIVEN))
    found = probe.timed(product, jax.devices()[0])
    assert found.wide > 0 and found.low > 0 and found.ratio > 0
    assert found.by == "measured"


# ---------------------------------------------------------------- assumed


def planned(fn: Callable[..., Any], device: Any, *args: Any) -> list[Any]:
    """The decisions for the products of a program on a device that is not here."""
    plan = make_plan(jax.make_jaxpr(fn)(*args), ASSUMED, worth=Assumed(device))
    return [d for d in plan.walk() if d.kind is pp.OpKind.COMPUTE]


def test_the_table_lowers_what_computes_long_and_not_what_is_only_cast():
    large = f32(4096, 4096), f32(4096, 4096)
    (decision,) = planned(jnp.matmul, H200, *large)
    assert decision.action is Action.LOWER
    (decision,) = planned(jnp.matmul, H200, f32(1, 4096), f32(4096, 4096))
    assert decision.action is Action.KEEP
    assert decision.reason.startswith("does not pay on NVIDIA H200: ")
    assert decision.reason.endswith("in f32 (assumed)")
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
    assert plan.count()[pp.OpKind.COMPUTE, Action.LOWER] == 3
    assert not clock.asked and plan.costs == ""


def test_custom_rules_are_asked_about_too(clock: Clock):
    @jax.custom_vjp
    def f(x, w):
        return x @ w

    f.defvjp(lambda x, w: (f(x, w), (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    mixed = pp.auto_mixed(lambda x, w: jnp.sin(f(x, w)).sum(), policy=MEASURED)
    clock.ratio = lambda product: 0.5 if product.avals[0][1] == (64, 8) else 2.0
    text = str(jax.make_jaxpr(jax.grad(mixed, (0, 1)))(jnp.ones((64, 8)), jnp.ones((8, 8))))
    assert {p.avals[0][1] for p in clock.asked} == {(64, 8), (8, 64)}
    assert "bf16[64,8]" in text and "bf16[8,64]" not in text


# ---------------------------------------------------------------- options


def test_an_option_of_the_function_comes_before_the_policys(clock: Clock):
    args = PARAMS, f32(1, 8)

    def low(fn: Any, **options: Any) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pp.PrecisionWarning)
            plan = pp.inspect(fn, **options)(*args).plan
        return plan.count()[pp.OpKind.COMPUTE, Action.LOWER]

    assert low(mlp, profitability="measured") == 0
    assert low(mlp, policy=MEASURED, profitability="always") == 3
    mixed = pp.auto_mixed(mlp, profitability="measured")
    assert low(mixed) == 0
    assert low(mixed, policy="AutoMixed") == 0
    assert low(pp.auto_mixed(mixed, profitability="always")) == 3
    assert pp.auto_mixed(mixed, profitability="measured") is mixed
    assert low(pp.auto_mixed(profitability="measured")(mlp)) == 0
    with pp.use_policy(MEASURED):
        assert low(mlp) == 0
        assert low(pp.auto_mixed(mlp, profitability="always")) == 3
        assert low(pp.auto_mixed(mlp, policy="AutoMixedBf16")) == 3
    with pp.use_policy(None):
        assert low(mixed) == 0
    assert "0 of 3 products low" in pp.explain(mlp, profitability="measured")(*args).text()


def test_a_call_runs_as_it_was_planned(clock: Clock):
    clock.ratio = lambda product: 0.5 if 8 in product.avals[0][1] else 2.0
    args = PARAMS, jnp.ones((64, 8))
    mixed = pp.auto_mixed(mlp, profitability="measured")
    found = pp.inspect(mixed)(*args)
    assert [d.action for d in products(found)] == [Action.LOWER, Action.KEEP, Action.KEEP]
    wanted = jax.jit(lambda *xs: ir.evaluate(found.after, xs))(*jax.tree.leaves(args))
    np.testing.assert_array_equal(mixed(*args), wanted[0])
    assert np.any(mixed(*args) != pp.auto_mixed(mlp)(*args))


@pytest.mark.parametrize("value", ["sometimes", "Measured", "", True, 3, b"always"])
def test_a_value_that_is_none_is_refused_with_the_legal_ones(value: Any):
    legal = "legal are 'measured'.*'assumed'.*'always'"
    for refuse in (
        lambda: pp.auto_mixed(mlp, profitability=value),
        lambda: pp.auto_mixed(profitability=value),
        lambda: pp.inspect(mlp, profitability=value),
        lambda: pp.explain(mlp, profitability=value),
        lambda: pp.AutoMixedBf16.with_profitability(value),
    ):
        with pytest.raises(ValueError, match=f"unknown profitability {value!r}: {legal}"):
            refuse()


AGAIN = [lambda value: pickle.loads(pickle.dumps(value)), copy.copy, copy.deepcopy]


@pytest.mark.parametrize("again", AGAIN)
def test_it_survives_pickling(again: Callable[[Any], Any], clock: Clock):
    assert again(MEASURED) == MEASURED != pp.AutoMixedBf16
    assert hash(again(MEASURED)) == hash(MEASURED)
    assert again(pp.auto_mixed(mlp, profitability="assumed")).profitability == "assumed"
    plan = pp.inspect(mlp, MEASURED)(PARAMS, f32(64, 8)).plan
    assert again(plan) == plan
    assert again(plan).costs == plan.costs != ""


def test_a_policy_says_so():
    assert repr(MEASURED) == str(MEASURED) == "AutoMixedBf16.with_profitability('measured')"
    assert eval(repr(MEASURED), vars(pp)) == MEASURED
    assert "products that pay, measured" in MEASURED._repr_html_()


# ---------------------------------------------------------------- what a plan says of it


def test_a_plan_says_where_its_costs_are_from(clock: Clock):
    found = pp.inspect(mlp, MEASURED)(PARAMS, f32(64, 8))
    device = worth.device_for()
    said = f"measured on {device}, jax {jax.__version__}"
    assert found.plan.costs == said
    assert f"costs  {said}" in found.diff(color=False)
    assert said in found._repr_html_() and said in found.plan._repr_html_()
    assert f"what products cost in each precision: {said}" in found.explain().text()
    with pytest.warns(pp.PrecisionWarning):
        small = pp.inspect(mlp, ASSUMED)(PARAMS, f32(1, 8))
    assert small.plan.costs == f"assumed for {device}"


def test_devices_do_not_make_plans_unequal(clock: Clock):
    jaxpr = jax.make_jaxpr(jnp.matmul)(f32(4096, 4096), f32(4096, 4096))
    h100 = device_named("gpu", "NVIDIA H100 80GB HBM3")
    plans = [make_plan(jaxpr, ASSUMED, worth=Assumed(device)) for device in (H200, h100)]
    assert plans[0] == plans[1]
    assert plans[0].costs != plans[1].costs


def test_a_saved_plan_keeps_where_its_costs_were_from(clock: Clock, tmp_path: Path):
    clock.ratio = lambda product: 2.0 if Origin.MADE in product.origins else 0.5
    args = PARAMS, f32(64, 8)
    before = pp.inspect(mlp, MEASURED)(*args)
    before.plan.save(tmp_path / "plan.json")
    policy = pp.Plan.load(tmp_path / "plan.json")
    assert policy.profitability == "measured"
    restarted()
    timed, clock.ratio = len(clock.asked), lambda product: 9.0
    after = pp.inspect(mlp, policy)(*args)
    assert [d.action for d in products(after)] == [d.action for d in products(before)]
    assert len(clock.asked) == timed
    assert after.plan.costs.endswith(f"; in the saved plan: {before.plan.costs}")


def test_a_file_of_before_it_was_an_option_is_read(tmp_path: Path):
    path = tmp_path / "plan.json"
    pp.inspect(jnp.matmul, "AutoMixedBf16")(f32(8, 8), f32(8, 8)).plan.save(path)
    text = path.read_text()
    assert '"costs"' not in text
    path.write_text(text.replace('  "profitability": "always",\n', ""))
    assert "profitability" not in path.read_text()
    assert pp.Plan.load(path).profitability == "always"


def test_on_the_command_line(clock: Clock, tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "pays.py").write_text("def f(x, w):\n    return x @ w\n")
    monkeypatch.chdir(tmp_path)
    command = ["explain", "pays.py:f", "--args", "f32[1,8], f32[8,8]"]
    assert main([*command, "--profitability", "measured"]) == 0
    assert "does not pay here: 20 us in bf16, 10 us in f32" in capsys.readouterr().out
    assert main(command) == 0
    assert "1 of 1 products low" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main([*command, "--profitability", "never"])
    assert ended.value.code == 2
    assert "'measured', 'assumed', 'always'" in capsys.readouterr().err.replace(
        "measured, assumed, always", "'measured', 'assumed', 'always'"
    )
