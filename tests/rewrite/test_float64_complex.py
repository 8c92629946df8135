"""Complex numbers in float64 regions: complex64 is evaluated as complex128.

Each program cancels to what is a rounding of complex64, so that one equation in it shows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from tests.support.float64_programs import region

Fn = Callable[..., Any]
R = np.random.default_rng(0)
X = R.normal(size=8).astype(np.float32)
Z = (R.normal(size=(8, 8)) + 1j * R.normal(size=(8, 8))).astype(np.complex64)


def mixed(fn: Fn) -> Fn:
    return pp.auto_mixed(fn, policy=pp.AlwaysF32)


def lost(z: Any) -> Any:
    """`z`, of which complex64 keeps two or three digits."""
    return jnp.exp(jnp.log(z + 1e5)) - 1e5


def times(x: Any, z: Any) -> Any:
    return lax.complex(x, jnp.zeros_like(x)) * z


def scanned(x: Any) -> Any:
    start = lax.complex(x, x)
    return jnp.abs(lax.scan(lambda c, _: (lost(c), None), start, None, length=3)[0])


def solved(x: Any) -> Any:
    a = jnp.asarray(Z) + 10 * jnp.eye(8, dtype=Z.dtype)
    return jnp.real(jnp.linalg.solve(a, a @ lax.complex(x, x)))


def unitary(x: Any) -> Any:
    a = jnp.asarray(Z)
    _, v = jnp.linalg.eigh((a + a.conj().T) * lax.complex(x[0], x[0] * 0.0))
    return jnp.real(jnp.einsum("ij,kj,k->i", v, v.conj(), lax.complex(x, x)))


def updated(x: Any) -> Any:
    z = jnp.zeros(8, jnp.complex64).at[jnp.arange(8)].add(lax.complex(x, x))
    return jnp.imag(lost(z))


# All are the identity of float32 vectors.
PROGRAMS: dict[str, Fn] = {
    "fft": lambda x: jnp.real(jnp.fft.ifft(jnp.fft.fft(lost(lax.complex(x, x))))),
    "rfft": lambda x: jnp.fft.irfft(lost(jnp.fft.rfft(x))),
    "fftn": lambda x: jnp.real(jnp.fft.ifft2(jnp.fft.fft2(x.reshape(2, 4)))).reshape(8),
    "real and imaginary": lambda x: jnp.real(lost(times(x, 1j)) * -1j),
    "conjugate": lambda x: jnp.conj(lost(lax.complex(x, x))).real,
    "einsum": lambda x: (
        jnp.einsum("ij,j->i", jnp.eye(8, dtype=jnp.complex64), lost(lax.complex(x, x))).imag
    ),
    "jit": lambda x: jax.jit(lost)(lax.complex(x, x)).real,
    "scan": lambda x: scanned(x) / jnp.sqrt(2.0) * jnp.sign(x),
    "cond": lambda x: lax.cond(x[0] > 9, lambda z: z * 2, lost, lax.complex(x, x)).real,
    "solve": solved,
    "eigh": unitary,
    "scatter": updated,
    "cast": lambda x: lost(x.astype(jnp.complex64)).real,
    "number": lambda x: jnp.real(times(x, 0.1 + 0.7j) / (0.1 + 0.7j)),
    "checkpoint": lambda x: jax.checkpoint(lost)(lax.complex(x, x)).real,
}


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_complex_numbers_are_complex128(name: str, x64: bool):
    def off_by(x: Any) -> Any:
        with pp.keep("f64"):
            return PROGRAMS[name](x) - x

    with jax.enable_x64(x64), jax.numpy_dtype_promotion("standard"):
        x = jnp.asarray(X)
        of_rows, of_value = jax.jit(lambda x: (jax.vmap(mixed(off_by))(x[None])[0], x))(x)
        found = {
            "value": mixed(off_by)(x),
            "vmap outside": of_rows,
            "vmap inside": mixed(lambda x: jax.vmap(off_by)(x[None])[0])(x),
        }
    assert of_value.dtype == np.float32
    for form, errors in found.items():
        assert errors.dtype == np.float32, form
        assert np.max(np.abs(errors)) < 1e-9, form


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_derivatives_of_complex_numbers_are_complex128(name: str, x64: bool):
    """The gradient of a sum of the identity is one."""

    def off_by(x: Any) -> Any:
        with pp.keep("f64"):
            return jnp.sum((PROGRAMS[name](x) - x) * 1e3)

    with jax.enable_x64(x64), jax.numpy_dtype_promotion("standard"):
        x = jnp.asarray(X)
        inside, outside = mixed(jax.grad(off_by))(x), jax.jit(jax.grad(mixed(off_by)))(x)
        _, tangent = jax.jvp(mixed(off_by), (x,), (x,))
    assert np.max(np.abs(inside)) < 2e-7
    assert np.max(np.abs(outside)) < 2e-7
    assert abs(tangent) < 1e-6


def test_complex_operands_and_results_keep_their_dtype():
    def fn(z: Any) -> Any:
        return lost(z) - z, jnp.fft.fft(z)

    off, transformed = mixed(region(fn))(Z)
    assert off.dtype == transformed.dtype == np.complex64
    assert np.max(np.abs(off)) < 1e-9
    want = np.fft.fft(Z.astype(np.complex128))
    assert np.max(np.abs(transformed - want.astype(np.complex64))) <= 1e-6


def test_a_complex_value_crosses_exactly_from_one_span_to_the_next():
    def fn(x: Any) -> Any:
        with pp.keep("f64"):
            z = lax.complex(x, x) * 0.1
        y = jnp.tanh(x)
        with pp.keep("f64"):
            return jnp.real(z) * 10.0 - x + y[0] * 0.0

    def total(x: Any) -> Any:
        return jnp.sum(fn(x))

    assert np.max(np.abs(mixed(fn)(X))) < 1e-15
    assert np.max(np.abs(jax.grad(mixed(total))(X))) < 1e-6


def test_outside_of_the_region_and_under_other_policies_complex_numbers_stay():
    def fn(x: Any) -> Any:
        return jnp.fft.ifft(jnp.fft.fft(x)).real - x

    np.testing.assert_array_equal(mixed(fn)(X), jax.jit(fn)(X))
    assert not pp.inspect(lambda x: jnp.fft.fft(x) * 2, "AlwaysF32")(X).plan.changes
