"""Reports name the modules of a model and the user's lines, and no line inside a library."""

import importlib.util
import sys
import textwrap
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import precpass as pp
from tests.support import layered
from tests.support.devices import for_a_gpu
from tests.support.layered import TOKENS, promoting

X = jnp.ones((8, layered.WIDTH))
LINEAR = pp.AutoMixedBf16.with_rules(
    pp.Rule(where=lambda eqn: eqn.file.endswith(("linear.py", "basic.py")), precision="f32")
)
GRADIENTS: dict[str, Any] = {
    "nnx": (nnx.grad(layered.loss), lambda: (layered.nnx_model(), TOKENS)),
    "equinox": (eqx.filter_grad(layered.eqx_loss), lambda: (layered.eqx_model(), X)),
    "linen": (jax.grad(layered.linen_loss), lambda: (layered.linen_parameters(), X)),
    "haiku": (jax.grad(layered.haiku_loss), lambda: (layered.haiku_parameters(), X)),
}
INNER = {
    "nnx": "blocks[i].up",
    "equinox": "feeds[i].down",
    "linen": "feeds_*/down",
    "haiku": "net/feed_1/down",
}

FIRST = {"nnx": "blocks[i].attention.query", "haiku": "net/feed/up"}
"""Where `explain` in brief, which names three places, does not reach the inner one."""


def named(report: str, fn: Any, args: Any) -> str:
    with promoting(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        match report:
            case "explain":
                return str(pp.explain(fn, LINEAR)(*args))
            case "all of explain":
                return pp.explain(fn, LINEAR)(*args).all
            case "audit":
                return str(pp.audit(fn, "AutoMixedF16")(*args))
            case _:
                return pp.inspect(fn)(*args).diff(report)


@pytest.mark.parametrize("report", ["explain", "all of explain", "lines", "equations", "audit"])
@pytest.mark.parametrize("library", GRADIENTS)
def test_a_report_names_modules_and_the_lines_that_call_them(library, report):
    fn, args = GRADIENTS[library]
    text = named(report, fn, args())
    if report == "audit" and "no finding" in text:
        pytest.skip("this processor multiplies float16")
    inner = FIRST.get(library, INNER[library]) if report == "explain" else INNER[library]
    assert inner in text and "tests/support/layered.py:" in text
    assert not any(file in text for file in ("linear.py:", "basic.py:", "flax/", "haiku/"))


@pytest.mark.parametrize("library", GRADIENTS)
def test_the_page_of_an_inspection_has_the_users_lines(library):
    fn, args = GRADIENTS[library]
    with promoting():
        page, _, _ = pp.inspect(fn)(*args())._repr_html_().partition("<svg")
    assert INNER[library] in page and "tests/support/layered.py:" in page
    assert not any(f"{file}:" in page for file in ("linear.py", "basic.py", "normalization.py"))


KERAS = """
import jax

def traced(fn):
    def wrapped(*args):
        return fn(*args)
    return wrapped

class Layer:
    def __init__(self, name):
        self.name = name

    @traced
    def __call__(self, x):
        with jax.named_scope(self.name):
            return self.call(x)

class Dense(Layer):
    def __init__(self, name, kernel):
        super().__init__(name)
        self.kernel = kernel

    def call(self, x):
        return x @ self.kernel
"""


def test_a_keras_layer_has_the_path_of_its_scopes_and_the_users_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "site-packages" / "keras" / "src" / "layers" / "layer.py"
    file.parent.mkdir(parents=True)
    file.write_text(textwrap.dedent(KERAS))
    spec = importlib.util.spec_from_file_location("layer", file)
    assert spec and spec.loader
    keras = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(keras)
    package = SimpleNamespace(__file__=str(file.parents[2] / "__init__.py"))
    monkeypatch.setitem(sys.modules, "keras", package)

    class Block(keras.Layer):
        def call(self, x: Any) -> Any:
            return jnp.tanh(keras.Dense("dense", x.T)(x))

    text = pp.inspect(lambda x: Block("block")(x))(X).diff("lines")
    assert text.splitlines()[1].startswith("block/dense  tests/view/test_sites.py:")


@pytest.mark.parametrize("level", ["lines", "equations"])
def test_layers_that_differ_in_their_numbers_are_one_place(level):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(3):
                x = nn.Dense(layered.WIDTH)(x)
            return nn.Dense(8, name="head")(x)

    with promoting():
        params = jax.eval_shape(Net().init, jax.random.key(0), X)
        text = pp.inspect(Net().apply)(params, X).diff(level)
    heads = [line.split()[0] for line in text.splitlines() if "test_sites.py:" in line]
    assert heads == ["Net/Dense_*", "Net/head"]


def test_an_optimizers_step_is_found_at_its_call():
    def step(params: Any, state: Any) -> Any:
        grads = jax.grad(lambda w: jnp.square(X @ w).mean())(params)
        return optimizer.update(grads, state, params)

    optimizer, w = optax.adam(1e-3), jnp.ones((layered.WIDTH, 8))
    with promoting():
        found = pp.inspect(step)(w, optimizer.init(w))
    lines = {info.site.source.file for info in found.plan.eqn_infos}
    assert all(file.endswith("test_sites.py") for file in lines)
    # what machines read has the innermost line
    assert any("optax" in info.source.file for info in found.plan.eqn_infos)


def test_the_first_five_lines_have_the_verdict_the_saving_and_a_remedy(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    fn, args = GRADIENTS["nnx"]
    title, verdict, saving, *rest = named("explain", fn, args()).splitlines()[:5]
    assert "under AutoMixedBf16" in title
    assert "matrix products run in bfloat16" in verdict
    assert saving.startswith("  Saved for the backward pass: ") and "instead of" in saving
    assert rest[0].startswith("  1. change that rule of the policy")


def test_there_are_at_most_three_remedies_and_scalars_hide_none():
    def fn(x: Any, w: Any, *scalars: Any) -> Any:
        for i, n in enumerate((30, 33, 35, 37)):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w[: x.shape[1], :n])
        with jax.numpy_dtype_promotion("standard"):
            return x, [s / jnp.float32(8.0) for s in scalars]

    scalars = [jnp.ones((), jnp.bfloat16)] * 50
    found = pp.inspect(fn)(jnp.ones((64, 64)), jnp.ones((64, 64)), *scalars)
    text = str(for_a_gpu(found))
    assert text.count("pad ") == 6 and "4. " not in text and "1 more" in text
    assert "8.0" not in text and text.splitlines()[3].startswith("  1. pad ")


def test_what_is_saved_for_the_backward_pass_says_why_it_is_not_half():
    def loss(w: Any, x: Any) -> Any:
        return jnp.sin(jnp.exp(x @ w)).sum()

    text = str(pp.explain(jax.grad(loss))(jnp.ones((64, 64)), jnp.ones((64, 64))))
    _, _, after = text.partition("Saved for the backward pass in float32:\n")
    assert "XLA may compute it again" in after


@pytest.mark.parametrize("library", GRADIENTS)
def test_a_failing_check_names_modules_and_the_lines_that_call_them(library):
    fn, args = GRADIENTS[library]
    with promoting(), pytest.raises(AssertionError) as raised:
        pp.testing.assert_precision(fn, args(), {"dot_general": "f32"})
    text = str(raised.value)
    assert f"{INNER[library].replace('*', '0')}  tests/support/layered.py:" in text
    assert not any(file in text for file in ("linear.py:", "basic.py:", "flax/", "haiku/"))
