"""The form of a program with products of 8 bits is one of those that are compiled."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import precpass as pp
from precpass.autotune import compiled
from precpass.types import OpKind, Precision
from tests.support.values import f32, normal_array

D = 256
LAYERS = 5
WS = [f32(D, D)] * LAYERS
X = f32(D, D)


def model(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jax.nn.relu(x @ w)
    return x


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Callable[[float], list[str]]:
    """Gives programs with values of int8 a cost, and all others 1."""
    monkeypatch.setenv("PRECPASS_CACHE_DIR", str(tmp_path))

    def given(eight: float) -> list[str]:
        asked: list[str] = []

        def figures(jaxpr: Any, *_: Any) -> compiled.Figures:
            asked.append(str(jaxpr))
            return compiled.Figures(0.0, eight if "i8[" in asked[-1] else 1.0, 100.0)

        monkeypatch.setattr(compiled, "figures_of", figures)
        return asked

    return given


@pytest.mark.parametrize("eight, is_scaled", [(0.9, True), (0.98, False), (1.2, False)])
def test_a_form_of_eight_bits_is_taken_if_it_saves_enough(
    costs: Callable[[float], list[str]], eight: float, is_scaled: bool
):
    asked = costs(eight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        found = pp.inspect(model, pp.AutoMixedInt8.with_profitability("best"))(WS, X)
    assert sum("i8[" in text for text in asked) == 1
    assert ("i8[" in str(found.after)) == is_scaled
    assert "products of 8 bits" in found.plan.costs


def test_the_other_forms_have_no_eight_bits(costs: Callable[[float], list[str]]):
    asked = costs(0.1)
    with pytest.warns(pp.PrecisionWarning, match="lowered nothing"):
        found = pp.inspect(model, pp.AutoMixedBf16.with_profitability("best"))(WS, X)
    assert not any("i8[" in text for text in asked)
    assert "8 bits" not in found.plan.costs


def test_of_a_program_that_cannot_be_compiled_no_product_has_eight_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    def fails(*_: Any) -> Any:
        raise ValueError("no such kernel")

    monkeypatch.setenv("PRECPASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "figures_of", fails)
    policy = pp.AutoMixedInt8.with_profitability("best")
    with pytest.warns(pp.PrecisionWarning, match="lowered to 16 bits instead"):
        found = pp.inspect(model, policy)(WS, X)
    low = [d.product.scaled or d.compute for d in found.plan.walk() if d.kind is OpKind.COMPUTE]
    assert low == [Precision.BF16] * LAYERS


@pytest.mark.release
def test_compiled_for_a_cpu_the_program_is_near_and_its_weights_are_rounded_ahead_of_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    """`quantized` asks for no costs, because it takes away what makes 8 bits dear."""
    monkeypatch.setenv("PRECPASS_CACHE_DIR", str(tmp_path))
    policy = pp.AutoMixedInt8.with_profitability("best")
    ws, x = [normal_array(i, D, D) / 16 for i in range(LAYERS)], normal_array(9, D, D)
    small = pp.quant.quantized(model, policy)(ws, x)
    assert sum(isinstance(w, pp.quant.QuantizedArray) for w in small) == LAYERS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        found = pp.auto_mixed(model, policy)(small, x)
    exact = model(ws, x)
    assert 0 < jnp.linalg.norm(found - exact) < 0.05 * jnp.linalg.norm(exact)
