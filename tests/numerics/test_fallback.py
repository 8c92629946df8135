"""Fallback: every check fires on a program built to fire it, and is quiet on one built not to."""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import precpass as pp
from precpass.numerics.checks import condition_number
from tests.support.float64_programs import X, assert_float64, fragile, in_float64
from tests.support.jaxprs import low_products, products
from tests.support.passes import quiet
from tests.support.values import normal, rel_error

pytestmark = pytest.mark.programs

f32 = jnp.float32
W, V = jnp.asarray(normal(0, 8, 8)), jnp.asarray(normal(1, 8))


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(w @ x)


def hilbert(n: int) -> np.ndarray:
    """The matrix of 1 / (i + j + 1), whose condition number grows as 33^n (Todd 1954)."""
    i = np.arange(n)
    return (1 / (i[:, None] + i + 1)).astype(np.float32)


def rungs_of(report: Any) -> Any:
    return np.asarray(report.rung).tolist()


# ---------------------------------------------------------------- checks

BIG = jnp.full((8,), 1e5)
CHECKS: dict[str, tuple[Any, Any, tuple[Any, ...], tuple[Any, ...], str]] = {
    "non-finite": (
        lambda w, x: w @ x,
        pp.numerics.NonFinite(),
        (jnp.eye(8), V),
        (jnp.eye(8), BIG),
        "f16: values not finite: 8",
    ),
    "out of range": (
        lambda w, x: w @ x,
        pp.numerics.OutOfRange(10.0),
        (jnp.eye(8), jnp.full((8,), 9.5)),
        (jnp.eye(8), jnp.full((8,), 11.0)),
        "f16: a magnitude of 11, above 10",
    ),
    "out of range, NaN": (
        lambda w, x: w @ x,
        pp.numerics.OutOfRange(10.0),
        (jnp.eye(8), V),
        (jnp.eye(8), V * jnp.nan),
        "f16: a magnitude of nan, above 10",
    ),
    "function": (
        layer,
        lambda out: jnp.any(out < -0.99),
        (W * 0, V),
        (W * 0 - 1, jnp.ones(8)),
        "f16: <lambda>",
    ),
    "predicate of the arguments": (
        layer,
        pp.numerics.Predicate(
            lambda out, w, x: jnp.any(x > 4), takes_args=True, name="x above {4}"
        ),
        (W, V),
        (W, V + 9),
        "f16: x above {4}",
    ),
    "condition": (
        layer,
        pp.numerics.IllConditioned("w"),
        (jnp.eye(8), V),
        (jnp.diag(jnp.asarray([1.0] * 7 + [2.0**-8])), V),
        "f16: a condition number of 256 leaves less than 1 digit",
    ),
    "condition of a function": (
        layer,
        pp.numerics.IllConditioned(lambda w, x: w.T @ w, digits=0),
        (jnp.eye(8), V),
        (jnp.diag(jnp.asarray([1.0] * 7 + [2.0**-6])), V),
        "f16: a condition number of 4.1e+03 leaves less than 0 digits",
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_fires_where_it_is_to_and_is_quiet_elsewhere(name: str):
    fn, check, calm, bad, said = CHECKS[name]
    guarded = pp.with_fallback(fn, ("f16", "f32"), check)
    _, report = guarded(*calm)
    assert rungs_of(report) == 0 and bool(report.stable) and not report.fired.any()
    assert str(report) == "f16"
    _, report = guarded(*bad)
    assert rungs_of(report) == 1 and bool(report.fired[0, 0])
    assert said in str(report)


def test_several_checks_are_told_apart():
    checks = [pp.numerics.OutOfRange(10.0), pp.numerics.NonFinite(), lambda out: out[0] > 100]
    guarded = pp.with_fallback(lambda w, x: w @ x, ("f16", "f32"), checks)
    out, report = guarded(jnp.ones((8, 8)), BIG)
    assert report.fired.tolist() == [[True, True, True], [True, False, True]]
    # the last rung reports what fires there too
    assert not report.stable and rungs_of(report) == 1
    assert out.tolist() == [8e5] * 8
    assert report.evidence[1].tolist() == [8e5, 0.0, 1.0]
    assert str(report) == (
        "f32 [f16: a magnitude of inf, above 10, values not finite: 8, <lambda>; "
        "f32: a magnitude of 8e+05, above 10, <lambda>]"
    )


def test_a_limit_is_not_rounded_to_the_format_of_the_result():
    def fires(limit: float, x: Any) -> bool:
        guarded = pp.with_fallback(lambda x: x * 1, ("f32", "f64"), pp.numerics.OutOfRange(limit))
        return not bool(guarded(x)[1].stable)

    for infinite in (jnp.float16(jnp.inf), jnp.float32(jnp.inf)):
        assert fires(1e5, infinite) and fires(1e39, infinite) and fires(10**40, infinite)
    # bfloat16 has 1000 and 1004, and between them nothing
    assert fires(1002, jnp.bfloat16(1004)) and not fires(1003, jnp.bfloat16(1000))
    assert fires(1001, jnp.bfloat16(1004))


def test_the_default_check_is_that_of_finite_values():
    _, report = pp.with_fallback(layer)(W, V * jnp.nan)
    assert rungs_of(report) == 2 and report.fired[:, 0].all()


# ---------------------------------------------------------------- rungs


def test_every_rung_is_the_pass_in_its_precision():
    for ladder in (("bf16", "f32", "f64"), (pp.types.Precision.F16, "AlwaysF32", jnp.float64)):
        guarded = pp.with_fallback(layer, ladder, lambda out: out[0] < 2)
        jaxpr = jax.make_jaxpr(guarded)(W, V)
        kinds = [str(e.invars[0].aval.dtype) for e in products(jaxpr)]
        low = "bfloat16" if ladder[0] == "bf16" else "float16"
        assert sorted(kinds) == sorted([low, "float32", "float64"])
        assert len(low_products(jaxpr)) == 1


def variance(x: Any) -> Any:
    """Of each column, by the formula that loses the digits that both means have in common."""
    return jnp.diagonal(x.T @ x) / len(x) - jnp.mean(x, 0) ** 2


SAMPLES = np.asarray(4096 + normal(2, 64), np.float32)[:, None] * np.float32([1, -1])


def test_a_variance_with_cancellation_is_right():
    """What two rungs give is all rounding: the digits of x^2 are beyond float32."""
    want = np.var(SAMPLES.astype(np.float64), 0)
    low, mid = (pp.auto_mixed(variance, policy=p)(SAMPLES) for p in ("AutoMixedBf16", "AlwaysF32"))
    assert (abs(low - want) > 100 * want).all() and (abs(mid - want) > 0.1 * want).all()

    def noisy(out: Any, x: Any) -> Any:
        return (jnp.abs(out / jnp.var(x, 0) - 1) > 1e-3).any()

    check = pp.numerics.Predicate(noisy, takes_args=True)
    value, report = pp.with_fallback(variance, unstable=check)(SAMPLES)
    assert rungs_of(report) == 2 and value.dtype == f32
    np.testing.assert_allclose(value, want, rtol=1e-6)


def test_a_hilbert_system_is_solved_in_float64():
    a, b = hilbert(8), np.ones(8, np.float32)
    want = np.linalg.solve(a.astype(np.float64), b.astype(np.float64))
    assert rel_error(jnp.linalg.solve(a, b), want) > 0.01
    solve = pp.with_fallback(jnp.linalg.solve, ("f32", "f64"), pp.numerics.IllConditioned("a"))
    x, report = solve(a, b)
    assert rungs_of(report) == 1 and report.stable and report.evidence[0, 0] > 3e9
    assert rel_error(x, want) < 2.0**-23
    _, report = solve(a + np.eye(8, dtype=np.float32), b)
    assert rungs_of(report) == 0


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("x64", [False, True])
def test_a_condition_number_is_that_of_numpy(x64: bool):
    well, ill = normal(3, 7, 7).astype(np.float32), hilbert(7)
    sizes = np.float32([1e30, 1e-30])
    known = np.stack([well, well.T, well * sizes[0], well * sizes[1], ill])
    bad = np.stack([well * 0, well * np.nan])
    with jax.enable_x64(x64):
        found = jax.jit(jax.vmap(condition_number))(np.concatenate([known, bad])).tolist()
        want = [np.linalg.cond(a.astype(np.float64), 1) for a in known]
        np.testing.assert_allclose(found[:5], want, rtol=1e-3)
        assert found[5:] == [np.inf] * 2
        # of a batch it is the largest
        largest = jax.jit(condition_number)(known)
        assert largest.dtype == f32
        np.testing.assert_allclose(largest, max(want), rtol=1e-3)


# ---------------------------------------------------------------- transforms


def test_a_float64_rung_is_float64_with_x64_off():
    """A program that loses five digits in float32: values and derivatives, to second order."""

    def fn(x: Any) -> Any:
        return jnp.sum(fragile(x) ** 2)

    want = in_float64(lambda x: (fn(x), jax.grad(fn)(x), jax.hessian(fn)(x)), X)
    guarded = pp.with_fallback(fn, ("f32", "f64"), lambda out: out > 0)

    def first(x: Any) -> Any:
        return guarded(x)[0]

    got = jax.jit(lambda x: (first(x), jax.grad(first)(x), jax.hessian(first)(x)))(X)
    assert_float64(got, want)
    assert rel_error(jax.jit(fn)(X), want[0]) > 1e-4
    tangent = jax.jvp(first, (X,), (X,))[1]
    assert_float64(tangent, in_float64(lambda x: jax.jvp(fn, (x,), (x,))[1], X))


def test_x64_on_gives_float64_results_and_lowers_float64_products():
    with jax.enable_x64(True):
        w, x = np.asarray(W, np.float64), np.asarray(V, np.float64)
        taken, report = pp.with_fallback(layer, unstable=lambda out: out[0] < 2)(w, x)
        assert taken.dtype == np.float64 and rungs_of(report) == 2
        np.testing.assert_allclose(taken, np.tanh(w @ x), rtol=1e-14)
        low, report = pp.with_fallback(layer)(w, x)
        assert low.dtype == np.float64 and rungs_of(report) == 0
        assert 1e-4 < rel_error(low, np.tanh(w @ x)) < 0.05
        jaxpr = jax.make_jaxpr(pp.with_fallback(layer))(w, x)
        kinds = sorted(str(e.invars[0].aval.dtype) for e in products(jaxpr))
        assert kinds == ["bfloat16", "float32", "float64"]


@pytest.mark.parametrize("rung", [0, 1, 2])
def test_the_rung_that_is_taken_is_differentiated(rung: int):
    names = ("bf16", "f32", "f64")

    def fires(out: Any, w: Any, x: Any, n: Any) -> Any:
        return n > 0

    def body(w: Any, x: Any, n: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            return jax.checkpoint(layer)(w, c), None

        return lax.cond(x[0] > 9, lambda: x, lambda: lax.scan(step, x, None, length=3)[0])

    # rungs below the one wanted fire by what they are given
    ladder = names[: rung + 1] if rung else names[:2]
    guarded = pp.with_fallback(body, ladder, pp.numerics.Predicate(fires, takes_args=True))
    n = jnp.int32(rung)

    def total(w: Any) -> Any:
        out, report = guarded(w, V, n)
        return jnp.sum(out), report.rung

    got, taken = jax.jit(jax.grad(total, has_aux=True))(W)
    assert int(taken) == rung
    policy = (pp.AutoMixedBf16, pp.AlwaysF32, pp.AlwaysF32)[rung]
    alone = pp.auto_mixed(body, policy=policy)
    want = jax.jit(jax.grad(lambda w: jnp.sum(alone(w, V, n))))(W)
    tolerance = 1e-6 if rung < 2 else 1e-5
    assert rel_error(got, want) < tolerance
    if rung == 0:
        exact = jax.jit(jax.grad(lambda w: jnp.sum(body(w, V, n))))(W)
        assert rel_error(got, exact) > 1e-4


def test_under_vmap_and_scan_each_has_its_own_rung():
    guarded = pp.with_fallback(layer, ("bf16", "f64"), pp.numerics.OutOfRange(0.5))
    xs = jnp.stack([V * 0, V, V * 0])
    for run in (
        jax.vmap(guarded, (None, 0)),
        lambda w, xs: lax.scan(lambda c, x: (c, guarded(w, x)), 0, xs)[1],
    ):
        out, report = jax.jit(run)(W, xs)
        assert rungs_of(report) == [0, 1, 0] and report.stable.tolist() == [True, False, True]
        np.testing.assert_allclose(out[1], layer(W, V), rtol=1e-6)
        said = "2 in bf16, 1 in f64, of 3; a check fires on 1 of those in f64 too"
        assert str(report) == said
    grads = jax.jit(jax.vmap(jax.grad(lambda x: jnp.sum(guarded(W, x)[0]))))(xs)
    np.testing.assert_allclose(grads[1], jax.grad(lambda x: jnp.sum(layer(W, x)))(V), rtol=1e-4)


def test_a_traced_report_says_so():
    said: list[str] = []

    @jax.jit
    def run(w: Any, x: Any) -> Any:
        out, report = pp.with_fallback(layer)(w, x)
        said.append(str(report))
        return out, jax.tree.map(lambda x: x, report)

    _, report = run(W, V)
    assert said == ["one of bf16, f32, f64: not known while it is traced"]
    assert str(report) == "bf16" and report.ladder == ("bf16", "f32", "f64")


def test_higher_rungs_are_paid_for_only_when_they_are_taken():
    runs: list[int] = []

    def counted(x: Any) -> Any:
        runs.append(1)
        return x

    def fn(w: Any, x: Any) -> Any:
        y = w @ x
        return jax.pure_callback(counted, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

    guarded = pp.with_fallback(fn, ("f16", "f32", "f64"), pp.numerics.OutOfRange(10.0))
    with quiet():  # what the callback computes is out of the pass's sight
        compiled = jax.jit(guarded).lower(W, V).compile()
    assert compiled.as_text().count(" conditional(") == 2
    for x, want in ((V * 0, 1), (V * 1e3, 3)):
        runs.clear()
        jax.block_until_ready(compiled(W, x))
        assert len(runs) == want
    # a rung that the arguments rule out is not run
    before = pp.with_fallback(fn, ("f16", "f32"), pp.numerics.IllConditioned("w"))
    bad = W.at[0].set(W[1] + 2.0**-10)
    with quiet():
        for w, rung in ((jnp.eye(8), 0), (bad, 1)):
            runs.clear()
            _, report = jax.block_until_ready(before(w, V))
            assert (len(runs), rungs_of(report)) == (1, rung)


def test_the_higher_rungs_keep_only_their_arguments_for_the_backward_pass():
    def deep(w: Any, x: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.tanh(w @ c), None), x, None, length=50)[0]

    def kept(fn: Any) -> int:
        residuals = jax.jit(lambda w: jax.vjp(lambda w: fn(w, V), w)[1])
        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(residuals, W)))

    guarded = pp.with_fallback(deep)
    # those of the higher rungs and the result before them, and flags that say which one it is
    own = 2 * (W.size + V.size) + 8
    assert kept(lambda w, x: guarded(w, x)[0]) - kept(pp.auto_mixed(deep)) <= own < 50 * V.size


# ---------------------------------------------------------------- calls


def test_devices_agree_on_a_rung():
    """One of four overflows, and a sum across them stands in the function."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def body(w: Any, x: Any) -> Any:
        own = pp.with_fallback(
            lambda w, x: w @ x[0] + 0 * lax.pmean(jnp.sign(x[0]), "d"),
            ("f16", "f32"),
            [pp.numerics.IllConditioned("w"), pp.numerics.NonFinite()],
            axis_name="d",
        )
        out, report = own(w, x)
        return out[None], report.rung[None], report.fired[None]

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d")))
    xs = jnp.stack([V, V, jnp.full((8,), 1e5), V])
    out, rung, fired = run(jnp.eye(8), xs)
    assert rung.tolist() == [1] * 4 and fired[:, 0].tolist() == [[False, True]] * 4
    np.testing.assert_allclose(out, xs, rtol=1e-6)
    assert run(jnp.eye(8), xs.at[2].set(V))[1].tolist() == [0] * 4


def test_it_is_called_as_a_function_of_auto_mixed():
    def fn(w: Any, x: Any, times: int, *, mode: str = "plain") -> Any:
        "Its text."
        out = w @ x
        for _ in range(times):
            out = out * 2
        return {"out": out if mode == "plain" else -out, "none": None}

    guarded = pp.with_fallback(fn, ("bf16", "f32"), static_argnames="times")
    assert guarded.__name__ == "fn" and guarded.__doc__ == "Its text."
    assert list(inspect.signature(guarded).parameters) == ["w", "x", "times", "mode"]
    for mode, sign in (("plain", 1), ("other", -1)):
        out, _ = guarded(W, V, times=3, mode=mode)
        np.testing.assert_allclose(out["out"], sign * 8 * (W @ V), rtol=0.05, atol=0.1)

    @dataclasses.dataclass(frozen=True)
    class Model:
        @pp.with_fallback
        def apply(self, w: Any, x: Any) -> Any:
            return w @ x

    assert str(Model().apply(W, V)[1]) == "bf16"


def test_odd_results_pass_through():
    """Keys, integers, empty arrays and float8, behind a rung that is not run at all."""

    def fn(w: Any, key: Any, n: Any) -> Any:
        low = (w @ w[0]).astype(jnp.float8_e4m3fn)
        return {"key": jax.random.split(key)[1], "n": n + 1, "empty": jnp.zeros((0, 3)), "low": low}

    ladder = ("bf16", "f32")
    check = [
        pp.numerics.IllConditioned("w"),
        pp.numerics.NonFinite(),
        pp.numerics.OutOfRange(500.0),
    ]
    guarded = pp.with_fallback(fn, ladder, check)
    out, report = guarded(jnp.asarray(hilbert(4)), jax.random.key(0), jnp.int32(3))
    want = fn(hilbert(4), jax.random.key(0), jnp.int32(3))
    assert rungs_of(report) == 1
    assert jax.random.key_data(out["key"]).tolist() == jax.random.key_data(want["key"]).tolist()
    assert int(out["n"]) == 4 and out["empty"].shape == (0, 3)
    np.testing.assert_array_equal(out["low"].astype(f32), want["low"].astype(f32))
    # where the arguments rule out the last rung too, it is what there is
    singular = jnp.ones((4, 4))
    out, report = guarded(singular, jax.random.key(0), jnp.int32(3))
    assert rungs_of(report) == 1 and not report.stable and report.fired[:, 0].all()
    assert out["low"].astype(f32).tolist() == [4.0] * 4 and int(out["n"]) == 4


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_results_have_the_dtypes_of_the_original(dtype: Any):
    w, x = W.astype(dtype), V.astype(dtype)
    with quiet():
        out, report = pp.with_fallback(layer, unstable=lambda out: out[0] < 2)(w, x)
    assert out.dtype == dtype and rungs_of(report) == 2
    exact = np.tanh(np.asarray(w, np.float64) @ np.asarray(x, np.float64))
    np.testing.assert_array_equal(out, exact.astype(out.dtype))


def test_a_policy_around_it_does_not_round_what_the_checks_compare():
    fn = pp.with_fallback(lambda w, x: w @ x, ("f32", "f64"), pp.numerics.OutOfRange(1000.5))
    around = pp.auto_mixed(lambda w, x: fn(w, x), policy="AlwaysBf16")
    # bfloat16 has 1000 and 1004 there, and nothing between
    for size, rung in ((1000.25, 0), (1001.0, 1)):
        assert rungs_of(around(jnp.eye(8), jnp.full((8,), size))[1]) == rung


def test_switched_off_every_rung_is_the_function():
    guarded = pp.with_fallback(layer, unstable=lambda out: out[0] < 2)
    with pp.use_policy(None):
        out, report = guarded(W, V)
    np.testing.assert_array_equal(out, jax.jit(layer)(W, V))
    assert rungs_of(report) == 2


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "ladder, said",
    [
        ((), "has 0 rungs, and takes two or more"),
        (("f32",), "auto_mixed(fn, policy=...) runs on one"),
        (("bf16", "f33"), "unknown rung 'f33': legal are 'bf16', 'f16', 'f32', 'f64'"),
        (("bf16", "AutoMixxed"), "unknown rung 'AutoMixxed'"),
        (("f32", "bf16"), "does not rise: 'bf16' (unit roundoff 0.0039) comes after 'f32'"),
        (("bf16", "f32", "f32"), "has 'f32' twice"),
        (("AutoMixed", "AutoMixedBf16", "f32"), "does not rise"),
        ((pp.AutoMixedBf16.with_output("bf16"), "f32"), "has an output format"),
    ],
)
def test_bad_ladders_are_refused(ladder: Any, said: str):
    with pytest.raises(ValueError) as error:
        pp.with_fallback(layer, ladder)
    assert said in str(error.value) and "with_fallback" in str(error.value)


def several(*args: Any, **kinds: Any) -> Any:
    return layer(*args, **kinds)


@pytest.mark.parametrize("ladder", ["bf16", pp.AutoMixed, 3])
def test_what_is_no_ladder_is_refused(ladder: Any):
    with pytest.raises(TypeError, match="is to be a tuple such as"):
        pp.with_fallback(layer, ladder)


@pytest.mark.parametrize(
    "make, error, said",
    [
        (lambda: pp.numerics.OutOfRange(0.0), ValueError, "OutOfRange(limit=0.0)"),
        (lambda: pp.numerics.OutOfRange("1"), ValueError, "positive and finite"),
        (lambda: pp.numerics.IllConditioned(3), TypeError, "an argument's name or a function"),
        (lambda: pp.numerics.IllConditioned("w", digits=-1), ValueError, "digits=-1"),
        (lambda: pp.numerics.Predicate("x"), TypeError, "Predicate('x')"),
        (lambda: pp.with_fallback(layer, unstable=[]), ValueError, "has no check"),
        (lambda: pp.with_fallback(layer, unstable=3), TypeError, "3, which is not a check: legal"),
        (
            lambda: pp.with_fallback(layer, unstable=pp.numerics.NonFinite),
            TypeError,
            "give a value of it",
        ),
        (
            lambda: pp.with_fallback(layer, unstable=pp.numerics.IllConditioned("a")),
            ValueError,
            "the function's arguments are 'w', 'x'",
        ),
        (
            lambda: pp.with_fallback(several, unstable=pp.numerics.IllConditioned("args")),
            ValueError,
            "*args is any number of arguments, and the matrix is one: give a function of all "
            "arguments that returns it, such as `lambda *args, **kinds: args[0]`",
        ),
        (
            lambda: pp.with_fallback(several, unstable=pp.numerics.IllConditioned("kinds")),
            ValueError,
            "such as `lambda *args, **kinds: kinds['a']`",
        ),
        (lambda: pp.with_fallback(3), TypeError, "3"),
    ],
)
def test_bad_arguments_are_refused(make: Any, error: Any, said: str):
    with pytest.raises(error) as found:
        make()
    assert said in str(found.value)


@pytest.mark.parametrize(
    "fn, check, error, said",
    [
        (layer, lambda out: out < 0, TypeError, "returned bool[8], and is to return a boolean"),
        (layer, lambda out: jnp.sum(out), TypeError, "returned float32[]"),
        (layer, lambda out: None, TypeError, "returned None"),
        (lambda w, x: (w @ x, "name"), None, TypeError, "result[1] is 'name', a str"),
        (layer, pp.numerics.IllConditioned(lambda w, x: x), ValueError, "not one of shape (8,)"),
        (
            layer,
            pp.numerics.IllConditioned(lambda w, x: w[:4]),
            ValueError,
            "not one of shape (4, 8)",
        ),
        (layer, pp.numerics.IllConditioned(lambda w, x: w > 0), TypeError, "not one of bool"),
    ],
)
def test_what_is_found_while_tracing_is_refused(fn: Any, check: Any, error: Any, said: str):
    with pytest.raises(error) as found:
        pp.with_fallback(fn, unstable=check)(W, V)
    assert said in str(found.value)


def test_modules_with_state_are_refused():
    module = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="a module of flax nnx"):
        pp.with_fallback(lambda m, x: m(x))(module, V)
    graph, state = nnx.split(module)
    out, _ = pp.with_fallback(lambda state, x: nnx.merge(graph, state)(x))(state, V)
    np.testing.assert_allclose(out, module(V), rtol=0.02, atol=0.02)


# ---------------------------------------------------------------- loops

_ROTATION = np.linalg.qr(np.random.default_rng(0).normal(size=(64, 64)))[0]
A64 = jnp.asarray((_ROTATION * np.linspace(1, 3, 64)) @ _ROTATION.T, f32)
B64 = jnp.ones(64)
ORDERED = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="dot_general", precision="bf16"))


def richardson(a: Any, b: Any) -> Any:
    def body(state: Any) -> Any:
        x = state[0] + 0.4 * state[1]
        return x, b - a @ x, state[2] + 1

    def residual_is_large(state: Any) -> Any:
        return jnp.linalg.norm(state[1]) > 1e-4 * jnp.linalg.norm(b)

    return lax.while_loop(residual_is_large, body, (jnp.zeros_like(b), b, 0))


def test_a_rung_whose_loop_never_ends_is_left():
    guarded = pp.with_fallback(lambda a, b: richardson(a, b)[2], (ORDERED, "f32"), max_trips=200)
    trips, report = guarded(A64, B64)
    assert trips == jax.jit(richardson)(A64, B64)[2]
    assert (int(report.rung), bool(report.stable)) == (1, True)
    assert report.stopped.tolist() == [True, False]
    assert str(report).endswith("a loop did not end in 200 trips]")
    # an element of a batch that ends by itself keeps its rung
    trips, report = jax.vmap(guarded, (None, 0))(A64, jnp.stack([B64, 0 * B64]))
    assert rungs_of(report) == [1, 0]
    assert trips.tolist() == [int(jax.jit(richardson)(A64, B64)[2]), 0]


def test_the_derivative_through_a_loop_that_was_stopped_is_that_of_the_rung_taken():
    @jax.custom_vjp
    def solve(a: Any, b: Any) -> Any:
        return richardson(a, b)[0]

    def backward(kept: Any, g: Any) -> Any:
        a, x = kept
        u = solve(a.T, g)
        return -jnp.outer(u, x), u

    def forward(a: Any, b: Any) -> Any:
        x = solve(a, b)
        return x, (a, x)

    solve.defvjp(forward, backward)

    def loss(a: Any, b: Any) -> Any:
        x, report = pp.with_fallback(solve, (ORDERED, "f32"), max_trips=200)(a, b)
        return jnp.sum(x**2), report

    gradient, report = jax.jit(jax.grad(loss, has_aux=True))(A64, B64)
    wanted = jax.jit(jax.grad(lambda a: jnp.sum(jnp.linalg.solve(a, B64) ** 2)))(A64)
    assert rel_error(gradient, wanted) < 2e-3
    assert str(report).endswith("values not finite: 64]")


def test_the_bound_is_checked():
    with pytest.raises(ValueError, match=r"max_trips=0: give the most trips .* or None"):
        pp.with_fallback(jnp.linalg.solve, ("bf16", "f32"), max_trips=0)
    unbounded = pp.with_fallback(richardson, ("f32", "f64"), max_trips=None)
    assert not unbounded(A64, B64)[1].stopped.any()
