"""The rounding model: its grids are the formats' own, and its directions bracket a value."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.support.rounding_model import Rounding, exact, model, noise, round_to, rounding

FORMATS = (ml_dtypes.bfloat16, np.float16)
SMALLEST = 2.0**-126
"""Float32's smallest normal number, below which JAX's arithmetic flushes to zero; so no gap of
the model's grids is smaller."""

each_format = pytest.mark.parametrize("dtype", FORMATS, ids=["bf16", "f16"])


def values(dtype: Any) -> np.ndarray:
    """Every finite number of a format, the midpoints between them, and what lies beside those.

    Below the number whose gap is float32's smallest normal one the model's grid is coarser.
    """
    info = ml_dtypes.finfo(dtype)
    bits = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        grid = bits.view(dtype).astype(np.float64)
    grid = np.unique(grid[np.isfinite(grid)])
    middles = ((grid[:-1] + grid[1:]) / 2).astype(np.float32)
    largest = np.float32(info.max)
    # to nearest, from the middle of the gap above the largest number on is infinite
    step = largest - np.float32(grid[-2])
    above = largest + step * np.asarray([0.25, 0.5, 0.75], np.float32)
    random = np.random.default_rng(0).integers(0, 1 << 32, 50_000, np.uint32).view(np.float32)
    random = random[np.isfinite(random)]
    found = np.concatenate([np.float32(grid), middles, above, -above, random])
    beside = [np.nextafter(found, np.float32(to)) for to in (-np.inf, np.inf)]
    found = np.concatenate([found, *beside, np.asarray([np.inf, -np.inf, np.nan], np.float32)])
    return found[np.isnan(found) | (np.abs(found) >= SMALLEST / float(info.eps)) | (found == 0)]


def rounded(x: np.ndarray, to: Rounding) -> np.ndarray:
    return np.asarray(round_to(x, to, np.int32(1)))


@each_format
def test_rounding_to_nearest_is_the_cast(dtype: Any):
    x = values(dtype)
    with np.errstate(over="ignore"):
        cast = x.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(rounded(x, rounding(dtype, -1.0)), cast)


@each_format
def test_directed_roundings_are_the_neighbours_on_both_sides(dtype: Any):
    x = values(dtype)
    x = x[np.isfinite(x)]
    down, up = rounded(x, rounding(dtype, 0.0)), rounded(x, rounding(dtype, 1.0))
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    inside = np.abs(x) <= largest
    assert np.all((down <= x)[inside])
    assert np.all((x <= up)[inside])
    on_grid = x[inside].astype(dtype).astype(np.float32) == x[inside]
    lower, upper = down[inside].astype(dtype), up[inside].astype(dtype)
    np.testing.assert_array_equal(lower[on_grid], upper[on_grid])
    np.testing.assert_array_equal(np.nextafter(lower, upper)[~on_grid], upper[~on_grid])
    assert np.all(np.isinf(up[x > largest]))
    assert np.all(down[x > largest] >= largest)


@each_format
def test_tiny_values_are_off_by_no_more_than_float32_flushes(dtype: Any):
    x = np.random.default_rng(0).uniform(-1, 1, 10_000).astype(np.float32) * np.float32(
        SMALLEST * 256
    )
    for up in (-1.0, 0.0, 1.0, 0.5):
        gap = max(SMALLEST, float(ml_dtypes.finfo(dtype).smallest_subnormal))
        assert np.max(np.abs(rounded(x, rounding(dtype, up)) - x)) <= gap


@each_format
def test_random_directions_are_drawn_evenly_and_by_position(dtype: Any):
    x = np.full(10_000, 1 + 2.0**-12, np.float32)
    first, second = (rounded(x, rounding(dtype, 0.5, seed)) for seed in (0, 1))
    for run in (first, second):
        assert 0.45 < np.mean(run > x) < 0.55
    assert 0.4 < np.mean(first == second) < 0.6


def test_the_exact_grid_changes_nothing_and_the_noise_is_16_units():
    x = values(np.float16)
    x = x[np.isnan(x) | (np.abs(x) > SMALLEST * 2**23) | (x == 0)]
    np.testing.assert_array_equal(rounded(x, exact()), x)
    x = x[np.isfinite(x) & (np.abs(x) < 1e30)]
    change = np.abs(rounded(x, noise(0)) - x)
    assert change.max() > 0
    assert np.all(change <= 16 * np.spacing(np.abs(x)))


def spread(fn: Any, args: Sequence[Any], dtype: Any) -> list[np.ndarray]:
    run = jax.jit(model(jax.make_jaxpr(fn)(*args)))
    grids = [rounding(dtype, up, seed) for seed, up in enumerate((-1.0, 0.0, 1.0))]
    return [np.asarray(run(grid, noise(0), *args)[0]) for grid in grids]


def test_a_product_is_rounded_and_what_is_not_one_is_not():
    x = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    for fn, least, most in (
        (lambda x: x @ x, 2.0**-9, 2.0**-6),
        (lambda x: jnp.tanh(x) * x, 0.0, 2.0**-18),
        # operands that bfloat16 holds
        (lambda x: jnp.round(x) @ jnp.round(x), 0.0, 2.0**-18),
    ):
        nearest, down, up = spread(fn, [x], jnp.bfloat16)
        exactly = np.asarray(fn(x))
        for run in (nearest, down, up):
            off = np.linalg.norm(run - exactly) / np.linalg.norm(exactly)
            assert least <= off <= most
