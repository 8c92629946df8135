"""The ingredients of random programs that have bodies: control flow, custom rules, effects."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback

import precpass as pp
from tests.support.random_programs import Picks, Scope, Steps, alone, fit, ingredient, unit


@contextlib.contextmanager
def region(precision: str) -> Iterator[None]:
    """A named scope, or a region that keeps a precision."""
    with pp.keep(precision) if precision else jax.named_scope("part"):
        yield


Bodies = tuple[Steps, ...]
X = (3, 4)


def bounded(x: Any) -> Any:
    """A carry that stays within bounds however often the body runs."""
    return jnp.tanh(fit(x, X))


@ingredient(bodies=1, weight=5)
def scan(s: Scope, n: Picks, bodies: Bodies) -> None:
    xs, length = s.float(n, (2, 3, 4)), 2
    accumulates, many = n(2), n(3)

    def step(carry: Any, x: Any) -> Any:
        h, total, count = carry
        inner = s.inner(h, x, effects=False)
        out = bounded(inner.run(bodies[0]))
        total = total + out.sum() if accumulates else total * 0.5 + out[0, 0]
        return (out, total, count + 1), (out[0], {"n": count, "none": None})

    init = (fit(s.float(n), X), jnp.float32(0), jnp.int32(0))
    (h, total, count), (ys, rest) = lax.scan(
        step, init, xs, length=length, reverse=many == 1, unroll=2 if many == 2 else 1
    )
    s.floats += [total, ys, h]
    s.ints.append((rest["n"][0] + count + jnp.arange(4, dtype=jnp.int32)) % 4)


@ingredient(bodies=1, weight=2)
def fori(s: Scope, n: Picks, bodies: Bodies) -> None:
    def step(i: Any, carry: Any) -> Any:
        h, at = carry
        inner = s.inner(h * 0.5 + at[0].astype(jnp.float32), effects=False)
        return bounded(inner.run(bodies[0])), lax.convert_element_type((at + i) % 4, jnp.int32)

    h, at = lax.fori_loop(0, 1 + n(3), step, (fit(s.float(n), X), s.int(n)))
    s.floats.append(h)
    s.ints.append(at)


@ingredient(bodies=1, weight=2)
def while_(s: Scope, n: Picks, bodies: Bodies) -> None:
    """Its predicate reads what it computes; no gradient goes through it backwards."""
    x, most = lax.stop_gradient(s.float(n, X)), 1 + n(3)
    outer = s.inner(effects=False)
    outer.floats = [lax.stop_gradient(v) for v in outer.floats]

    def go(carry: Any) -> Any:
        h, count = carry
        return (count < most) & (jnp.sum(h @ fit(x, (4, 4))) < 50.0)

    def step(carry: Any) -> Any:
        h, count = carry
        inner = outer.inner(h)
        return bounded(inner.run(bodies[0])), count + 1

    h, count = lax.while_loop(go, step, (x, jnp.int32(0)))
    s.floats.append(h)
    s.ints.append(jnp.minimum(count + jnp.zeros(4, jnp.int32), 3))


@ingredient(bodies=2, weight=3)
def cond(s: Scope, n: Picks, bodies: Bodies) -> None:
    x = s.float(n, X)

    def branch(steps: Steps) -> Any:
        return lambda x: fit(s.inner(x, effects=False).run(steps), X)

    if n(2):
        which = s.bools[-1] if n(2) else jnp.sum(x) > 0
        out = lax.cond(which, branch(bodies[0]), branch(bodies[1]), x)
    else:
        branches = [branch(bodies[0]), lambda x: x * 0.5, branch(bodies[1])]
        out = lax.switch(s.int(n)[0], branches, x)
    s.floats.append(out)


@ingredient(weight=5)
def helper(s: Scope, n: Picks, _: Bodies) -> None:
    """One of the program's functions under `jax.jit`, called at any depth."""
    if not s.helpers:
        s.floats.append(jax.jit(lambda x: jnp.tanh(x) @ fit(x, (4, 4)))(s.float(n, X)))
        return
    fn = n.of(s.helpers)
    x = fn(s.float(n, X), s.int(n))
    s.floats.append(x)
    if n(2):
        s.floats.append(fn(fit(unit(x), X), s.int(n)))


POLICIES = (
    None,
    jax.checkpoint_policies.dots_saveable,
    jax.checkpoint_policies.everything_saveable,
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names("part"),
)


@ingredient(bodies=1, weight=3)
def remat(s: Scope, n: Picks, bodies: Bodies) -> None:
    def body(x: Any) -> Any:
        out = s.inner(x, effects=False).run(bodies[0])
        return checkpoint_name(out, "part") * 1.5

    saved = jax.checkpoint(body, policy=n.of(POLICIES), prevent_cse=bool(n(2)))
    s.floats.append(saved(s.float(n, X)) * 0.5)


def closed(s: Scope, steps: Steps) -> Any:
    """A body as a function of one array alone, as custom rules want it."""

    def fn(x: Any) -> Any:
        return fit(unit(alone(x, jnp.arange(4, dtype=jnp.int32), s.helpers).run(steps)), X)

    return fn


@ingredient(bodies=1, weight=3)
def custom_jvp(s: Scope, n: Picks, bodies: Bodies) -> None:
    body, form = closed(s, bodies[0]), n(3)
    fn = jax.custom_jvp(body if form else lambda x, scale: body(x) * scale, nondiff_argnums=())
    if form == 0:
        fn = jax.custom_jvp(lambda scale, x: body(x) * scale, nondiff_argnums=(0,))

        def rule(scale: Any, primals: Any, tangents: Any) -> Any:
            (x,), (t,) = primals, tangents
            return body(x) * scale, t * (scale * 2)

        fn.defjvp(rule)
        s.floats.append(fn(0.5, s.float(n, X)))
        return

    def rule1(primals: Any, tangents: Any) -> Any:
        (x,), (t,) = primals, tangents
        if form == 1:
            return jax.jvp(body, (x,), (t,))
        return body(x), t @ (fit(x, (4, 4)) * 0.5)

    fn.defjvp(rule1)
    s.floats.append(fn(s.float(n, X)))


@ingredient(bodies=1, weight=3)
def custom_vjp(s: Scope, n: Picks, bodies: Bodies) -> None:
    body, form = closed(s, bodies[0]), n(3)
    if form == 0:
        scaled = jax.custom_vjp(lambda scale, x, ids: body(x) * scale, nondiff_argnums=(0,))
        scaled.defvjp(
            lambda scale, x, ids: (body(x) * scale, (x, ids)),
            lambda scale, kept, g: (
                g @ (fit(kept[0], (4, 4)) * scale),
                np.zeros(kept[1].shape, jax.dtypes.float0),
            ),
        )
        s.floats.append(scaled(0.5, s.float(n, X), s.int(n)))
        return
    fn = jax.custom_vjp(body)
    if form == 1:
        fn.defvjp(lambda x: jax.vjp(body, x), lambda pull, g: pull(g))
    else:
        fn.defvjp(lambda x: (body(x), {"x": x}), lambda kept, g: (jnp.cos(kept["x"]) * g,))
    s.floats.append(fn(s.float(n, X)))


@ingredient(bodies=1, weight=1)
def custom_batching(s: Scope, n: Picks, bodies: Bodies) -> None:
    """Forward only: JAX has no reverse mode through it."""
    body = closed(s, bodies[0])
    fn = custom_vmap(body)

    @fn.def_vmap
    def rule(axis_size: int, in_batched: Any, x: Any) -> Any:
        return lax.map(body, x), True

    x = lax.stop_gradient(s.float(n, (2, 3, 4)))
    s.floats.append(jax.vmap(fn)(x) if n(2) else fn(x[0]))


@ingredient(bodies=1, weight=3)
def vmapped(s: Scope, n: Picks, bodies: Bodies) -> None:
    w = s.float(n, (4, 4))

    def body(x: Any, y: Any) -> Any:
        return fit(s.inner(x, w, x @ w + y[None], effects=False).run(bodies[0]), X)

    s.floats.append(jax.vmap(body, (0, None))(s.float(n, (2, 3, 4)), s.float(n, (4,))))


@ingredient(bodies=1, weight=1)
def inner_gradient(s: Scope, n: Picks, bodies: Bodies) -> None:
    """A gradient taken inside of the program."""
    body = closed(s, bodies[0])
    s.floats.append(unit(jax.grad(lambda x: jnp.sum(jnp.tanh(body(x))))(s.float(n, X))))


@ingredient(bodies=1, weight=3)
def kept(s: Scope, n: Picks, bodies: Bodies) -> None:
    with region(n.of(("f32", "bf16", "", "f16", ""))):
        inner = s.inner(effects=False)
        s.floats.append(inner.run(bodies[0]) * 1.0)


@ingredient(weight=2)
def island(s: Scope, n: Picks, _: Bodies) -> None:
    """A region in float64, with x64 on or off."""
    x, w = s.float(n, X), s.float(n, (4, 4))
    with region("f64"):
        match n(4):
            case 0:
                out = x @ w * 0.3
            case 1:
                out = jnp.sum(jnp.square(x - x.mean(0, keepdims=True)), 0)
            case 2:
                out = jnp.log(jnp.exp(x * 0.1).sum(-1)) + 1.0
            case _:
                out = jnp.concatenate([x, x[:1]], 0) @ w
    s.floats.append(out)


@ingredient(weight=2)
def report(s: Scope, n: Picks, _: Bodies) -> None:
    """An effect: what is reported, and in which order, is part of the program."""
    if not s.effects or s.log is None:
        return
    log, form, ids = s.log, n(3), s.int(n)

    def note(tag: str) -> Any:
        return lambda *xs: log.append((tag, *map(np.asarray, xs)))

    if form == 0:
        jax.debug.callback(note("debug"), ids, s.float(n), ordered=True)
    elif form == 1:
        io_callback(note("io"), None, ids, lax.stop_gradient(s.float(n)), ordered=True)
    else:

        def doubled(x: Any) -> Any:
            log.append(("pure", np.asarray(x)))
            return np.asarray(x) * 2

        x = lax.stop_gradient(s.float(n, X))
        s.floats.append(io_callback(doubled, jax.ShapeDtypeStruct(X, x.dtype), x, ordered=True))


@ingredient(weight=1)
def linear_solve(s: Scope, n: Picks, _: Bodies) -> None:
    x = unit(s.float(n, (4, 4)))
    matrix = x @ x.T * 0.25 + 2 * jnp.eye(4, dtype=jnp.float32)
    out = lax.custom_linear_solve(
        lambda v: matrix @ v,
        s.float(n, (4,)),
        lambda _, b: b / 2 - matrix @ b / 8,
        symmetric=True,
    )
    s.floats.append(out)


@ingredient(weight=1)
def associative(s: Scope, n: Picks, _: Bodies) -> None:
    x = s.float(n, (2, 3, 4))
    s.floats.append(lax.associative_scan(lambda a, b: a * 0.5 + b, x, axis=n(2)))
