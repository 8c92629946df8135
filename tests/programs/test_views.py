"""Diff, explanation, picture, HTML and saved plan of real programs, each held against the plan."""

import contextlib
import functools
import json
import warnings
import xml.etree.ElementTree as ET
from typing import Any

import demo_model
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import precpass as pp
from precpass.types import Action, OpKind
from tests.support.values import f32
from tests.view.test_diff import assert_complete, hand_mixed

pytestmark = pytest.mark.programs


class Residual(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.relu(nn.GroupNorm(4)(nn.Conv(self.features, (3, 3))(x)))
        return nn.relu(x + nn.Conv(self.features, (3, 3))(h))


class Digits(nn.Module):
    """Of scikit-learn's digits: images of 8 x 8 pixels."""

    @nn.compact
    def __call__(self, images: Any) -> Any:
        x = nn.Conv(8, (3, 3))(images)
        x = Residual(8)(x)
        x = Residual(8)(nn.avg_pool(x, (2, 2), (2, 2)))
        return nn.Dense(10)(x.mean((1, 2)))


def cnn():
    images, labels = f32(4, 8, 8, 1), jax.ShapeDtypeStruct((4,), jnp.int32)
    params = jax.eval_shape(Digits().init, jax.random.key(0), images)

    def loss(params, images, labels):
        scores = jax.nn.log_softmax(Digits().apply(params, images))
        return -jnp.take_along_axis(scores, labels[:, None], 1).mean()

    return jax.value_and_grad(loss), (params, images, labels)


def neural_ode():
    from tests.programs import test_diffrax as programs

    def loss(weights, y0):
        return jnp.square(programs.solve(weights, y0, programs.diffrax.Euler()).ys).mean()

    return jax.grad(loss), (programs.WEIGHTS, programs.Y0)


def transformer():
    shape = demo_model.Shape(layers=2, width=16, heads=2, length=8, batch=2)
    task = demo_model.make_task(shape)
    return task.loss, (task.params, jax.ShapeDtypeStruct((2, 9), "int32"))


MADE = {
    "the demo's transformer": transformer,
    "a convolutional network": cnn,
    "a neural differential equation": neural_ode,
    "mixed by hand": lambda: (jax.grad(hand_mixed), (f32(8, 8), f32(8, 8))),
}


@functools.cache
def inspected(name):
    with promoting():
        fn, args = MADE[name]()
    return fn, args, look(fn, None, args)


@contextlib.contextmanager
def promoting():
    """Flax and diffrax mix integers and floats, as most programs do."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def look(fn, policy, args):
    with warnings.catch_warnings(), promoting():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        return pp.inspect(fn, policy)(*args)


each = pytest.mark.parametrize("name", MADE)


@each
def test_the_diff_is_complete(name):
    _, _, found = inspected(name)
    assert_complete(found)
    assert found.diff("lines").count("\n") <= found.diff().count("\n")
    assert found.diff("jaxpr").startswith("--- a/")


@each
def test_the_explanation_is_that_of_the_plan(name):
    _, _, found = inspected(name)
    explanation = found.explain()
    low = found.plan.count()[OpKind.COMPUTE, Action.LOWER]
    assert low > 0
    assert explanation.verdict.after.low - explanation.verdict.before.low == low
    after = explanation.verdict.after
    assert explanation.verdict.left_wide == after.products - after.low
    # that of the transformer is the loss alone
    assert (explanation.verdict.kept_before > 0) == (name != "the demo's transformer")


@pytest.mark.release(keep=2)
@each
def test_the_picture_and_the_page_are_well_formed(name):
    _, _, found = inspected(name)
    root = ET.fromstring(found.draw().svg)
    assert float(root.get("height")) < 4000
    assert "in low precision" in found._repr_html_()


@each
def test_the_saved_plan_is_the_plan(name, tmp_path):
    fn, args, found = inspected(name)
    found.plan.save(tmp_path / "plan.json")
    loaded = look(fn, pp.Plan.load(tmp_path / "plan.json"), args)
    loaded.plan.save(tmp_path / "again.json")
    first, again = (json.loads((tmp_path / n).read_text()) for n in ("plan.json", "again.json"))
    assert first == again
    assert loaded.plan.notes == found.plan.notes
    assert len(loaded.diff().splitlines()) >= len(found.diff().splitlines()) > 2
