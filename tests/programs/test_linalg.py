"""Every public function of `jnp.linalg` and `jnp.fft`, and the library of `jax.scipy.linalg`.

Decompositions, solves and transforms keep their digits: they have no low kernels, and JAX asks
for the highest precision in the products of its own that they are made of. What a user sees as a
product is low.
"""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import pytest

import precpass as pp
from precpass.plan.reasons import DecidedBy
from tests.support.jaxprs import low_products, products, touches_low, walk
from tests.support.libraries import check_program
from tests.support.passes import AUTO, both_grads, look, run, text_of
from tests.support.values import identical, normal, rel_error

pytestmark = pytest.mark.programs

each_auto = pytest.mark.parametrize("policy", AUTO, ids=lambda p: p.name)

# The square matrix is far from singular and its eigenvalues are apart: derivatives of
# decompositions divide by their differences.
SQUARE = np.diag(np.arange(1.0, 9.0, dtype=np.float32)) + normal(0, 8, 8) * np.float32(0.1)
SYMMETRIC = (SQUARE + SQUARE.T) / 2
TALL = np.concatenate([SQUARE, normal(1, 8, 8) * np.float32(0.1)])[:, :6]
VECTOR = normal(2, 8)
LINALG_ARGS = {"a": SQUARE, "s": SYMMETRIC, "tall": TALL, "b": VECTOR}

PRODUCTS = {
    "matmul": lambda x: jnp.linalg.matmul(x["a"], x["tall"].T[:, :8].T),
    "matrix_power": lambda x: jnp.linalg.matrix_power(x["a"] / 8, 3),
    "multi_dot": lambda x: jnp.linalg.multi_dot([x["a"], x["s"], x["b"]]),
}
# Products that use each element once, as elementwise work and a reduction, which stay float32.
ELEMENTWISE = {
    "tensordot": lambda x: jnp.linalg.tensordot(x["a"], x["s"]),
    "vecdot": lambda x: jnp.linalg.vecdot(x["a"], x["s"]),
}
WIDE = {
    "cholesky": lambda x: jnp.linalg.cholesky(x["s"]),
    "cond": lambda x: jnp.linalg.cond(x["a"]),
    "cross": lambda x: jnp.linalg.cross(x["a"][:, :3], x["a"][:, 3:6]),
    "det": lambda x: jnp.linalg.det(x["a"] / 4),
    "diagonal": lambda x: jnp.linalg.diagonal(x["a"]),
    "eigh": lambda x: jnp.linalg.eigh(x["s"]),
    "eigvalsh": lambda x: jnp.linalg.eigvalsh(x["s"]),
    "inv": lambda x: jnp.linalg.inv(x["a"]),
    "lstsq": lambda x: jnp.linalg.lstsq(x["tall"], jnp.tile(x["b"], 2))[0],
    "matrix_norm": lambda x: jnp.linalg.matrix_norm(x["a"], ord="nuc"),
    "matrix_transpose": lambda x: jnp.linalg.matrix_transpose(x["a"]),
    "norm": lambda x: jnp.linalg.norm(x["a"], ord=2),
    "outer": lambda x: jnp.linalg.outer(x["b"], x["b"]),
    "pinv": lambda x: jnp.linalg.pinv(x["tall"]),
    "qr": lambda x: jnp.linalg.qr(x["tall"]),
    "slogdet": lambda x: jnp.linalg.slogdet(x["a"]),
    "solve": lambda x: jnp.linalg.solve(x["a"], x["b"]),
    "svd": lambda x: jnp.linalg.svd(x["tall"], full_matrices=False),
    "svdvals": lambda x: jnp.linalg.svdvals(x["tall"]),
    "tensorinv": lambda x: jnp.linalg.tensorinv(x["a"].reshape(4, 2, 8), ind=2),
    "tensorsolve": lambda x: jnp.linalg.tensorsolve(x["a"].reshape(2, 4, 8), x["b"].reshape(2, 4)),
    "trace": lambda x: jnp.linalg.trace(x["a"]),
    "vector_norm": lambda x: jnp.linalg.vector_norm(x["b"]),
}
# Complex or integer results, or none that could be differentiated.
OTHERS = {
    "eig": lambda x: jnp.linalg.eig(x["a"]),
    "eigvals": lambda x: jnp.linalg.eigvals(x["a"]),
    "matrix_rank": lambda x: jnp.linalg.matrix_rank(x["a"]),
}
FFT = {
    "fft": lambda x: jnp.fft.fft(x["a"]),
    "fft2": lambda x: jnp.fft.fft2(x["a"]),
    "fftfreq": lambda x: jnp.fft.fftfreq(8, d=0.5),
    "fftn": lambda x: jnp.fft.fftn(x["a"]),
    "fftshift": lambda x: jnp.fft.fftshift(x["a"]),
    "hfft": lambda x: jnp.fft.hfft(x["a"]),
    "ifft": lambda x: jnp.fft.ifft(x["a"]),
    "ifft2": lambda x: jnp.fft.ifft2(x["a"]),
    "ifftn": lambda x: jnp.fft.ifftn(x["a"]),
    "ifftshift": lambda x: jnp.fft.ifftshift(x["a"]),
    "ihfft": lambda x: jnp.fft.ihfft(x["a"]),
    "irfft": lambda x: jnp.fft.irfft(x["a"]),
    "irfft2": lambda x: jnp.fft.irfft2(x["a"]),
    "irfftn": lambda x: jnp.fft.irfftn(x["a"]),
    "rfft": lambda x: jnp.fft.rfft(x["a"]),
    "rfft2": lambda x: jnp.fft.rfft2(x["a"]),
    "rfftfreq": lambda x: jnp.fft.rfftfreq(8, d=0.5),
    "rfftn": lambda x: jnp.fft.rfftn(x["a"]),
}
SCIPY = {
    "cho_solve": lambda x: jsp.linalg.cho_solve(jsp.linalg.cho_factor(x["s"]), x["b"]),
    "expm": lambda x: jsp.linalg.expm(x["a"]),
    "expm_frechet": lambda x: jsp.linalg.expm_frechet(x["a"], x["s"]),
    "hessenberg": lambda x: jsp.linalg.hessenberg(x["a"]),
    "lu": lambda x: jsp.linalg.lu(x["a"]),
    "lu_solve": lambda x: jsp.linalg.lu_solve(jsp.linalg.lu_factor(x["a"]), x["b"]),
    "polar": lambda x: jsp.linalg.polar(x["a"]),
    "schur": lambda x: jsp.linalg.schur(x["a"]),
    "solve_sylvester": lambda x: jsp.linalg.solve_sylvester(x["a"], x["s"], x["a"]),
    "solve_triangular": lambda x: jsp.linalg.solve_triangular(x["a"], x["b"]),
    "sqrtm": lambda x: jsp.linalg.sqrtm(x["s"]),
    "toeplitz": lambda x: jsp.linalg.toeplitz(x["b"]),
    "dct": lambda x: jsp.fft.dctn(x["a"]),
    "idct": lambda x: jsp.fft.idctn(x["a"]),
}


def args_of(args):
    return {name: jnp.asarray(x) for name, x in args.items()}


def all_of(table):
    return lambda x: {name: fn(x) for name, fn in table.items()}


def public(module):
    return {n for n in dir(module) if not n.startswith("_") and callable(getattr(module, n))}


def test_every_public_function_is_here():
    """A new one of a later JAX must be added above."""
    assert public(jnp.linalg) == (
        PRODUCTS.keys() | ELEMENTWISE.keys() | WIDE.keys() | OTHERS.keys()
    )
    assert public(jnp.fft) == FFT.keys()


def test_products_are_low_but_for_elementwise_work():
    fn, args = all_of(PRODUCTS | ELEMENTWISE), args_of(LINALG_ARGS)
    check_program(fn, args, least=5, elementwise=len(ELEMENTWISE))


@each_auto
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_products_that_are_elementwise_work_stay_float32(name, policy):
    found = look(ELEMENTWISE[name], policy, args_of(LINALG_ARGS))
    assert len(products(found.after)) == 1 and not low_products(found.after)
    assert "an elementwise product" in text_of(found)


@each_auto
def test_nothing_else_is_low(policy):
    fn = all_of(WIDE | OTHERS | FFT | SCIPY)
    found = look(fn, policy, args_of(LINALG_ARGS))
    assert products(found.after)
    assert not [eqn for eqn in walk(found.after) if touches_low(eqn)]


def test_their_values_are_float32s_beside_a_product():
    def fn(x):
        return all_of(WIDE | OTHERS | FFT)(x), x["a"] @ x["s"]

    args = args_of(LINALG_ARGS)
    assert len(low_products(look(fn, pp.AutoMixedBf16, args).after)) == 1
    assert identical(run(fn, pp.AutoMixedBf16, args)[0], jax.jit(fn)(args)[0])


GRADIENTS = (
    *("cholesky", "det", "eigvalsh", "inv", "lstsq", "pinv", "qr", "slogdet", "solve"),
    *("svdvals", "tensorsolve"),
)


@pytest.mark.release
def test_gradients_of_decompositions_are_near_and_wide_by_jaxs_own_order_or_for_a_solve():
    """The products of a backward pass have the precision that JAX gave those of the forward pass,
    the highest nearly everywhere; the others are operands of a linear solve. Where `jax.grad` is
    outside, what the derivative rules of the decompositions' primitives multiply comes after the
    pass."""
    fn = all_of({name: WIDE[name] for name in GRADIENTS})

    def loss(x):
        leaves = jax.tree.leaves(fn(x))
        return sum((jnp.sum(jnp.arctan(leaf)) for leaf in leaves), jnp.float32(0))

    args = args_of(LINALG_ARGS)
    inspected = look(jax.grad(loss), pp.AutoMixedBf16, args)
    computing = [d for _, d, _ in inspected.decisions() if d.kind is pp.types.OpKind.COMPUTE]
    without_order = [d.reason for d in computing if d.decided_by is not DecidedBy.USER]
    assert 0 < len(without_order) < len(computing)
    assert all("is an operand of a linear solve" in str(reason) for reason in without_order)
    want = jax.jit(jax.grad(loss))(args)
    for form, got in both_grads(loss, pp.AutoMixedBf16, args).items():
        assert rel_error(got, want) < 8 * pp.AutoMixedBf16.low.unit_roundoff, form
