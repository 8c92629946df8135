"""The demo's training job, small: fully lowered in both compositions, and the loss of float32."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import demo_model
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precpass as pp
from tests.support import jaxprs
from tests.support.jaxprs import contracts, is_low

pytestmark = pytest.mark.programs

SHAPE = demo_model.Shape(layers=2, width=64, heads=2, length=32, batch=2)
STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def as_the_libraries_expect():
    # flax and optax are written for JAX's own promotion
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def task(as_the_libraries_expect: None) -> Any:
    return demo_model.make_task(SHAPE)


def whole_step(task: Any) -> Callable[..., Any]:
    return pp.auto_mixed(task.train_step, policy=pp.AutoMixedBf16)


def under_grad(task: Any) -> Callable[..., Any]:
    loss = pp.auto_mixed(task.loss, policy=pp.AutoMixedBf16)
    return jax.jit(task.with_gradient(jax.value_and_grad(loss)))


def train(step: Callable[..., Any], task: Any) -> tuple[list[float], Any]:
    data = demo_model.batches(demo_model.standard_library(), SHAPE, STEPS)
    params, state, losses = task.params, task.opt_state, []
    for tokens in data:
        params, state, loss = step(params, state, jnp.asarray(tokens))
        losses.append(float(loss))
    return losses, (params, state)


def products(jaxpr: Any) -> list[bool]:
    """For each product that contracts something: whether both operands have 16 bits."""
    return [is_low(e, jnp.bfloat16) for e in jaxprs.products(jaxpr, True) if contracts(e)]


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("compose", [whole_step, under_grad])
def test_every_product_is_low_and_the_loss_is_that_of_float32(compose: Any, task: Any):
    step = compose(task)
    tokens = jnp.zeros((SHAPE.batch, SHAPE.length + 1), jnp.int32)
    low = products(jax.make_jaxpr(step)(task.params, task.opt_state, tokens))
    wide = products(jax.make_jaxpr(task.train_step)(task.params, task.opt_state, tokens))
    assert len(low) == len(wide) > 20
    assert all(low) and not any(wide)
    losses, (params, state) = train(step, task)
    expected, _ = train(jax.jit(task.train_step), task)
    np.testing.assert_allclose(losses, expected, rtol=0.02)
    floats = [x for x in jax.tree.leaves((params, state)) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {jnp.dtype(jnp.float32)}


@pytest.mark.release
def test_the_demo_in_a_pipe_fits_80_columns_and_ends_with_a_conclusion():
    root = Path(__file__).resolve().parents[2]
    options = [
        "--steps",
        "1",
        "--layers",
        "1",
        "--policy",
        "AlwaysF32",
        "--policy",
        "AutoMixedBf16",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    for option in ("JAX_NUMPY_RANK_PROMOTION", "JAX_NUMPY_DTYPE_PROMOTION", "PRECPASS"):
        environment.pop(option, None)
    done = subprocess.run(
        [sys.executable, str(root / "scripts" / "demo.py"), *options],
        env={**environment, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    (at,) = (n for n, line in enumerate(lines) if line.startswith("Conclusion: AutoMixedBf16 "))
    assert " ".join(lines[at:]).count(". ") == 0 and lines[-1].endswith(".")
