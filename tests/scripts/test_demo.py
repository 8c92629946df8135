"""The demo: low in both compositions, the loss of float32, a short table and a conclusion."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import demo
import demo_model
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import jaxprs
from tests.support.jaxprs import contracts, is_low

pytestmark = pytest.mark.programs

SHAPE = demo_model.Shape(layers=2, width=64, heads=2, length=32, batch=2)
STEPS = 4


@pytest.fixture(scope="module")
def task():
    # flax and optax are written for JAX's own promotion
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield demo_model.make_task(SHAPE)


def train(step: Callable[..., Any], task: Any) -> tuple[list[float], Any]:
    data = demo_model.batches(demo_model.standard_library(), SHAPE, STEPS)
    params, state, losses = *jax.tree.map(jnp.copy, (task.params, task.opt_state)), []
    for tokens in data:
        params, state, loss = step(params, state, jnp.asarray(tokens))
        losses.append(float(loss))
    return losses, (params, state)


def products(step: Any, task: Any) -> list[bool]:
    """For each product that contracts something: whether both operands have 16 bits."""
    tokens = jnp.zeros((SHAPE.batch, SHAPE.length + 1), jnp.int32)
    jaxpr = jax.make_jaxpr(step)(task.params, task.opt_state, tokens)
    return [is_low(e, jnp.bfloat16) for e in jaxprs.products(jaxpr, True) if contracts(e)]


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("name", ["AutoMixedBf16", demo.UNDER_GRAD])
def test_every_product_is_low_and_the_loss_is_that_of_float32(name: str, task: Any):
    step = demo.build_step(name, task)
    low, wide = products(step, task), products(task.train_step, task)
    assert len(low) == len(wide) > 20
    assert all(low) and not any(wide)
    losses, (params, state) = train(step, task)
    expected, _ = train(jax.jit(task.train_step), task)
    np.testing.assert_allclose(losses, expected, rtol=0.02)
    floats = [x for x in jax.tree.leaves((params, state)) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {jnp.dtype(jnp.float32)}


@pytest.mark.release
def test_in_a_pipe_it_fits_80_columns_and_ends_with_a_conclusion():
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
    dropped = ("COLUMNS", "JAX_NUMPY_RANK_PROMOTION", "JAX_NUMPY_DTYPE_PROMOTION", "PRECPASS")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
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


@pytest.mark.parametrize(
    "loss, seconds, says",
    [
        (2.0, 0.5, "takes 0.40 of float32's time for a step and 1.00 of its temporary"),
        (2.0, 1.24, "gains nothing, it takes 0.99 of float32's time for a step."),
        (2.001, 0.5, "after 40 steps is that of float32 within 0.05%, without a change"),
        (2.2, 0.5, "differs from float32's by 10.00%, so look at the losses"),
    ],
)
def test_the_conclusion_is_one_sentence_of_the_figures(loss: float, seconds: float, says: str):
    def row(name: str, loss: float, seconds: float) -> demo.Row:
        state = None, ((), ())
        return demo.Row(name, *state, "23/23", 132, 64.4, [5.5] + [loss] * 39, [seconds] * 40)

    wide = row("AlwaysF32", 2.0, 1.25)
    text = demo.conclusion([wide, row("AutoMixedBf16", loss, seconds)])
    assert text.startswith("Conclusion: AutoMixedBf16 ") and says in text and text.endswith(".")
    assert "nothing to compare without" in demo.conclusion([wide])
