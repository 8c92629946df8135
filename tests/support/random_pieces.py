"""The ingredients of random programs in which precision is delicate: masks, positions, casts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.support.random_programs import LOW, Picks, Scope, ingredient, unit

MASKS = (-1e30, float(np.finfo(np.float32).min), -1e9, -np.inf, -1e4)


@ingredient(weight=4)
def masked(s: Scope, n: Picks, _: Any) -> None:
    """Attention's masks: a softmax, or a product behind one."""
    x, mask = unit(s.float(n, (3, 4))), n.of(MASKS)
    keep = jnp.tril(jnp.ones((3, 4), bool)) if n(2) else x > -5
    scores = jnp.where(keep, x, mask)
    if n(4):
        s.floats.append(jax.nn.softmax(scores, axis=-1) @ s.float(n, (4, 4)))
    else:
        s.floats.append(jnp.where(keep, jnp.exp(scores), 0.0))


@ingredient(weight=4)
def epsilon(s: Scope, n: Picks, _: Any) -> None:
    x, eps, form = s.float(n, (3, 4)), n.of((1e-12, 1e-6, 1e-30)), n(4)
    if form == 0:
        mean = x.mean(-1, keepdims=True)
        out = (x - mean) * lax.rsqrt(x.var(-1, keepdims=True) + eps + 1e-3)
    elif form == 1:
        out = x / jnp.maximum(jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6), eps)
    elif form == 2:
        out = jnp.log(jnp.square(x) + 0.1 + eps)
    else:
        out = (x * eps) @ (s.float(n, (4, 4)) / 4) * (1 / eps)
    s.floats.append(out)


@ingredient(weight=4)
def positions(s: Scope, n: Picks, _: Any) -> None:
    start, form = n.of((0, 300, 5000, 0)), n(4)
    at = (jnp.arange(4, dtype=jnp.int32) + start).astype(jnp.float32)
    if form == 0:
        angles = jnp.einsum("i,j->ij", at, jnp.array([1.0, 0.01, 1e-4, 1e-6], jnp.float32))
        out = jnp.cos(angles)
    elif form == 1:
        table = at[:, None] + jnp.arange(3, dtype=jnp.float32)[None]
        out = table.T @ (s.float(n, (4, 4)) / (start + 1))
    elif form == 2:
        out = jnp.cumsum(jnp.ones((4, 4), jnp.float32), axis=0) @ s.float(n, (4, 4)) * 0.1
    else:
        out = s.int(n).astype(jnp.float32)[None] * s.float(n, (3, 4)) * 0.3
    s.floats.append(out)


@ingredient(weight=3)
def integers(s: Scope, n: Picks, _: Any) -> None:
    ids, form = s.int(n), n(7)
    match form:
        case 0:
            new = (ids * 3 + 1) % 4
        case 1:
            new = lax.shift_right_logical(ids, 1) ^ 1
        case 2:
            new = jnp.cumsum(ids, dtype=jnp.int32) // 2 % 4
        case 3:
            new = jnp.where(ids > 1, ids, 3 - ids)
        case 4:
            new = jnp.broadcast_to(jnp.dot(ids, ids, preferred_element_type=jnp.int32), (4,)) % 4
        case 5:
            new = jnp.clip(s.float(n, (4,)).astype(jnp.int32), 0, 3)
        case _:
            new = lax.bitcast_convert_type(s.float(n, (4,)), jnp.int32) & 3
    s.ints.append(new)
    s.bools.append(jnp.any(ids > 2) | s.bools[-1])


@ingredient(weight=5)
def cast(s: Scope, n: Picks, _: Any) -> None:
    x, low, form = unit(s.float(n, (3, 4))), n.of(LOW), n(7)
    y = x.astype(low)
    match form:
        case 0:
            out = y.astype(jnp.float32)
        case 1:
            out = (y * 2 + y).astype(jnp.float32)
        case 2:
            out = (y @ s.float(n, (4, 4)).astype(low)).astype(jnp.float32)
        case 3:
            out = jnp.sum(y, axis=0).astype(jnp.float32)
        case 4:
            out = jnp.tanh(y).astype(jnp.float32) @ s.float(n, (4, 4))
        case 5:
            s.kept.append(y)
            out = y.astype(jnp.float32).astype(low).astype(jnp.float32)
        case _:
            out = jnp.where(y > 0, y, -y).astype(jnp.float32)
    s.floats.append(out)


@ingredient(weight=3)
def sample(s: Scope, n: Picks, _: Any) -> None:
    key, other = jax.random.split(s.keys[-1])
    s.keys.append(key)
    match n(7):
        case 0:
            s.floats.append(jax.random.normal(other, (3, 4), jnp.float32) @ s.float(n, (4, 4)))
        case 1:
            s.floats.append(jax.random.uniform(other, (4, 4), jnp.float32, -1) * s.float(n, (4, 4)))
        case 2:
            s.ints.append(jax.random.randint(other, (4,), 0, 4, jnp.int32))
        case 3:
            s.floats.append(
                jnp.where(jax.random.bernoulli(other, 0.7, (3, 4)), s.float(n, (3, 4)), 0.0)
            )
        case 4:
            draws = jax.random.categorical(other, s.float(n, (4, 4)), axis=-1)
            s.ints.append(draws.astype(jnp.int32))
        case 5:
            s.floats.append(jax.random.gumbel(other, (4,), jnp.float32) * 0.1 + s.float(n, (4,)))
        case _:
            s.floats.append(jax.random.permutation(other, s.float(n, (4, 4))))


@ingredient()
def bits(s: Scope, n: Picks, _: Any) -> None:
    x, form = s.float(n, (3, 4)), n(3)
    if form == 0:
        s.floats.append(lax.reduce_precision(x, 8, 7) @ s.float(n, (4, 4)))
    elif form == 1:
        raw = lax.bitcast_convert_type(lax.stop_gradient(x), jnp.int32)
        s.floats.append(lax.bitcast_convert_type(raw & -65536, jnp.float32))
    else:
        s.floats.append(lax.stop_gradient(jnp.nextafter(x, x + 1)) @ s.float(n, (4, 4)) * 0.3)


@ingredient()
def spectrum(s: Scope, n: Picks, _: Any) -> None:
    x = s.float(n, (3, 4))
    z = jnp.fft.fft(x.astype(jnp.complex64)) if n(2) else lax.complex(x, x * 0.5)
    w = s.float(n, (4, 4)).astype(jnp.complex64)
    out = z @ w * 0.2
    s.floats.append(jnp.real(out) + jnp.imag(out))
    s.kept.append(z)


@ingredient()
def empty(s: Scope, n: Picks, _: Any) -> None:
    x = s.float(n, (3, 4))
    nothing = x[:, :0]
    if n(2):
        s.floats.append(nothing @ s.float(n, (4, 4))[:0] + x)
    else:
        s.floats.append(jnp.concatenate([nothing, x], axis=1) + jnp.sum(nothing))
    s.kept.append(nothing.T @ x)


@ingredient()
def solve(s: Scope, n: Picks, _: Any) -> None:
    x = unit(s.float(n, (4, 4)))
    spd = x @ x.T + 3 * jnp.eye(4, dtype=jnp.float32)
    if n(2):
        s.floats.append(jnp.linalg.cholesky(spd))
    else:
        s.floats.append(lax.linalg.triangular_solve(spd, s.float(n, (4, 4)), left_side=True))


@ingredient(weight=3)
def network(s: Scope, n: Picks, _: Any) -> None:
    """A realistic piece: attention, a normalised MLP, or an update of weights."""
    x, w, form = unit(s.float(n, (2, 3, 4))), s.float(n, (4, 4)) * 0.5, n(3)
    if form == 0:
        scores = jnp.einsum("bqd,bkd->bqk", x @ w, x) / np.float32(2)
        causal = jnp.tril(jnp.ones((3, 3), bool))
        out = jax.nn.softmax(jnp.where(causal[None], scores, n.of(MASKS))) @ x
    elif form == 1:
        normed = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        out = x + jax.nn.gelu(normed @ w) @ w.T
    else:
        out = w - 0.1 * jnp.einsum("bij,bik->jk", x, jnp.tanh(x @ w))
    s.floats.append(out)


@ingredient(weight=1)
def window(s: Scope, n: Picks, _: Any) -> None:
    x, form = s.float(n, (3, 4)), n(3)
    if form == 0:
        out = lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "VALID")
    elif form == 1:
        out = lax.reduce_window(x, -np.inf, lax.max, (1, 2), (1, 2), "SAME")
    else:
        out = x + lax.stop_gradient(lax.reduce(x, np.float32(1), lambda a, b: a * 0.5 + b, (0, 1)))
    s.floats.append(out)


@ingredient(weight=3, x64=True)
def wide(s: Scope, n: Picks, _: Any) -> None:
    """Float64 arithmetic beside float32's."""
    d = s.kept[n(len(s.kept))] if s.kept else None
    if d is None or d.dtype != jnp.float64 or d.shape != (3, 4):
        d = s.float(n, (3, 4)).astype(jnp.float64)
    match n(4):
        case 0:
            d = d @ s.float(n, (4, 4)).astype(jnp.float64) * 0.3
        case 1:
            d = jnp.cumsum(jnp.tanh(d), axis=1)
        case 2:
            s.floats.append(d.astype(jnp.float32) @ s.float(n, (4, 4)))
        case _:
            d = jnp.where(d > 0, d, -1e300) * 1e-300 + jnp.sum(d)
    s.kept.append(d)
