"""Runs a test session with `jax.jit` replaced, and comparisons as wide as the format is.

pytest loads it (`-p suites_plugin`) before any library, so that what a library imports as
`jax.jit` is the replacement. PRECPASS_SUITE names the policy; with "plain" nothing is replaced.
"""

import functools
import os
import sys
import unittest

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precpass as pp
import precpass.api  # while `jax.jit` is JAX's own

POLICY = os.environ.get("PRECPASS_SUITE", "plain")

# a few roundings of bfloat16, whose unit roundoff is 2^-8 = 0.0039, in a row
RELATIVE = ABSOLUTE = 0.05


plain_jit = jax.jit


def mixed_jit(fun=None, /, **options):
    """`jax.jit` as the policy has it, and as it is for JAX and the pass themselves."""
    if fun is None:
        return functools.partial(mixed_jit, **options)
    caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
    if caller in ("jax", "precpass"):
        return plain_jit(fun, **options)
    return pp.auto_mixed(fun, policy=POLICY, **options)


def is_floating(x):
    try:
        return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    except TypeError:  # a tree, or an object
        return False


def is_extended(x):
    """Whether a value is an array of keys, which NumPy cannot convert."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def widened(compare, *, exact=False):
    """A comparison of arrays within the format's tolerance, where either is floating."""
    wide = np.allclose if compare in (np.allclose, jnp.allclose) else np.testing.assert_allclose

    @functools.wraps(compare)
    def compared(actual, desired, *args, **kwargs):
        extended = any(is_extended(x) for x in (actual, desired))
        if extended or (exact and not (is_floating(actual) or is_floating(desired))):
            return compare(actual, desired, *args, **kwargs)
        one, other = (np.asarray(x) for x in (actual, desired))
        if not (is_floating(one) or is_floating(other)):
            return compare(actual, desired, *args, **kwargs)
        if jnp.issubdtype(one.dtype, jnp.floating):  # numpy compares no bfloat16
            one, other = one.astype(np.float64), other.astype(np.float64)
        finite = np.abs(other[np.isfinite(other)])
        atol = ABSOLUTE * max(1.0, float(finite.max(initial=0.0)))
        # a test that allows more keeps what it allows
        own = (kwargs.get(name) or 0 for name in ("rtol", "atol"))
        rtol, atol = map(max, (RELATIVE, atol), own)
        return wide(one, other, rtol=rtol, atol=atol, equal_nan=True)

    return compared


def widen_comparisons():
    for name in ("assert_allclose", "assert_array_almost_equal", "assert_almost_equal"):
        setattr(np.testing, name, widened(getattr(np.testing, name)))
    for name in ("assert_array_equal", "assert_equal"):
        setattr(np.testing, name, widened(getattr(np.testing, name), exact=True))
    np.allclose, jnp.allclose = widened(np.allclose), widened(jnp.allclose)

    def almost_equal(self, first, second, places=None, msg=None, delta=None):
        delta = max(delta or 0.0, ABSOLUTE * max(1.0, abs(float(second))))
        if not abs(float(first) - float(second)) <= delta:
            self.fail(msg or f"{first} != {second} within {delta}")

    unittest.TestCase.assertAlmostEqual = almost_equal


if POLICY != "plain":
    jax.jit = mixed_jit
    if POLICY != "AlwaysF32":
        widen_comparisons()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "ignore::precpass.PrecisionWarning")
