"""The ingredients of random programs that have bodies: control flow, custom rules, effects."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback

import precpass as pp
from tests.support.random_programs import Fn, Picks, Scope, Steps, alone, fit, ingredient, unit

Bodies = tuple[Steps, ...]
X = (3, 4)


def inside(s: Scope, steps: Steps) -> Fn:
    """A body as a function of arrays that sees all around it; its result stays within bounds."""
    return lambda *xs: unit(fit(s.inner(*xs).run(steps), X))


def closed(s: Scope, steps: Steps) -> Fn:
    """A body as a function of one array alone, as custom rules want it."""
    ids = np.arange(4, dtype=np.int32)
    return lambda x: unit(fit(alone(x, jnp.asarray(ids), s.helpers).run(steps), X))


@ingredient(bodies=1, weight=5)
def scan(s: Scope, n: Picks, bodies: Bodies) -> None:
    accumulates, form, body = n(2), n(3), inside(s, bodies[0])

    def step(carry: Any, x: Any) -> Any:
        h, total, count = carry
        out = body(h, x)
        total = total + out.sum() if accumulates else total * 0.5 + out[0, 0]
        return (out, total, count + 1), (out[0], {"n": count, "none": None})

    init, xs = (s.float(n, X), jnp.float32(0), jnp.int32(0)), s.float(n, (2, 3, 4))
    options = {"length": 2, "reverse": form == 1, "unroll": 2 if form == 2 else 1}
    (h, total, count), (ys, rest) = lax.scan(step, init, xs, **options)
    s.floats += [total, ys, h]
    s.ints.append((rest["n"][0] + count + jnp.arange(4, dtype=jnp.int32)) % 4)


@ingredient(bodies=1)
def fori(s: Scope, n: Picks, bodies: Bodies) -> None:
    body = inside(s, bodies[0])

    def step(i: Any, carry: Any) -> Any:
        h, at = carry
        out = body(h * 0.5 + at[0].astype(jnp.float32))
        return out, lax.convert_element_type((at + i) % 4, jnp.int32)

    h, at = lax.fori_loop(0, 1 + n(3), step, (s.float(n, X), s.int(n)))
    s.floats.append(h)
    s.ints.append(at)


@ingredient(bodies=1)
def while_(s: Scope, n: Picks, bodies: Bodies) -> None:
    """Its predicate reads what it computes; no gradient goes through it backwards."""
    x, most, outer = lax.stop_gradient(s.float(n, X)), 1 + n(3), s.inner()
    outer.floats = [lax.stop_gradient(v) for v in outer.floats]
    body = inside(outer, bodies[0])

    def go(carry: Any) -> Any:
        h, count = carry
        return (count < most) & (jnp.sum(h @ fit(x, (4, 4))) < 50.0)

    h, count = lax.while_loop(go, lambda c: (body(c[0]), c[1] + 1), (x, jnp.int32(0)))
    s.floats.append(h)
    s.ints.append(jnp.minimum(count + jnp.zeros(4, jnp.int32), 3))


@ingredient(bodies=2, weight=3)
def cond(s: Scope, n: Picks, bodies: Bodies) -> None:
    x, first, second = s.float(n, X), *(inside(s, steps) for steps in bodies)
    match n(3):
        case 0:
            s.floats.append(lax.cond(s.bools[-1], first, second, x))
        case 1:
            s.floats.append(lax.cond(jnp.sum(x) > 0, first, second, x))
        case _:
            s.floats.append(lax.switch(s.int(n)[0], [first, lambda x: x * 0.5, second], x))


@ingredient(weight=5)
def helper(s: Scope, n: Picks, _: Bodies) -> None:
    """One of the program's functions under `jax.jit`, called at any depth."""
    if not s.helpers:
        s.floats.append(jax.jit(lambda x: jnp.tanh(x) @ fit(x, (4, 4)))(s.float(n, X)))
        return
    fn = n.of(s.helpers)
    s.floats.append(fn(s.float(n, X), s.int(n)))
    if n(2):
        s.floats.append(fn(fit(unit(s.floats[-1]), X), s.int(n)))


SAVED = (
    None,
    jax.checkpoint_policies.dots_saveable,
    jax.checkpoint_policies.everything_saveable,
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names("part"),
)


@ingredient(bodies=1, weight=3)
def remat(s: Scope, n: Picks, bodies: Bodies) -> None:
    def body(x: Any) -> Any:
        return checkpoint_name(s.inner(x).run(bodies[0]), "part") * 1.5

    saved = jax.checkpoint(body, policy=n.of(SAVED), prevent_cse=bool(n(2)))
    s.floats.append(saved(s.float(n, X)) * 0.5)


@ingredient(bodies=1, weight=3)
def custom_jvp(s: Scope, n: Picks, bodies: Bodies) -> None:
    body, form, x = closed(s, bodies[0]), n(3), s.float(n, X)
    if form == 0:
        scaled = jax.custom_jvp(lambda scale, x: body(x) * scale, nondiff_argnums=(0,))
        scaled.defjvp(lambda k, primals, tangents: (body(*primals) * k, tangents[0] * (k * 2)))
        s.floats.append(scaled(0.5, x))
        return
    fn = jax.custom_jvp(body)
    if form == 1:
        fn.defjvp(lambda primals, tangents: jax.jvp(body, primals, tangents))
    else:
        fn.defjvp(lambda p, t: (body(*p), t[0] @ (fit(p[0], (4, 4)) * 0.5)))
    s.floats.append(fn(x))


@ingredient(bodies=1, weight=3)
def custom_vjp(s: Scope, n: Picks, bodies: Bodies) -> None:
    body, form, x = closed(s, bodies[0]), n(3), s.float(n, X)
    if form == 0:
        scaled = jax.custom_vjp(lambda scale, x, ids: body(x) * scale, nondiff_argnums=(0,))
        scaled.defvjp(
            lambda scale, x, ids: (body(x) * scale, (x, ids)),
            lambda scale, kept, g: (
                g @ (fit(kept[0], (4, 4)) * scale),
                np.zeros(kept[1].shape, jax.dtypes.float0),
            ),
        )
        s.floats.append(scaled(0.5, x, s.int(n)))
        return
    fn = jax.custom_vjp(body)
    if form == 1:
        fn.defvjp(lambda x: jax.vjp(body, x), lambda pull, g: pull(g))
    else:
        fn.defvjp(lambda x: (body(x), {"x": x}), lambda kept, g: (jnp.cos(kept["x"]) * g,))
    s.floats.append(fn(x))


@ingredient(bodies=1, weight=1)
def custom_batching(s: Scope, n: Picks, bodies: Bodies) -> None:
    """Forward only: JAX has no reverse mode through it."""
    body = closed(s, bodies[0])
    fn = custom_vmap(body)
    fn.def_vmap(lambda axis_size, in_batched, x: (lax.map(body, x), True))
    x = lax.stop_gradient(s.float(n, (2, 3, 4)))
    s.floats.append(jax.vmap(fn)(x) if n(2) else fn(x[0]))


@ingredient(bodies=1, weight=3)
def vmapped(s: Scope, n: Picks, bodies: Bodies) -> None:
    w, body = s.float(n, (4, 4)), inside(s, bodies[0])
    mapped = jax.vmap(lambda x, y: body(x, w, x @ w + y[None]), (0, None))
    s.floats.append(mapped(s.float(n, (2, 3, 4)), s.float(n, (4,))))


@ingredient(bodies=1, weight=1)
def inner_gradient(s: Scope, n: Picks, bodies: Bodies) -> None:
    """A gradient taken inside of the program."""
    body = closed(s, bodies[0])
    s.floats.append(unit(jax.grad(lambda x: jnp.sum(body(x)))(s.float(n, X))))


@ingredient(bodies=1, weight=3)
def kept(s: Scope, n: Picks, bodies: Bodies) -> None:
    """A region that keeps a precision, or a named scope."""
    precision = n.of(("f32", "bf16", "", "f16"))
    with pp.keep(precision) if precision else jax.named_scope("part"):
        s.floats.append(s.inner().run(bodies[0]) * 1.0)


@ingredient()
def island(s: Scope, n: Picks, _: Bodies) -> None:
    """A region in float64, with x64 on or off."""
    x, w = s.float(n, X), s.float(n, (4, 4))
    with pp.keep("f64"):
        match n(4):
            case 0:
                out = x @ w * 0.25
            case 1:
                out = jnp.sum(jnp.square(x - x.mean(0, keepdims=True)), 0)
            case 2:
                out = jnp.log(jnp.exp(x * 0.1).sum(-1)) + 1.0
            case _:
                out = jnp.concatenate([x, x[:1]], 0) @ w
    s.floats.append(out)


@ingredient()
def report(s: Scope, n: Picks, _: Bodies) -> None:
    """An effect: what is reported, and in which order, is part of the program."""
    if s.log is None:
        return
    note, form, ids = s.log.append, n(3), s.int(n)
    if form == 0:
        jax.debug.callback(lambda *xs: note(("debug", *xs)), ids, s.float(n), ordered=True)
        return
    x = lax.stop_gradient(s.float(n, X))
    if form == 1:
        io_callback(lambda *xs: note(("io", *xs)), None, ids, x, ordered=True)
        return

    def doubled(x: Any) -> Any:
        note(("pure", x))
        return np.asarray(x) * 2

    s.floats.append(io_callback(doubled, jax.ShapeDtypeStruct(X, x.dtype), x, ordered=True))


@ingredient(weight=1)
def associative(s: Scope, n: Picks, _: Bodies) -> None:
    x = s.float(n, (2, 3, 4))
    s.floats.append(lax.associative_scan(lambda a, b: a * 0.5 + b, x, axis=n(2)))
