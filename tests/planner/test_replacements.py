"""A loop's state of which pieces are replaced, such as the cache of an attention, is stored low."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from tests.support.jaxprs import named
from tests.support.values import normal_array, rel_error

STEPS, BATCH, SIZE = 12, 4, 64
W, X = normal_array(0, SIZE, SIZE) / 8, normal_array(1, BATCH, SIZE)
CACHE = (BATCH, STEPS, SIZE)


def attended(x: jax.Array, cache: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("bd,bsd->bs", x, cache) / 8)
    return jnp.tanh(jnp.einsum("bs,bsd->bd", weights, cache) + x)


def sliced(i: jax.Array, new: jax.Array, cache: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(cache, new[:, None], (0, i, 0))


def scattered(i: jax.Array, new: jax.Array, cache: jax.Array) -> jax.Array:
    return cache.at[:, i].set(new)


def selected(i: jax.Array, new: jax.Array, cache: jax.Array) -> jax.Array:
    return jnp.where((jnp.arange(STEPS) == i)[:, None], new[:, None], cache)


def shifted(i: jax.Array, new: jax.Array, cache: jax.Array) -> jax.Array:
    return jnp.concatenate([cache[:, 1:], new[:, None]], 1)


def twice(i: jax.Array, new: jax.Array, cache: jax.Array) -> jax.Array:
    return sliced(jnp.zeros_like(i), 0.5 * (new @ W), sliced(i, new, cache))


def reshaped(i: jax.Array, new: jax.Array, cache: jax.Array) -> jax.Array:
    heads = cache.reshape(BATCH, STEPS, 8, SIZE // 8)
    new = new.reshape(BATCH, 1, 8, SIZE // 8)
    return lax.dynamic_update_slice(heads, new, (0, i, 0, 0)).reshape(CACHE)


def called(i: jax.Array, new: jax.Array, cache: jax.Array) -> jax.Array:
    return jax.jit(sliced)(i, new, cache)


Replaces = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Reads = Callable[[jax.Array, jax.Array], jax.Array]


def looped(
    replaces: Replaces, reads: Reads, w: jax.Array, x: jax.Array, cache: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A loop that writes to its cache and reads it."""

    def trip(carry: tuple[jax.Array, jax.Array], i: jax.Array) -> tuple[Any, None]:
        x, cache = carry
        cache = replaces(i, x @ w, cache)
        return (reads(x, cache), cache), None

    return lax.scan(trip, (x, cache), jnp.arange(STEPS))[0]


def decoded(replaces: Replaces, w: jax.Array, x: jax.Array) -> jax.Array:
    """The result of a loop that attends to a cache of its own."""
    return looped(replaces, attended, w, x, jnp.zeros(CACHE))[0]


def while_decoded(w: jax.Array, x: jax.Array) -> jax.Array:
    def trip(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Any, Any, Any]:
        i, x, cache = carry
        y = attended(x, cache)  # read before it is written to
        return i + 1, y, sliced(i, x @ w, cache)

    return lax.while_loop(lambda c: c[0] < STEPS, trip, (jnp.int32(0), x, jnp.zeros(CACHE)))[1]


def of_layers(w: jax.Array, x: jax.Array) -> jax.Array:
    """A scan over layers, each with its own cache, inside of a loop over tokens."""
    ws = jnp.stack([w, w.T, -w])

    def trip(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, caches = carry

        def layer(x: jax.Array, of: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            w, cache = of
            cache = sliced(i, x @ w, cache)
            return attended(x, cache), cache

        return lax.scan(layer, x, (ws, caches))

    return lax.fori_loop(0, STEPS, trip, (x, jnp.zeros((3, *CACHE))))[0]


def in_one_array(w: jax.Array, x: jax.Array) -> jax.Array:
    """The caches of several layers in one array, of which each layer reads its part."""

    def trip(carry: tuple[jax.Array, jax.Array], i: jax.Array) -> tuple[Any, None]:
        x, caches = carry
        for layer, of in enumerate((w, w.T)):
            new = (x @ of)[None, :, None]
            caches = lax.dynamic_update_slice(caches, new, (layer, 0, i, 0))
            x = attended(x, caches[layer])
        return (x, caches), None

    return lax.scan(trip, (x, jnp.zeros((2, *CACHE))), jnp.arange(STEPS))[0][0]


def reordered(i: jax.Array, new: jax.Array, cache: jax.Array) -> jax.Array:
    """As of a beam search, which keeps the best hypotheses."""
    best = jnp.argsort(new[:, 0])
    return sliced(i, new[best], cache[best])


def repeated(w: jax.Array, x: jax.Array) -> jax.Array:
    """Four queries read each key, by copies of the cache that a jitted function makes."""

    @jax.jit
    def grouped(x: jax.Array, cache: jax.Array) -> jax.Array:
        keys = jnp.repeat(cache.reshape(BATCH, STEPS, 4, SIZE // 4), 4, axis=2)
        queries = jnp.concatenate([x, -x, 2 * x, x * x], 1).reshape(BATCH, 16, SIZE // 4)
        weights = jax.nn.softmax(jnp.einsum("bhd,bshd->bhs", queries, keys))
        found = jnp.einsum("bhs,bshd->bhd", weights, keys)
        return jnp.tanh(found.reshape(BATCH, 4, SIZE).sum(1))

    return looped(sliced, grouped, w, x, jnp.zeros(CACHE))[0]


def split(w: jax.Array, x: jax.Array) -> jax.Array:
    """Keys and values side by side in one cache."""

    def reads(x: jax.Array, cache: jax.Array) -> jax.Array:
        keys, values = jnp.split(cache, 2, axis=-1)
        weights = jax.nn.softmax(jnp.einsum("bd,bsd->bs", x, keys) / 8)
        return jnp.tanh(jnp.einsum("bs,bsd->bd", weights, values) + x)

    both = jnp.concatenate([w, w.T], 1)
    return looped(sliced, reads, both, x, jnp.zeros((BATCH, STEPS, 2 * SIZE)))[0]


REPLACEMENTS = (sliced, scattered, selected, shifted, twice, reshaped, called, reordered)

LOW: dict[str, Callable[..., Any]] = {
    **{fn.__name__: functools.partial(decoded, fn) for fn in REPLACEMENTS},
    "while": while_decoded,
    "layers": of_layers,
    "one array": in_one_array,
    "repeated": repeated,
    "split": split,
}


def states(fn: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    """The formats of the loops' results that are at least as large as a cache."""
    after = pp.inspect(fn, **options, compiled=False)(*args).after
    loops = [*named(after, "scan"), *named(after, "while")]
    avals = [v.aval for eqn in loops for v in eqn.outvars]
    return [str(aval.dtype) for aval in avals if aval.size >= BATCH * STEPS * SIZE]


@pytest.mark.parametrize("target", [None, "h100", "tpu v5e"])
@pytest.mark.parametrize("name", LOW)
def test_a_cache_that_products_alone_read_is_carried_in_16_bits(name: str, target: str | None):
    low = {"uint16"} if target is None else {"bfloat16"}
    assert low <= set(states(LOW[name], W, X, target=target))
    after = pp.inspect(LOW[name], target=target, compiled=False)(W, X).after
    # no whole cache is rounded in a trip: it has 16 bits already, and its pieces are rounded
    for eqn in named(after, "convert_element_type"):
        inside = eqn not in getattr(after, "jaxpr", after).eqns
        is_narrowing = str(eqn.outvars[0].aval.dtype) == "bfloat16"
        assert not (inside and is_narrowing and eqn.outvars[0].aval.size >= BATCH * STEPS * SIZE)


PUT_TOGETHER = ("dynamic_update_slice", "scatter", "select_n", "concatenate", "gather")
WIDE = pp.AutoMixedBf16.with_rules(*(pp.Rule(primitive=p, precision="f32") for p in PUT_TOGETHER))
"""The policy with caches in float32, which products round in every trip."""


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("name", LOW)
def test_the_values_are_those_of_a_float32_cache_to_the_last_bit(name: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)  # not each rule matches
        assert "float32" in states(LOW[name], W, X, policy=WIDE)
        found, wanted = (pp.auto_mixed(LOW[name], policy=p)(W, X) for p in ("AutoMixedBf16", WIDE))
    assert np.array_equal(found, wanted)
    assert rel_error(found, jax.jit(LOW[name])(W, X)) < 0.05


# ---------------------------------------------------------------- what stays in float32


def adds(i: jax.Array, new: jax.Array, cache: jax.Array) -> jax.Array:
    return cache.at[:, i].add(new)


def adds_to_a_piece(i: jax.Array, new: jax.Array, cache: jax.Array) -> jax.Array:
    old = lax.dynamic_slice(cache, (0, 0, 0), (BATCH, 1, SIZE))
    return lax.dynamic_update_slice(cache, old + new[:, None], (0, 0, 0))


def decays(i: jax.Array, new: jax.Array, cache: jax.Array) -> jax.Array:
    return sliced(i, new, 0.999 * cache)


def applies(i: jax.Array, new: jax.Array, cache: jax.Array) -> jax.Array:
    return cache.at[:, i].apply(lambda x: x + 1.0) + 0.0 * new.sum()


def larger(i: jax.Array, new: jax.Array, cache: jax.Array) -> jax.Array:
    return jnp.maximum(cache, new[:, None])


@pytest.mark.parametrize("replaces", [adds, adds_to_a_piece, decays, applies, larger])
def test_a_state_that_is_read_in_float32_stays(replaces: Replaces):
    fn = functools.partial(decoded, replaces)
    assert set(states(fn, W, X)) == {"float32"}


def test_a_cache_that_is_returned_or_given_has_its_own_format():
    given = functools.partial(looped, sliced, attended)
    cache = normal_array(2, *CACHE)
    found = pp.auto_mixed(given)(W, X, cache)
    assert [str(leaf.dtype) for leaf in found] == ["float32"] * 2
    assert rel_error(found[1], given(W, X, cache)[1]) < 0.02
    assert set(states(given, W, X, cache)) == {"float32"}


def test_positions_that_a_cache_holds_keep_their_digits():
    """What was never rounded by a product is only rounded if products alone read it."""

    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        def trip(carry: tuple[jax.Array, jax.Array], i: jax.Array) -> tuple[Any, None]:
            x, cache = carry
            cache = sliced(i, x + 1000.0 + i.astype(jnp.float32), cache)
            nearest = jnp.square(cache - x[:, None]).min(1)
            return (attended(jnp.tanh(nearest), cache), cache), None

        return lax.scan(trip, (x, jnp.zeros(CACHE)), jnp.arange(STEPS))[0][0] @ w

    assert set(states(fn, W, X)) == {"float32"}
