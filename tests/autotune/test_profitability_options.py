"""Where profitability is asked for, what refuses it, and what a plan says of it."""

import copy
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
from precpass.analysis.operand_origin import OperandOrigin
from precpass.cli import main
from precpass.devices import detect
from precpass.devices.devices import device_named
from precpass.planner.planner import make_plan
from precpass.planner.profit import Assumed
from precpass.types import Action
from tests.support.profitability import (
    ASSUMED,
    H200,
    MEASURED,
    PARAMS,
    Clock,
    mlp,
    products,
    restarted,
)
from tests.support.values import f32

# ---------------------------------------------------------------- options


def test_an_option_of_the_function_comes_before_the_policys(clock: Clock):
    args = PARAMS, f32(1, 8)

    def low(fn: Any, **options: Any) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pp.PrecisionWarning)
            plan = pp.inspect(fn, **options)(*args).plan
        return plan.count()[pp.types.OpKind.COMPUTE, Action.LOWER]

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
    assert "0 of 3 matrix products run" in pp.explain(mlp, profitability="measured")(*args).text()


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
    device = detect.device_for()
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
    plans = [make_plan(jaxpr, ASSUMED, profit_model=Assumed(device)) for device in (H200, h100)]
    assert plans[0] == plans[1]
    assert plans[0].costs != plans[1].costs


def test_a_saved_plan_keeps_where_its_costs_were_from(clock: Clock, tmp_path: Path):
    clock.ratio = lambda product: 2.0 if OperandOrigin.FUSED in product.origins else 0.5
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
    assert "1 of 1 matrix product runs" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main([*command, "--profitability", "never"])
    assert ended.value.code == 2
    assert "'measured', 'compiled', 'assumed', 'always'" in capsys.readouterr().err.replace(
        "measured, compiled, assumed, always", "'measured', 'compiled', 'assumed', 'always'"
    )
