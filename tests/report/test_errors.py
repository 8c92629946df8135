"""Errors against a reference, and the reference: the function evaluated in float64."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import precpass as pp
from precpass.jit.arguments import Declared
from precpass.report.compare.errors import Leaf, as_written, error_of, errors_of, evaluated, ulp

F32, BF16, F16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
RNG = np.random.default_rng(0)


def errors(got: Any, want: Any, dtype: Any = F32) -> Any:
    return error_of([Leaf("x", np.asarray(got), dtype)], [Leaf("x", np.asarray(want), dtype)])


# ---------------------------------------------------------------- figures


@pytest.mark.parametrize("dtype", [F32, F16, BF16, np.dtype(np.float64)], ids=str)
def test_an_ulp_is_the_distance_to_the_next_larger_number(dtype):
    exponents = RNG.integers(-20, 15, 200)
    some = RNG.standard_normal(200) * 2.0**exponents
    tiny = float(ml_dtypes.finfo(dtype).smallest_normal)
    edges = [1.0, 2.0, -4.0, 0.0, tiny, tiny / 2, tiny * 1.5, 0.999]
    x = np.concatenate([some, edges]).astype(dtype)
    larger = np.nextafter(np.abs(x), np.asarray(np.inf, dtype))
    want = larger.astype(np.float64) - np.abs(x).astype(np.float64)
    np.testing.assert_array_equal(ulp(x.astype(np.float64), dtype), want)
    if dtype != BF16:
        np.testing.assert_array_equal(ulp(x.astype(np.float64), dtype), np.spacing(np.abs(x)))


def test_the_figures_are_those_of_their_definitions():
    want = RNG.standard_normal((7, 5))
    got = (want + 1e-3 * RNG.standard_normal((7, 5))).astype(F32)
    found, d = errors(got, want), got - want
    assert found.relative == pytest.approx(np.linalg.norm(d) / np.linalg.norm(want))
    units = np.abs(d) / np.spacing(np.abs(want).astype(F32)).astype(np.float64)
    # float32's rounding of the reference can step over a power of two
    assert found.max_ulp == pytest.approx(units.max(), rel=1e-12)
    assert found.sqnr == pytest.approx(20 * np.log10(np.linalg.norm(want) / np.linalg.norm(d)))
    cosine = np.vdot(got, want) / np.linalg.norm(got.astype(np.float64)) / np.linalg.norm(want)
    assert found.cosine == pytest.approx(cosine, abs=1e-15)
    assert (found.nonfinite, found.differing) == (0, 0)


def test_rounding_to_a_format_is_half_an_ulp_of_it():
    want = RNG.standard_normal(1000)
    for dtype in (F32, F16, BF16):
        found = errors(want.astype(dtype), want, dtype)
        assert 0.4 < found.max_ulp <= 0.5
        # in another format the same numbers are as far in its own units
        wide = errors(want.astype(dtype), want, np.dtype(np.float64))
        assert wide.max_ulp > 2**20
        assert wide.relative == found.relative


def test_leaves_count_together_and_large_numbers_do_not_overflow():
    want = [1e200 * RNG.standard_normal(4), RNG.standard_normal((2, 2))]
    got = [w * 1.01 for w in want]
    f64 = np.dtype(np.float64)
    leaves = [[Leaf("x", x, f64) for x in xs] for xs in (got, want)]
    found = error_of(*leaves)
    assert found.relative == pytest.approx(0.01)
    assert found.sqnr == pytest.approx(40.0)
    assert found.cosine == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("got", "want", "figures"),
    [
        ([0.0, 0.0], [0.0, 0.0], (0.0, 0.0, math.inf, 1.0)),
        ([1.0, 0.0], [0.0, 0.0], (math.inf, 2.0**24, -math.inf, 0.0)),
        ([0.0, 0.0], [1.0, 0.0], (1.0, 2.0**23, 0.0, 0.0)),
        ([2.0], [2.0], (0.0, 0.0, math.inf, 1.0)),
        ([-2.0], [2.0], (2.0, 2.0**24, -20 * math.log10(2), -1.0)),
        ([math.nan, 1.0], [math.nan, 1.0], (0.0, 0.0, math.inf, 1.0)),
        ([math.inf, 1.0], [1e39, 1.0], (0.0, 0.0, math.inf, 1.0)),  # no float32 is 1e39
        ([], [], (None, None, None, None)),
    ],
)
def test_zero_empty_and_non_finite_references(got, want, figures):
    found = errors(np.asarray(got, F32), np.asarray(want, np.float64))
    assert (found.relative, found.max_ulp, found.sqnr, found.cosine) == figures
    assert found.nonfinite == 0


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_an_error_in_ulp_ends_where_no_digit_is_right(dtype):
    """In units of a tiny reference an error would have forty digits, which say nothing."""
    most = 2 / float(jnp.finfo(dtype).eps)
    assert errors(np.asarray([0.25], dtype), [1e-30], dtype).max_ulp == most
    assert errors(np.asarray([0.25], dtype), [0.0], dtype).max_ulp == most
    assert errors(np.asarray([0.5], dtype), [1.0], dtype).max_ulp == most / 4


def test_what_is_not_finite_where_the_reference_is():
    found = errors(np.asarray([math.nan, 1.0, -math.inf, math.inf], F32), [1.0, 1.0, 2.0, math.nan])
    assert found.nonfinite == 2
    assert (found.relative, found.max_ulp, found.sqnr) == (math.inf, math.inf, -math.inf)
    assert found.cosine is not None
    assert math.isnan(found.cosine)


def test_the_errors_of_each_leaf_are_those_of_it_alone():
    f64 = np.dtype(np.float64)
    want = [Leaf("a", RNG.standard_normal(9), f64), Leaf("n", np.arange(3), np.dtype(int))]
    want += [Leaf("b", np.full(3, 1e-200), f64), Leaf("none", np.asarray([math.nan]), f64)]
    got = [leaf._replace(value=leaf.value + 0.5 * abs(leaf.value)) for leaf in want]
    together, each = errors_of(got, want)
    assert together == error_of(got, want)
    assert each == [error_of([g], [w]) for g, w in zip(got, want, strict=True)]
    assert [e.relative for e in each] == [pytest.approx(0.5), None, pytest.approx(0.5), None]
    assert [e.differing for e in each] == [0, 2, 0, 0]


def test_integers_and_booleans_that_differ_are_counted():
    leaves = [
        [Leaf("n", np.asarray([1, 2, 3]), np.dtype(int)), Leaf("b", np.asarray([True]), bool)],
        [Leaf("n", np.asarray([1, 5, 4]), np.dtype(int)), Leaf("b", np.asarray([False]), bool)],
    ]
    found = error_of(*leaves)
    assert found.differing == 3
    assert found.relative is None


def test_complex_numbers_count_as_pairs():
    want = RNG.standard_normal(6) + 1j * RNG.standard_normal(6)
    got = want.astype(np.complex64)
    found = errors(got, want, np.dtype(np.complex64))
    assert found.relative == pytest.approx(np.linalg.norm(got - want) / np.linalg.norm(want))
    assert 0 < found.max_ulp <= 0.5


# ---------------------------------------------------------------- the reference


def values_of(
    fn: Callable[..., Any], *args: Any, precision: Any = pp.types.Precision.F64
) -> list[Any]:
    mixed = pp.auto_mixed(fn)
    written = as_written(mixed, Declared(mixed.__wrapped__, {}), "fn", args, {})
    return [leaf.value for leaf in evaluated(written, precision)]


X = jnp.asarray(RNG.standard_normal((6, 6)) / 3, jnp.float32)
WIDE = np.asarray(X, np.float64)


def kept(x):
    with pp.keep("f32"):
        x = x @ x
    with pp.keep("bf16"):
        x = x @ x
    with pp.keep("f64"):
        return x @ x


def kept_wide():
    return np.linalg.matrix_power(WIDE, 8)


def scanned(x):
    return lax.scan(lambda c, w: (jnp.tanh(c @ x + w), None), x, jnp.stack([x, x]))[0]


def scanned_wide():
    c = WIDE
    for _ in range(2):
        c = np.tanh(c @ WIDE + WIDE)
    return c


def looped(x):
    def ends(c):
        return jnp.sum(c[1]) < 1e3

    return lax.while_loop(ends, lambda c: (c[0] + 1, c[1] * 1.5 + 0.1), (0, x * x))


def looped_wide():
    n, c = 0, WIDE * WIDE
    while c.sum() < 1e3:
        # the constants are float32's
        n, c = n + 1, c * 1.5 + float(np.float32(0.1))
    return n, c


def branched(x):
    return lax.cond(x[0, 0] > 100, lambda x: x, lambda x: jnp.exp(x) @ x, x)


def remat(x):
    return jnp.sin(x @ x).sum()


def remat_wide():
    c = np.cos(WIDE @ WIDE)
    return c @ WIDE.T + WIDE.T @ c


def factor(x):
    return jnp.linalg.cholesky(x @ x.T + jnp.eye(6))


def with_effects(x):
    def step(c, _):
        c = jnp.sin(c @ x)
        jax.debug.callback(lambda c: None, c, ordered=True)
        return c, None

    return lax.scan(step, x, length=3)[0]


def with_effects_wide():
    c = WIDE
    for _ in range(3):
        c = np.sin(c @ WIDE)
    return c


@jax.custom_jvp
def cubed(x):
    return x @ x @ x


@cubed.defjvp
def _(primals, tangents):
    return cubed(*primals), 3.0 * (primals[0] @ tangents[0])


PROGRAMS: list[tuple[str, Callable[..., Any], Callable[[], Any]]] = [
    ("product", lambda x: jnp.exp(x @ x).sum(), lambda: np.exp(WIDE @ WIDE).sum()),
    ("written low", lambda x: (x.astype(BF16) @ x.astype(BF16)).astype(F32), lambda: WIDE @ WIDE),
    ("spelled out", lambda x: jnp.asarray(x, F32) * F32.type(2), lambda: WIDE * 2),
    ("low throughout", lambda x: (x.astype(F16) + 1).astype(BF16), lambda: WIDE + 1),
    ("kept", kept, kept_wide),
    ("kept inside jit", jax.jit(kept), kept_wide),
    ("inner policy", pp.auto_mixed(lambda x: x @ x, policy=pp.AlwaysF16), lambda: WIDE @ WIDE),
    ("around one", lambda x: pp.auto_mixed(kept, policy="AlwaysBf16")(x), kept_wide),
    ("scan", scanned, scanned_wide),
    ("while", looped, looped_wide),
    ("cond", branched, lambda: np.exp(WIDE) @ WIDE),
    ("effects", with_effects, with_effects_wide),
    ("custom_jvp", cubed, lambda: WIDE @ WIDE @ WIDE),
    ("its gradient", jax.grad(lambda x: cubed(x).sum()), lambda: 3 * WIDE.T @ np.ones((6, 6))),
    ("remat", jax.grad(jax.checkpoint(remat)), remat_wide),
    ("cholesky", factor, lambda: np.linalg.cholesky(WIDE @ WIDE.T + np.eye(6))),
    ("sort", lambda x: jnp.sort(x @ x), lambda: np.sort(WIDE @ WIDE)),
]


@pytest.mark.release(keep=2)
@pytest.mark.parametrize(("fn", "want"), [p[1:] for p in PROGRAMS], ids=[p[0] for p in PROGRAMS])
def test_the_whole_function_is_evaluated_in_float64(fn, want):
    found, expected = values_of(fn, X), jax.tree.leaves(want())
    assert len(found) == len(expected)
    for got, exact in zip(found, expected, strict=True):
        if np.issubdtype(got.dtype, np.integer):
            assert got == exact
        else:
            assert got.dtype == np.float64
            np.testing.assert_allclose(got, exact, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["written low", "low throughout", "inner policy", "around one"])
def test_in_float32_no_low_format_and_no_policy_is_left(name):
    ((fn, want),) = [program[1:] for program in PROGRAMS if program[0] == name]
    (found,) = values_of(fn, X, precision=pp.types.Precision.F32)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, want(), rtol=1e-5, atol=1e-6)


def test_samplers_draw_the_numbers_that_the_function_draws():
    def fn(key, x):
        return jax.random.normal(key, (6, 6)) @ x

    key = jax.random.key(3)
    drawn = np.asarray(jax.random.normal(key, (6, 6)), np.float64)
    (found,) = values_of(fn, key, X)
    np.testing.assert_allclose(found, drawn @ WIDE, rtol=1e-12, atol=1e-13)


def test_python_numbers_are_read_as_the_function_reads_them():
    (found,) = values_of(lambda x, a: x * a, X, 0.1)
    np.testing.assert_array_equal(found, WIDE * float(np.float32(0.1)))


def test_with_x64_on_float64_values_are_themselves():
    with jax.enable_x64(True):
        wide = jnp.asarray(WIDE)
        values = values_of(lambda x, y: (x @ x, y @ y), wide, X)
    assert len(values) == 2
    for got in values:
        np.testing.assert_allclose(got, WIDE @ WIDE, rtol=1e-13, atol=1e-14)


def test_a_function_that_cannot_run_in_float64_says_what_else_there_is(monkeypatch):
    def fails(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError("no float64 on this backend")

    monkeypatch.setattr("precpass.report.compare.errors.make_plan", fails)
    with pytest.raises(RuntimeError, match=r"no float64 on this backend.*reference='f32'"):
        values_of(lambda x: x @ x, X)
