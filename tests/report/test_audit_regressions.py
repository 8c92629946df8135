"""What XLA:CPU spoils in programs that ask for low precision, and what the pass makes of them.

Each program is written once: with its operands cast to bfloat16 by hand, and in plain float32
under the policy. Of the first `audit` finds what XLA did not run as it is written, which differs
between releases and is read from the compiled text too; of the second there is nothing to find.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from tests.support.audits import audited, bf16, f32, factor_dtypes, kinds, of
from tests.support.jaxprs import products
from tests.support.values import normal

TOKENS, WIDTH, LAYERS = 48, 64, 5
ROWS, SQUARE = (TOKENS, WIDTH), (WIDTH, WIDTH)
STACK = (LAYERS, *SQUARE)

Cast = Callable[[jax.Array], jax.Array]
Program = Callable[[Cast, jax.Array, jax.Array], jax.Array]


def layers(cast: Cast, x: jax.Array, ws: jax.Array) -> jax.Array:
    return lax.scan(lambda x, w: (jnp.tanh(x @ cast(w)), None), cast(x), ws)[0]


def transposed_layers(cast: Cast, x: jax.Array, ws: jax.Array) -> jax.Array:
    """Weights as torch has them: out by in."""
    return lax.scan(lambda x, w: (jnp.tanh(x @ cast(w).T), None), cast(x), ws)[0]


def repeated(cast: Cast, x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.scan(lambda x, _: (jnp.arctan(x @ cast(w)), None), cast(x), length=LAYERS)[0]


def flat(cast: Cast, x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.arctan(cast(x) @ cast(w))


def tied(cast: Cast, x: jax.Array, e: jax.Array) -> jax.Array:
    return jnp.arctan(cast(x) @ cast(e)) @ cast(e).T


def attention(cast: Cast, x: jax.Array, w: jax.Array) -> jax.Array:
    k = cast(x) @ cast(w)
    q, k, v = (h.reshape(2, -1, 4, WIDTH // 4) for h in (cast(x), k, jnp.arctan(k)))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(f32))
    return jnp.einsum("bhqk,bkhd->bqhd", cast(weights), v)


def per_example(cast: Cast, x: jax.Array, w: jax.Array) -> jax.Array:
    """A layer of one example, as equinox has it."""
    return jax.vmap(lambda row: jnp.tanh(cast(w) @ cast(row)))(x)


def chained(cast: Cast, x: jax.Array, w: jax.Array) -> jax.Array:
    """A transpose of a transpose, one of them of a batch."""
    pairs = jnp.stack([cast(x), cast(x)]).transpose(2, 0, 1).transpose(1, 0, 2)
    return jnp.einsum("bkm,nk->bmn", pairs, cast(w).T.T)


PROGRAMS = {
    "residuals of a scan": (layers, STACK),
    "transposed weights in a scan": (transposed_layers, STACK),
    "a loop's constant": (repeated, SQUARE),
    "a flat weight gradient": (flat, SQUARE),
    "a tied embedding": (tied, SQUARE),
    "attention": (attention, SQUARE),
    "one example": (per_example, SQUARE),
    "transposes": (chained, SQUARE),
}


def by_hand(program: Program) -> Callable[..., Any]:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(program(lambda a: a.astype(bf16), x, w).astype(f32)))

    return loss


def plain(program: Program) -> Callable[..., Any]:
    return lambda x, w: jnp.sum(jnp.square(program(lambda a: a, x, w)))


both = functools.partial(jax.grad, argnums=(0, 1))
COMPOSED = {
    "forward": lambda f: pp.auto_mixed(f, policy="AutoMixedBf16"),
    "auto(grad)": lambda f: pp.auto_mixed(both(f), policy="AutoMixedBf16"),
    "grad(auto)": lambda f: both(pp.auto_mixed(f, policy="AutoMixedBf16")),
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("composed", COMPOSED)
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_low_product_runs_on_low_operands(name: str, composed: str):
    program, weights = PROGRAMS[name]
    fn = COMPOSED[composed](plain(program))
    shapes = of(f32, *ROWS), of(f32, *weights)
    traced = jax.jit(fn).trace(*shapes)
    low = [eqn for eqn in products(traced.jaxpr) if eqn.invars[0].aval.dtype == bf16]
    assert len(low) == len(products(traced.jaxpr)) > 0
    factors = factor_dtypes(traced.lower().compile().as_text())
    assert len(factors) > 0 and set(factors) == {("bf16", "bf16")}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("composed", ["forward", "auto(grad)"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_and_the_audit_has_nothing_to_say(name: str, composed: str):
    program, weights = PROGRAMS[name]
    fn = plain(program) if composed == "forward" else both(plain(program))
    shapes = of(f32, *ROWS), of(f32, *weights)
    found = audited(fn, *shapes, policy=pp.AutoMixedBf16)
    assert found.ok, str(found)
    assert found.as_planned + found.merged == found.products > 0


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_by_hand_it_finds_what_is_not_run_as_written(name: str):
    program, weights = PROGRAMS[name]
    found = audited(both(by_hand(program)), of(f32, *ROWS), of(f32, *weights))
    widened = [pair for pair in factor_dtypes(found.hlo) if pair != ("bf16", "bf16")]
    assert bool(widened) == ("product widened" in kinds(found))


def test_this_xla_spoils_some_of_them():
    shapes = of(f32, *ROWS), of(f32, *SQUARE)
    assert not audited(both(by_hand(flat)), *shapes).ok
    assert not audited(both(by_hand(tied)), *shapes).ok


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("composed", COMPOSED)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_values_are_those_of_float32_but_for_the_rounding(name: str, composed: str):
    program, weights = PROGRAMS[name]
    args = normal(1, *ROWS) / 4, normal(2, *weights) / 8
    fn = plain(program) if composed == "forward" else both(plain(program))
    wanted, got = fn(*args), COMPOSED[composed](plain(program))(*args)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        # the unit roundoff of bfloat16 is 2**-8; a few products follow one another
        assert np.linalg.norm(a - b) <= 2**-6 * np.linalg.norm(a)
        assert np.any(a != b)
