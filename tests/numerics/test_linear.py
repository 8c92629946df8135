"""Linear systems by refinement: matrices of known condition, and what is said beyond the limits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import lu_factor

import precpass as pp
from precpass.numerics.linear import factors

pytestmark = pytest.mark.programs

N = 100
# the largest power of ten for which it converges, and one for which it cannot
LIMITS = {
    ("f32", "classic"): (7, 10),
    ("f16", "classic"): (3, 6),
    ("bf16", "classic"): (2, 5),
    ("f32", "gmres"): (14, 17),
    ("f16", "gmres"): (9, 17),
    ("bf16", "gmres"): (8, 17),
}


def randsvd(condition: float, n: int = N, seed: int = 0) -> np.ndarray:
    """Singular values in a geometric sequence (Higham 2002, section 28.3, mode 3)."""
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.standard_normal((n, n)))[0] for _ in range(2))
    return (left * np.logspace(0.0, -np.log10(condition), n)) @ right


@functools.cache
def system(power: int, n: int = N) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    a, x = randsvd(10.0**power, n), np.random.default_rng(1).standard_normal(n)
    return a, x, a @ x


def error(found: Any, x: np.ndarray) -> float:
    return float(np.max(np.abs(np.asarray(found.x) - x)) / np.max(np.abs(x)))


@pytest.mark.release
@pytest.mark.parametrize("factor, method", LIMITS)
def test_it_is_float64s_solution_up_to_the_limit_and_says_so_beyond(factor: str, method: str):
    within, beyond = LIMITS[factor, method]
    for power in range(0, within + 1, 2 if method == "classic" else 4):
        a, x, b = system(power)
        found = pp.numerics.solve(a, b, factor=factor, method=method)
        assert bool(found.converged), (power, found.reason)
        assert found.x.dtype == np.float64
        assert float(found.backward_error) <= np.sqrt(N) * 2.0**-53
        # as far as the residual, in float64, knows it
        assert error(found, x) < 100 * 2.0**-53 * 10.0**power
        assert float(found.error) < 100 * 2.0**-53 * 10.0**power
        assert error(found, x) < 10 * float(found.error)
    a, x, b = system(beyond)
    found = pp.numerics.solve(a, b, factor=factor, method=method)
    assert not bool(found.converged) and float(found.error) > 0.1
    assert "ill-conditioned" in found.reason or "no correct digit" in found.reason


def test_a_bad_solve_is_never_called_good():
    """Wherever it says that it converged, the digits that it promises are there."""
    for factor in ("f16", "bf16"):
        for power in range(2, 17, 2):
            a, x, b = system(power)
            found = pp.numerics.solve(a, b, factor=factor, method="classic")
            assert not bool(found.converged) or error(found, x) < 10 * float(found.error)


@pytest.mark.release
def test_the_factors_are_as_good_as_their_format():
    a = randsvd(10.0)
    for precision in (pp.types.Precision.F16, pp.types.Precision.BF16):
        made = factors(jnp.asarray(a, jnp.float32), precision)
        lu = np.asarray(made.lu, np.float64)
        product = (np.tril(lu, -1) + np.eye(N)) @ np.triu(lu)
        rows, columns = (np.asarray(s, np.float64) for s in (made.rows, made.columns))
        scaled = (rows[:, None] * a * columns)[np.asarray(made.order)]
        off = np.max(np.abs(product - scaled)) / np.max(np.abs(scaled))
        assert precision.unit_roundoff / 4 < off < 20 * precision.unit_roundoff
        assert np.max(np.abs(np.tril(lu, -1))) <= 1.0
    exact = factors(jnp.asarray(a, jnp.float32), pp.types.Precision.F32)
    scaled = np.asarray(exact.rows)[:, None] * np.asarray(a, np.float32) * np.asarray(exact.columns)
    np.testing.assert_allclose(exact.lu, lu_factor(scaled)[0], atol=1e-4)


def test_trailing_updates_have_low_operands_and_wide_sums():
    text = str(jax.make_jaxpr(lambda a: factors(a, pp.types.Precision.BF16))(jnp.ones((N, N))))
    assert text.count("preferred_element_type=float32") == 3


@pytest.mark.parametrize("factor", ["f16", "f32"])
def test_matrices_of_any_scale(factor: str):
    """Entries that overflow float16, and float32, or vanish in it."""
    a, x, _ = system(1)
    rows, columns = np.logspace(-60, 60, N), np.logspace(80, -20, N)
    a = rows[:, None] * a * columns
    found = pp.numerics.solve(a, a @ (x / columns), factor=factor, method="classic")
    # beyond scaling, backward errors are relative to the whole matrix: see the worst column's
    assert bool(found.converged) and np.all(np.isfinite(found.x))


@pytest.mark.parametrize("method", ["classic", "gmres"])
@pytest.mark.parametrize("power", [-250, -160, 160, 250])
def test_solutions_of_any_scale(power: int, method: str):
    """Their squares are no number of float64."""
    a, x, b = system(2)
    scale = 10.0**power
    for found, times in (
        (pp.numerics.solve(a, b * scale, method=method), scale),
        (pp.numerics.solve(a * scale, b, method=method), 1 / scale),
    ):
        assert bool(found.converged), found.reason
        assert np.max(np.abs(found.x / times - x)) < 1e-12 * np.max(np.abs(x))


@pytest.mark.release
@pytest.mark.parametrize("method", ["classic", "gmres"])
def test_residuals_that_would_underflow_are_those_of_any_scale(method: str):
    """The first step is off by 1e-3, and its residual is below all numbers of float64."""
    a, x, b = system(2)
    found = pp.numerics.solve(a * 1e-300, b * 1e-300, factor="f16", method=method)
    assert bool(found.converged) and error(found, x) < 1e-12
    assert float(found.backward_error) > 0.0


@pytest.mark.release
@pytest.mark.parametrize(
    "b, options",
    [
        (np.array([1e-315, 2e-315]), {}),
        # the solution is a tenth of it
        (np.array([3e-308, 6e-308]), {}),
        (np.array([1e-40, 0.0], np.float32), {}),
        (np.array([1e-50, 2e-50]), {"refine": "f32"}),
    ],
)
def test_what_underflows_is_not_called_converged(b: Any, options: Any):
    a = np.array([[4.0, 1.0], [2.0, 3.0]])
    found = pp.numerics.solve(a, b, **options)
    assert found.reason.endswith("scale b") and float(found.error) == np.inf
    # beside a column that is solved, and one of zeros
    columns = np.stack([b.astype(np.float64), 0 * b, np.ones(2)], 1).astype(b.dtype)
    assert pp.numerics.solve(a, columns, **options).converged.tolist() == [False, True, True]
    with jax.enable_x64(True):
        assert not bool(jax.jit(lambda b: pp.numerics.solve(a, b, **options).converged)(b))
        # of a constant XLA may compute what a processor takes for zero
        folded = jax.jit(lambda: pp.numerics.solve(a, b, **options))()
        is_right = np.allclose(folded.x, np.linalg.solve(a, np.asarray(b, np.float64)), atol=0)
        assert is_right or not bool(folded.converged)


@pytest.mark.release
def test_a_numpy_array_that_it_was_given_under_a_transform_is_that_of_float32_programs_too():
    a, b = np.array([[4.0, 1.0], [2.0, 3.0]]), np.array([1.0, 2.0])
    jax.grad(lambda a: jnp.sum(pp.numerics.solve(a, b).x))(jnp.asarray(a))
    assert jnp.linalg.solve(a, b).dtype == np.float32


@pytest.mark.release
def test_a_numpy_matrix_is_differentiated_forwards():
    a, b = np.array([[4.0, 1.0], [2.0, 3.0]]), np.array([1.0, 2.0])
    found = jax.jacfwd(lambda a: pp.numerics.solve(a, b).x)(a)
    # dx = -A^-1 dA x
    want = -np.einsum("ij,k->ijk", np.linalg.inv(a), np.linalg.solve(a, b))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, want, rtol=1e-6)


@pytest.mark.release
def test_many_right_hand_sides_each_have_a_report():
    a, x, b = system(3)
    found = pp.numerics.solve(a, np.stack([b, 0 * b, 2.0**1000 * b], 1), factor="f16")
    assert found.x.shape == (N, 3) and found.converged.tolist() == [True, True, True]
    assert found.x[:, 1].tolist() == [0.0] * N and int(found.steps[1]) == 0
    # in the same column: a processor may round another one's dot products in another order
    scaled = pp.numerics.solve(a, np.stack([2.0**1000 * b, 0 * b, b], 1), factor="f16")
    np.testing.assert_allclose(scaled.x[:, 0] / 2.0**1000, found.x[:, 0], rtol=1e-14)
    assert found.reason == ["converged"] * 3
    for column in (found.x[:, 0], found.x[:, 2] / 2.0**1000):
        assert error(pp.numerics.LinearSolve(column, *[0] * 4, *[None] * 3), x) < 1e-11


@pytest.mark.release
def test_batches_jit_and_derivatives_with_x64_off():
    matrices = jnp.asarray(np.stack([randsvd(10.0, 8, s) for s in range(3)]), jnp.float32)
    b = jnp.ones((8, 2), jnp.float32)

    def loss(a: Any, b: Any) -> Any:
        return jnp.sum(jnp.sin(pp.numerics.solve(a, b, factor="bf16").x))

    def plain(a: Any, b: Any) -> Any:
        return jnp.sum(jnp.sin(jnp.linalg.solve(a, b)))

    ours = jax.jit(jax.vmap(jax.value_and_grad(loss, (0, 1)), (0, None)))(matrices, b)
    want = jax.vmap(jax.value_and_grad(plain, (0, 1)), (0, None))(matrices, b)
    for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(want), strict=True):
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
    along = [functools.partial(f, matrices[0]) for f in (loss, plain)]
    tangents = [jax.jvp(f, (b,), (b,))[1] for f in along]
    np.testing.assert_allclose(*tangents, rtol=1e-4)


@pytest.mark.release
def test_float32_refinement_and_float32_results():
    a, x, b = system(2)
    found = pp.numerics.solve(a, b, factor="f16", refine="f32")
    assert found.x.dtype == np.float32 and bool(found.converged)
    assert error(found, x) < 1e-3
    with jax.enable_x64(True):
        wide = pp.numerics.solve(jnp.array(a), jnp.array(b))
        assert isinstance(wide.x, jax.Array) and wide.x.dtype == np.float64


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("method", ["classic", "gmres"])
def test_what_is_singular_or_not_finite(method: str):
    singular = np.ones((4, 4))
    broken = np.where(np.eye(4) > 0, np.nan, 1.0)
    for a in (singular, broken, np.zeros((4, 4))):
        found = pp.numerics.solve(a, np.arange(4.0), factor="f16", method=method)
        assert not bool(found.converged), a
        assert isinstance(found.reason, str) and found.reason != "converged"
    few = pp.numerics.solve(*system(3)[::2], factor="bf16", method="classic", max_steps=2)
    assert not bool(few.converged) and "largest number of steps" in few.reason


@pytest.mark.parametrize(
    "given, said",
    [
        ({"factor": "f64"}, "factor='f64': legal are 'f32', 'f16', 'bf16'"),
        ({"factor": "f9"}, "unknown precision 'f9'"),
        ({"refine": "bf16"}, "refine='bf16': legal are 'f64', 'f32'"),
        ({"method": "cg"}, "method='cg': legal are 'classic', 'gmres'"),
        ({"A": np.ones((2, 3))}, r"A has the shape \(2, 3\)"),
        ({"A": np.ones((0, 0)), "b": np.ones(0)}, r"A has the shape \(0, 0\)"),
        ({"A": np.ones((5, 2, 2))}, "for batches use jax.vmap"),
        ({"b": np.ones(3)}, r"b has the shape \(3,\): it is to be \(2,\) or \(2, k\)"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"restart": 1.5}, "restart=1.5"),
    ],
)
def test_bad_values_are_refused(given: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        pp.numerics.solve(**{"A": np.eye(2), "b": np.ones(2), **given})


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("name", ["A", "b"])
@pytest.mark.parametrize("method", ["classic", "gmres"])
def test_complex_systems_are_solved_as_real_ones(name: str, method: str):
    rng = np.random.default_rng(0)
    given = {"A": rng.normal(size=(20, 20)), "b": rng.normal(size=(20, 2))}
    given[name] = given[name] + 1j * rng.normal(size=given[name].shape)
    found = pp.numerics.solve(**given, method=method)
    assert np.asarray(found.converged).tolist() == [True, True]
    assert found.x.dtype == np.complex128
    np.testing.assert_allclose(found.x, np.linalg.solve(given["A"], given["b"]), rtol=1e-11)
    slope = jax.grad(lambda s: jnp.abs(pp.numerics.solve(s * given["A"], given["b"]).x).sum())(1.0)
    np.testing.assert_allclose(slope, -np.abs(found.x).sum(), rtol=1e-5)  # x / s


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("A", np.eye(2, dtype=int), "A is int.*: it is to be floating or complex"),
        ("b", "ab", "b is a str: .* an array"),
        ("A", [[1.0]], "A is a list: .* an array"),
    ],
)
def test_bad_types_are_refused(name: str, value: Any, said: str):
    with pytest.raises(TypeError, match=said):
        pp.numerics.solve(**{"A": np.eye(2), "b": np.ones(2), name: value})
