"""Programs of JAX's own library that are made of products: attention, convolutions, solvers."""

import functools
import warnings

import jax
import jax.numpy as jnp
import jax.scipy.integrate
import jax.scipy.optimize
import jax.scipy.signal
import jax.scipy.sparse.linalg
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse
from jax.experimental.ode import odeint

import precpass as pp
from tests.support.jaxprs import low_products, products
from tests.support.libraries import FAST, assert_leaves_near, check_program, ordered
from tests.support.passes import AUTO, look, run, text_of
from tests.support.values import identical, normal, rel_error

pytestmark = pytest.mark.programs


def array(seed, *shape):
    return jnp.asarray(normal(seed, *shape))


# ---------------------------------------------------------------- attention


ATTENTION_ARGS = (*(array(s, 2, 32, 4, 16) for s in range(3)), array(3, 1, 4, 32, 32))


def test_dot_product_attention_and_its_gradients():
    def fn(q, k, v, bias):
        attend = jax.nn.dot_product_attention
        return {
            "causal": attend(q, k, v, is_causal=True),
            "bias": attend(q, k, v, bias=bias),
            "grouped": attend(q, k[:, :, :2], v[:, :, :2]),
        }

    check_program(fn, *ATTENTION_ARGS, wrt=range(4), least=6)


def test_dot_product_attention_in_float16():
    def fn(q, k, v, bias):
        attend = jax.nn.dot_product_attention
        tril = jnp.tril(jnp.ones(bias.shape, bool))
        lengths = jnp.array([10, 32], jnp.int32)
        return {
            "plain": attend(q, k, v),
            "xla": attend(q, k, v, implementation="xla"),
            "mask": attend(q, k, v, mask=tril),
            "lengths": attend(q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths),
            "window": attend(q, k, v, local_window_size=(3, 2)),
        }

    check_program(fn, *ATTENTION_ARGS, policy=pp.AutoMixed, wrt=None, least=10)


# ---------------------------------------------------------------- products


def test_ragged_products():
    sizes = jnp.array([500, 300, 0, 200], jnp.int32)

    def fn(x, w):
        return lax.ragged_dot(x, w, sizes)

    check_program(fn, array(0, 1000, 16), array(1, 4, 16, 8), wrt=(0, 1))


@pytest.mark.parametrize("mode", ["contracting", "batch"])
def test_general_ragged_products(mode):
    """JAX has no derivatives of them."""
    dims = lax.RaggedDotDimensionNumbers
    if mode == "contracting":
        numbers = dims((((0,), (0,)), ((), ())), [0], [])
        args, sizes = (array(0, 24, 16), array(1, 24, 8)), jnp.array([5, 7, 0, 12], jnp.int32)
    else:
        numbers = dims((((2,), (1,)), ((0,), (0,))), [0], [])
        args, sizes = (array(0, 4, 6, 16), array(1, 4, 16, 8)), jnp.array([1, 3], jnp.int32)
    check_program(lambda x, w: lax.ragged_dot_general(x, w, sizes, numbers), *args, wrt=None)


def convolutions(x, w):
    numbers = ("NCHW", "OIHW", "NCHW")
    general = functools.partial(lax.conv_general_dilated, dimension_numbers=numbers)
    channels_last = x.transpose(0, 2, 3, 1), w.transpose(2, 3, 1, 0)
    return {
        "conv": lax.conv(x, w, (1, 1), "SAME"),
        "dilated": general(x, w, (2, 2), ((1, 0), (0, 1)), lhs_dilation=(2, 1)),
        "kernel dilated": general(x, w, (1, 1), "VALID", rhs_dilation=(2, 2)),
        "groups": general(x, w[:, :2], (1, 1), "SAME", feature_group_count=2),
        "batch groups": general(x, w, (1, 1), "SAME", batch_group_count=2),
        "transpose": lax.conv_transpose(*channels_last, (2, 2), "SAME"),
        "patches": lax.conv_general_dilated_patches(x, (3, 3), (1, 1), "SAME"),
        "reversed": lax.conv_with_general_padding(
            x, lax.rev(w, (2, 3)), (1, 1), "SAME", None, None
        ),
        "1d": jnp.convolve(x[0, 0].ravel(), w[0, 0, 0]),
        "2d": jax.scipy.signal.convolve2d(x[0, 0], w[0, 0], mode="same"),
    }


def test_convolutions():
    check_program(convolutions, array(0, 2, 4, 8, 8), array(1, 6, 4, 3, 3), wrt=(0, 1), least=10)


EINSUMS = (
    "ij,jk->ik",
    "ij,ij->i",
    "ij,ij->",
    "ji,jk->ki",
    "ij,kj,kl->il",
    "bij,bjk->bik",
    "bij,kj->bik",
    "bij,bkj->kb",
    "bij,bij,bjk->bk",
    "...ij,...jk->...ik",
)


# They sum a product that uses each element once; "bij,bij,bjk->bk" does so before it multiplies.
ELEMENTWISE = ("ij,ij->i", "ij,ij->", "bij,bij,bjk->bk", "vdot")


def by_spec(spec, x, y):
    terms = spec.split("->")[0].split(",")
    ranks = [len(term.replace("...", "b")) for term in terms]
    pairs = zip((x, y, x), ranks, strict=False)
    return jnp.einsum(spec, *(a[0] if rank == 2 else a for a, rank in pairs))


EINSUM_CALLS = {spec: functools.partial(by_spec, spec) for spec in EINSUMS} | {
    "tensordot": lambda x, y: jnp.tensordot(x, y, axes=((0, 2), (0, 1))),
    "inner": lambda x, y: jnp.inner(x[0], y[0]),
    "vdot": lambda x, y: jnp.vdot(x[0], y[0]),
    "matvec": lambda x, y: jnp.matvec(x[0], y[0, 0]),
    "vecmat": lambda x, y: jnp.vecmat(x[0, 0], y[0]),
    "trace": lambda x, _: jnp.einsum("ii->", x[0]),
    "polynomial": lambda x, y: jnp.polyval(x[0, 0, :4], y[0, 0]),
}


def einsums(x, y):
    return {name: call(x, y) for name, call in EINSUM_CALLS.items()}


@pytest.mark.release
def test_einsums():
    args = array(0, 3, 16, 16), array(1, 3, 16, 16)
    check_program(einsums, *args, wrt=(0, 1), least=13, elementwise=len(ELEMENTWISE))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_einsums_that_are_elementwise_work_stay_float32(name):
    found = look(EINSUM_CALLS[name], pp.AutoMixedBf16, *[array(0, 3, 16, 16)] * 2)
    multiplies_matrices_too = name == "bij,bij,bjk->bk"
    assert len(low_products(found.after)) == multiplies_matrices_too
    assert len(products(found.after)) == 1 + multiplies_matrices_too
    assert "an elementwise product" in text_of(found)


def test_an_outer_product_contracts_nothing_and_stays_as_it_was():
    def fn(x, y):
        return jnp.einsum("i,j->ij", x, y), jnp.kron(x[:, None], y[None])

    found = look(fn, pp.AutoMixedBf16, array(0, 16), array(1, 16))
    assert found.after is found.before


# ---------------------------------------------------------------- loops


def test_loops_maps_and_segments():
    def fn(x, w):
        return {
            "matrices": lax.associative_scan(lambda a, b: jnp.einsum("nij,njk->nik", a, b), w),
            "map": lax.map(lambda row: jnp.tanh(row @ w[0]), x, batch_size=8),
            "segments": jax.ops.segment_sum(x @ w[0], jnp.arange(len(x)) % 3, 3),
        }

    check_program(fn, array(0, 20, 16), array(1, 4, 16, 16) / 4, wrt=(0, 1), least=4)


def test_resized_images_and_diagonal_recurrences():
    """`resize` asks for the highest precision in its own products."""

    def fn(x, w):
        return {
            "diagonal": lax.associative_scan(lambda a, b: a * b, jnp.tanh(x @ w)),
            "resized": jax.image.resize((x @ w)[None], (1, 7, 32), "bilinear"),
        }

    args = array(0, 20, 16), array(1, 16, 16)
    check_program(fn, *args, wrt=None, wide=ordered(fn, *args))


# ---------------------------------------------------------------- solvers


def spd(size):
    """A symmetric matrix with condition number near 3, and a right-hand side."""
    noise = normal(0, size, size) * np.float32(0.2 / np.sqrt(size))
    return jnp.asarray(np.eye(size, dtype=np.float32) * 2 + noise + noise.T), array(1, size)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("method", ["cg", "gmres", "bicgstab"])
def test_krylov_solvers(method):
    """Their loops end on a tolerance, so the solution is that of the matrix that is given."""
    solve = getattr(jax.scipy.sparse.linalg, method)

    def fn(a, b):
        return solve(lambda x: a @ x, b, tol=1e-2)[0]

    a, b = spd(64)
    assert "ends on a tolerance" in text_of(look(fn, pp.AutoMixedBf16, a, b))
    got, want = run(fn, pp.AutoMixedBf16, a, b), jax.jit(fn)(a, b)
    assert rel_error(got, want) < 1e-5
    assert rel_error(a @ got, b) < 0.02


def test_a_custom_linear_solve_and_its_gradient():
    def fn(a, b):
        def direct(_matvec, rhs):
            return jnp.linalg.solve(a, rhs)

        return lax.custom_linear_solve(lambda x: a @ x, b, direct, symmetric=True)

    a, b = spd(32)
    found = look(
        jax.grad(lambda a, b: jnp.sum(jnp.arctan(fn(a, b))), (0, 1)), pp.AutoMixedBf16, a, b
    )
    assert low_products(found.after)
    assert identical(run(fn, pp.AutoMixedBf16, a, b), jax.jit(fn)(a, b))


@pytest.mark.release
def test_odeint_and_its_gradient():
    """The tolerance is far below the format's rounding; steps stay finite all the same."""

    def fn(w, y0):
        def field(y, _t):
            return jnp.tanh(y @ w) - y

        return odeint(field, y0, jnp.linspace(0.0, 1.0, 4), rtol=1e-4, atol=1e-4)

    args = array(0, 16, 16) / 4, array(1, 16)
    check_program(fn, *args, wrt=(0, 1), wide=ordered(fn, *args))


def test_a_minimum_found_by_bfgs():
    matrix, rhs = spd(8)

    def fn(x0, matrix, rhs):
        def objective(x):
            return 0.5 * jnp.dot(x, matrix @ x) - jnp.dot(rhs, x)

        return jax.scipy.optimize.minimize(objective, x0, method="BFGS", tol=1e-2).x

    args = jnp.zeros(8), matrix, rhs
    inspection = look(fn, pp.AutoMixedBf16, *args)
    assert low_products(inspection.after) == []
    assert "ends on a tolerance" in text_of(inspection)
    assert rel_error(run(fn, pp.AutoMixedBf16, *args), jax.jit(fn)(*args)) < 1e-5


def residual(a, b, y):
    return y + jnp.tanh(a @ y) - b


def newton(f, y):
    """Newton's method down to a residual of 1e-2 in the root mean square."""

    def step(state):
        steps, y = state
        return steps + 1, y - jnp.linalg.solve(jax.jacfwd(f)(y), f(y))

    steps, y = lax.while_loop(lambda s: jnp.mean(f(s[1]) ** 2) > 1e-4, step, (0, y))
    return y, steps


def test_newtons_method_in_a_while_loop():
    """All are wide: the predicate's product, and those of the loop, which ends on a tolerance."""

    def fn(a, b):
        return newton(lambda y: residual(a, b, y), b)

    args = array(0, 32, 32) / 10, array(1, 32)
    assert low_products(look(fn, pp.AutoMixedBf16, *args).after) == []
    (y, steps), want = run(fn, pp.AutoMixedBf16, *args), jax.jit(fn)(*args)
    assert rel_error(y, want[0]) < 1e-5
    assert 2 <= int(steps) == int(want[1]) <= 5


def test_custom_root_and_its_gradient():
    def fn(a, b):
        def tangent_solve(g, y):
            return jnp.linalg.solve(jax.jacfwd(g)(jnp.zeros_like(y)), y)

        y = lax.custom_root(
            lambda y: residual(a, b, y), b, lambda f, y: newton(f, y)[0], tangent_solve
        )
        return jnp.sum(jnp.arctan(a @ y))

    args = array(0, 32, 32) / 10, array(1, 32)
    want = jax.jit(jax.grad(fn, (0, 1)), **FAST)(*args)
    inside = pp.auto_mixed(jax.grad(fn, (0, 1)), **FAST)
    outside = jax.jit(jax.grad(pp.auto_mixed(fn), (0, 1)), **FAST)
    for form in (inside, outside):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", pp.PrecisionWarning)
            traced = form.trace(*args)
        assert not [w for w in caught if issubclass(w.category, pp.PrecisionWarning)]
        # the root's loop ends on a tolerance, and the Jacobians are factorized; low are those of
        # the loss, of which a derivative that JAX takes later holds one fewer
        assert len(low_products(traced.jaxpr)) >= 2
        got = traced.lower().compile()(*args)
        assert_leaves_near(got, want, 8 * pp.types.Precision.BF16.unit_roundoff)


def test_an_integral_over_a_product():
    def fn(x, w):
        return jax.scipy.integrate.trapezoid(jnp.tanh(x @ w), dx=0.1, axis=0)

    check_program(fn, array(0, 20, 16), array(1, 16, 8), wrt=(0, 1))


# ---------------------------------------------------------------- unchanged


def test_sparse_products_keep_their_digits():
    """BCOO products are primitives of their own, opaque to the pass; the dense one is low."""
    dense = jnp.asarray(np.where(normal(0, 16, 16) > 0.5, normal(1, 16, 16), np.float32(0)))
    held = sparse.BCOO.fromdense(dense)

    def fn(data, x):
        product = sparse.BCOO((data, held.indices), shape=held.shape) @ x
        return product, x @ x

    def loss(data, x):
        return jnp.sum(jnp.sin(fn(data, x)[0]))

    args = held.data, array(2, 16, 16)
    assert len(low_products(look(fn, pp.AutoMixedBf16, *args).after)) == 1
    assert identical(run(fn, pp.AutoMixedBf16, *args)[0], jax.jit(fn)(*args)[0])
    want = jax.jit(jax.grad(loss))(*args)
    assert identical(jax.jit(jax.grad(lambda *xs: run(loss, pp.AutoMixedBf16, *xs)))(*args), want)


def orderings(x):
    return {
        "sort": jnp.sort(x),
        "argsort": jnp.argsort(x),
        "lexsort": jnp.lexsort((x[0], x[1])),
        "top_k": lax.top_k(x, 5),
        "approx": lax.approx_max_k(x, 5),
        "partition": jnp.partition(x, 5),
        "median": jnp.median(x),
        "percentile": jnp.percentile(x, 30.0),
        "searchsorted": jnp.searchsorted(jnp.sort(x[0]), x[1]),
        "unique": jnp.unique(x, size=8),
        "argmax": jnp.argmax(x, axis=1),
        "histogram": jnp.histogram(x, bins=8),
    }


@pytest.mark.parametrize("policy", AUTO, ids=lambda p: p.name)
def test_orderings_are_those_of_float32(policy):
    found = look(orderings, policy, array(0, 4, 64))
    assert found.after is found.before
