"""Nonlinear least squares by role: NIST's certified problems, and where float64 is float64."""

import functools
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
import scipy.optimize
from jax import lax

import precpass as pp
from tests.support.nist_problems import any_residual, lre, padded, problems, read

pytestmark = pytest.mark.programs

SOLVED = 6.0
T = np.linspace(0.0, 2.0, 12)
Y = 2.0 * np.exp(-1.5 * T) + 0.5 * np.sin(40.0 * T)


def decay(b: Any, scale: Any = None) -> Any:
    y = Y if scale is None else jnp.asarray(scale, np.float64) * Y
    return b[0] * jnp.exp(-b[1] * T) - y


START = np.array([1.0, 1.0])

# ---------------------------------------------------------------- NIST


def test_the_models_are_nists():
    assert len(problems()) == 27
    for problem in problems().values():
        squares = float(np.sum(np.asarray(problem.residual(problem.certified), np.float64) ** 2))
        # in float32, and Lanczos' residuals are its rounding errors
        assert problem.name.startswith("Lanczos") or abs(squares / problem.squares - 1) < 1e-2


def test_the_files_are_read():
    problem = read("Nelson")
    assert problem.starts.tolist() == [[2.0, 0.0001, -0.01], [2.5, 5e-9, -0.05]]
    assert problem.certified[1] == 5.6177717026e-09
    assert problem.x.shape == (2, 128) and problem.y[0] == np.log(15.0)


@functools.cache
def digits(roles: pp.numerics.Roles) -> dict[tuple[str, int], float]:
    found = {}
    for name, problem in problems().items():
        for start in (0, 1):
            b, args = padded(problem, start)
            fit = pp.numerics.least_squares(any_residual, b, args, roles=roles, max_steps=2000)
            found[name, start] = lre(fit.value[: len(problem.certified)], problem.certified)
    return found


def count(roles: pp.numerics.Roles) -> int:
    return sum(x >= SOLVED for x in digits(roles).values())


@pytest.mark.release
def test_nist_with_a_float32_jacobian_is_solved_as_in_float64():
    """27 problems from two starts; the baseline is optimistix's own solver."""
    baseline = count(pp.numerics.Roles.all("f64"))
    assert baseline >= 51
    assert count(pp.numerics.Roles()) >= baseline


# ---------------------------------------------------------------- roles


@functools.cache
def fitted(solver: str, **roles: str) -> pp.numerics.LeastSquares:
    return pp.numerics.least_squares(decay, START, roles=roles, solver=solver)


def exact() -> np.ndarray:
    return np.asarray(fitted("GaussNewton", jacobian="f64").value)


@pytest.mark.release
@pytest.mark.parametrize("solver", ["GaussNewton", "LevenbergMarquardt", "Dogleg"])
def test_the_jacobian_decides_how_many_steps_and_the_gradient_where_they_end(solver: str):
    with_low_jacobian = fitted(solver, jacobian="bf16")
    with_low_gradient = fitted(solver, jacobian="bf16", gradient="bf16")
    assert lre(with_low_jacobian.value, exact()) > 7.5
    assert lre(with_low_gradient.value, exact()) < 5
    assert bool(with_low_jacobian.converged)
    assert float(with_low_jacobian.step) < 1e-7 < float(with_low_gradient.step)


@pytest.mark.parametrize("roles", [{"jacobian": "f16"}, {"solve": "f32"}])
def test_lower_formats_end_at_the_same_place(roles: dict[str, str]):
    found = fitted("GaussNewton", **roles)
    assert bool(found.converged) and lre(found.value, exact()) > 8.5


def test_float32_throughout_is_float32():
    found = pp.numerics.least_squares(decay, START, roles=pp.numerics.Roles.all("f32"))
    assert found.value.dtype == np.float32 and found.step.dtype == np.float32
    assert 3 < lre(found.value, exact()) < 8.5


def test_float64_throughout_is_optimistixs_own_solver():
    found = fitted("LevenbergMarquardt", jacobian="f64")
    with jax.enable_x64(True):
        solver = optx.LevenbergMarquardt(1e-10, 1e-14)
        want = optx.least_squares(lambda b, _: decay(b), solver, jnp.array(START))
        assert found.value.tolist() == want.value.tolist()
        assert int(found.steps) == int(want.stats["num_steps"])


def jacobian_products(roles: pp.numerics.Roles) -> set[str]:
    """The formats that the products of `x @ b` have in the steps."""
    x = np.ones((5, 3))

    def run(b: Any) -> Any:
        return pp.numerics.least_squares(lambda b, _: jnp.tanh(x @ b) - 1.0, b, roles=roles).value

    with jax.enable_x64(True):
        text = str(jax.make_jaxpr(run)(jnp.ones(3)))
    return {name for name in ("bf16", "f16", "f32") if f":{name}[" in text}


def test_the_precisions_are_in_the_program():
    assert jacobian_products(pp.numerics.Roles.all("f64")) == set()
    assert jacobian_products(pp.numerics.Roles()) == {"f32"}
    assert "bf16" in jacobian_products(pp.numerics.Roles(jacobian="bf16"))
    rising = pp.numerics.Roles(jacobian=("bf16", "f32", "f64"))
    assert {"bf16", "f32"} <= jacobian_products(rising)


def test_a_residual_that_is_linear_in_the_simplest_way():
    found = pp.numerics.least_squares(
        lambda x, c: {"a": x["a"] - c, "b": 2.0 * x["b"] - 3.0},
        {"a": np.zeros(2), "b": np.float32(5.0)},
        np.array([3.0, 4.0]),
    )
    assert found.value["a"].tolist() == pytest.approx([3.0, 4.0], rel=1e-12)
    assert found.value["b"].shape == () and float(found.value["b"]) == pytest.approx(1.5)


def test_a_residual_without_products_is_no_cause_for_a_warning():
    for roles in (pp.numerics.Roles(), pp.numerics.Roles.all("f32")):
        found = pp.numerics.least_squares(lambda b, _: b - 1.0, np.array([3.0, 4.0]), roles=roles)
        assert bool(found.converged)
        np.testing.assert_allclose(found.value, 1.0, rtol=1e-6)


class Line:
    """A residual whose data change, which cannot be seen from outside."""

    def __init__(self) -> None:
        self.y, self.slope = np.array([1.0, 2.0]), 2.0

    def residual(self, b: Any, _: Any) -> Any:
        return self.slope * b - self.y


def test_what_a_residual_reads_may_change_between_calls():
    line, start = Line(), np.ones(2)
    assert pp.numerics.least_squares(line.residual, start).value.tolist() == [0.5, 1.0]
    line.y[:] = 4.0
    assert pp.numerics.least_squares(line.residual, start).value.tolist() == [2.0, 2.0]
    line.y = np.array([8.0, 6.0])
    assert pp.numerics.least_squares(line.residual, start).value.tolist() == [4.0, 3.0]
    line.slope = 4.0
    assert pp.numerics.least_squares(line.residual, start).value.tolist() == [2.0, 1.5]


def test_what_a_jit_within_a_branch_of_a_residual_reads_may_change():
    y = np.array([1.0, 2.0])

    def residual(b: Any, _: Any) -> Any:
        away = jax.jit(lambda b: b - y)
        return lax.cond(jnp.all(b > -1e3), away, lambda b: b, b)

    assert pp.numerics.least_squares(residual, np.ones(2)).value.tolist() == [1.0, 2.0]
    y = np.array([3.0, 4.0])
    assert pp.numerics.least_squares(residual, np.ones(2)).value.tolist() == [3.0, 4.0]


def test_one_program_is_compiled_once(caplog: pytest.LogCaptureFixture):
    line = Line()

    def compiled() -> int:
        caplog.clear()
        with jax.log_compiles():
            pp.numerics.least_squares(line.residual, np.ones(2))
        return sum("Compiling" in r.message and "fit" in r.message for r in caplog.records)

    assert compiled() == 1
    line.y = np.array([8.0, 6.0])
    assert compiled() == 0


def test_a_module_of_equinox_is_a_residual():
    class Scaled(eqx.Module):
        by: Any

        def __call__(self, b: Any, _: Any) -> Any:
            return self.by * b - 1.0

    for by in (2.0, 4.0):
        found = pp.numerics.least_squares(Scaled(np.full(2, by)), np.ones(2))
        assert found.value.tolist() == [1 / by, 1 / by]


def test_an_unknown_that_the_residual_does_not_have_stays():
    found = pp.numerics.least_squares(lambda b, _: decay(b[:2]), np.array([1.0, 1.0, 7.0]))
    assert bool(found.converged) and found.value[2] == 7.0


def test_a_jacobian_that_overflows_its_format_is_computed_again():
    """Rat43's from start 1 holds exp(100) on its way, and float16 holds no 1e6."""
    problem = read("Rat43")
    found = pp.numerics.least_squares(problem.residual, problem.starts[0])
    assert lre(found.value, problem.certified) > SOLVED
    large = pp.numerics.least_squares(
        lambda b, _: 1e6 * decay(b), START, roles={"jacobian": "f16"}, solver="GaussNewton"
    )
    assert bool(large.converged) and lre(large.value, exact()) > SOLVED


# ---------------------------------------------------------------- x64 and transforms


def test_the_dtypes_that_come_out():
    assert isinstance(fitted("LevenbergMarquardt").value, np.ndarray)
    assert fitted("LevenbergMarquardt").value.dtype == np.float64
    with jax.enable_x64(True):
        found = pp.numerics.least_squares(decay, START)
        assert isinstance(found.value, jax.Array) and found.value.dtype == np.float64
        assert lre(found.value, exact()) > 9


@pytest.mark.release
def test_under_transforms_with_x64_off():
    """Inside it is float64: the rounded results have all digits of float32."""

    def scaled(s: Any) -> Any:
        return pp.numerics.least_squares(decay, START, s).value

    scales = jnp.array([1.0, 2.0], jnp.float32)
    values = jax.jit(jax.vmap(scaled))(scales)
    assert values.dtype == np.float32
    want = np.stack([exact(), exact() * [2.0, 1.0]])
    np.testing.assert_allclose(values, want, rtol=2 * np.finfo(np.float32).eps)
    # b[0] is proportional to the scale
    value, gradient = jax.value_and_grad(lambda s: scaled(s)[0])(jnp.float32(1.0))
    np.testing.assert_allclose(gradient, value, rtol=1e-6)
    held = jax.grad(lambda s: pp.numerics.least_squares(lambda b, _: decay(b, s), START).value[0])
    np.testing.assert_allclose(held(jnp.float32(1.0)), value, rtol=1e-6)


def test_the_result_goes_out_of_jit_and_says_what_it_is():
    found = jax.jit(lambda b: pp.numerics.least_squares(decay, b))(jnp.ones(2))
    assert found.roles == pp.numerics.Roles() and int(found.steps) > 1
    text = found.summary()
    assert "jacobian='f32'" in text and "its tolerances were met" in text
    assert "\n1 step, " in pp.numerics.least_squares(decay, START, max_steps=1).summary()


def test_a_numpy_array_is_that_of_float32_programs_too():
    """JAX hands both modes of x64 the form of a numpy array that a program holds."""
    t = np.linspace(0.0, 1.0, 7)

    def residual(b: Any, _: Any = None) -> Any:
        return b[0] * jnp.exp(-b[1] * t) - t

    pp.numerics.least_squares(residual, START)
    low = jax.jit(jax.grad(lambda b: jnp.sum(residual(b) ** 2)))
    assert low(jnp.ones(2)).dtype == np.float32
    kept = jax.make_jaxpr(residual)(jnp.ones(2))
    want = pp.numerics.least_squares(residual, START, rtol=1e-8).value
    held = functools.partial(_of_data, {"t": (t, [t])})
    in_default = lambda b, _, t=t: b[0] * jnp.exp(-b[1] * t) - t  # noqa: E731
    for fn in (lambda b, _: residual(b), jax.jit(lambda b, _: residual(b)), held, in_default):
        np.testing.assert_array_equal(pp.numerics.least_squares(fn, START, rtol=1e-8).value, want)
    assert held.args[0]["t"][0] is t and in_default.__defaults__ == (t,)
    with pytest.raises(TypeError, match=r"where least_squares cannot find it.*close over it, or"):
        pp.numerics.least_squares(_Hidden(weakref.ref(t)), START)
    del kept


def _of_data(data: Any, b: Any, _: Any) -> Any:
    t, (y,) = data["t"]
    return b[0] * jnp.exp(-b[1] * t) - y


class _Hidden:
    """A residual whose data no attribute holds."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __call__(self, b: Any, _: Any) -> Any:
        return b[0] * jnp.exp(-b[1] * self.data()) - self.data()


def test_data_of_float32_is_what_it_is():
    t = np.linspace(0.0, 2.0, 12, dtype=np.float32)
    y = (2 * np.exp(-1.5 * t)).astype(np.float32)
    with jax.numpy_dtype_promotion("standard"):
        fit = pp.numerics.least_squares(lambda b, _: b[0] * jnp.exp(-b[1] * t) - y, START)
    wide = t.astype(np.float64), y.astype(np.float64)
    want = pp.numerics.least_squares(lambda b, d: b[0] * jnp.exp(-b[1] * d[0]) - d[1], START, wide)
    np.testing.assert_allclose(fit.value, want.value, rtol=1e-12)


@pytest.mark.release
def test_what_does_not_converge_says_so():
    found = pp.numerics.least_squares(decay, START, max_steps=3)
    assert not bool(found.converged) and int(found.steps) == 3
    assert "maximum number of steps" in found.summary()
    assert float(found.step) > 1e-3
    nowhere = pp.numerics.least_squares(lambda b, _: jnp.sqrt(b - 2.0), np.array([1.0]))
    assert not bool(nowhere.converged)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "given, said",
    [
        ({"roles": {"hessian": "f32"}}, "unknown role 'hessian': legal are 'residual', 'gradient'"),
        ({"roles": {"jacobian": "f9"}}, r"Roles\(jacobian=...\): unknown precision 'f9'"),
        ({"roles": {"jacobian": "f8"}}, r"Roles\(jacobian='f8e4m3'\): legal are 'f64', 'f32'"),
        ({"roles": {"solve": "bf16"}}, r"Roles\(solve='bf16'\): legal are 'f64', 'f32'"),
        ({"roles": {"residual": "f32"}}, "gradient='f64'.* is wider than residual='f32'"),
        ({"solver": "Newton"}, "solver='Newton': legal are 'LevenbergMarquardt', 'Dogleg'"),
        ({"rtol": 2.0}, "rtol=2.0"),
        ({"rtol": "a"}, "rtol='a': it is to be a number between 0 and 1.*None for"),
        ({"atol": np.nan}, "atol=nan: it is to be a number"),
        ({"atol": np.ones(2)}, r"atol=array\(.*: it is to be a number"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"solver": optx.GaussNewton(1e-3, 1e-3), "rtol": 1e-3}, "set them in it"),
        ({"x0": []}, "no unknowns"),
        ({"options": {"gtol": 1}}, "options has 'gtol': LevenbergMarquardt takes norm, linear_so"),
        ({"solver": optx.GaussNewton(1e-3, 1e-3), "options": {"norm": abs}}, "set them in it"),
        ({"bounds": 3}, r"bounds=3: give \(lower, upper\)"),
        ({"bounds": ([0, 0, 0], 5)}, r"the lower bounds \[0, 0, 0\] do not fit x0"),
        ({"bounds": (2, 1)}, "each lower bound is to be below its upper bound"),
        ({"bounds": (2, 3)}, r"outside of bounds=\(2, 3\): start within them"),
        ({"residual": lambda b, _: b[:0]}, "returned no residuals"),
    ],
)
def test_bad_values_are_refused(given: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        pp.numerics.least_squares(**{"residual": decay, "x0": START, **given})


@pytest.mark.parametrize(
    "given, said",
    [
        ({"roles": "f32"}, "roles='f32': it is to be Roles"),
        ({"solver": optx.BFGS(1e-3, 1e-3)}, "a solver of optimistix with a `descent`"),
        ({"x0": {"b": np.array([1, 2])}}, r"x0\['b'\] is int"),
        ({"x0": [1j]}, r"x0\[0\] is complex"),
        ({"x0": [jax.random.key(0)]}, "unknowns are real and floating"),
        ({"x0": ["float32"]}, r"x0\[0\] is a str: unknowns are floating arrays"),
        ({"residual": 3}, "residual is an int: it is to be a function of the unknowns and args"),
        ({"args": "t"}, "args is a str: args are arrays and numbers; hold what is neither"),
        ({"args": {"mode": "bfloat16"}}, r"args\['mode'\] is a str"),
        ({"args": [np.array([None])]}, r"args\[0\] is a ndarray of object"),
        ({"residual": lambda b, _: b > 0}, "is to return floating or complex arrays"),
        ({"residual": lambda b, _: b.astype(jnp.float32)}, "its role is f64"),
    ],
)
def test_bad_types_are_refused(given: dict[str, Any], said: str):
    with pytest.raises(TypeError, match=said):
        pp.numerics.least_squares(**{"residual": decay, "x0": START, **given})


def test_a_traced_tolerance_is_refused():
    with pytest.raises(ValueError, match=r"rtol=.*known while it is\s+traced"):
        jax.jit(lambda rtol: pp.numerics.least_squares(decay, START, rtol=rtol).value)(1e-3)


def test_args_may_be_anything_that_jax_computes_with():
    given = {"t": 1.0, "n": 2, "none": None, "key": jax.random.key(0), "is": np.True_, "c": 1j}
    found = pp.numerics.least_squares(
        lambda b, a: b - a["t"] * a["n"], START, given, rtol=jnp.float32(1e-3)
    )
    np.testing.assert_allclose(found.value, 2.0)


def test_without_optimistix_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    import sys

    from precpass import numerics

    monkeypatch.delitem(sys.modules, "precpass.numerics.fitting", raising=False)
    monkeypatch.delattr(numerics, "fitting", raising=False)
    monkeypatch.setitem(sys.modules, "optimistix", None)
    with pytest.raises(ModuleNotFoundError, match="pip install optimistix lineax equinox"):
        pp.numerics.least_squares(decay, START)


# ---------------------------------------------------------------- as in scipy

NOISY = 2.0 * np.exp(-1.5 * T) + 0.3 + 0.01 * np.random.default_rng(0).normal(size=12)


def three(b: Any, scale: Any = None) -> Any:
    scale = 1.0 if scale is None else jnp.asarray(scale, np.float64)
    return scale * b[0] * jnp.exp(-b[1] * T) + b[2] - NOISY


def test_the_jacobian_and_the_covariance_are_scipys():
    fit = pp.numerics.least_squares(three, np.ones(3))
    best, covariance = scipy.optimize.curve_fit(
        lambda t, a, k, c: a * np.exp(-k * t) + c, T, NOISY, np.ones(3), xtol=1e-14
    )
    np.testing.assert_allclose(fit.value, best, rtol=1e-6)
    np.testing.assert_allclose(fit.covariance, covariance, rtol=1e-5)
    exact = np.stack([np.exp(-best[1] * T), -best[0] * T * np.exp(-best[1] * T), T * 0 + 1], 1)
    np.testing.assert_allclose(fit.jac, exact, rtol=1e-6)
    np.testing.assert_allclose(fit.fun, np.asarray(three(best)), atol=1e-6)
    twice = jax.vmap(lambda s: pp.numerics.least_squares(three, jnp.ones(3), s).covariance)(
        jnp.ones(2)
    )
    np.testing.assert_allclose(twice[1], covariance, rtol=1e-3)


def test_what_does_not_decide_its_unknowns_has_no_covariance():
    lost = pp.numerics.least_squares(lambda b, _: b[0] + b[1] - Y, np.ones(2)).covariance
    assert np.isinf(lost).all()
    assert np.isinf(pp.numerics.least_squares(lambda b, _: b - 1.0, np.ones(2)).covariance).all()


BOUNDS: list[Any] = [
    ([0, 0, 0.4], [3, 5, 1]),
    ([0, 0, -np.inf], [1.9, np.inf, 1]),
    (-np.inf, [3, 1.2, 0.5]),
    ([0.5, 1.6, 0.3], [5, 9, 0.31]),
    (0, 10),
]


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("solver", ["LevenbergMarquardt", "Dogleg", "GaussNewton"])
@pytest.mark.parametrize(
    "roles", [{}, pp.numerics.Roles.all("f64"), {"jacobian": ("bf16", "f32", "f64")}]
)
@pytest.mark.parametrize("bounds", BOUNDS)
def test_bounds_are_scipys(bounds: Any, roles: Any, solver: str):
    start = np.clip(np.ones(3), *bounds)
    fit = pp.numerics.least_squares(three, start, roles=roles, bounds=bounds, solver=solver)
    want = scipy.optimize.least_squares(
        lambda b: b[0] * np.exp(-b[1] * T) + b[2] - NOISY,
        start,
        bounds=bounds,
        xtol=1e-15,
        ftol=1e-15,
        gtol=1e-15,
    )
    assert bool(fit.converged)
    np.testing.assert_allclose(fit.value, want.x, rtol=1e-6)
    assert np.all((bounds[0] <= fit.value) & (fit.value <= bounds[1]))
    assert float(fit.cosine) < 1e-6


@pytest.mark.release
def test_an_unknown_at_its_bound_stays_there_in_derivatives():
    def fitted(scale: Any) -> Any:
        return pp.numerics.least_squares(three, jnp.ones(3), scale, bounds=(0, [9, 1.2, 9])).value

    with jax.enable_x64(True):
        slope = jax.jacfwd(fitted)(1.0)
        step = (fitted(1.0 + 1e-5) - fitted(1.0 - 1e-5)) / 2e-5
        np.testing.assert_allclose(jax.jacrev(fitted)(1.0), slope, atol=1e-8)
    np.testing.assert_allclose(np.asarray(slope), np.asarray(step), atol=1e-5)
    assert np.asarray(slope)[1] == 0


def test_complex_residuals_are_fitted():
    wave = 2.0 * np.exp(3j * T)

    def turning(b: Any, _: Any) -> Any:
        return lax.complex(b[0] * jnp.cos(b[1] * T), b[0] * jnp.sin(b[1] * T)) - wave

    fit = pp.numerics.least_squares(turning, np.array([1.0, 2.8]))
    np.testing.assert_allclose(fit.value, [2.0, 3.0], rtol=1e-12)
    assert fit.fun.shape == (24,)


def test_the_solvers_options_reach_it():
    seen: list[Any] = []

    def norm(x: Any) -> Any:
        seen.append(x)
        return optx.max_norm(x)

    pp.numerics.least_squares(decay, START, options={"norm": norm})
    assert seen
