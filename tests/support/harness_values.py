"""Whether a policy's results are as near to the plain program's as its roundings allow."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import precpass as pp
from tests.support.passes import ALWAYS_LOW

FACTOR = 2.0
"""A result may be this much further from float32's than the worst run of the model."""
NOISE = 2.0**-20
"""What float32 itself may add, relative to a result's norm: 16 of its units."""


@np.errstate(all="ignore")
def compare(policy: Any, plain: Any, got: Any, counts: Counter[str]) -> list[str]:
    """What is wrong with a policy's results, against those of a `harness_checks.Plain`.

    Results that are equal, or off by one rounding to the policy's low format, pass at
    once; the runs of the model decide on the others.
    """
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(plain.result), strict=True)
    found: list[str] = []
    for i, (x, y) in enumerate(pairs):
        a, b, what = to_numpy(x), to_numpy(y), f"result {i}"
        if a.shape != b.shape or a.dtype != b.dtype:
            found.append(f"{what} is {a.dtype}{a.shape}, not {b.dtype}{b.shape}")
        elif a.tobytes() == b.tobytes():
            counts["results equal"] += 1
        elif policy is pp.AlwaysF32:
            counts["results compared with the float32 program"] += 1
            first, others = plain.wide()
            found += _as_accurate(a, b, first[i], [run[i] for run in others], what)
        elif _off_by_one_rounding(a, b, policy.low.unit_roundoff):
            counts["results within one rounding"] += 1
        else:
            counts["results within the model's error"] += 1
            runs = [run[i] for run in plain.rounded(policy)]
            found += _within(a, b, runs, what, policy not in ALWAYS_LOW, counts)
    return found


def _off_by_one_rounding(a: np.ndarray, b: np.ndarray, unit: float) -> bool:
    """Whether two arrays are non-finite alike and differ by no more than a unit of their norm."""
    if not is_inexact(b):
        return False
    a, b = wide_numpy(a), wide_numpy(b)
    at = np.isfinite(b)
    alike = bool(np.all(at | _same_bits(a, b)))
    return alike and bool(np.all(np.isfinite(a[at]))) and norm((a - b)[at]) <= unit * norm(b[at])


def _within(
    a: np.ndarray,
    b: np.ndarray,
    runs: list[np.ndarray],
    what: str,
    strict: bool,
    counts: Counter[str],
) -> list[str]:
    """Whether `a` is as near to `b` as the model's runs are."""
    if not is_inexact(b):
        settled = np.ones(b.shape, bool) if strict else np.all([r == b for r in runs], axis=0)
        wrong = int(np.sum((a != b) & settled))
        return [f"{what}: {wrong} of {b.size} integers or booleans differ"] if wrong else []
    a, b, *runs = (wide_numpy(x) for x in (a, b, *runs))
    finite = np.isfinite(b)
    modelled = finite & np.all([np.isfinite(r) for r in runs], axis=0)
    lost = int(np.sum((finite if strict else modelled) & ~np.isfinite(a)))
    if lost:
        return [f"{what}: {lost} of {b.size} values are no longer finite"]
    agreed = ~finite & np.all([_same_bits(r, b) for r in runs], axis=0)
    if not np.all(_same_bits(a, b)[agreed]):
        return [f"{what}: an infinity or NaN of the plain program is another value"]
    at = modelled & np.isfinite(a)
    size = norm(b[at])
    bound = FACTOR * max(norm((r - b)[at]) for r in runs) + NOISE * size + _tiny(b)
    error = norm((a - b)[at])
    counts["results with a bound above a tenth"] += bool(bound > 0.1 * size)
    ok = error <= bound
    return [] if ok else [f"{what}: error {error:.3g} > {bound:.3g}, of a norm of {size:.3g}"]


def _as_accurate(
    a: np.ndarray, b: np.ndarray, wide: np.ndarray, noisy: list[np.ndarray], what: str
) -> list[str]:
    """Whether `a` is as near to `wide` as `b` is, or as one rounding is."""
    if not is_inexact(b):
        settled = np.all([r == wide for r in noisy], axis=0)
        wrong = int(np.sum((a != wide) & (a != b) & settled))
        return [f"{what}: {wrong} of {b.size} integers or booleans differ"] if wrong else []
    unit = float(jnp.finfo(b.dtype).eps) / 2
    rounded = wide_numpy(wide.astype(b.dtype))
    a, b, wide, *noisy = (wide_numpy(x) for x in (a, b, wide, *noisy))
    expected = np.isfinite(rounded) & np.isfinite(wide)
    if not np.all(np.isfinite(a[expected & np.isfinite(b)])):
        return [f"{what}: values are no longer finite"]
    at = expected & np.isfinite(a) & np.isfinite(b)
    at &= np.all([np.isfinite(r) for r in noisy], axis=0)
    slack = FACTOR * max(norm((r - wide)[at]) for r in noisy) + NOISE * norm(wide[at]) + _tiny(b)
    error, plain_error = norm((a - wide)[at]), norm((b - wide)[at])
    bound = max(plain_error, unit * norm(wide[at])) + slack
    return [] if error <= bound else [f"{what}: error {error:.3g} > {bound:.3g}"]


def _tiny(x: np.ndarray) -> float:
    """What flushing to zero below the smallest normal number may add."""
    return float(2.0**-125 * np.sqrt(max(x.size, 1)))


def _same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a == b) | (np.isnan(a) & np.isnan(b))


def norm(x: np.ndarray) -> float:
    """The 2-norm, without overflow."""
    largest = float(np.max(np.abs(x), initial=0.0))
    return largest * float(np.linalg.norm((x / largest).ravel())) if largest else 0.0


def is_inexact(x: np.ndarray) -> bool:
    """Whether an array is floating or complex, ml_dtypes' types included."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def to_numpy(x: Any) -> np.ndarray:
    """An array's elements; a key's bits."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def wide_numpy(x: np.ndarray) -> np.ndarray:
    """Floats as float64, complex numbers as complex128."""
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
