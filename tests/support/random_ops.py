"""The ingredients of random programs that have no body; `random_programs.OPERANDS` has operands."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.support.jaxprs import LOW
from tests.support.random_programs import Picks, Scope, ingredient, operations

SPECS = (
    *("ij,jk->ik", "ij,kj->ik", "ji,jk->ik", "ij,jk->ki", "ij,j->i", "j,ij->i", "jk,bij->kbi"),
    *("bij,bjk->bik", "bij,bkj->bik", "bji,bjk->bki", "bij,jk->bik", "bij,bik->jk", "bij,bij->b"),
    *("bij,ibj->i", "bhij,bhjk->bihk", "i,i->", "i,j->ij", "ij,k->ijk", "ij,ij->ij"),
)
SIZES = {"b": 2, "i": 3, "h": 1}
"""Of the letters of einsum; of all others it is 4."""


@ingredient(weight=14)
def product(s: Scope, n: Picks, _: Any) -> None:
    spec = n.of(SPECS)
    sides = spec.partition("->")[0].split(",")
    operands = (s.float(n, tuple(SIZES.get(c, 4) for c in side)) for side in sides)
    s.floats.append(jnp.einsum(spec, *operands) * 0.4)


operations(
    "matmul",
    8,
    lambda x, w: x @ w * 0.5,
    lambda w, u: w @ (u * 0.5),
    lambda x, w, u: (x @ (w * 0.5)) @ (u * 0.5),
    lambda x, w, u: x @ (w * 0.5) @ (u * 0.5) @ (w * 0.5),
    lambda z, w: (z @ jnp.swapaxes(z, 1, 2)) @ z * 0.2,
)
NHWC = ("NHWC", "HWIO", "NHWC")
operations(
    "convolution",
    2,
    lambda z, w: lax.conv(z, w.ravel()[:6].reshape(1, 3, 2), (1,), "SAME") * 0.5,
    lambda z, w: lax.conv_general_dilated(
        z, w.ravel()[:12].reshape(2, 3, 2), (2,), [(1, 0)], rhs_dilation=(2,)
    ),
    lambda z, w: lax.conv_general_dilated(
        z, w.ravel()[:6].reshape(3, 1, 2), (1,), "VALID", feature_group_count=3
    ),
    lambda z, w: lax.conv_general_dilated(
        z.reshape(1, 3, 4, 2), w.reshape(2, 2, 2, 2), (1, 1), "VALID", dimension_numbers=NHWC
    ),
)
operations(
    "ordered_product",
    2,
    lambda x, w: jnp.matmul(x, w, precision=lax.Precision.HIGHEST) * 0.5,
    lambda x, w: lax.dot(x.astype(LOW[0]), w.astype(LOW[0]), preferred_element_type=jnp.float32),
    lambda x, w: lax.dot(x, w, precision=lax.DotAlgorithmPreset.F32_F32_F32) * 0.5,
)
operations(
    "ragged_product",
    2,
    lambda x, w, u: lax.ragged_dot(x, jnp.stack([w, u]), jnp.array([1, 2], jnp.int32)) * 0.5,
)

# ---------------------------------------------------------------- elementwise

UNARY = (
    *(jnp.tanh, jnp.exp, jnp.sin, jnp.cos, lax.logistic, lax.erf, jax.nn.relu, jax.nn.gelu),
    *(jax.nn.silu, jnp.abs, jnp.sign, jnp.square, jnp.floor, jnp.expm1, jnp.arctan),
    jax.nn.softplus,
    lambda a: jnp.log(jnp.abs(a) + 0.5),
    lambda a: jnp.log1p(a * a),
    lambda a: lax.rsqrt(a * a + 0.1),
    lambda a: jnp.sqrt(jnp.abs(a) + 0.1),
    lambda a: jnp.power(jnp.abs(a) + 0.5, 1.5),
    lambda a: a**3,
    lambda a: lax.integer_pow(jnp.abs(a) + 1, -2),
    lambda a: lax.cbrt(a + 3.0),
    lambda a: lax.atan2(a, 2.0 + a * a),
    lambda a: jnp.round(a * 4) / 4,
    lambda a: lax.stop_gradient(a) + a,
    lambda a: lax.erf_inv(jnp.tanh(a) * 0.9),
)
operations("elementwise", 8, *(lambda a, fn=fn: fn(a) for fn in UNARY))
operations(
    "binary",
    8,
    lambda a, b: a + b,
    lambda a, b: a - b * 3,
    lambda a, b: a * b,
    lambda a, b: a / (1 + jnp.abs(b)),
    lambda a, b: jnp.maximum(a, b),
    lambda a, b: jnp.minimum(a, b),
    lambda a, b: jnp.where(a > b, a * 2, b),
    lambda a, b: lax.clamp(np.float32(-0.5), a, np.float32(0.5)) * b,
    lambda a, b: jnp.hypot(a, b + 3.0),
    lambda a, b: lax.rem(a, 1.0 + jnp.abs(b)),
    lambda a, b: a - 0.1 * b,
    lambda a, b: jnp.logaddexp(a, b),
    lambda a, b: jax.nn.glu(jnp.concatenate([a, b], -1)) if a.ndim else a * b,
)
operations(
    "weak",
    2,
    lambda x: (x * 2 + 1, lax.full_like(jnp.asarray(2.0), 3.0) * 1.5),
    lambda x: (3 - x) / 7,
    lambda x: x * 1e-3 + 0.5,
)

# ---------------------------------------------------------------- accumulation and order

REDUCTIONS = (
    *(jnp.sum, jnp.mean, jnp.max, jnp.min, jnp.var, jax.nn.logsumexp),
    lambda m, axis: jnp.prod(m + 1.1, axis=axis),
    lambda m, axis: jnp.sqrt(jnp.sum(m * m, axis=axis) + 1e-12),
)
AXES = (0, -1, None)
operations(
    "reduction", 5, *(lambda m, fn=fn, k=k: fn(m, axis=k) for fn in REDUCTIONS for k in AXES)
)
CUMULATIONS = (
    *(lax.cumsum, lax.cummax, lax.cumlogsumexp),
    lambda m, **options: lax.cumprod(m + 2, **options),
)
operations(
    "cumulation",
    3,
    *(
        lambda m, fn=fn, k=k: jnp.tanh(fn(m, axis=k, reverse=bool(k)))
        for fn in CUMULATIONS
        for k in (0, 1)
    ),
)
operations(
    "order",
    3,
    lambda x: jnp.sort(x, axis=-1),
    lambda x: (lax.top_k(x, 2)[0], lax.top_k(x, 2)[1].ravel()[:4]),
    lambda x: jnp.concatenate([jnp.argmax(x, axis=1), jnp.argmin(x)[None]]),
    lambda x: jnp.argsort(x[0]),
    lambda x: lax.sort((x[0], x[1] * 2), num_keys=1),
)
operations(
    "indexing",
    4,
    lambda w, ids: w[ids],
    lambda w, ids: jnp.take_along_axis(w, ids[:, None], axis=1),
    lambda w, ids, u: w.at[ids].add(u),
    lambda w, ids, u: w.at[ids[0]].set(u[0]),
    lambda w, ids: lax.dynamic_slice(w, (ids[0], ids[1]), (2, 2)),
    lambda w, ids, u: lax.dynamic_update_slice(w, u[:2], (ids[0], ids[1])),
    lambda w, ids: jax.ops.segment_sum(w, ids, num_segments=4),
    lambda w, ids: jax.nn.one_hot(ids, 4, dtype=jnp.float32) @ w,
    lambda w, ids, u: w.at[ids].max(u),
)
operations(
    "movement",
    5,
    lambda x, y: jnp.concatenate([x, y]),
    lambda x: jnp.pad(x, ((1, 0), (0, 2))),
    lambda x: x.T,
    lambda x, y: jnp.stack([x, y]),
    lambda x: jnp.subtract(*jnp.split(x, 2, axis=1)),
    lambda x, y: lax.rev(x, (0,)) + y,
    lambda x, y: jnp.broadcast_to(x[:1], (3, 4)) * y,
    lambda x: lax.pad(x, np.float32(0), ((0, -1, 0), (1, 0, 1))),
    lambda x: jnp.roll(x, 1, axis=1),
    lambda x, y: lax.optimization_barrier((x, y))[0][:, ::2],
)
operations(
    "window",
    1,
    lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "VALID"),
    lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 2), (1, 2), "SAME"),
    lambda x: x + lax.stop_gradient(lax.reduce(x, np.float32(1), lambda p, q: p * 0.5 + q, (0, 1))),
)

# ---------------------------------------------------------------- where precision is delicate

MASKS = (-1e30, float(np.finfo(np.float32).min), -1e9, -np.inf, -1e4)


def causal(n: int) -> Any:
    return jnp.tril(jnp.ones((n, 4), bool))


operations(
    "masked",
    4,
    *(
        lambda x, w, mask=mask: jax.nn.softmax(jnp.where(causal(3), jnp.tanh(x), mask)) @ w
        for mask in MASKS
    ),
    *(
        lambda x, mask=mask: jnp.where(x > -5, jnp.exp(jnp.where(x > -5, jnp.tanh(x), mask)), 0.0)
        for mask in MASKS
    ),
)
EPSILONS = (1e-12, 1e-6, 1e-30)
operations(
    "epsilon",
    4,
    lambda x: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-3),
    *(
        lambda x, eps=eps: x / jnp.maximum(jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6), eps)
        for eps in EPSILONS
    ),
    *(lambda x, eps=eps: jnp.log(jnp.square(x) + 0.1 + eps) for eps in EPSILONS),
    *(lambda x, w, eps=eps: (x * eps) @ (w / 4) * (1 / eps) for eps in EPSILONS),
)


def positions(start: int) -> Any:
    return (jnp.arange(4, dtype=jnp.int32) + start).astype(jnp.float32)


STARTS = (0, 300, 5000)
FREQUENCIES = (1.0, 0.01, 1e-4, 1e-6)
operations(
    "positions",
    4,
    *(
        lambda s=s: jnp.cos(jnp.einsum("i,j->ij", positions(s), jnp.array(FREQUENCIES)))
        for s in STARTS
    ),
    *(
        lambda w, s=s: (
            (positions(s)[:, None] + jnp.arange(3, dtype=jnp.float32)[None]).T @ (w / (s + 1))
        )
        for s in STARTS
    ),
    lambda w: jnp.cumsum(jnp.ones((4, 4), jnp.float32), axis=0) @ w * 0.1,
    lambda x, ids: ids.astype(jnp.float32)[None] * x * 0.3,
)
operations(
    "integers",
    3,
    lambda ids: ((ids * 3 + 1) % 4, jnp.any(ids > 2)),
    lambda ids: lax.shift_right_logical(ids, 1) ^ 1,
    lambda ids: jnp.cumsum(ids, dtype=jnp.int32) // 2 % 4,
    lambda ids: jnp.where(ids > 1, ids, 3 - ids),
    lambda ids: jnp.broadcast_to(jnp.dot(ids, ids, preferred_element_type=jnp.int32), (4,)) % 4,
    lambda v: jnp.clip(v.astype(jnp.int32), 0, 3),
    lambda v: lax.bitcast_convert_type(v, jnp.int32) & 3,
)
operations(
    "cast",
    5,
    *(
        lambda x, w, fn=fn, low=low: fn(jnp.tanh(x).astype(low), w.astype(low))
        for low in LOW
        for fn in (
            lambda y, _: y.astype(jnp.float32),
            lambda y, _: (y * 2 + y).astype(jnp.float32),
            lambda y, k: (y @ k).astype(jnp.float32),
            lambda y, _: jnp.sum(y, axis=0).astype(jnp.float32),
            lambda y, k: jnp.tanh(y).astype(jnp.float32) @ k.astype(jnp.float32),
            lambda y, _: (y, y.astype(jnp.float32).astype(y.dtype).astype(jnp.float32)),
            lambda y, _: jnp.where(y > 0, y, -y).astype(jnp.float32),
        )
    ),
)
operations(
    "sample",
    3,
    lambda key, w: jax.random.normal(key, (3, 4), jnp.float32) @ w,
    lambda key, w: jax.random.uniform(key, (4, 4), jnp.float32, -1) * w,
    lambda key: jax.random.randint(key, (4,), 0, 4, jnp.int32),
    lambda key, x: jnp.where(jax.random.bernoulli(key, 0.7, (3, 4)), x, 0.0),
    lambda key, w: jax.random.categorical(key, w, axis=-1),
    lambda key, v: jax.random.gumbel(key, (4,), jnp.float32) * 0.1 + v,
    lambda key, w: jax.random.permutation(key, w),
)
operations(
    "bits",
    2,
    lambda x, w: lax.reduce_precision(x, 8, 7) @ w,
    lambda x: lax.bitcast_convert_type(
        lax.bitcast_convert_type(lax.stop_gradient(x), jnp.int32) & -65536, jnp.float32
    ),
    lambda x, w: lax.stop_gradient(jnp.nextafter(x, x + 1)) @ w * 0.3,
)


def spectrum(z: Any, w: Any) -> Any:
    out = z @ w.astype(jnp.complex64) * 0.2
    return jnp.real(out) + jnp.imag(out), z


operations(
    "spectrum",
    2,
    lambda x, w: spectrum(jnp.fft.fft(x.astype(jnp.complex64)), w),
    lambda x, w: spectrum(lax.complex(x, x * 0.5), w),
)
operations(
    "empty",
    2,
    lambda x, w: (x[:, :0] @ w[:0] + x, x[:, :0].T @ x),
    lambda x: jnp.concatenate([x[:, :0], x], axis=1) + jnp.sum(x[:, :0]),
)


def definite(w: Any) -> Any:
    w = jnp.tanh(w)
    return w @ w.T + 3 * jnp.eye(4, dtype=jnp.float32)


operations(
    "solve",
    2,
    lambda w: jnp.linalg.cholesky(definite(w)),
    lambda w, u: lax.linalg.triangular_solve(definite(w), u, left_side=True),
    lambda w, v: lax.custom_linear_solve(
        lambda p: definite(w) @ p / 4,
        v,
        lambda _, q: q / 2 - definite(w) @ q / 16,
        symmetric=True,
    ),
)


def attention(z: Any, w: Any, mask: float) -> Any:
    z = jnp.tanh(z)
    scores = jnp.einsum("bqd,bkd->bqk", z @ w, z) / np.float32(2)
    return jax.nn.softmax(jnp.where(causal(3)[None, :, :3], scores, mask)) @ z


def perceptron(z: Any, w: Any) -> Any:
    normed = z * lax.rsqrt(jnp.mean(z * z, -1, keepdims=True) + 1e-6)
    return jnp.tanh(z) + jax.nn.gelu(normed @ w) @ w.T


operations(
    "network",
    3,
    *(lambda z, w, mask=mask: attention(z, w * 0.5, mask) for mask in MASKS),
    *[lambda z, w: perceptron(z, w * 0.5)] * 3,
    *[lambda z, w: w - 0.1 * jnp.einsum("bij,bik->jk", z, jnp.tanh(z @ w))] * 3,
)
operations(
    "float64",
    3,
    lambda d, w: d @ w.astype(jnp.float64) * 0.3,
    lambda d: jnp.cumsum(jnp.tanh(d), axis=1),
    lambda d, w: d.astype(jnp.float32) @ w,
    lambda d: jnp.where(d > 0, d, -1e300) * 1e-300 + jnp.sum(d),
    x64=True,
)
