"""JAX's own primitive harnesses under every preset, two of each group, and the check itself.

`harness_checks` says what must hold; `scripts/sweep harnesses` checks all of them.
"""

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from precpass.policy import primitives
from tests.support import harness_programs
from tests.support.harness_checks import Plain, check, check_harness
from tests.support.harness_values import compare

pytestmark = pytest.mark.programs

SAMPLE = harness_programs.sample()


@pytest.fixture(scope="module", autouse=True)
def quickly_compiled() -> Iterator[None]:
    """Code generation without optimization: each program runs once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.release(keep=20)
@pytest.mark.parametrize("group", SAMPLE)
def test_harnesses_of_a_group(group: str):
    for harness in SAMPLE[group]:
        report = check_harness(harness_programs.short_id(harness))
        assert not report.failures
        assert report.counts["programs"] == 1


def test_the_sample_has_two_of_every_group():
    groups = Counter(h.group_name for h in harness_programs.harnesses())
    assert len(groups) > 100
    assert {name: len(found) for name, found in SAMPLE.items()} == {
        name: min(2, number) for name, number in groups.items()
    }


# ---------------------------------------------------------------- the check sees what is wrong

X = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
LOW = X.astype(jnp.bfloat16)


def product(x: Any) -> Any:
    return x @ x


def position(x: Any) -> Any:
    return jnp.argmax(x, axis=-1)


def quotient(x: Any) -> Any:
    return x / jnp.zeros_like(x)


def first(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def changed(x: np.ndarray) -> np.ndarray:
        x = np.array(x)
        x.flat[0] = value
        return x

    return changed


@pytest.mark.parametrize(
    ("policy", "fn", "x", "wrong", "text"),
    [
        (pp.AutoMixedBf16, product, X, lambda y: y * np.float32(1.05), "error"),
        (pp.AutoMixed, product, X, lambda y: y * np.float32(1.01), "error"),
        (pp.AlwaysF16, product, X, lambda y: y * np.float32(1.01), "error"),
        (pp.AlwaysF32, product, LOW, lambda y: y * LOW.dtype.type(1.05), "error"),
        (pp.AutoMixedBf16, product, X, first(np.inf), "no longer finite"),
        (pp.AlwaysF16, product, X, first(np.nan), "no longer finite"),
        (pp.AlwaysF32, product, LOW, first(np.nan), "no longer finite"),
        (pp.AutoMixedBf16, position, X, first(7), "1 of 8 integers"),
        (pp.AlwaysBf16, position, X, first(7), "1 of 8 integers"),
        (pp.AutoMixedBf16, quotient, X, first(-np.inf), "another value"),
        (pp.AutoMixedBf16, product, X, lambda y: y.astype(np.float16), "is float16"),
        (pp.AutoMixedBf16, product, X, lambda y: y[:4], "(4, 8), not"),
    ],
)
def test_wrong_values_are_seen(policy: Any, fn: Any, x: Any, wrong: Any, text: str):
    plain = Plain(fn, (x,))
    right = np.asarray(plain.result)
    assert not compare(policy, plain, right, Counter())
    (found,) = compare(policy, plain, wrong(right), Counter())
    assert text in found


def low(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: fn(x).astype(jnp.bfloat16)


def raising(fn: Callable[..., Any]) -> Callable[..., Any]:
    def raised(x: Any) -> Any:
        raise ValueError("not today")

    return raised


def warning(fn: Callable[..., Any]) -> Callable[..., Any]:
    def warned(x: Any) -> Any:
        warnings.warn("not today", UserWarning, stacklevel=1)
        return fn(x)

    return warned


@pytest.mark.parametrize(
    ("wrong", "fn", "text"),
    [
        (lambda fn: lambda x: fn(x) * 1.05, product, "AutoMixedBf16 result 0: error"),
        (low, product, "AutoMixedBf16 gives ['bfloat16[8,8]'], not ['float32[8,8]']"),
        (lambda fn: lambda x: [fn(x)], product, "AutoMixedBf16 gives PyTreeDef([*])"),
        (raising, product, "AutoMixedBf16 raises ValueError: not today"),
        (warning, product, "AutoMixedBf16 warns UserWarning: not today"),
        (lambda fn: lambda x: fn(x) * 1.0, jnp.sort, "AutoMixedBf16 changes nothing, but"),
    ],
    ids=["value", "dtype", "tree", "error", "warning", "text"],
)
def test_a_pass_that_is_wrong_is_seen(monkeypatch: Any, wrong: Any, fn: Any, text: str):
    assert not check(fn, (X,)).failures
    monkeypatch.setattr(pp, "auto_mixed", lambda fn, policy: jax.jit(wrong(fn)))
    assert any(text in failure for failure in check(fn, (X,)).failures)


def test_a_missing_guard_is_seen(monkeypatch: Any):
    def scaled() -> Any:  # another function each time: the same one finds its program again
        return lambda x: (x * 1e6) @ x

    assert not check(scaled(), (X,)).failures
    monkeypatch.setattr("precpass.planner.guards.why_out_of_range", lambda *_: None)
    failures = check(scaled(), (X,)).failures
    assert any(
        "AutoMixedF16 result 0: " in text and "no longer finite" in text for text in failures
    )


def test_a_sum_that_is_taken_low_is_seen(monkeypatch: Any):
    def sums() -> Any:
        return lambda x: lax.reduce_window(x, np.float32(0), lax.add, (4096,), (4096,), "VALID")

    ones, op = np.ones(8192, np.float32), primitives.op("reduce_window_sum")
    assert not check(sums(), (ones,)).failures
    low = dataclasses.replace(op, accumulates=False)
    monkeypatch.setitem(primitives.ROWS, "reduce_window_sum", low)
    failures = check(sums(), (ones,)).failures
    assert any("AlwaysBf16 result 0: error" in text for text in failures)


def test_a_program_that_jax_itself_refuses_is_no_failure():
    report = check(lambda x: x + np.ones(3, np.float32), (X,))
    assert not report.failures
    assert report.counts == {"not traced by JAX itself": 1}
