"""Programs that float32 gets wrong by orders of magnitude, and what float64 makes of them."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import precpass as pp
from tests.support.jaxprs import inner_jaxprs, opened
from tests.support.values import rel_error

ROUNDING = 2.0**-23
"""One rounding to float32 is 2**-24 of each result; twice that is room for nothing else."""

X = np.asarray([0.3, -0.7, 1.1, 0.9, -0.2, 0.55], np.float32)
DIRECTION = np.asarray([1.0, 0.5, -0.3, 0.2, 0.9, -1.0], np.float32)
ROWS = np.stack([X, X * np.float32(0.5) + np.float32(0.1), X[::-1]])
_A = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)
SPD = _A @ _A.T + 6 * np.eye(6, dtype=np.float32)


def fragile(x: Any) -> Any:
    """`x`, for |x| < 1e6: float32 keeps one or two of its digits, float64 ten."""
    # abs keeps XLA from folding the two constants (jax 0.10.2 does, under jit)
    return jnp.abs(x + 1e6) - 1e6


def in_float64(fn: Callable[..., Any], *args: Any) -> Any:
    """What the program is in float64: x64 on, float32 arguments as float64."""
    with jax.enable_x64(True):
        floats = [
            jnp.asarray(x, jnp.float64 if x.dtype == np.float32 else None)
            for x in map(np.asarray, args)
        ]
        return jax.tree.map(np.asarray, jax.jit(fn)(*floats))


def region(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` inside of `keep("f64")`."""

    def kept(*args: Any) -> Any:
        with pp.keep("f64"):
            return fn(*args)

    return kept


def assert_float64(got: Any, want: Any) -> None:
    """Every leaf is what float64 gives, rounded to float32."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(got):
        reference = want
        for key in path:
            reference = reference[getattr(key, "key", getattr(key, "idx", None))]
        assert leaf.dtype == np.float32, f"{path}: {leaf.dtype}"
        found = rel_error(leaf, reference)
        assert found <= ROUNDING, f"{path}: off by {found:.3g}"


# ---------------------------------------------------------------- programs


@jax.jit
def helper(x: Any) -> Any:
    return jnp.sin(fragile(x)) * x


@jax.custom_jvp
def tripled_jvp(x: Any) -> Any:
    return fragile(x) ** 2


tripled_jvp.defjvp(lambda p, t: (tripled_jvp(p[0]), 3 * fragile(p[0]) * t[0]))


@jax.custom_vjp
def tripled_vjp(x: Any) -> Any:
    return fragile(x) ** 2


def _tripled_bwd(kept: Any, g: Any) -> Any:
    # the user's code: with x64 off `jnp.ones` is float32, and strict promotion is on
    ones = jnp.ones(kept[0].shape)
    return (3 * fragile(kept[1]) * g * ones + 0 * kept[0],)


tripled_vjp.defvjp(lambda x: (tripled_vjp(x), (x, fragile(x))), _tripled_bwd)


def _scan(x: Any) -> Any:
    def body(carry: Any, y: Any) -> Any:
        carry = fragile(carry) * 0.5 + y * y
        return carry, helper(carry)

    carry, ys = lax.scan(body, x[0], x)
    return carry + ys.sum()


def _matrix(x: Any) -> Any:
    return jnp.asarray(SPD, x.dtype) + jnp.outer(fragile(x), x)


def _linear_solve(x: Any) -> Any:
    a = jnp.asarray(SPD, x.dtype)
    return lax.custom_linear_solve(
        lambda v: jnp.dot(a, v), fragile(x), lambda _, b: jnp.linalg.solve(a, b), symmetric=True
    )[1]


PAIRS = np.asarray([0, 1, 0, 2, 3, 3], np.int32)

CALLS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda x: jnp.sum(fragile(x) ** 2),
    "jit": lambda x: jnp.sum(helper(x)),
    "scan": _scan,
    "cond": lambda x: lax.cond(
        x[0] > 0, lambda x: jnp.prod(fragile(x)), lambda x: jnp.sum(fragile(2 * x)), x
    ),
    "fori_loop": lambda x: jnp.sum(lax.fori_loop(0, 3, lambda _, c: fragile(c) * x, x)),
    "custom_jvp": lambda x: jnp.sum(tripled_jvp(x)),
    "custom_vjp": lambda x: jnp.sum(tripled_vjp(x)),
    "remat": lambda x: jnp.sum(jax.checkpoint(lambda x: helper(fragile(x)))(x)),
    "vmap": lambda x: jnp.sum(jax.vmap(lambda y: helper(fragile(y)))(x)),
    "grad": lambda x: jnp.sum(jax.grad(lambda y: jnp.sum(fragile(y) ** 3))(x)),
    "custom_linear_solve": _linear_solve,
}
"""Every way in which equations hold equations."""

PRIMITIVES: dict[str, Callable[[Any], Any]] = {
    "gather": lambda x: jnp.sum(fragile(x)[PAIRS] ** 2),
    "scatter-add": lambda x: jnp.sum(jnp.zeros(4, x.dtype).at[PAIRS].add(fragile(x)) ** 2),
    "sort": lambda x: jnp.sum(jnp.sort(fragile(x)) ** 3),
    "cumsum": lambda x: jnp.sum(jnp.cumsum(fragile(x)) ** 2),
    "cumprod": lambda x: jnp.sum(jnp.cumprod(fragile(x))),
    "max": lambda x: jnp.max(fragile(x)) ** 2,
    "argmax": lambda x: fragile(x)[jnp.argmax(fragile(x))] ** 2,
    "top_k": lambda x: jnp.sum(lax.top_k(fragile(x), 3)[0] ** 2),
    "softmax": lambda x: jnp.sum(jax.nn.softmax(fragile(x)) * x),
    "logsumexp": lambda x: jax.scipy.special.logsumexp(fragile(x)) ** 2,
    "dynamic_slice": lambda x: jnp.prod(lax.dynamic_slice(fragile(x), (jnp.int32(2),), (3,))),
    "conv": lambda x: jnp.sum(jnp.convolve(fragile(x), x) ** 2),
    "dot_general": lambda x: fragile(x) @ (jnp.asarray(SPD, x.dtype) @ x),
    "select_n": lambda x: jnp.sum(jnp.where(x > 0, fragile(x) ** 2, 0.5 * x)),
    "cholesky": lambda x: jnp.linalg.cholesky(_matrix(x) + _matrix(x).T)[3, 2],
    "eigh": lambda x: jnp.linalg.eigh(_matrix(x) + _matrix(x).T)[0][2],
    "svd": lambda x: jnp.linalg.svd(_matrix(x), compute_uv=False)[3],
    "qr": lambda x: jnp.linalg.qr(_matrix(x))[1][2, 3],
    "lu": lambda x: jnp.sum(jnp.linalg.solve(_matrix(x), x) ** 2),
}
"""What JAX's own rules transpose by new equations, and what it factorises."""


# ---------------------------------------------------------------- reading


def inside_islands(jaxpr: Any) -> Iterator[Any]:
    """Every equation inside of float64 stretches, bodies included."""

    def walk(jaxpr: Any, inside: bool) -> Iterator[Any]:
        for eqn in opened(jaxpr).eqns:
            if inside:
                yield eqn
            held = eqn.primitive.name == "precpass_float64"
            for inner in inner_jaxprs(eqn):
                yield from walk(inner, inside or held)

    return walk(jaxpr, False)


def narrow_arithmetic(jaxpr: Any) -> list[str]:
    """The equations of float64 stretches that compute in float32; casts are none."""
    return [
        str(eqn)
        for eqn in inside_islands(jaxpr)
        if eqn.primitive.name != "convert_element_type"
        and not inner_jaxprs(eqn)
        and any(getattr(v.aval, "dtype", None) == np.float32 for v in (*eqn.invars, *eqn.outvars))
    ]
