"""Comparing values, avals and reports of two runs of a program."""

import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import precpass as pp
from tests.support.jaxprs import opened, walk
from tests.support.kernels import LOW


def has_user_line(eqn: Any) -> bool:
    """Whether JAX recorded a line of the user's; it records no deep stack to its end."""
    traceback = eqn.source_info.traceback
    own = (os.path.dirname(jax.__file__), os.path.dirname(pp.__file__))
    return traceback is not None and any(not f.file_name.startswith(own) for f in traceback.frames)


def numeric(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def finite(values: Sequence[Any]) -> bool:
    return all(np.isfinite(np.asarray(x, np.complex128)).all() for x in values if numeric(x))


def distance(a: Any, b: Any) -> float:
    """The norm of the difference; infinite for infinities, NaNs, and integers that differ."""
    if not numeric(b):
        return 0.0 if np.array_equal(bits_of(a), bits_of(b)) else math.inf
    a, b = (np.asarray(x, np.complex128) for x in (a, b))
    found = float(np.linalg.norm((a - b).ravel()))
    return math.inf if math.isnan(found) else found


def size(x: Any) -> float:
    return float(np.linalg.norm(np.asarray(x, np.complex128).ravel()))


def bits_of(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    # a NaN is a NaN; -0 is 0: XLA and numpy choose among equals differently
    return np.where(np.isnan(x), np.nan, x) + 0 if numeric(x) else x


def assert_same(a: Any, b: Any, what: str) -> None:
    assert (a.shape, a.dtype) == (b.shape, b.dtype), what
    assert np.asarray(bits_of(a)).tobytes() == np.asarray(bits_of(b)).tobytes(), f"{what}: {a} {b}"


def same_avals(got: Any, want: Any) -> None:
    for a, b in zip(
        (*opened(got).invars, *opened(got).outvars),
        (*opened(want).invars, *opened(want).outvars),
        strict=True,
    ):
        assert a.aval.strip_weak_type() == b.aval.strip_weak_type(), f"{a.aval} for {b.aval}"
        weak = [getattr(v.aval, "weak_type", False) for v in (a, b)]
        assert weak[0] == weak[1], f"weak types {weak}"


def same_reports(got: Sequence[Any], want: Sequence[Any], exact: bool) -> None:
    """The same reports in the same order; values that low products reach only where exact."""
    assert [r[0] for r in got] == [r[0] for r in want], "other effects, or in another order"
    for a, b in zip(got, want, strict=True):
        for x, y in zip(a[1:], b[1:], strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            if exact:
                assert_same(x, y, "a report")


def fits(x: Any, precision: pp.types.Precision, eqn: Any) -> None:
    """What a product may read low: nothing that overflows, no position that is lost."""
    wide = np.asarray(x, np.float64)
    wide = wide[np.isfinite(wide)]
    largest = np.abs(wide).max(initial=0.0)
    assert largest <= precision.max, f"{largest:.3g} overflows in {precision}: {eqn}"
    # above float32's own integers every number is one, and what has been rounded loses nothing
    counts = precision.exact_integers < largest <= pp.types.Precision.F32.exact_integers
    counts = counts and bool((wide.astype(precision.dtype) != wide).any())
    whole = counts and np.unique(wide).size > 1 and bool((wide == np.rint(wide)).all())
    assert not whole, f"integers up to {largest}, lost in {precision}: {eqn}"


def low_sums(jaxpr: Any, names: Sequence[str]) -> int:
    return sum(
        e.primitive.name in names and any(v.aval.dtype in LOW for v in e.outvars)
        for e in walk(jaxpr)
    )
