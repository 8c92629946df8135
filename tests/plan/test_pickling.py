"""Policies, plans and decisions can be saved, sent to another process and copied."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from tests.support.passes import POLICIES, look
from tests.support.values import identical


def is_small(eqn: Any) -> bool:
    return eqn.primitive == "dot_general" and eqn.shapes[0][0] < 5


def loss(w, x):
    """A program with a body in a body, a custom rule, and an equation that a guard keeps wide."""
    step = jax.checkpoint(lambda c, _: (jax.nn.relu(c @ w), None))
    c = lax.scan(step, x, length=3)[0]
    return jax.nn.logsumexp(jnp.where(c > 0, c, jnp.finfo(jnp.float32).min) @ w)


ARGS = jnp.eye(8), jnp.ones((4, 8))
RULES = (
    pp.Rule(scope="*/head", precision="f32"),
    pp.Rule(primitive="tanh", precision="bf16"),
    pp.Rule(file="*/attention.py", line=7, precision="f32"),
    pp.Rule(where=is_small, precision="f32"),
)
CUSTOM = pp.Custom({pp.types.OpKind.COMPUTE: "f16", pp.types.OpKind.REDUCTION: "bf16"}, rules=RULES)
ALL = (*POLICIES, pp.AutoMixedBf16.with_rules(*RULES), CUSTOM)
AGAIN: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}
again = pytest.mark.parametrize("again", AGAIN.values(), ids=AGAIN)
each_policy = pytest.mark.parametrize("policy", ALL, ids=str)


@again
@each_policy
def test_a_policy_comes_back_equal(policy: pp.types.PrecisionPolicy, again: Callable[[Any], Any]):
    got = again(policy)
    assert got == policy
    assert hash(got) == hash(policy)
    assert got.rules == policy.rules
    assert got != pp.Custom({pp.types.OpKind.COMPUTE: "bf16"})


@pytest.mark.release(keep=2)
@again
@each_policy
def test_a_plan_and_its_decisions_come_back_equal(
    policy: pp.types.PrecisionPolicy, again: Callable[[Any], Any]
):
    plan = look(jax.grad(loss), policy, *ARGS).plan
    got = again(plan)
    assert got == plan
    assert hash(got) == hash(plan)
    assert list(got.walk()) == list(plan.walk())
    assert repr(got) == repr(plan)
    for decision in plan.walk():
        assert again(decision) == decision
    assert got != look(loss, policy, *ARGS).plan


@pytest.mark.release
def test_what_another_process_pickled_equals_what_is_planned_here(tmp_path: Path):
    """Though hashes of enum members and of strings differ between processes."""
    file = tmp_path / "plan"
    code = (
        "import pickle, jax, tests.conftest, tests.plan.test_pickling as t\n"
        "from tests.support.passes import look\n"
        "plan = look(jax.grad(t.loss), t.CUSTOM, *t.ARGS).plan\n"
        "hash(plan), hash(t.CUSTOM)\n"
        f"pickle.dump((plan, t.CUSTOM), open({str(file)!r}, 'wb'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    plan, policy = pickle.loads(file.read_bytes())
    here = look(jax.grad(loss), CUSTOM, *ARGS).plan
    assert (plan, policy) == (here, CUSTOM)
    assert (hash(plan), hash(policy)) == (hash(here), hash(CUSTOM))
    assert {plan: 1}[here] == {policy: 1}[CUSTOM] == 1


def test_a_policy_that_came_back_plans_the_same():
    got = pickle.loads(pickle.dumps(pp.AutoMixed))
    here, there = (look(loss, policy, *ARGS) for policy in (pp.AutoMixed, got))
    assert here.plan == there.plan
    assert identical(
        pp.auto_mixed(loss, policy=got)(*ARGS), pp.auto_mixed(loss, policy=pp.AutoMixed)(*ARGS)
    )


def test_an_inspection_says_what_can_be_pickled_instead():
    found = look(loss, pp.AutoMixedBf16, *ARGS)
    with pytest.raises(TypeError, match=r"pickle its \.plan and its \.policy"):
        pickle.dumps(found)
    assert pickle.loads(pickle.dumps((found.plan, found.policy))) == (found.plan, found.policy)


def test_a_copied_inspection_is_the_same_immutable_object():
    found = look(loss, pp.AutoMixedBf16, *ARGS)
    assert copy.copy(found) is copy.deepcopy(found) is found
