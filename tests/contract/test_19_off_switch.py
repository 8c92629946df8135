"""Design section 3, line 19: one switch turns the pass off."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import precpass as pp
from tests.support.jaxprs import low_products, products
from tests.support.passes import assert_all_low
from tests.support.values import normal_array

X, W = normal_array(0, 4, 8), normal_array(1, 8, 8)


def loss(x, w):
    with jax.named_scope("layer"):
        return jnp.exp(jnp.tanh(x @ w)).sum()


FUNCTIONS = {"forward": loss, "gradient": jax.grad(loss)}
OPTIONS = {"plain": {}, "donated": {"donate_argnums": 0}, "static": {"static_argnames": "unused"}}
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def text(jitted, *args) -> str:
    return jitted.lower(*args).as_text(debug_info=False)


@each_function
@pytest.mark.parametrize("options", OPTIONS)
def test_use_policy_none_is_jit(name: str, options: str):

    def fn(x, w, unused=3):
        return x * FUNCTIONS[name](x, w)

    mixed = pp.auto_mixed(fn, **OPTIONS[options])
    plain = text(jax.jit(fn, **OPTIONS[options]), X, W)
    assert text(mixed, X, W) != plain
    with pp.use_policy(None):
        assert text(mixed, X, W) == plain
    assert text(mixed, X, W) != plain


@each_function
def test_it_beats_a_policy_of_its_own_and_an_outer_use_policy(name: str):
    fn = FUNCTIONS[name]
    own = pp.auto_mixed(fn, policy=pp.AlwaysF16)
    assert_all_low(own, X, W, dtype=jnp.float16)
    with pp.use_policy("AutoMixed"), pp.use_policy(None):
        assert text(own, X, W) == text(jax.jit(fn), X, W)


def test_a_keep_region_leaves_no_mark():
    def fn(x, w):
        with pp.keep("bf16"), jax.named_scope("mine"):
            return x @ w

    def scopes():
        jaxpr = pp.auto_mixed(fn).trace(X, W).jaxpr
        return {str(eqn.source_info.name_stack) for eqn in products(jaxpr)}

    assert scopes() == {"precpass.keep[bf16]/mine"}
    with pp.use_policy(None):
        assert scopes() == {"mine"}


def test_an_inner_use_policy_turns_it_on_again():
    mixed = pp.auto_mixed(loss)
    with pp.use_policy(None):
        assert not low_products(jax.make_jaxpr(mixed)(X, W))
        with pp.use_policy("AutoMixed"):
            assert_all_low(mixed, X, W, dtype=jnp.float16)
        assert not low_products(jax.make_jaxpr(mixed)(X, W))


def test_nested_under_jit_and_grad_it_is_off_too():
    mixed = pp.auto_mixed(loss)
    assert_all_low(jax.grad(mixed), X, W, least=2)
    with pp.use_policy(None):
        found = products(jax.make_jaxpr(jax.jit(jax.grad(mixed)))(X, W))
        assert len(found) == 2
        assert {v.aval.dtype for e in found for v in e.invars} == {jnp.dtype("float32")}


PROGRAM = """
import jax, jax.numpy as jnp, precpass as pp

def loss(x, w):
    return jnp.exp(jnp.tanh(x @ w)).sum()

x, w = jnp.ones((4, 8)), jnp.ones((8, 8))
for fn in (loss, jax.grad(loss)):
    mixed = pp.auto_mixed(fn, policy=pp.AutoMixedBf16).lower(x, w).as_text()
    print(mixed == jax.jit(fn).lower(x, w).as_text(), "bf16" in mixed)
"""


@pytest.mark.release(keep=1)
@pytest.mark.parametrize(
    ("value", "printed"),
    [("OFF", "True False"), ("on", "False True"), (None, "False True")],
)
def test_the_environment_variable(value: str | None, printed: str):
    environment = {k: v for k, v in os.environ.items() if k != "PRECPASS"}
    environment["PYTHONPATH"] = str(Path(pp.__file__).resolve().parents[1])
    if value is not None:
        environment["PRECPASS"] = value
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == [printed, printed]
