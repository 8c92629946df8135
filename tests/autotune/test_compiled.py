"""Whole programs in several forms: which are compiled, which one counts, and where it is kept."""

import json
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from precpass.autotune import compiled
from precpass.autotune.forms import FORMS, in_form
from precpass.policy.primitives import OpKind
from tests.support.values import normal_array, rel_error

BEST = pp.AutoMixedBf16.with_profitability("best")
X, WS = normal_array(0, 32, 64), normal_array(1, 4, 64, 64) / 8


def layers(x: jax.Array, ws: jax.Array) -> jax.Array:
    return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PRECPASS_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def costing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Gives each form the cost and the temporary memory that a test says."""

    def given(*costs: tuple[float, float] | Exception) -> list[str]:
        rest, asked = list(costs), list[str]()

        def figures(jaxpr: Any, *_: Any) -> Any:
            asked.append(str(jaxpr))
            found = rest.pop(0)
            if isinstance(found, Exception):
                raise found
            cost, temp = found
            return compiled.Figures(0.0, cost, temp)

        monkeypatch.setattr(compiled, "figures_of", figures)
        monkeypatch.setattr(compiled, "compiles_at_once", lambda _: False)  # in the forms' order
        return asked

    return given


@pytest.mark.parametrize(("cycles", "lowers"), [(5.0, True), (0.0, False)])
def test_forms_are_judged_by_cycles_only_if_all_have_an_estimate(
    monkeypatch: pytest.MonkeyPatch, cycles: float, lowers: bool
):
    figures = compiled.Figures
    each = iter([figures(9.0, 1.0, 0.0)])  # float32's; the others take twice the seconds
    monkeypatch.setattr(compiled, "figures_of", lambda *_: next(each, figures(cycles, 2.0, 0.0)))
    monkeypatch.setattr(compiled, "compiles_at_once", lambda _: False)  # in the forms' order
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        plan = pp.inspect(product, BEST)(X, WS[0]).plan
    assert bool(low(plan)) is lowers
    assert f"products {5 / 9 if lowers else 2:.2f} (" in plan.costs


def low(plan: pp.Plan) -> int:
    return plan.count()[OpKind.COMPUTE, pp.types.Action.LOWER]


# ---------------------------------------------------------------- forms


def test_each_form_is_a_policy_with_more_in_16_bits_than_the_one_before():
    def text(form: str) -> str:
        policy = in_form(BEST, form)
        assert policy.profitability == "always"
        found = pp.inspect(jax.grad(layers), policy)(X, WS)
        return str(found.after)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        texts = {form: text(form) for form in FORMS}
    assert "bf16" not in texts["float32"]
    counts = [texts[form].count("bf16") for form in FORMS]
    assert 0 < counts[1] == counts[2] < counts[3]
    assert "u16[4" not in texts["products"]
    assert "u16[4" in texts["products and storage"]


def test_a_form_leaves_what_the_user_made_low():
    def fn(x: jax.Array) -> jax.Array:
        return jnp.tanh(x * x) + x

    low_x = X.astype(jnp.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        for form in FORMS:
            found = pp.inspect(fn, in_form(BEST, form))(low_x)
            assert str(found.after) == str(found.before), form


# ---------------------------------------------------------------- the choice


@pytest.mark.release(keep=3)
@pytest.mark.parametrize(
    ("costs", "form"),
    [
        ([(1.0, 9), (0.5, 9), (0.4, 9)], "products and storage"),
        ([(1.0, 9), (0.5, 9), (0.49, 9)], "products with float32 results"),
        ([(1.0, 9), (0.5, 9), (0.5, 5)], "products and storage"),
        ([(1.0, 9), (0.5, 9), (0.51, 5)], "products with float32 results"),
        ([(1.0, 9), (0.5, 9), (0.504, 5)], "products and storage"),
        ([(1.0, 9), (0.98, 9), (1.2, 1)], "float32"),
        ([(1.0, 0), (1.005, 0), (1.005, 0)], "float32"),  # no memory is none saved
        ([(1.0, 9), RuntimeError("no such kernel"), (0.4, 9)], "products and storage"),
    ],
)
def test_the_cheapest_form_counts_and_the_more_accurate_one_if_it_costs_little_more(
    costing: Any, costs: list[Any], form: str
):
    asked = costing(*costs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        plan = pp.inspect(jax.grad(layers), BEST)(X, WS).plan
    assert plan.form == form
    # on a CPU results are float32 in any form, so that two forms are one program
    assert len(set(asked)) == 3


def test_the_choice_is_kept_in_a_file_for_every_process(costing: Any, folder: Path):
    asked = costing((1.0, 9), (0.5, 9), (0.4, 9))
    first = pp.inspect(jax.grad(layers), BEST)(X, WS).plan
    (path,) = folder.glob("programs-*.json")
    (entry,) = json.loads(path.read_text())["products"].values()
    assert entry[0] == "products and storage"
    compiled._cache_of.cache_clear()  # pyright: ignore[reportPrivateUsage]
    second = pp.inspect(jax.grad(layers), BEST)(X, WS).plan
    assert len(asked) == 3
    assert (second.form, second.costs) == (first.form, first.costs)
    assert "products and storage 0.40 (temp 9 bytes)" in second.costs
    # another shape and another policy are other programs
    costing((1.0, 9), (0.5, 9), (0.5, 9))
    assert pp.inspect(jax.grad(layers), BEST)(X[:16], WS).plan.form != first.form


def without_costs(entry: list[Any]) -> list[Any]:
    form, _ = entry
    return [form, []]


def with_another_form(entry: list[Any]) -> list[Any]:
    _, costs = entry
    return ["nonsense", costs]


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (with_another_form, "'nonsense' is not a form"),
        (without_costs, "float32 results' has no cost"),
    ],
)
def test_a_damaged_file_is_told_and_rebuilt(
    costing: Any, folder: Path, damaged: Callable[[list[Any]], list[Any]], said: str
):
    costing((1.0, 9), (0.4, 9))
    whole = pp.inspect(product, BEST)(X, WS[0]).plan.costs
    (path,) = folder.glob("programs-*.json")
    content = json.loads(path.read_text())
    content["products"] = {name: damaged(each) for name, each in content["products"].items()}
    path.write_text(json.dumps(content))
    compiled._cache_of.cache_clear()  # pyright: ignore[reportPrivateUsage]
    costing((1.0, 9), (0.4, 9))
    with pytest.warns(pp.PrecisionWarning, match=f"is damaged .*{said}"):
        plan = pp.inspect(product, BEST)(X, WS[0]).plan
    assert (plan.form, plan.costs) == ("products with float32 results", whole)
    assert all(damaged(each) != each for each in json.loads(path.read_text())["products"].values())


def test_a_program_that_gains_nothing_stays_and_says_why(costing: Any):
    costing((1.0, 9), (1.5, 9))
    with pytest.warns(
        pp.PrecisionWarning, match=r"lowered nothing.*saves enough: compiled for .*1.5"
    ):
        result = pp.auto_mixed(lambda x, w: product(x, w), policy=BEST)(X, WS[0])
    assert (result == jax.jit(product)(X, WS[0])).all()
    (wide,) = pp.explain(product, BEST)(X, WS[0]).wide
    assert "AutoMixedBf16 by profitability='best': compute in f32" in wide.reason


def test_a_program_that_no_compiler_takes_is_lowered_with_a_warning(costing: Any):
    costing(*[RuntimeError("no such kernel")] * 3)
    with pytest.warns(pp.PrecisionWarning, match=r"'best': no form .*no such kernel"):
        mixed = pp.auto_mixed(lambda x, w: product(x, w), policy=BEST)
        assert "bf16" in mixed.lower(X, WS[0]).as_text()


def test_custom_rules_follow_the_form(costing: Any):
    @jax.custom_vjp
    def apply(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    apply.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return apply(x, w).sum()

    def lowered(*costs: tuple[float, float]) -> int:
        costing(*costs)
        mixed = pp.auto_mixed(lambda x, w: loss(x, w), policy=BEST)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pp.PrecisionWarning)
            return str(jax.make_jaxpr(jax.grad(mixed))(X, WS[0])).count("bf16")

    assert lowered((1.0, 9), (0.4, 9)) > 0
    compiled._cache_of.cache_clear()  # pyright: ignore[reportPrivateUsage]
    for path in Path(compiled.cache_folder()).glob("*"):
        path.unlink()
    assert lowered((1.0, 9), (1.5, 9)) == 0


# ---------------------------------------------------------------- for real


def test_programs_are_compiled_and_not_run():
    plan = pp.inspect(jax.grad(layers), BEST)(X, WS).plan
    assert plan.form in FORMS
    assert plan.costs.startswith("compiled for ")
    assert "float32 1.00 (temp " in plan.costs
    results = pp.auto_mixed(jax.grad(layers), policy=BEST)(X, WS)
    wanted = jax.jit(jax.grad(layers))(X, WS)
    assert rel_error(results, wanted) < 0.02


def test_forms_are_compiled_at_once_but_for_a_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch):
    waiting, at_once, asked = threading.Condition(), list[int](), list[str]()

    def figures(jaxpr: Any, *_: Any) -> compiled.Figures:
        with waiting:
            asked.append(str(jaxpr))
            waiting.notify_all()
            waiting.wait_for(lambda: len(asked) > 1, timeout=20)
            at_once.append(len(asked))
        return compiled.Figures(0.0, 1.0, 0.0)

    monkeypatch.setattr(compiled, "figures_of", figures)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        pp.inspect(jax.grad(layers), BEST)(X, WS)
    assert len(set(asked)) == len(asked) > 1 and min(at_once) > 1
    gpu = types.SimpleNamespace(platform="gpu")
    assert compiled.compiles_at_once(gpu)
    monkeypatch.setattr(compiled, "is_present", lambda device: device is gpu)
    assert not compiled.compiles_at_once(gpu)


def test_empty_arrays_cost_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        assert pp.auto_mixed(lambda x: x @ x.T, policy=BEST)(X[:0]).shape == (0, 0)


def test_a_part_of_a_sharded_program_is_lowered_with_a_warning():
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("a")
    inner = pp.auto_mixed(lambda x: lax.psum(x @ WS[0], "a"), policy=BEST)
    sharded = jax.shard_map(inner, mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec())
    with pytest.warns(pp.PrecisionWarning, match="no form of the program can be compiled"):
        assert rel_error(jax.jit(sharded)(X), X @ WS[0]) < 0.02


def test_symbolic_sizes_are_not_compiled():
    (n,) = jax.export.symbolic_shape("n")
    with pytest.warns(pp.PrecisionWarning, match="XLA compiles for numbers, and n is symbolic"):
        plan = pp.inspect(product, BEST)(jax.ShapeDtypeStruct((n, 64), jnp.float32), WS[0]).plan
    assert low(plan) == 1


def test_results_in_float32_are_a_policy_for_gpus_too():
    args = normal_array(0, 8, 8, 8, 4), normal_array(1, 3, 3, 4, 4)

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        axes = ("NHWC", "HWIO", "NHWC")
        return jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=axes))

    wide = pp.AutoMixedBf16.with_results("f32")
    assert "result in bf16" in pp.inspect(fn, target="h100")(*args).diff()
    assert "result in bf16" not in pp.inspect(fn, wide, target="h100")(*args).diff()


def test_a_saved_plan_keeps_the_options(costing: Any, tmp_path: Path):
    policy = pp.AutoMixedBf16.with_results("f32").with_profitability("best")
    path = tmp_path / "plan.json"
    costing((1.0, 9), (0.5, 9))
    pp.inspect(product, policy)(X, WS[0]).plan.save(path)
    loaded = pp.Plan.load(path)
    assert (loaded.results, loaded.profitability) == ("f32", "best")
    # what is saved decides, and nothing is compiled
    costing()
    assert low(pp.inspect(product, loaded)(X, WS[0]).plan) == 1
