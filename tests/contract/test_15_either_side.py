"""Design section 3, line 15: JAX's transforms on either side of the pass.

`sweeps/test_enumeration_compositions.py` has every entered primitive under the transforms of
`compositions.py`, and `test_15_export.py` exports; here two programs meet the others.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import precpass as pp
from tests.support.compositions import DW, DX, W, X, over_rows
from tests.support.jaxprs import check_all_low
from tests.support.values import error

Fn = Callable[..., Any]
ROUNDOFF = 2.0**-8


def scanned_mlp(x, w):
    return lax.scan(lambda h, row: (jnp.tanh(h @ w) + row, None), x, x[:3, None])[0]


@jax.custom_vjp
def weighed(scores, values):
    return jax.nn.softmax(scores) @ values


def _weighed_bwd(kept, g):
    return jax.vjp(lambda s, v: jax.nn.softmax(s) @ v, *kept)[1](g)


weighed.defvjp(lambda s, v: (weighed(s, v), (s, v)), _weighed_bwd)


def attention(x, w):
    q = x @ w
    return weighed(q @ q.T / jnp.sqrt(6.0), x)


def loss(fn: Fn) -> Fn:
    return lambda x, w: jnp.arctan(fn(x, w)).sum()


TRANSFORMS: dict[str, Callable[[Fn], Fn]] = {
    "vmap": lambda f: jax.vmap(f, (0, None)),
    "grad": lambda f: jax.grad(f, (0, 1)),
    "value_and_grad": lambda f: jax.value_and_grad(f, (0, 1)),
    "jacrev": lambda f: jax.jacrev(f, 0),
    "remat": lambda f: jax.checkpoint(f),
    "shard_map": over_rows,
    "vjp": lambda f: lambda x, w: jax.vjp(f, x, w)[1](DX),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (DX, DW)),
    "jacfwd": lambda f: jax.jacfwd(f, 0),
    "hessian": lambda f: jax.hessian(f, 0),
    "linearize": lambda f: lambda x, w: jax.linearize(f, x, w)[1](DX, DW),
}
"""Those with another function as their result."""
SCALAR = ("grad", "value_and_grad", "hessian")
FORWARD = ("jvp", "jacfwd", "hessian", "linearize")
PROGRAMS: dict[str, Fn] = {"mlp": scanned_mlp, "attention": attention}
# a shard of the attention's rows is another program
LEFT_OUT = {("attention", name) for name in (*FORWARD, "shard_map")}
CELLS = [(p, t) for p in PROGRAMS for t in TRANSFORMS if (p, t) not in LEFT_OUT]
mixed = functools.partial(pp.auto_mixed, policy=pp.AutoMixedBf16)
SIDES: dict[str, Callable[[Fn, Fn], Fn]] = {
    "outside": lambda transform, fn: transform(mixed(fn)),
    "inside": lambda transform, fn: mixed(transform(fn)),
}


def avals(out: Any) -> list[Any]:
    return [(a.shape, a.dtype, a.weak_type) for a in jax.tree.leaves(out)]


@pytest.mark.release(keep=5)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.enumerated
@pytest.mark.parametrize(("program", "transform"), CELLS)
def test_a_transform_on_either_side(program: str, transform: str, side: str):
    """Low, of the same types, and off by a few roundings of each of at most four products."""
    fn = PROGRAMS[program]
    fn = loss(fn) if transform in SCALAR else fn
    x = np.stack([X, -np.asarray(X)]) if transform == "vmap" else X
    plain, after = TRANSFORMS[transform](fn), SIDES[side](TRANSFORMS[transform], fn)
    check_all_low(jax.make_jaxpr(after)(x, W), dtype=jnp.bfloat16)
    both = jax.jit(lambda *args: (after(*args), plain(*args))).trace(x, W)
    assert avals(both.out_info[0]) == avals(both.out_info[1])
    assert 0 < error(*both.lower().compile()(x, W)) < 8 * ROUNDOFF


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("program", PROGRAMS)
def test_stages_and_switches(program: str):
    """jit around and inside, lowered ahead of time, abstract, eager, and exported."""
    fn = PROGRAMS[program]
    want = jax.jit(fn)(X, W)
    here = mixed(fn)
    check_all_low(jax.make_jaxpr(here)(X, W), dtype=jnp.bfloat16)
    assert here.eval_shape(X, W) == jax.eval_shape(here, X, W) == jax.eval_shape(fn, X, W)
    with jax.disable_jit():
        eager = here(X, W)
    results = {
        "jit outside": jax.jit(here)(X, W),
        "jit inside": mixed(jax.jit(fn))(X, W),
        "ahead of time": here.lower(X, W).compile()(X, W),
        "disable_jit": eager,
        "export": export.export(here)(X, W).call(X, W),
    }
    for name, got in results.items():
        assert 0 < error(got, want) < 8 * ROUNDOFF, name


@pytest.mark.parametrize("side", SIDES)
def test_linear_transpose_on_either_side(side: str):
    def transposed(f: Fn) -> Fn:
        return lambda g, w: jax.linear_transpose(lambda x: f(x, w), X)(g)[0]

    def double(x, w):
        return (x @ w) @ w

    fn = SIDES[side](transposed, double)
    check_all_low(jax.make_jaxpr(fn)(DX, W), least=2, dtype=jnp.bfloat16)
    both = jax.jit(lambda g, w: (fn(g, w), g @ w.T @ w.T))
    assert 0 < error(*both(DX, W)) < 8 * ROUNDOFF
