"""The ingredients of random programs that have no body: arithmetic, products, movement."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.support.random_programs import LOW, SHAPES, Picks, Scope, fit, ingredient, unit

EINSUMS = (
    ("ij,jk->ik", (3, 4), (4, 4)),
    ("ij,kj->ik", (3, 4), (4, 4)),
    ("ji,jk->ik", (3, 4), (3, 4)),
    ("ij,jk->ki", (3, 4), (4, 4)),
    ("bij,bjk->bik", (2, 3, 4), (2, 4, 3)),
    ("bij,bkj->bik", (2, 3, 4), (2, 3, 4)),
    ("bji,bjk->bki", (2, 3, 4), (2, 3, 4)),
    ("bij,jk->bik", (2, 3, 4), (4, 4)),
    ("bij,bik->jk", (2, 3, 4), (2, 3, 4)),
    ("bij,bij->b", (2, 3, 4), (2, 3, 4)),
    ("ij,j->i", (3, 4), (4,)),
    ("i,i->", (4,), (4,)),
    ("i,j->ij", (4,), (4,)),
    ("ij,ij->ij", (3, 4), (3, 4)),
    ("bhij,bhjk->bihk", (2, 1, 3, 4), (2, 1, 4, 4)),
)


DOTS = (
    ((3, 4), (4, 4), (((1,), (0,)), ((), ()))),
    ((3, 4), (4, 4), (((1,), (1,)), ((), ()))),
    ((3, 4), (3, 4), (((0,), (0,)), ((), ()))),
    ((2, 3, 4), (2, 4, 3), (((2,), (1,)), ((0,), (0,)))),
    ((2, 3, 4), (2, 3, 4), (((1,), (1,)), ((0,), (0,)))),
    ((2, 3, 4), (2, 3, 4), (((0, 1), (0, 1)), ((), ()))),
    ((2, 3, 4), (4, 4), (((2,), (0,)), ((), ()))),
    ((4, 4), (2, 3, 4), (((0,), (2,)), ((), ()))),
    ((2, 3, 4), (3, 2, 4), (((0, 2), (1, 2)), ((1,), (0,)))),
    ((4,), (4,), (((0,), (0,)), ((), ()))),
    ((4,), (3, 4), (((0,), (1,)), ((), ()))),
    ((3, 4), (4,), (((), ()), ((), ()))),
    ((3, 4), (3, 4), (((), ()), ((0, 1), (0, 1)))),
)


@ingredient(weight=12)
def dot(s: Scope, n: Picks, _: Any) -> None:
    left, right, numbers = n.of(DOTS)
    s.floats.append(lax.dot_general(s.float(n, left), s.float(n, right), numbers) * 0.4)


@ingredient(weight=3)
def einsum(s: Scope, n: Picks, _: Any) -> None:
    spec, left, right = n.of(EINSUMS)
    s.floats.append(jnp.einsum(spec, s.float(n, left), s.float(n, right)) * 0.4)


@ingredient(weight=6)
def matmul(s: Scope, n: Picks, _: Any) -> None:
    x = s.float(n, n.of(((3, 4), (4, 4))))
    for _ in range(1 + n(3)):
        x = x @ (s.float(n, (4, 4)) * 0.5)
    s.floats.append(x)


@ingredient()
def convolution(s: Scope, n: Picks, _: Any) -> None:
    x, w = s.float(n, (2, 3, 4)), s.float(n, (4, 4))
    form = n(4)
    if form == 0:
        out = lax.conv(x, fit(w, (4, 3, 2)), (1,), "SAME")
    elif form == 1:
        out = lax.conv_general_dilated(x, fit(w, (2, 3, 2)), (2,), [(1, 0)], rhs_dilation=(2,))
    elif form == 2:
        out = lax.conv_general_dilated(x, fit(w, (3, 1, 2)), (1,), "VALID", feature_group_count=3)
    else:
        numbers = ("NHWC", "HWIO", "NHWC")
        square, kernel = fit(x, (1, 3, 4, 2)), fit(w, (2, 2, 2, 2))
        out = lax.conv_general_dilated(square, kernel, (1, 1), "VALID", dimension_numbers=numbers)
    s.floats.append(out * 0.5)


@ingredient()
def ordered_product(s: Scope, n: Picks, _: Any) -> None:
    """What the user said about a product's precision stands."""
    x, w, form = s.float(n, (3, 4)), s.float(n, (4, 4)), n(3)
    if form == 0:
        out = jnp.matmul(x, w, precision=lax.Precision.HIGHEST)
    elif form == 1:
        low = x.astype(LOW[0]), w.astype(LOW[0])
        out = lax.dot(*low, preferred_element_type=jnp.float32)
    else:
        out = lax.dot(x, w, precision=lax.DotAlgorithmPreset.F32_F32_F32)
    s.floats.append(out * 0.5)


@ingredient()
def ragged_product(s: Scope, n: Picks, _: Any) -> None:
    sizes = jnp.array([1, 2], jnp.int32)
    s.floats.append(lax.ragged_dot(s.float(n, (3, 4)), s.float(n, (2, 4, 4)), sizes) * 0.5)


UNARY = (
    jnp.tanh,
    jnp.exp,
    lambda x: jnp.log(jnp.abs(x) + 0.5),
    jnp.sin,
    jnp.cos,
    lax.logistic,
    lax.erf,
    jax.nn.relu,
    jax.nn.gelu,
    jax.nn.silu,
    jnp.abs,
    jnp.sign,
    jnp.square,
    jnp.floor,
    jnp.expm1,
    lambda x: jnp.log1p(x * x),
    lambda x: lax.rsqrt(x * x + 0.1),
    lambda x: jnp.sqrt(jnp.abs(x) + 0.1),
    lambda x: jnp.power(jnp.abs(x) + 0.5, 1.5),
    lambda x: x**3,
    lambda x: lax.integer_pow(jnp.abs(x) + 1, -2),
    lambda x: lax.cbrt(x + 3.0),
    lambda x: lax.atan2(x, 2.0 + x * x),
    lambda x: jnp.round(x * 4) / 4,
    lambda x: jnp.arctan(x),
    lambda x: jax.nn.softplus(x),
    lambda x: lax.stop_gradient(x) + x,
    lambda x: lax.erf_inv(jnp.tanh(x) * 0.9),
)


@ingredient(weight=8)
def elementwise(s: Scope, n: Picks, _: Any) -> None:
    fn, x = n.of(UNARY), s.float(n, n.of((None, *SHAPES)))
    s.floats.append(unit(fn(unit(x))) if n(2) else fn(unit(x)))


BINARY = (
    jnp.add,
    jnp.subtract,
    jnp.multiply,
    lambda x, y: x / (1 + jnp.abs(y)),
    jnp.maximum,
    jnp.minimum,
    lambda x, y: jnp.where(x > y, x * 2, y),
    lambda x, y: lax.clamp(np.float32(-1), x, np.float32(1)) * y,
    lambda x, y: jnp.hypot(x, y + 3.0),
    lambda x, y: lax.rem(x, 1.0 + jnp.abs(y)),
    lambda x, y: x - 0.1 * y,
    lambda x, y: jnp.logaddexp(x, y),
    lambda x, y: jax.nn.glu(jnp.concatenate([x, y], -1)) if x.ndim else x * y,
)


@ingredient(weight=8)
def binary(s: Scope, n: Picks, _: Any) -> None:
    fn, shape = n.of(BINARY), n.of(SHAPES)
    s.floats.append(fn(unit(s.float(n, shape)), s.float(n, shape)))


@ingredient()
def weak(s: Scope, n: Picks, _: Any) -> None:
    x = s.float(n)
    s.floats.append(n.of((lambda x: x * 2 + 1, lambda x: (3 - x) / 7, lambda x: x * 1e-3 + 0.5))(x))
    s.kept.append(lax.full_like(jnp.asarray(2.0), 3.0) * 1.5)


@ingredient(weight=5)
def reduction(s: Scope, n: Picks, _: Any) -> None:
    x, axis = unit(s.float(n, n.of(SHAPES[:3]))), n.of((0, 1, -1, None))
    fn = n.of(
        (
            jnp.sum,
            jnp.mean,
            jnp.max,
            jnp.min,
            jnp.var,
            jax.nn.logsumexp,
            lambda x, axis: jnp.prod(jnp.tanh(x) + 1.1, axis=axis),
            lambda x, axis: jnp.sqrt(jnp.sum(x * x, axis=axis) + 1e-12),
        )
    )
    s.floats.append(fn(x, axis=axis))


@ingredient(weight=3)
def cumulation(s: Scope, n: Picks, _: Any) -> None:
    x = unit(s.float(n, n.of(SHAPES[:3])))
    fn = n.of((lax.cumsum, lax.cummax, lax.cumlogsumexp, lambda x, **k: lax.cumprod(x + 2, **k)))
    s.floats.append(unit(fn(x, axis=n(2), reverse=bool(n(2)))))


@ingredient(weight=3)
def order(s: Scope, n: Picks, _: Any) -> None:
    x, form = s.float(n, (3, 4)), n(5)
    if form == 0:
        s.floats.append(jnp.sort(x, axis=-1))
    elif form == 1:
        top, at = lax.top_k(x, 2)
        s.floats.append(top)
        s.ints.append(at.ravel()[:4])
    elif form == 2:
        s.ints.append(jnp.concatenate([jnp.argmax(x, axis=1), jnp.argmin(x)[None]]))
    elif form == 3:
        s.ints.append(lax.convert_element_type(jnp.argsort(x[0]), jnp.int32))
    else:
        keys, values = lax.sort((x[0], x[1] * 2), num_keys=1)
        s.floats += [keys, values]
    s.ints[-1] = lax.convert_element_type(s.ints[-1], jnp.int32)


@ingredient(weight=4)
def indexing(s: Scope, n: Picks, _: Any) -> None:
    x, ids, form = s.float(n, (4, 4)), s.int(n), n(9)
    y = s.float(n, (4, 4))
    match form:
        case 0:
            out = x[ids]
        case 1:
            out = jnp.take_along_axis(x, ids[:, None], axis=1)
        case 2:
            out = x.at[ids].add(y)
        case 3:
            out = x.at[ids[0]].set(y[0])
        case 4:
            out = lax.dynamic_slice(x, (ids[0], ids[1]), (2, 2))
        case 5:
            out = lax.dynamic_update_slice(x, y[:2], (ids[0], ids[1]))
        case 6:
            out = jax.ops.segment_sum(x, ids, num_segments=4)
        case 7:
            out = jax.nn.one_hot(ids, 4, dtype=jnp.float32) @ x
        case _:
            out = x.at[ids].max(y)
    s.floats.append(out)


@ingredient(weight=5)
def movement(s: Scope, n: Picks, _: Any) -> None:
    x, y, form = s.float(n, (3, 4)), s.float(n, (3, 4)), n(10)
    match form:
        case 0:
            out = jnp.concatenate([x, y])
        case 1:
            out = jnp.pad(x, ((1, 0), (0, 2)))
        case 2:
            out = x.T
        case 3:
            out = jnp.stack([x, y])
        case 4:
            a, b = jnp.split(x, 2, axis=1)
            out = a - b
        case 5:
            out = lax.rev(x, (0,)) + y
        case 6:
            out = jnp.broadcast_to(x[:1], (3, 4)) * y
        case 7:
            out = lax.pad(x, np.float32(0), ((0, -1, 0), (1, 0, 1)))
        case 8:
            out = jnp.roll(x, 1, axis=1)
        case _:
            out = lax.optimization_barrier((x, y))[0][:, ::2]
    s.floats.append(out)
