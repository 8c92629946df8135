"""Design section 3, line 17: retracing happens when jit would retrace, never per call."""

import contextlib
import decimal
import fractions

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precpass as pp
from tests.support.calls import Layer, W, X, as_jit_traces, counted


def scaled(x, n=1.0):
    return x @ x.T * n


def tree(t, n=1.0):
    return jax.tree.map(lambda x: x @ x.T * n, t)


def repeated(x, n):
    for _ in range(n):
        x = x @ x
    return x


def at(*arguments):
    """Calls at each of these arguments."""
    return lambda f: (f(*args) for args in arguments)


def keywords(f):
    yield f(X)
    yield f(X, 2.0)
    yield f(X, n=2.0)
    yield f(x=X, n=2.0)
    yield f(n=3.0, x=X)
    yield f(X, 5.0)


def named(f):
    yield from at((X, 1), (X, 2), (X, 2))(f)
    yield f(X, n=2)


FLOATS = ("float32", "bfloat16", "float16", "float32", "bfloat16")
# a function, the calls, how often it was traced after each, and options of jit
CALLS = {
    "shapes": (scaled, at(*((jnp.ones((n, 3)),) for n in (2, 3, 2, 4))), [1, 2, 2, 3], {}),
    "dtypes": (scaled, at(*((jnp.ones((3, 3), d),) for d in FLOATS)), [1, 2, 3, 3, 3], {}),
    "weak types": (
        scaled,
        at((X, jnp.float32(2)), (X, jnp.asarray(2.0)), (X, 2.0), (X, jnp.float32(3))),
        [1, 2, 2, 2],
        {},
    ),
    "numbers by type and not by value": (
        scaled,
        at(*((X, n) for n in (1.0, 2.0, 1, 7, True, False, 1 + 2j, 3j, 2.5))),
        [1, 1, 2, 2, 3, 3, 4, 4, 4],
        {},
    ),
    "arrays of numpy and of jax": (
        scaled,
        at(
            (np.asarray(X), np.float32(2)),
            (X, jnp.float32(2)),
            (np.asarray(X, np.float64), np.float32(2)),  # float32 with x64 off
            (jnp.asarray(X), np.asarray(2, np.float32)),
        ),
        [1, 1, 1, 1],
        {},
    ),
    "tree structures": (
        tree,
        at(
            ({"a": X, "b": W},),
            ({"b": W, "a": X},),
            ((X, W),),
            ([X, W],),
            ({"a": X, "b": None},),
            ({"a": X, "b": W},),
        ),
        [1, 1, 2, 3, 4, 4],
        {},
    ),
    "static fields of a pytree": (
        lambda layer, x: layer(x),
        at(*((Layer(W, power), X) for power in (1, 2, 1, 3, 2))),
        [1, 2, 2, 3, 3],
        {},
    ),
    "keywords and positions": (scaled, keywords, [1, 2, 3, 4, 4, 4], {}),
    "static_argnums": (repeated, named, [1, 2, 2, 3], {"static_argnums": 1}),
    "static_argnums from the end": (
        repeated,
        at((X, 1), (X, 2), (X, 2)),
        [1, 2, 2],
        {"static_argnums": -1},
    ),
    "static_argnames": (repeated, named, [1, 2, 2, 3], {"static_argnames": "n"}),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_traces_when_jit_does(name):
    fn, calls, wanted, options = CALLS[name]
    with jax.numpy_dtype_promotion("standard"):
        assert as_jit_traces(fn, calls, **options) == wanted


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_shardings_of_the_arguments(kind):
    devices = jax.devices()
    axis_types = (jax.sharding.AxisType[kind],)
    mesh = jax.make_mesh((2,), ("d",), axis_types, devices=devices[:2])
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))

    def calls(f):
        yield f(X)
        yield f(jax.device_put(X, split))
        yield f(jax.device_put(X, devices[1]))
        yield f(X)
        yield f(jax.device_put(W, split))

    assert as_jit_traces(lambda x: x @ jnp.ones((8, 4)), calls)[-1] < 4


CONTEXTS = {
    "x64": lambda: jax.enable_x64(True),
    "matmul precision": lambda: jax.default_matmul_precision("highest"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("standard"),
    "default device": lambda: jax.default_device(jax.devices()[1]),
    "named scope": lambda: jax.named_scope("outer"),
    "debug nans": lambda: jax.debug_nans(True),
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.filterwarnings("ignore::precpass.PrecisionWarning")
def test_contexts_of_jax(name):
    def calls(f):
        yield f(X)
        with CONTEXTS[name]():
            yield f(X)
            yield f(X)
        yield f(X)
        with CONTEXTS[name]():
            yield f(X)

    as_jit_traces(lambda x: x @ x, calls)


def test_each_policy_is_rewritten_once():
    counting, runs = counted(lambda x: x @ x)
    mixed = pp.auto_mixed(counting)
    regions = [
        contextlib.nullcontext,
        lambda: pp.use_policy("AutoMixed"),
        lambda: pp.use_policy(None),
        lambda: pp.keep("f16"),
        lambda: pp.use_policy(
            pp.Custom({"compute": "bf16"})
        ),  # equal, and another object each time
    ]
    for _ in range(2):
        for region in regions:
            with region():
                mixed(X)
                mixed(X)
    assert len(runs) <= len(regions)


# ---------------------------------------------------------------- beyond jit


STATIC = {
    "by value": (lambda x, m: x @ x if m == "twice" else x @ x.T, ["twice", "once", "tw" + "ice"]),
    "by type too": (lambda x, n: x @ x, [fractions.Fraction(1), decimal.Decimal(1)]),
    "functions by identity": (lambda x, act: act(x @ x), [jnp.tanh, jax.nn.relu]),
}


@pytest.mark.parametrize("name", STATIC)
def test_static_leaves(name):
    fn, leaves = STATIC[name]
    counting, runs = counted(fn)
    mixed = pp.auto_mixed(lambda x, leaf: (counting(x, leaf), type(leaf).__name__))
    for leaf in leaves * 2:
        assert mixed(X, leaf)[1] == type(leaf).__name__
    assert len(runs) == 2


def test_inspecting_and_calling_share_the_trace():
    counting, runs = counted(lambda x: x @ x)
    mixed = pp.auto_mixed(counting)
    pp.inspect(mixed)(X)
    mixed(X)
    pp.inspect(mixed)(X)
    mixed.lower(X)
    assert len(runs) == 1  # and a result that is no array costs none: test_17_static_leaves


@pytest.mark.parametrize("clear", [lambda f: f.clear_cache(), lambda f: jax.clear_caches()])
def test_clearing_the_caches_traces_again_once(clear):
    def calls(f):
        yield f(X)
        clear(f)
        yield f(X)
        yield f(X)

    assert as_jit_traces(scaled, calls) == [1, 2, 2]


def test_a_jitted_function_that_is_called_on_both_sides():
    counting, runs = counted(lambda x: x @ x)
    helper = jax.jit(counting)
    mixed = pp.auto_mixed(lambda x: helper(x) @ helper(x + 1))
    for _ in range(3):
        helper(X)
        mixed(X)
    # its trace inside is one of its own: an auto_mixed function in it would do otherwise there
    assert len(runs) == 2
