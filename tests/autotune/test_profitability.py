"""Where profitability is asked for, what refuses it, and what a plan says of it."""

import copy
import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precpass as pp
from precpass import jaxpr as ir
from precpass.autotune import compiled
from precpass.cli import main
from precpass.devices import detect
from precpass.types import Action
from tests.support.values import f32

BEST = pp.AutoMixedBf16.with_profitability("best")
ARGS = [f32(8, 16), f32(16, 16), f32(16, 4)], f32(32, 8)
FORMER = ["compiled", "measured", "assumed"]


def mlp(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jax.nn.relu(x @ w)
    return x


@pytest.fixture(autouse=True)
def cost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, float]:
    """What programs in 16 bits cost, to those in float32, and how many were compiled."""
    found = {"low": 2.0, "compiled": 0}

    def figures(jaxpr: Any, *_: Any) -> compiled.Figures:
        found["compiled"] += 1
        return compiled.Figures(0.0, found["low"] if "f16[" in str(jaxpr) else 1.0, 100.0)

    monkeypatch.setenv("PRECPASS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "figures_of", figures)
    return found


def low(fn: Any, **options: Any) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        plan = pp.inspect(fn, **options)(*ARGS).plan
    return plan.count()[pp.types.OpKind.COMPUTE, Action.LOWER]


# ---------------------------------------------------------------- options


def test_an_option_of_the_function_comes_before_the_policys():
    assert low(mlp, profitability="best") == 0
    assert low(mlp, policy=BEST, profitability="always") == 3
    mixed = pp.auto_mixed(mlp, profitability="best")
    assert low(mixed) == 0
    assert low(mixed, policy="AutoMixed") == 0
    assert low(pp.auto_mixed(mixed, profitability="always")) == 3
    assert pp.auto_mixed(mixed, profitability="best") is mixed
    assert low(pp.auto_mixed(profitability="best")(mlp)) == 0
    with pp.use_policy(BEST):
        assert low(mlp) == 0
        assert low(pp.auto_mixed(mlp, profitability="always")) == 3
        assert low(pp.auto_mixed(mlp, policy="AutoMixedBf16")) == 3
    with pp.use_policy(None):
        assert low(mixed) == 0
    assert "0 of 3 matrix products run" in pp.explain(mlp, profitability="best")(*ARGS).text()


def test_a_call_runs_as_it_was_planned(cost: dict[str, float]):
    cost["low"] = 0.5
    args = jax.tree.map(lambda a: np.random.default_rng(0).random(a.shape, np.float32), ARGS)
    mixed = pp.auto_mixed(mlp, profitability="best")
    found = pp.inspect(mixed)(*args)
    wanted = jax.jit(lambda *xs: ir.evaluate(found.after, xs))(*jax.tree.leaves(args))
    np.testing.assert_array_equal(mixed(*args), wanted[0])
    assert np.any(mixed(*args) != jax.jit(mlp)(*args))


def refusals(value: Any) -> list[Callable[[], Any]]:
    return [
        lambda: pp.auto_mixed(mlp, profitability=value),
        lambda: pp.auto_mixed(profitability=value),
        lambda: pp.inspect(mlp, profitability=value),
        lambda: pp.explain(mlp, profitability=value),
        lambda: pp.AutoMixedBf16.with_profitability(value),
    ]


@pytest.mark.parametrize("value", ["sometimes", "Best", "", True, 3, b"always"])
def test_a_value_that_is_none_is_refused_with_the_legal_ones(value: Any):
    legal = "legal are 'always' .* and 'best'"
    for refuse in refusals(value):
        with pytest.raises(ValueError, match=f"profitability = {value!r}: {legal}"):
            refuse()


@pytest.mark.parametrize("value", FORMER)
def test_a_former_value_is_refused_with_what_to_write_instead(value: str):
    advice = "write 'best'$" if value == "compiled" else r"write 'best' \(whole .*\) or 'always'$"
    for refuse in refusals(value):
        with pytest.raises(ValueError, match=f"profitability '{value}' is .*: {advice}"):
            refuse()


AGAIN = [lambda value: pickle.loads(pickle.dumps(value)), copy.copy, copy.deepcopy]


@pytest.mark.parametrize("again", AGAIN)
def test_it_survives_pickling(again: Callable[[Any], Any], cost: dict[str, float]):
    cost["low"] = 0.5
    assert again(BEST) == BEST != pp.AutoMixedBf16
    assert hash(again(BEST)) == hash(BEST)
    assert again(pp.auto_mixed(mlp, profitability="best")).profitability == "best"
    plan = pp.inspect(mlp, BEST)(*ARGS).plan
    assert again(plan) == plan
    assert again(plan).costs == plan.costs != ""


def test_a_policy_says_so():
    assert repr(BEST) == str(BEST) == "AutoMixedBf16.with_profitability('best')"
    assert "the form of the program that costs least" in BEST._repr_html_()


# ---------------------------------------------------------------- what a plan says of it


def test_a_plan_says_where_its_costs_are_from(cost: dict[str, float]):
    cost["low"] = 0.5
    found = pp.inspect(mlp, BEST)(*ARGS)
    said = found.plan.costs
    assert said.startswith(f"compiled for {detect.device_for()}, jax {jax.__version__}: products")
    assert f"costs  {said}" in found.diff(color=False)
    assert said in found._repr_html_() and said in found.plan._repr_html_()
    assert (
        f"what the forms of the program cost, relative to the first: {said}"
        in found.explain().text()
    )


def test_always_compiles_nothing(cost: dict[str, float]):
    assert low(mlp, policy="AutoMixedBf16") == 3 and not cost["compiled"]
    assert pp.inspect(mlp, "AutoMixedBf16")(*ARGS).plan.costs == ""


def test_for_several_processes_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch, cost: dict[str, float]
):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    plan = pp.inspect(mlp, BEST)(*ARGS).plan
    assert plan.lowers and not cost["compiled"]
    assert plan.costs.startswith("not compiled, because several processes run it")


def test_rules_regions_and_saved_plans_come_before_it(tmp_path: Path, cost: dict[str, float]):
    rule = pp.Rule(primitive="dot_general", precision="bf16")
    assert low(mlp, policy=BEST.with_rules(rule)) == 3
    assert low(pp.keep("bf16")(mlp), policy=BEST) == 3
    pp.inspect(mlp, "AutoMixedBf16")(*ARGS).plan.save(tmp_path / "plan.json")
    compiled_before = cost["compiled"]
    saved = pp.Plan.load(tmp_path / "plan.json").with_profitability("best")
    assert low(mlp, policy=saved) == 3 and cost["compiled"] == compiled_before


# ---------------------------------------------------------------- files


def test_a_saved_plan_keeps_where_its_costs_were_from(cost: dict[str, float], tmp_path: Path):
    cost["low"] = 0.5
    before = pp.inspect(mlp, BEST)(*ARGS).plan
    before.save(tmp_path / "plan.json")
    policy = pp.Plan.load(tmp_path / "plan.json")
    assert policy.profitability == "best"
    after = pp.inspect(mlp, policy)(*ARGS).plan
    assert after.lowers and after.costs == f"in the saved plan: {before.costs}"


def saved(path: Path) -> dict[str, Any]:
    pp.inspect(jnp.matmul, "AutoMixedBf16")(f32(8, 8), f32(8, 8)).plan.save(path)
    return json.loads(path.read_text())


def test_a_file_of_before_it_was_an_option_is_read(tmp_path: Path):
    path = tmp_path / "plan.json"
    whole = saved(path)
    assert "costs" not in whole and whole["policy"].pop("profitability") == "always"
    path.write_text(json.dumps(whole))
    assert pp.Plan.load(path).profitability == "always"


@pytest.mark.parametrize("value", FORMER)
def test_a_saved_plan_with_a_former_value_loads_and_a_policy_says_what_to_write(
    tmp_path: Path, value: str
):
    path = tmp_path / "plan.json"
    whole = saved(path)
    whole["policy"]["profitability"] = value
    path.write_text(json.dumps(whole))
    loaded = pp.Plan.load(path)
    assert loaded.profitability == "best"
    assert pp.inspect(jnp.matmul, loaded)(f32(8, 8), f32(8, 8)).plan.lowers
    written = tmp_path / "policy.toml"
    written.write_text(f'policy = "AutoMixedBf16"\nprofitability = "{value}"\n')
    with pytest.raises(ValueError, match=rf"profitability '{value}' is .*: write 'best'"):
        pp.types.PrecisionPolicy.load(written)


def test_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "pays.py").write_text("def f(x, w):\n    return x @ w\n")
    monkeypatch.chdir(tmp_path)
    command = ["explain", "pays.py:f", "--args", "f32[1,8], f32[8,8]"]
    assert main([*command, "--profitability", "best"]) == 0
    assert "0 of 1 matrix product runs" in capsys.readouterr().out
    assert main(command) == 0
    assert "1 of 1 matrix product runs" in capsys.readouterr().out
    for value, said in (("never", "'always'"), ("measured", "write 'best'")):
        assert main([*command, "--profitability", value]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
